"""A kernel that only reads memory: the bandwidth that benchmarks compare with."""

import functools

from torch import Tensor

from tilepress.kernels import arch, jit

THREADS = 512


def source() -> str:
    return jit.source("sm80_read_bandwidth.cu")


@functools.cache
def _kernel() -> jit.Kernel:
    return jit.Kernel("read_bandwidth", source(), "words* never* n:8", THREADS)


def read(memory: Tensor) -> None:
    """Reads all of a CUDA tensor's memory (the last, less than a grid's reach, not) on the current stream."""
    grid = 2 * arch.card(memory.device).multiprocessors
    _kernel()(memory.device, grid, memory.data_ptr(), memory.data_ptr(), memory.nbytes // 16)
