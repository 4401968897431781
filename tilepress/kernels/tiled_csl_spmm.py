"""y = x W^T + bias with W in Tiled-CSL: the op `tilepress::tiled_csl_spmm` and its reference.

The reference decodes the whole weight once a call and multiplies densely, on any device: memory for one dense layer, time
of one scatter over the non-zeros on top of the dense product. It is what runs today on CPU and CUDA; results name it `reference`.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from tilepress.formats import tiled_csl
from tilepress.kernels import library

library.define(
    "tiled_csl_spmm(Tensor x, Tensor words, Tensor offsets, Tensor? bias, int rows, int tile_rows, ScalarType value_dtype) -> Tensor"
)


def tiled_csl_spmm_ref(
    x: Tensor, words: Tensor, offsets: Tensor, bias: Tensor | None, rows: int, tile_rows: int, value_dtype: torch.dtype
) -> Tensor:
    """x [..., cols] floating, words int32, offsets int32 [tiles + 1], bias [rows] or None -> [..., rows] of x's dtype.

    Values are converted to x's dtype before the product.
    """
    packed = tiled_csl.TiledCSL(words, offsets, rows, x.shape[-1], tile_rows, value_dtype)
    return linear(x, tiled_csl.unpack(packed).to(x.dtype), bias)


for _key in ("CPU", "CUDA"):
    library.impl("tiled_csl_spmm", tiled_csl_spmm_ref, _key)


@torch.library.register_fake("tilepress::tiled_csl_spmm")
def _(x, words, offsets, bias, rows, tile_rows, value_dtype):
    return x.new_empty(*x.shape[:-1], rows)


def path(device: torch.device) -> str:
    """Which implementation serves a device: what results report."""
    return f"tiled_csl_spmm reference on {device.type}"


tiled_csl_spmm = torch.ops.tilepress.tiled_csl_spmm
