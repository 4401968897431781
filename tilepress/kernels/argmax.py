"""The most probable token of each row of logits."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from tilepress.kernels import jit, library
from tilepress.kernels.jit import VARIES, Launch
from tilepress.kernels.once import Planned, gathering

library.define("argmax(Tensor x) -> Tensor")
THREADS = 1024


def argmax_ref(x: Tensor) -> Tensor:
    """x [rows, columns] -> int64 [rows]: where each row has its largest element, the first of equal ones; a NaN counts as the largest."""
    return x.argmax(-1)


def source(dtype: torch.dtype, vectors: bool) -> str:
    return jit.source("sm80_argmax.cu", BF16=int(dtype == torch.bfloat16), VECTORS=int(vectors))


@functools.cache
def _kernel(dtype: torch.dtype, vectors: bool) -> jit.Kernel:
    return jit.Kernel("argmax", source(dtype, vectors), "x* stride:8 columns out*", THREADS, overlaps=True)


def why_not(x: Tensor) -> str | None:
    """Return why the reference serves ("" for the CPU), or None where the kernel does."""
    if (why := jit.why_not(x.device)) is not None:
        return why
    if x.dtype not in (torch.bfloat16, torch.float16):
        return str(x.dtype)
    return None if x.numel() else "nothing to look at"


def _plan(x: Tensor) -> Callable:
    if why_not(x) is not None:
        return argmax_ref
    if x.stride(1) != 1:
        return gathering(_argmax_cuda, [0])
    vectors = x.shape[1] % 8 == x.stride(0) % 8 == x.data_ptr() % 16 == 0
    args = VARIES, x.stride(0), x.shape[1], VARIES
    launch = Launch(_kernel(x.dtype, vectors), x.device, len(x), args)
    return jit.filling(launch, [0, -1], [jit.like((len(x),), torch.int64, x.device)], 1)


_argmax_cuda = Planned(_plan)


library.impl("argmax", argmax_ref, "CPU")
library.impl("argmax", _argmax_cuda, "CUDA")


@torch.library.register_fake("tilepress::argmax")
def _(x):
    return x.new_empty(len(x), dtype=torch.int64)
