"""The modules that take the place of a model's linears when its weights are packed."""

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
        self.tile_rows, self.value_dtype, self.transposed = packed.tile_rows, packed.dtype, packed.transposed
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
            self.weight,
            self.weight_offsets,
            self.out_features,
            self.in_features,
            self.tile_rows,
            self.value_dtype,
            self.transposed,
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        return torch.ops.tilepress.tiled_csl_spmm(
            x, self.weight, self.weight_offsets, self.bias, self.out_features, self.tile_rows, self.value_dtype
        )

    @property
    def path(self) -> str:
        """The implementation that serves this layer where it is now."""
        return tiled_csl_spmm.path(self.weight.device)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, tile_rows={self.tile_rows}"


class PackedExperts(nn.Module):
    """The experts of a mixture, each with packed linears of its own, under their on-disk names.

    Takes the place of a `*Experts` module of transformers 5, which holds all experts in two 3-D parameters:
    forward(hidden_states [tokens, hidden], top_k_index [tokens, k], top_k_weights [tokens, k]) -> [tokens, hidden].
    """

    NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))  # gate, up, down as families call them

    def __init__(self, original: nn.Module, experts: dict[str, dict[str, TiledCSLLinear]]):
        """`experts`: {"0": {"gate_proj": …, "up_proj": …, "down_proj": …}, …}, all with the same names."""
        super().__init__()
        self.act_fn = original.act_fn
        self.num_experts = len(experts)
        self.gate, self.up, self.down = next(names for names in self.NAMES if set(names) == set(experts["0"]))
        for number, linears in experts.items():
            self.add_module(number, nn.ModuleDict(linears))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for number in torch.unique(top_k_index).tolist():
            if number >= self.num_experts:  # expert parallelism marks tokens of other ranks so
                continue
            token, choice = torch.where(top_k_index == number)
            expert, x = self.get_submodule(str(number)), hidden_states[token]
            y = expert[self.down](self.act_fn(expert[self.gate](x)) * expert[self.up](x))
            out.index_add_(0, token, (y * top_k_weights[token, choice, None]).to(out.dtype))
        return out
