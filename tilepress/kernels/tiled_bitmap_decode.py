"""W from a tiled bitmap to dense: the op `tilepress::tiled_bitmap_decode`, its reference and its CUDA kernel (sm_80 and later)."""

import functools

import torch
from torch import Tensor

from tilepress.formats import tiled_bitmap
from tilepress.formats.tiled_bitmap import TILE_COLS, TILE_ROWS, TiledBitmap
from tilepress.kernels import jit, library

library.define(
    "tiled_bitmap_decode(Tensor words, Tensor offsets, Tensor? scale, int rows, int cols, ScalarType value_dtype, int group) -> Tensor"
)
THREADS = 256


def macros(dtype: torch.dtype, value_dtype: torch.dtype, group: int) -> dict[str, int]:
    """Return the macros of tiled_bitmap.cuh, for x or dense weights of a dtype."""
    return {
        "GROUP": group,
        "WIDTH": group * value_dtype.itemsize,
        "INT8": int(value_dtype == torch.int8),
        "BF16": int(dtype == torch.bfloat16),
    }


def tiled_bitmap_decode_ref(
    words: Tensor, offsets: Tensor, scale: Tensor | None, rows: int, cols: int, value_dtype: torch.dtype, group: int
) -> Tensor:
    """words int32, offsets int32 [tiles + 1], scale [rows] of int8 values or None -> [rows, cols] of the scale's or the values' dtype. Offsets of some
    row blocks alone, with their rows' scale, decode these."""
    return tiled_bitmap.unpack(TiledBitmap(words, offsets, rows, cols, value_dtype, group, scale))


@functools.cache
def kernel(dtype: torch.dtype, value_dtype: torch.dtype, group: int) -> jit.Kernel:
    source = jit.source("sm80_tiled_bitmap_decode.cu", **macros(dtype, value_dtype, group))
    shared_bytes = max(2 * TILE_ROWS * TILE_COLS, tiled_bitmap.largest_tile(group, value_dtype))
    return jit.Kernel(
        "tiled_bitmap_decode", source, "words* offsets* scale* w* rows cols k_blocks", THREADS, shared_bytes
    )


def _cuda(
    words: Tensor, offsets: Tensor, scale: Tensor | None, rows: int, cols: int, value_dtype: torch.dtype, group: int
) -> Tensor:
    wide_scale = scale is not None and scale.dtype not in tiled_bitmap.SCALE_DTYPES
    if jit.why_not(words.device) is not None or wide_scale:
        return tiled_bitmap_decode_ref(words, offsets, scale, rows, cols, value_dtype, group)
    grid = tiled_bitmap.num_tiles(rows, cols)
    if offsets.shape != (grid + 1,) or offsets.dtype != torch.int32 or not offsets.is_contiguous():
        raise ValueError(f"{list(offsets.shape)} offsets of {offsets.dtype} for {grid} tiles")
    if not words.is_contiguous() or words.data_ptr() % 16 or (scale is not None and scale.shape != (rows,)):
        raise ValueError("words must begin at a multiple of 16 bytes, and a scale have a value for each row")
    dtype = value_dtype if scale is None else scale.dtype
    out = torch.empty(rows, cols, dtype=dtype, device=words.device)
    kernel(dtype, value_dtype, group)(
        words.device,
        grid,
        words.data_ptr(),
        offsets.data_ptr(),
        0 if scale is None else scale.data_ptr(),
        out.data_ptr(),
        rows,
        cols,
        -(-cols // TILE_COLS),
    )
    return out


library.impl("tiled_bitmap_decode", tiled_bitmap_decode_ref, "CPU")
library.impl("tiled_bitmap_decode", _cuda, "CUDA")


@torch.library.register_fake("tilepress::tiled_bitmap_decode")
def _(words, offsets, scale, rows, cols, value_dtype, group):
    return words.new_empty(rows, cols, dtype=value_dtype if scale is None else scale.dtype)


tiled_bitmap_decode = torch.ops.tilepress.tiled_bitmap_decode
