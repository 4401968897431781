"""Which part of each layer is a rank's, and that part of a layer that is whole: in files (sharding.py) or in memory (demo/shapes.py). Numbers are taken as
they are, nothing is packed or quantized again.

    dense, INT8   rows or columns of the matrix; scales of rows with the rows, of tensors and inputs as they are
    sparse        tiles are stored row block by row block: rows of a layer are one range of words, columns one range in each row block
    KV cache      calibration of the rank's own KV heads; one that several ranks' query heads attend to is on each of them

A part of a sparse layer that does not begin or end where tiles do takes all tiles that it touches (parallel.Trimmed): heads of 64 on an odd number, widths
of less than a tile for each rank.
"""

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tilepress.formats import TilepressError, UsageError
from tilepress.formats.int8 import Int8Scheme
from tilepress.formats.kv_calibration import KVCalibration, Side
from tilepress.formats.layout import Span, layout_of
from tilepress.runtime.decode import decoder
from tilepress.runtime.linear.int8 import quantizes
from tilepress.runtime.linear.packed import PackedLinear, packed_linear
from tilepress.runtime.parallel.group import (
    RowParallel,
    RowParallelInt8,
    TensorParallel,
    Trimmed,
    VocabularyParallel,
    parts,
)

VERIFY = "`tilepress verify DIR` lists every finding"


@dataclass(frozen=True)
class Part:
    """Of a layer's outputs and inputs those that a rank has; None: all. `sums`: its outputs are summed over the ranks."""

    rows: Span | None = None
    cols: Span | None = None

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
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
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
        """Of the columns of q, and of what the output projection takes."""
        return self.own[0] * self.dim, self.own[1] * self.dim

    @property
    def keys(self) -> Span:
        return self.own_kv[0] * self.dim, self.own_kv[1] * self.dim


@dataclass(frozen=True)
class Partition:
    """A rank's part of a model: of linear layers by their paths, and of heads."""

    group: TensorParallel
    linears: dict[str, Part]
    heads: _Heads

    @classmethod
    def of(cls, model: nn.Module, group: TensorParallel, name: str) -> "Partition":
        """Of a whole model, which may be empty. Raises UsageError, with the model's name, for an architecture that the lean pass does not know, and for heads
        that cannot be shared."""
        kind = f"{type(model).__module__}.{type(model).__qualname__}"
        if kind not in decoder.LLAMA and kind != decoder.OPT:
            raise UsageError(
                f"{name} is a {type(model).__name__}: tensor parallelism is for Llama, Mistral, Qwen2, Qwen3, OPT",
                "load it on one card",
            )
        heads = _Heads.of(model.config, group)
        names, found = {module: name for name, module in model.named_modules()}, {}
        for layer in _layers(model):
            attention, is_opt = layer.self_attn, hasattr(layer, "fc1")
            found[names[attention.q_proj]] = Part(rows=heads.queries)
            for linear in (attention.k_proj, attention.v_proj):
                found[names[linear]] = Part(rows=heads.keys)
            found[names[attention.out_proj if is_opt else attention.o_proj]] = Part(cols=heads.queries)
            into = [layer.fc1] if is_opt else [layer.mlp.gate_proj, layer.mlp.up_proj]
            out = layer.fc2 if is_opt else layer.mlp.down_proj
            inner = group.part(out.in_features)
            found |= {names[linear]: Part(rows=inner) for linear in into}
            found[names[out]] = Part(cols=inner)
        found["lm_head"] = Part(rows=group.part(model.lm_head.out_features))
        return cls(group, found, heads)

    def cut(self, path: str, whole: "Whole", dtype: torch.dtype) -> nn.Module:
        """The layer at a path, of a model of some dtype, as far as it is this rank's."""
        return _Cut(whole, self.linears.get(path, Part()), dtype, self.group).made()

    def of_cache(self, calibration: KVCalibration) -> KVCalibration:
        """The calibration of the rank's KV heads. Raises TilepressError for one of another number of heads."""
        heads = self.heads
        if calibration.kv_heads != heads.kv_count:
            raise TilepressError(
                f"the cache was calibrated for {calibration.kv_heads} KV heads, the model has {heads.kv_count}",
                "calibrate again: `tilepress compress kv`",
            )
        own = slice(*heads.own_kv)

        def side(whole: Side) -> Side:
            channels = None if whole.channels is None else whole.channels[:, own].contiguous()
            return Side(channels, None if whole.fixed is None else whole.fixed[own].contiguous(), whole.clip)

        layers = tuple((side(keys), side(values)) for keys, values in calibration.layers)
        return replace(calibration, kv_heads=heads.own_kv[1] - heads.own_kv[0], layers=layers)

    def finish(self, model: nn.Module) -> None:
        """What is left when all layers are in their places: the output head, and what the model's own modules and caches know of heads."""
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
        for layer in _layers(model):
            attention = layer.self_attn
            if hasattr(attention, "num_heads"):
                attention.num_heads = own
            if hasattr(attention, "num_key_value_groups"):
                attention.num_key_value_groups = own // own_kv
        model.tensor_parallel = self.group


