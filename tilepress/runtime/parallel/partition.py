"""The part of each layer that is a rank's, cut from a layer that is whole: in files (sharding.py) or in memory
(bench/shapes.py). Numbers are taken as they are, nothing is packed or quantized again.

    dense, INT8   rows or columns of the matrix; scales of rows with the rows, of tensors and inputs as they are
    sparse        tiles are stored row block by row block: rows of a layer are one range of words, columns one range in each row block
    KV cache      calibration of the rank's own KV heads; one that several ranks' query heads attend to is on each of them

A part of a sparse layer that does not begin or end where tiles do takes all tiles that it touches (`Trimmed` of
linear/cut.py): heads of 64 on an odd number, widths of less than a tile for each rank.
"""

import copy
import itertools
from dataclasses import dataclass, replace

import torch
from torch import nn

from tilepress.formats import TilepressError, UsageError
from tilepress.formats.kv_calibration import KVCalibration
from tilepress.formats.layout import Span
from tilepress.models.families import FAMILIES, family_of, heads_of, part
from tilepress.runtime.linear.cut import Piece, Whole, cut
from tilepress.runtime.linear.int8 import quantizes
from tilepress.runtime.linear.merged import merge
from tilepress.runtime.parallel.group import RowParallel, RowParallelInt8, TensorParallel, VocabularyParallel, parts


@dataclass(frozen=True)
class Part:
    """The outputs (`rows`) and inputs (`cols`) of a layer that a rank has; None: all. `sums`: its outputs are summed over the ranks.

    `others` are further outputs behind `rows`, where one stored matrix holds several projections."""

    rows: Span | None = None
    cols: Span | None = None
    others: tuple[Span, ...] = ()

    @property
    def sums(self) -> bool:
        return self.cols is not None


