"""The modules that take the place of a linear layer when its weight is sparse."""

import torch
from torch import Tensor, nn

from tilepress.formats.sparse import Packed, module_of
from tilepress.formats.tiled_bitmap import TiledBitmap
from tilepress.formats.tiled_csl import TiledCSL
from tilepress.kernels import tiled_bitmap_spmm, tiled_csl_spmm
from tilepress.kernels.arch import Path


class SparseLinear(nn.Module):
    """A linear layer whose weight is packed. Takes the place of nn.Linear and of transformers' Conv1D.

    The buffers carry the names that the tensors have on disk, so loading and `save_pretrained` need no renaming: `weight` int32 [words],
    `weight_offsets` int32 [tiles + 1], and those of its layout.
    """

    def __init__(self, packed: Packed, bias: bool, bias_dtype: torch.dtype | None = None):
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

    @property
    def packed(self) -> Packed:
        raise NotImplementedError

    def multiply(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        raise NotImplementedError

    def path_for(self, dtype: torch.dtype, n: int = 1) -> Path:
        """The implementation that serves this layer where it is now, for n rows of activations of a dtype."""
        raise NotImplementedError

    def check_bounds(self) -> str | None:
        """What would make running it unsafe, or None."""
        return module_of(self.packed).check_bounds(self.packed)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        if x.shape[-1] != self.in_features:
            raise ValueError(f"{x.shape[-1]} features for a layer of {self.in_features}")
        return self.multiply(x)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class TiledCSLLinear(SparseLinear):
    """The weight is Tiled-CSL (formats/tiled_csl.py): also `weight_layout` int32 [5]."""

    @property
    def packed(self) -> TiledCSL:
        shape = self.out_features, self.in_features
        return TiledCSL(self.weight, self.weight_offsets, *shape, self.value_dtype, self.transposed)

    def multiply(self, x: Tensor) -> Tensor:
        return torch.ops.tilepress.tiled_csl_spmm(
            x, self.weight, self.weight_offsets, self.bias, self.out_features, self.value_dtype
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

    def multiply(self, x: Tensor) -> Tensor:
        return torch.ops.tilepress.tiled_bitmap_spmm(
            x,
            self.weight,
            self.weight_offsets,
            self.weight_scale,
            self.bias,
            self.out_features,
            self.value_dtype,
            self.group,
        )

    def path_for(self, dtype: torch.dtype, n: int = 1) -> Path:
        return tiled_bitmap_spmm.path(self.weight.device, dtype, self.packed.weight_dtype, n, self.packed.group)


def sparse_linear(packed: Packed, bias: bool, bias_dtype: torch.dtype | None = None) -> SparseLinear:
    kind = TiledCSLLinear if isinstance(packed, TiledCSL) else TiledBitmapLinear
    return kind(packed, bias, bias_dtype)
