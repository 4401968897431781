"""Statistics of a model's attention for calibration: its shape, and statistics of queries, keys and values as the model
computes them.

Queries and keys are taken after RoPE. `Watch` makes the model's attention an ordinary one that shows what it gets.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from tilepress.compress.layers.layerwise import LayerByLayer
from tilepress.compress.layers.walk import Layer
from tilepress.formats import TilepressError, UsageError
from tilepress.formats.checkpoint import Checkpoint
from tilepress.models.attention import PLAIN, Scores, attend, unserved
from tilepress.models.families import turns_neighbours
from tilepress.ranks import Ranks

QUERIES = 64  # positions of a sampled window whose queries are kept
_ATTENTION = "tilepress_observed"
_OTHERWISE = {"kv_lora_rank": "latent", "alibi": "ALiBi", "use_bidirectional_attention": "bidirectional"}
_ORDINARY = "leave this model's cache as it is: `compress kv` is for causal softmax attention with one head dimension"


@dataclass(frozen=True)
class AttentionShape:
    """The shape of a model's attention."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    interleaved: bool = False  # RoPE turns neighbours
    rotary_dim: int = 0  # channels that RoPE turns; what the model does is seen only when it runs


def attention_shape(checkpoint: Checkpoint, trust_remote_code: bool = False) -> AttentionShape:
    """Return the shape that the config says, with the defaults of its class. Raises UsageError for attention that the cache does not serve."""
    from transformers import AutoConfig

    kind = checkpoint.config.get("model_type", "?")
    try:
        config = AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=trust_remote_code).get_text_config()
    except Exception as error:
        raise UsageError(
            f"transformers does not read config.json of {checkpoint.name}: {' '.join(str(error).split())[:160]}",
            "upgrade transformers, or give a decoder language model's checkpoint",
        ) from error

    def get(name: str, default=None):
        value = getattr(config, name, None)
        return default if value is None else value

    layers, heads, width = get("num_hidden_layers"), get("num_attention_heads"), get("hidden_size")
    if not all(isinstance(value, int) and value for value in (layers, heads, width)):
        raise UsageError(
            f"config.json of {checkpoint.name} ({kind}) does not tell its layers, heads and width", _ORDINARY
        )
    unknown = set(get("layer_types", ())) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UsageError(f"{checkpoint.name} ({kind}) has layers of the kind {min(unknown)}", _ORDINARY)
    for name, what in _OTHERWISE.items():
        if get(name):
            raise UsageError(f"{checkpoint.name} ({kind}) has {what} attention", _ORDINARY)
    head_dim, kv_heads = get("head_dim", width // heads), get("num_key_value_heads", heads)
    return AttentionShape(layers, heads, kv_heads, head_dim, turns_neighbours(kind))


def by_pairs(x: Tensor, shape: AttentionShape, reduce: Callable) -> Tensor:
    """Return what `reduce` (torch.amax, torch.sum) makes of each pair of channels that RoPE turns, for both: [..., D] -> [..., D]."""
    n = shape.rotary_dim
    if not n:
        return x
    pairs = x[..., :n].unflatten(-1, (-1, 2) if shape.interleaved else (2, -1))
    along = -1 if shape.interleaved else -2
    shared = reduce(pairs, along, keepdim=True).expand_as(pairs).flatten(-2)
    return torch.cat([shared, x[..., n:]], -1)


class Sample(NamedTuple):
    """Queries, keys and values of some windows of one length in one layer, float32."""

    query: Tensor  # [windows, KV heads, queries per KV head, n, D] at `positions`
    positions: Tensor  # [windows, n]
    key: Tensor  # [windows, KV heads, tokens, D]
    value: Tensor


@dataclass
class Ranges:
    """Statistics of a layer's keys or values over all tokens: [KV heads, D] each."""

    low: Tensor
    high: Tensor
    total: Tensor
    power: Tensor  # sum of squares

    @classmethod
    def of(cls, x: Tensor) -> "Ranges":
        """Return the statistics of x [KV heads, tokens, D] float32."""
        return cls(x.amin(1), x.amax(1), x.sum(1, dtype=torch.float64), x.square().sum(1, dtype=torch.float64))

    def add(self, other: "Ranges") -> "Ranges":
        low, high = torch.minimum(self.low, other.low), torch.maximum(self.high, other.high)
        return Ranges(low, high, self.total + other.total, self.power + other.power)


@dataclass
class LayerSeen:
    """One layer's queries, keys and values: statistics of all windows, and some windows whole."""

    name: str
    shape: AttentionShape
    key: Ranges | None = None
    value: Ranges | None = None
    longest: Tensor | None = None  # length of each key's pairs: [KV heads, D]
    query_power: Tensor | float = 0.0  # sum of squares [KV heads, D]
    tokens: int = 0
    windows: int = 0
    scaling: float = 1.0
    scores: Scores = PLAIN  # beyond their scale
    samples: list[Sample] = field(default_factory=list)
    firsts: dict[str, list[Tensor]] = field(
        default_factory=lambda: {"key": [], "value": []}
    )  # [KV heads, D] of each window
    fold: Tensor | None = None  # [KV heads, D, D]: values are stored times it (fold.py)

    def stored(self, what: str, x: Tensor) -> Tensor:
        """Return keys or values [..., KV heads, tokens, D] as the cache gets them."""
        return x if what == "key" or self.fold is None else x @ self.fold.mT

    def unstored(self, what: str, x: Tensor) -> Tensor:
        """Return the inverse of `stored`."""
        return x if what == "key" or self.fold is None else x @ self._back.mT

    @cached_property
    def _back(self) -> Tensor:
        return torch.linalg.inv(self.fold.double()).float()

    @property
    def value_weight(self) -> Tensor | float:
        """Return how much a squared error of each channel of a stored value counts: [KV heads, D]."""
        return 1.0 if self.fold is None else self._back.square().sum(-2)

    def fold_values(self, fold: Tensor, ranks: Ranks) -> None:
        """Store values times `fold`. Their extremes are those of the sampled windows from here on, their mean stays that of all windows."""
        self.fold = fold
        low, high = torch.full_like(self.value.low, torch.inf), torch.full_like(self.value.high, -torch.inf)
        for sample in self.samples:
            rows = self.stored("value", sample.value).transpose(0, 1).flatten(1, 2)
            low, high = torch.minimum(low, rows.amin(1)), torch.maximum(high, rows.amax(1))
        total = (fold.double() @ self.value.total[..., None])[..., 0]
        power = (fold.double().square() @ self.value.power[..., None])[..., 0]
        self.value = Ranges(-ranks.largest(-low), ranks.largest(high), total, power)
        self.firsts["value"] = [self.stored("value", row[:, None])[:, 0] for row in self.firsts["value"]]

    def first(self, what: str) -> Tensor:
        """Return the middle key or value of a window's first token, channel by channel: [KV heads, D]."""
        return torch.stack(self.firsts[what]).median(0).values

    def add(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, keep: bool, number: int | None = None
    ) -> None:
        """Add a window: query [1, heads, tokens, D], key and value [1, KV heads, tokens, D].

        `number` is which window of the text it is, unless windows come in order."""
        shape, self.scaling = self.shape, scaling
        expected = (shape.kv_heads, query.shape[2], shape.head_dim)
        if key.shape[1:] != expected or value.shape[1:] != expected:
            raise UsageError(
                f"{self.name} has keys {list(key.shape[1:])} and values {list(value.shape[1:])}, config.json says {list(expected)}",
                _ORDINARY,
            )
        keys, values, groups = key[0].float(), value[0].float(), query[0].float().unflatten(0, (key.shape[1], -1))
        found = {"key": Ranges.of(keys), "value": Ranges.of(values)}
        for what, ranges in found.items():
            self.firsts[what].append((keys if what == "key" else values)[:, 0])
            before = getattr(self, what)
            setattr(self, what, ranges if before is None else before.add(ranges))
        longest = by_pairs(keys.square(), shape, torch.sum).amax(1).sqrt()
        self.longest = longest if self.longest is None else torch.maximum(self.longest, longest)
        self.query_power = self.query_power + groups.square().sum((1, 2), dtype=torch.float64)
        self.tokens += key.shape[2]
        self.windows += 1
        if keep:
            generator = torch.Generator().manual_seed(len(self.samples) if number is None else number)
            at = torch.randperm(key.shape[2], generator=generator)[:QUERIES].sort().values.to(key.device)
            self.samples.append(Sample(*(part[None] for part in (groups[:, :, at], at, keys, values))))

    def reduce(self, ranks: Ranks) -> None:
        """Make the statistics those of all ranks' windows; samples stay where they are."""
        if ranks.size == 1:
            return
        for ranges in (self.key, self.value):
            ranges.low, ranges.high = -ranks.largest(-ranges.low), ranks.largest(ranges.high)
            ranges.total, ranges.power = ranks.sum(ranges.total), ranks.sum(ranges.power)
        self.longest, self.query_power = ranks.largest(self.longest), ranks.sum(self.query_power)
        self.tokens, self.windows = (sum(each) for each in zip(*ranks.tell((self.tokens, self.windows)), strict=True))
        told = ranks.tell({what: [row.cpu() for row in rows] for what, rows in self.firsts.items()})
        self.firsts = {what: [row.to(ranks.device) for found in told for row in found[what]] for what in self.firsts}

    def check(self) -> None:
        """Raise TilepressError if keys or values were not finite: once for all windows, since a card has to be waited for."""
        found = {
            what: torch.stack([ranges.low, ranges.high]) for what, ranges in (("key", self.key), ("value", self.value))
        }
        sound = torch.stack([torch.isfinite(extremes).all() for extremes in found.values()]).tolist()
        for what, finite in zip(found, sound, strict=True):
            if not finite:
                raise TilepressError(
                    f"the {what}s of {self.name} are not finite during calibration",
                    "the checkpoint overflows in its own dtype: check it with `tilepress eval perplexity`",
                )

    def together(self, most: int) -> list[Sample]:
        """Return the sampled windows, those of a length side by side where their keys are `most` numbers or fewer."""
        by_length: dict[int, list[Sample]] = {}
        for sample in self.samples:
            by_length.setdefault(sample.key.shape[2], []).append(sample)
        found = []
        for alike in by_length.values():
            at_once = max(most // alike[0].key.numel(), 1)
            for first in range(0, len(alike), at_once):
                found.append(Sample(*(torch.cat(parts) for parts in zip(*alike[first : first + at_once], strict=True))))
        return found


class Watch:
    """Runs a model layer by layer and keeps what its attention gets. Raises UsageError for attention that cannot be looked at."""

    def __init__(self, model: LayerByLayer, shape: AttentionShape):
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

        if len(model.layers) != shape.layers:
            raise UsageError(
                f"{len(model.layers)} decoder layers were found, config.json says {shape.layers}", _ORDINARY
            )
        self.model, self.shape = model, shape
        self._layer: LayerSeen | None = None  # the one that runs
        self._keeps, self._number = False, 0
        self._instead: tuple[Tensor, Tensor] | None = None  # keys and values that attention gets for those it is given
        AttentionInterface.register(_ATTENTION, self._attention)
        AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
        try:
            model.attend_by(_ATTENTION)
        except ValueError as error:
            raise UsageError(
                f"the attention of {type(model.model).__name__} cannot be looked at: {error}", _ORDINARY
            ) from error

    def layer(self, layer: Layer, sampled: int) -> LayerSeen:
        """Run all windows through a layer of a walk and return what its attention saw, with the first `sampled` windows whole."""
        seen = self._layer = LayerSeen(layer.path, self.shape)
        try:
            with self.model.loaded(layer.path):
                outputs = layer.outputs()
                for i in range(len(layer.hidden)):
                    self._number = layer.number_of(i)
                    self._keeps = self._number < sampled
                    layer.hidden[i] = next(outputs)
        finally:
            self._layer = None
        if seen.windows != len(layer.hidden):
            raise UsageError(
                f"{layer.path} attends {seen.windows / len(layer.hidden):g} times a pass in transformers' common way, not once",
                _ORDINARY,
            )
        seen.check()
        seen.reduce(layer.ranks)
        return seen

    def change(self, layer: Layer, hidden: Tensor, key: Tensor, value: Tensor) -> float:
        """Return how much a layer's output for a window `hidden` [1, tokens, hidden] changes when its attention gets other keys and values.

        These are [KV heads, tokens, D]. The squared change of a token relative to its output, for the middle one of all tokens but the first."""
        with self.model.loaded(layer.path):
            exact = self.model.run(layer.path, hidden)[0, 1:].float()
            self._instead = key[None], value[None]
            try:
                off = self.model.run(layer.path, hidden)[0, 1:].float() - exact
            finally:
                self._instead = None
        return float((off.square().sum(-1) / exact.square().sum(-1).clamp(min=1e-30)).median())

    def _attention(self, module, query, key, value, attention_mask, scaling=None, **kwargs):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        if (what := unserved(attention_mask, kwargs)) is not None:
            raise UsageError(f"the attention uses {what}", _ORDINARY)
        scores, scale = Scores.asked(kwargs), query.shape[-1] ** -0.5 if scaling is None else scaling
        if self._layer is not None:
            # A layer's tensors are loaded for it alone, and what was seen of it is looked at later.
            self._layer.scores = scores._replace(sinks=None if scores.sinks is None else scores.sinks.detach().clone())
            self._layer.add(query, key, value, scale, self._keeps, self._number)
        if self._instead is not None:
            key, value = (x.to(key.dtype) for x in self._instead)
        if scores.absolute:  # the mask has the window
            return attend(query, key, value, attention_mask, scale, scores).transpose(1, 2).contiguous(), None
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


def rotary_dim(model: LayerByLayer, shape: AttentionShape) -> int:
    """Return how many channels RoPE turns, from the cosines that the layers get; all of them if it does its work out of sight."""
    embeddings = model.argument("position_embeddings")
    if isinstance(embeddings, tuple) and isinstance(embeddings[0], Tensor):
        cosines = embeddings[0]
        pairs = cosines.unflatten(-1, (-1, 2) if shape.interleaved else (2, -1)).movedim(
            -1 if shape.interleaved else -2, 0
        )
        each = (
            1 if torch.equal(*pairs) else 2
        )  # most classes give both channels of a pair its cosine, some (gpt-oss) one
        return min(each * cosines.shape[-1], shape.head_dim)
    uses = getattr(model.model.config.get_text_config(), "rope_parameters", None)
    return shape.head_dim if uses else 0
