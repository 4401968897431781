"""Products in half precision on CPUs that have no instructions for them: computed in float32, and rounded once.

torch's own loops for such CPUs (AVX2 alone, say) also sum in float32 and round once, but 10 to 20 times slower than its float32 product. So while this
package runs a model of bfloat16 or float16 there, the four ops that multiply matrices are replaced; nothing else changes, in the process or in what a
model computes. Callers of a loaded model have torch's own.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_HALF = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
_OPS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1}  # which argument is the left matrix
_FEW_ROWS = 4  # torch's own loops are faster than turning the matrix into float32

_lock = threading.Lock()
_running, _library = 0, None  # how many models do, and what holds the replaced ops


def is_slow(dtype: torch.dtype, device: str | torch.device) -> bool:
    """Return whether the products of a dtype are many times slower on a device than those of float32."""
    if torch.device(device).type != "cpu" or dtype not in _HALF:
        return False
    return not getattr(torch.ops.mkldnn, _HALF[dtype], lambda: True)()


def _in_float32(name: str, left: int) -> Callable[..., Tensor]:
    op = getattr(torch.ops.aten, name)

    def product(*args, **scales) -> Tensor:
        dtype = args[left].dtype
        if dtype in _HALF and args[left].shape[-2] > _FEW_ROWS:
            args = [each.float() for each in args]
        return op.out(*args, **scales, out=args[left].new_empty(0)).to(dtype)  # `out` is not replaced

    return product


def _begin() -> None:
    """Replace the ops, until `_end` has been called as often."""
    global _running, _library
    with _lock:
        _running += 1
        if _library is None:
            _library = torch.library.Library("aten", "IMPL")
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="(?s).*verrid")
                for name, left in _OPS.items():
                    _library.impl(name, _in_float32(name, left), "CPU", allow_override=True)


def _end() -> None:
    global _running, _library
    with _lock:
        _running = max(_running - 1, 0)
        if not _running:
            _library = None  # and torch's own are back


@contextmanager
def fast_products(dtype: torch.dtype, device: str | torch.device) -> Iterator[None]:
    """Compute products of a dtype on a device in the fast way inside."""
    if not is_slow(dtype, device):
        yield
        return
    _begin()
    try:
        yield
    finally:
        _end()
