"""Tensor parallelism: the ranks of one torch.distributed group share each layer of a model, a card each.

    column-parallel   q, k, v, gate, up, fc1    a rank has some rows of the weight, and gives its part of the outputs: nothing is sent
    row-parallel      o, down, fc2              a rank has some columns and takes its part of the inputs: the outputs are summed over the ranks
    vocabulary        lm_head                   a rank has some rows, its logits are gathered: every rank has them all, the same bits

as in Megatron-LM (Shoeybi et al., 2019, section 3), so that a decoder layer has two sums. Query heads, with the KV heads that they attend to, are a rank's
own; embeddings and norms are everybody's. All ranks run the same requests in lockstep: what is chosen depends on gathered logits alone.

Row-parallel INT8 layers quantize a part of each token on each rank. A scale that is found at run time is the largest of all parts' scales: codes, and so
integer sums, are those of one card. A part of zeros counts as float32's epsilon.
"""

from collections.abc import Callable
from datetime import timedelta

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tilepress.ranks import Ranks
from tilepress.runtime.linear.int8 import Int8Linear

TILE = 128  # features of a part are multiples of this, where there are enough: rows and columns of tiles, and of what kernels like


class TensorParallel(Ranks):
    """This process's place among those that share a model, and what they do together. Every rank must call the same in the same order."""

    patience = timedelta(minutes=30)  # a rank may compile kernels while the others wait

    def part(self, count: int) -> tuple[int, int]:
        """First and end of this rank's part of so many features, in whole tiles where every rank gets one."""
        ends = parts(count, self.size)
        return ends[self.rank], ends[self.rank + 1]


def parts(count: int, size: int) -> list[int]:
    """Return where the ranks' parts of so many features begin, and the end.

    Parts are whole tiles, whose numbers differ by one at most.
    """
    unit = TILE if count >= TILE * size else 1
    units = -(-count // unit)
    return [min(count, rank * units // size * unit) for rank in range(size)] + [count]


class RowParallel(nn.Module):
    """A layer of this rank's part of its input features: the sum over the ranks. The bias is the first rank's, and nobody else's."""

    def __init__(self, linear: nn.Module, group: TensorParallel):
        super().__init__()
        self.linears, self.group = nn.ModuleList([linear]), group
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        return self.group.sum(self.linears[0](x))


class RowParallelInt8(Int8Linear):
    """The same of a layer with quantized inputs."""

    group: TensorParallel

    @classmethod
    def of_part(cls, linear: Int8Linear, group: TensorParallel) -> "RowParallelInt8":
        """Take over the tensors of this rank's part of a layer."""
        bias = None if linear.bias is None else linear.bias.dtype
        made = cls.of(linear.packed, bias, linear.weight_scale.dtype, linear.scheme)
        made.bias, made.group = linear.bias, group
        return made

    def codes(self, quantize: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        if self.static[0] is not None:
            return quantize(self.mode, *self.static)
        _, scale = quantize(self.mode, None, None)
        return quantize(self.mode, self.group.largest(scale), None)

    def multiply(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        return self.group.sum(super().multiply(codes, scale, dtype))


class VocabularyParallel(nn.Module):
    """An output head of this rank's tokens, `sizes` of each rank: all logits, the same on every rank."""

    def __init__(self, linear: nn.Module, sizes: list[int], group: TensorParallel):
        super().__init__()
        self.linears, self.sizes, self.group = nn.ModuleList([linear]), sizes, group

    @property
    def weight(self) -> Tensor:
        return self.linears[0].weight

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> [..., vocabulary]."""
        own, most = self.linears[0](x), max(self.sizes)
        own = own if own.shape[-1] == most else pad(own, (0, most - own.shape[-1]))
        found = self.group.gather(own.flatten(0, -2))
        if min(self.sizes) == most:
            found = found.transpose(0, 1).flatten(1)
        else:
            found = torch.cat([logits[:, :size] for logits, size in zip(found, self.sizes, strict=True)], -1)
        return found.unflatten(0, x.shape[:-1])