@dataclass(frozen=True)
class _Heads:
    """Heads of a model and those of a rank: query heads [first, end) with the KV heads that they attend to."""

    count: int
    kv_count: int
    dim: int
    own: Span
    own_kv: Span

    @classmethod
    def of(cls, config, group: TensorParallel) -> "_Heads":
        heads, kv_heads, dim = heads_of(config)
        if heads % group.size or (kv_heads % group.size and group.size % kv_heads):
            fit = [n for n in range(2, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
            raise UsageError(
                f"{heads} heads with {kv_heads} KV heads are not shared evenly by {group.size} ranks",
                f"use {', '.join(map(str, fit))} ranks" if fit else "use one card",
            )
        each, rank = heads // group.size, group.rank
        kv_each, first = max(1, kv_heads // group.size), rank * kv_heads // group.size
        return cls(heads, kv_heads, dim, (rank * each, (rank + 1) * each), (first, first + kv_each))

    @property
    def queries(self) -> Span:
        """The rank's columns of q, which are also those that its output projection takes."""
        return self.own[0] * self.dim, self.own[1] * self.dim

    @property
    def keys(self) -> Span:
        return self.own_kv[0] * self.dim, self.own_kv[1] * self.dim

    @property
    def projected(self) -> list[tuple[int, Span]]:
        """The number of columns of q, of k and of v, each with the rank's among them."""
        keys = self.kv_count * self.dim, self.keys
        return [(self.count * self.dim, self.queries), keys, keys]


@dataclass(frozen=True)
class Partition:
    """A rank's part of a model: of linear layers by their paths, and of heads."""

    group: TensorParallel
    linears: dict[str, Part]
    heads: _Heads

    @classmethod
    def of(cls, model: nn.Module, group: TensorParallel, name: str) -> "Partition":
        """Return a rank's part of a whole model, which may be empty. Raises UsageError, with the model's name, for an architecture that the lean pass
        does not know, and for heads that cannot be shared."""
        family = family_of(model, "model")
        if family is None or not family.decodes:
            served = ", ".join(dict.fromkeys(family.prefix for family in FAMILIES if family.decodes))
            limits = f" ({family.limits})" if family is not None else ""
            raise UsageError(
                f"{name} is a {type(model).__name__}{limits}: tensor parallelism is for {served}", "load it on one card"
            )
        heads, names, found = _Heads.of(model.config, group), family.names, {}
        for path, layer in _layers(model).items():
            attention = f"{path}.{names.attention}"
            found |= _side_by_side([f"{attention}.{name}" for name in names.qkv], heads.projected)
            found[f"{attention}.{names.out}"] = Part(cols=heads.queries)
            width = part(layer, names.outer).in_features
            inner = (width, group.part(width))
            found |= _side_by_side([f"{path}.{name}" for name in names.inner], [inner] * (1 + family.gated))
            found[f"{path}.{names.outer}"] = Part(cols=inner[1])
        found["lm_head"] = Part(rows=group.part(model.lm_head.out_features))
        return cls(group, found, heads)

    def cut(self, path: str, whole: Whole, dtype: torch.dtype) -> nn.Module:
        """The layer at a path, of a model of some dtype, as far as it is this rank's."""
        own, device = self.linears.get(path, Part()), self.group.device
        if not own.sums:
            return merge([cut(whole, rows, None, dtype, device) for rows in (own.rows, *own.others)])
        # The sum of all parts has the bias once.
        piece = Piece.of(whole, own.rows, own.cols, dtype, device, bias=self.group.rank == 0)
        if quantizes(piece.linear):
            return RowParallelInt8.of_part(piece.linear, self.group)
        return RowParallel(piece.trimmed(), self.group)

    def of_cache(self, calibration: KVCalibration) -> KVCalibration:
        """The calibration of the rank's KV heads. Raises TilepressError for one of another number of heads."""
        heads = self.heads
        if calibration.kv_heads != heads.kv_count:
            raise TilepressError(
                f"the cache was calibrated for {calibration.kv_heads} KV heads, the model has {heads.kv_count}",
                "calibrate again: `tilepress compress kv`",
            )
        first, end = heads.own_kv
        layers = tuple(layer.of_heads(first, end) for layer in calibration.layers)
        return replace(calibration, kv_heads=end - first, layers=layers)

    def finish(self, model: nn.Module) -> None:
        """Finish a model when all layers are in their places: the output head, and what the model's own modules and
        caches know of heads.
        """
        if getattr(model.config, "tie_word_embeddings", False):
            first, end = self.linears["lm_head"].rows
            head = nn.Linear(model.lm_head.in_features, end - first, bias=False, device="meta")
            head.weight = nn.Parameter(model.get_input_embeddings().weight[first:end], requires_grad=False)
            model.lm_head = head
        ends = parts(model.config.vocab_size, self.group.size)
        sizes = [end - first for first, end in itertools.pairwise(ends)]
        model.lm_head = VocabularyParallel(model.lm_head, sizes, self.group)
        own, own_kv = (end - first for first, end in (self.heads.own, self.heads.own_kv))
        config = copy.deepcopy(model.config)
        config.head_dim, config.num_attention_heads = self.heads.dim, own
        if getattr(config, "num_key_value_heads", None) is not None:
            config.num_key_value_heads = own_kv
        for module in model.modules():
            if hasattr(module, "config"):
                module.config = config
        counts = {"num_heads": own, "num_key_value_heads": own_kv, "num_key_value_groups": own // own_kv}
        for layer in _layers(model).values():
            attention = part(layer, family_of(model, "model").names.attention)
            for name in counts.keys() & vars(attention).keys():
                setattr(attention, name, counts[name])
        model.tensor_parallel = self.group


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """A model's decoder layers by their paths."""
    names = family_of(model, "model").names
    path = f"{names.body}.{names.layers}"
    return {f"{path}.{name}": layer for name, layer in part(model, path).named_children()}


def _side_by_side(paths: list[str], sizes: list[tuple[int, Span]]) -> dict[str, Part]:
    """A rank's parts of projections of one input: each of a layer of its own, or all of one matrix that holds their rows one after the other."""
    if len(paths) == len(sizes):
        return {path: Part(rows=own) for path, (_, own) in zip(paths, sizes, strict=True)}
    starts = itertools.accumulate((size for size, _ in sizes), initial=0)
    first, *others = ((start + own[0], start + own[1]) for start, (_, own) in zip(starts, sizes, strict=False))
    return {paths[0]: Part(rows=first, others=tuple(others))}
