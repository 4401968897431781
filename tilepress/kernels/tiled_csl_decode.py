"""W from Tiled-CSL to dense: the op `tilepress::tiled_csl_decode`, its reference and its CUDA kernel (sm_80 and later)."""

import functools

import torch
from torch import Tensor

from tilepress.formats import tiled_csl
from tilepress.kernels import jit, library

library.define("tiled_csl_decode(Tensor words, Tensor offsets, int rows, int cols, ScalarType value_dtype) -> Tensor")
THREADS = 256


def tiled_csl_decode_ref(words: Tensor, offsets: Tensor, rows: int, cols: int, value_dtype: torch.dtype) -> Tensor:
    """words int32, offsets int32 [tiles + 1] -> [rows, cols] of the values' dtype. Offsets of some row blocks alone decode these."""
    return tiled_csl.unpack(tiled_csl.TiledCSL(words, offsets, rows, cols, value_dtype))


def source() -> str:
    return jit.source("sm80_tiled_csl_decode.cu")


@functools.cache
def kernel() -> jit.Kernel:
    return jit.Kernel("tiled_csl_decode", source(), "words* offsets* w* rows cols k_blocks", THREADS)


def _cuda(words: Tensor, offsets: Tensor, rows: int, cols: int, value_dtype: torch.dtype) -> Tensor:
    if jit.why_not(words.device) is not None:
        return tiled_csl_decode_ref(words, offsets, rows, cols, value_dtype)
    grid = tiled_csl.num_tiles(rows, cols)
    if offsets.shape != (grid + 1,) or offsets.dtype != torch.int32 or not offsets.is_contiguous():
        raise ValueError(f"{list(offsets.shape)} offsets of {offsets.dtype} for {grid} tiles")
    out = torch.empty(rows, cols, dtype=value_dtype, device=words.device)
    addresses = (words.data_ptr(), offsets.data_ptr(), out.data_ptr())
    kernel()(words.device, grid, *addresses, rows, cols, -(-cols // tiled_csl.TILE_COLS))
    return out


library.impl("tiled_csl_decode", tiled_csl_decode_ref, "CPU")
library.impl("tiled_csl_decode", _cuda, "CUDA")


@torch.library.register_fake("tilepress::tiled_csl_decode")
def _(words, offsets, rows, cols, value_dtype):
    return words.new_empty(rows, cols, dtype=value_dtype)


tiled_csl_decode = torch.ops.tilepress.tiled_csl_decode