def _layers(model: nn.Module) -> nn.ModuleList:
    return getattr(model.model, "decoder", model.model).layers


@dataclass(frozen=True)
class Whole:
    """A linear layer of which ranges are read: `read("weight_scale", slice(0, 64))`; without ranges a whole tensor."""

    name: str
    shape: tuple[int, int]  # features out, in
    bias: bool
    read: Callable[..., Tensor]
    packed: Any = None  # as its layout puts it together; the tensors may be empty. None: dense
    scheme: Int8Scheme | None = None  # of INT8

    @classmethod
    def of(cls, name: str, linear: nn.Module) -> "Whole":
        """One in memory."""

        def read(part: str, *index: slice) -> Tensor:
            return getattr(linear, part)[index]

        packed = linear.packed if isinstance(linear, PackedLinear) else None
        shape = linear.out_features, linear.in_features
        return cls(name, shape, linear.bias is not None, read, packed, getattr(linear, "scheme", None))


@dataclass(frozen=True)
class _Cut:
    """A part of a layer as a layer of its own, on the rank's device."""

    whole: Whole
    part: Part
    dtype: torch.dtype  # of the model
    group: TensorParallel

    @property
    def rows(self) -> Span:
        return self.part.rows or (0, self.whole.shape[0])

    @property
    def cols(self) -> Span:
        return self.part.cols or (0, self.whole.shape[1])

    @property
    def bias(self) -> bool:
        return self.whole.bias and not (self.part.sums and self.group.rank)  # the sum has it once

    def made(self) -> nn.Module:
        covered = self.rows, self.cols
        if self.whole.packed is None:
            height, width = (end - first for first, end in covered)
            made = nn.Linear(width, height, bias=self.bias, device="meta")
            made.weight = nn.Parameter(self._read("weight", *(slice(*span) for span in covered)), requires_grad=False)
        else:
            made, covered = self._packed()
        if self.bias:
            made.bias = nn.Parameter(self._read("bias", slice(*covered[0])), requires_grad=False)
        if self.part.sums and quantizes(made):
            return RowParallelInt8.of_part(made, self.group)
        if covered != (self.rows, self.cols):
            spans = zip((self.rows, self.cols), covered, strict=True)
            made = Trimmed(made, *(tuple(x - top for x in span) for span, (top, _) in spans))
        return RowParallel(made, self.group) if self.part.sums else made

    def _read(self, name: str, *index: slice) -> Tensor:
        """A range in memory of its own, in the model's dtype."""
        return self.whole.read(name, *index).to(self.group.device, self.dtype, copy=True).contiguous()

    def _packed(self) -> tuple[PackedLinear, tuple[Span, Span]]:
        """A layer of at least the part, and the part that it covers."""
        whole = self.whole
        try:
            packed, covered = layout_of(whole.packed).slice(
                whole.packed, whole.read, self.rows, self.cols, self.group.device
            )
        except TilepressError as error:
            raise TilepressError(f"{whole.name}: {error.message}", error.hint) from error
        made = packed_linear(packed, self.dtype if self.bias else None, self.dtype, whole.scheme)
        if (problem := made.check_bounds()) is not None:
            raise TilepressError(f"{whole.name}: {problem}", VERIFY)
        return made, covered
