"""The modules that take the place of a linear layer when its weight is sparse."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tilepress.formats.int8 import Int8Scheme
from tilepress.formats.layout import layout_of
from tilepress.formats.tiled_bitmap import TiledBitmap
from tilepress.formats.tiled_csl import TiledCSL
from tilepress.kernels import tiled_bitmap_prefill, tiled_bitmap_spmm, tiled_csl_spmm
from tilepress.kernels.arch import Path
from tilepress.runtime.linear.packed import PackedLinear, biases, one_weight, product, register


class SparseLinear(PackedLinear):
    """A linear layer whose weight is sparse: `weight` int32 [words], `weight_offsets` int32 [tiles + 1], and what else its layout stores."""

    def __init__(self, packed: TiledCSL | TiledBitmap, bias: bool, bias_dtype: torch.dtype | None = None):
        """`packed` may be on the meta device: its sizes are what counts until the weights are loaded."""
        super().__init__()
        self.in_features, self.out_features = packed.cols, packed.rows
        self.value_dtype, self.transposed = packed.dtype, packed.transposed
        device = packed.words.device
        self.register_buffer("weight", packed.words)
        for suffix, part in packed.beside().items():
            self.register_buffer(f"weight{suffix}", part.to(device))
        self.bias = (
            nn.Parameter(torch.empty(packed.rows, dtype=bias_dtype, device=device), requires_grad=False)
            if bias
            else None
        )

    @classmethod
    def of(
        cls, packed: Any, bias: torch.dtype | None, dtype: torch.dtype, scheme: Int8Scheme | None = None
    ) -> "SparseLinear":
        return cls(packed, bias is not None, bias)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in_features], bias [out_features] -> [..., out_features], without gradients."""
        raise NotImplementedError

    def merged(self, others: list["SparseLinear"]) -> "SparseLinear | None":
        linears = [self, *others]
        packed = layout_of(self.packed).concat([x.packed for x in linears], lambda: one_weight(linears))
        if packed is None:
            return None
        bias = biases(linears)
        made = self.of(packed, None if bias is None else bias.dtype, self.value_dtype)
        if bias is not None:
            made.bias = nn.Parameter(bias, requires_grad=False)
        return made

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features], with gradients of x and of the bias."""
        if x.shape[-1] != self.in_features:
            raise ValueError(f"{x.shape[-1]} features for a layer of {self.in_features}")
        return product(self, partial(self.multiply, bias=self.bias), x)


class TiledCSLLinear(SparseLinear):
    """The weight is Tiled-CSL (formats/tiled_csl.py): also `weight_layout` int32 [5]."""

    @property
    def packed(self) -> TiledCSL:
        shape = self.out_features, self.in_features
        return TiledCSL(self.weight, self.weight_offsets, *shape, self.value_dtype, self.transposed)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.tilepress.tiled_csl_spmm(
            x, self.weight, self.weight_offsets, bias, self.out_features, self.value_dtype
        )

    def dense(self) -> Tensor:
        return torch.ops.tilepress.tiled_csl_decode(
            self.weight, self.weight_offsets, self.out_features, self.in_features, self.value_dtype
        )

    def path_for(self, dtype: torch.dtype, n: int = 1) -> Path:
        return tiled_csl_spmm.path(self.weight.device, dtype, self.value_dtype, n)


class TiledBitmapLinear(SparseLinear):
    """The weight is a tiled bitmap (formats/tiled_bitmap.py): also `weight_bitmap` int32 [7] and, of int8 values, `weight_scale` [out_features]."""

    def __init__(self, packed: TiledBitmap, bias: bool, bias_dtype: torch.dtype | None = None):
        super().__init__(packed, bias, bias_dtype)
        self.group = packed.group
        if packed.scale is None:
            self.weight_scale = None

    @property
    def packed(self) -> TiledBitmap:
        shape = self.out_features, self.in_features
        stored = self.value_dtype, self.group, self.weight_scale, self.transposed
        return TiledBitmap(self.weight, self.weight_offsets, *shape, *stored)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.tilepress.tiled_bitmap_spmm(
            x,
            self.weight,
            self.weight_offsets,
            self.weight_scale,
            bias,
            self.out_features,
            self.value_dtype,
            self.group,
        )

    def dense(self) -> Tensor:
        stored = self.weight, self.weight_offsets, self.weight_scale
        shape = self.out_features, self.in_features
        return torch.ops.tilepress.tiled_bitmap_decode(*stored, *shape, self.value_dtype, self.group)

    def path_for(self, dtype: torch.dtype, n: int = 1) -> Path:
        device, packed = self.weight.device, self.packed
        if tiled_bitmap_prefill.serves(n, device, dtype, packed):
            return Path("tiled_bitmap_prefill", device.type)
        return tiled_bitmap_spmm.path(device, dtype, packed.weight_dtype, n, packed.group)


register("tiled-csl", TiledCSLLinear)
register("tiled-bitmap", TiledBitmapLinear)
