"""The module that takes the place of a linear layer when its weight is sparse."""

import torch
from torch import Tensor, nn

from tilepress.formats.tiled_csl import TiledCSL
from tilepress.kernels import tiled_csl_spmm


class TiledCSLLinear(nn.Module):
    """A linear layer whose weight is Tiled-CSL. Takes the place of nn.Linear and of transformers' Conv1D.

    The buffers carry the names that the tensors have on disk, so loading and `save_pretrained` need no renaming:
    `weight` int32 [words], `weight_offsets` int32 [tiles + 1], `weight_layout` int32 [5] (see formats/tiled_csl.py).
    """

    def __init__(self, packed: TiledCSL, bias: bool, bias_dtype: torch.dtype | None = None):
        """`packed` may be on the meta device: its sizes are what counts until the weights are loaded."""
        super().__init__()
        self.in_features, self.out_features = packed.cols, packed.rows
        self.value_dtype, self.transposed = packed.dtype, packed.transposed
        self.register_buffer("weight", packed.words)
        self.register_buffer("weight_offsets", packed.offsets)
        self.register_buffer("weight_layout", packed.layout().to(packed.words.device))
        device = packed.words.device
        self.bias = (
            nn.Parameter(torch.empty(packed.rows, dtype=bias_dtype, device=device), requires_grad=False)
            if bias
            else None
        )

    @property
    def packed(self) -> TiledCSL:
        return TiledCSL(
            self.weight, self.weight_offsets, self.out_features, self.in_features, self.value_dtype, self.transposed
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        if x.shape[-1] != self.in_features:
            raise ValueError(f"{x.shape[-1]} features for a layer of {self.in_features}")
        return torch.ops.tilepress.tiled_csl_spmm(
            x, self.weight, self.weight_offsets, self.bias, self.out_features, self.value_dtype
        )

    def path_for(self, dtype: torch.dtype) -> str:
        """The implementation that serves this layer where it is now, for a few rows of activations of a dtype."""
        return tiled_csl_spmm.path(self.weight.device, dtype, self.value_dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
