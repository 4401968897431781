"""An attention cache of quantized pages for transformers models: `generate` fills it, attention reads it.

`PagedCache` holds a batch of sequences, each a list of pages of 64 tokens. Padding takes no place in it: a sequence in a batch has the rows that it has
alone. `install` makes a model use it: a hook before the model's forward pass finds out which of the new positions are real and gives them slots, and an
attention function of our own reads the pages (runtime/attention.py). Attention modules of the common form use fewer and larger ops (fused_attention.py).
"""

import contextlib
import inspect
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tilepress.formats import TilepressError, UsageError
from tilepress.formats.kv_calibration import KVCalibration
from tilepress.formats.kv_int4 import PAGE_TOKENS
from tilepress.kernels.arch import Path
from tilepress.kernels.kv_read import rounded
from tilepress.models.attention import PLAIN, Scores, attend, unserved
from tilepress.runtime import attention
from tilepress.runtime.attention import PagePool, Rope
from tilepress.runtime.hf import fused_attention, hooks

ATTENTION = "tilepress_kv"


class _Layer(CacheLayerMixin):
    """One layer's view of a `PagedCache`, as transformers wants to see it."""

    is_sliding = False

    def __init__(self, cache: "PagedCache", number: int):
        super().__init__()
        self.cache, self.number, self.is_initialized = cache, number, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if key_states.requires_grad and torch.is_grad_enabled() and self.cache.trains():
            raise UsageError("the packed cache has no gradients", "train with use_cache=False")
        self.cache.append(self.number, key_states, value_states)
        self.cache.appended = (key_states, value_states)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.columns

    def get_max_length(self) -> int:
        return -1 if self.cache.pool.grows else self.cache.pool.total * PAGE_TOKENS


class _Announced(NamedTuple):
    """The positions of a forward pass, and what the sequences have with them."""

    positions: Tensor  # int64 [batch, positions], of each query in its own sequence
    slots: Tensor  # int64 [batch * positions], -1 for padding
    block_table: Tensor  # int32 [batch, most pages]
    seq_lens: Tensor  # int32 [batch]


class PagedCache(Cache):
    """The cache of a batch of sequences. `num_pages` fixes the pool (64 tokens a page), or `pool` is shared; without both it grows.

    `begin` announces the positions of a forward pass, then each layer appends and attends. Pages are on `device`; those of a layer on another one
    (`device_map`) move there when it first appends.
    """

    def __init__(
        self,
        calibration: KVCalibration,
        device: torch.device | str,
        num_pages: int | None = None,
        pool: PagePool | None = None,
    ):
        super().__init__(layers=[_Layer(self, i) for i in range(len(calibration.layers))])
        self.calibration, self.pool = calibration, pool or PagePool(calibration, device, num_pages)
        self.appended: tuple[Tensor, Tensor] | None = None  # what the layer at hand gave, until it attends
        self.training = False
        self.free()

    @property
    def columns(self) -> int:
        """Return the positions that the first layer has, padding included: what transformers calls the cache's length."""
        return self.real.shape[1] - (self._new if 0 in self._awaited else 0)

    @property
    def lengths(self) -> list[int]:
        """Return the number of tokens of each sequence."""
        return self.real.sum(1).tolist()

    def trains(self) -> bool:
        return self.training

    def begin(self, real: Tensor) -> None:
        """Give slots to the next positions: real bool [batch, positions], False for padding. Raises TilepressError, and changes nothing, if
        the pool is too small; UsageError if the batch is another or the pass before did not come to its end."""
        if self._awaited:
            raise UsageError("the pass before stopped in the middle: some layers lack its tokens", "use a new cache")
        real = real.cpu()
        if self.tables and len(self.tables) != real.shape[0]:
            raise UsageError(
                f"the cache holds {len(self.tables)} sequences, the batch has {real.shape[0]}", "use a new cache"
            )
        tables = self.tables or [[] for _ in range(real.shape[0])]
        lengths = self.real.sum(1) if self.tables else torch.zeros(real.shape[0], dtype=torch.long)
        after = lengths + real.sum(1)
        wanted = [-(-n // PAGE_TOKENS) - len(table) for n, table in zip(after.tolist(), tables, strict=True)]
        shared, users = [], {}  # sequences whose last page is written to now and read by others
        for i, (table, n, new) in enumerate(zip(tables, lengths.tolist(), real.sum(1).tolist(), strict=True)):
            if new and n % PAGE_TOKENS:
                users[table[-1]] = users.get(table[-1], self.pool.users[table[-1]]) - 1
                if users[table[-1]]:
                    shared.append(i)
        taken = self.pool.take(sum(wanted) + len(shared))
        for i in shared:
            own, others = taken.pop(), tables[i][-1]
            self.pool.copy(others, own)
            self.pool.give([others])
            tables[i][-1] = own
        for table, count in zip(tables, wanted, strict=True):
            table += [taken.pop() for _ in range(count)]
        self.tables = tables
        self.real = torch.cat([self.real if self.real.numel() else real.new_empty(real.shape[0], 0), real], 1)
        self._awaited, self._new = set(range(len(self.pool.pages))), real.shape[1]
        self.padded = not bool(self.real.all())
        most = max(1, *map(len, tables))
        table = torch.tensor([row + [0] * (most - len(row)) for row in tables], dtype=torch.int32)
        positions = lengths[:, None] + real.long().cumsum(1) - 1
        pages = table.long().gather(1, positions.clamp(min=0) // PAGE_TOKENS)
        slots = torch.where(real, pages * PAGE_TOKENS + positions % PAGE_TOKENS, -1).reshape(-1)
        self._announced = {torch.device("cpu"): _Announced(positions, slots, table, after.int())}
        self.announced(self.pool.pages[0].device)

    def announced(self, device: torch.device) -> _Announced:
        """Return what `begin` found, copied to a device once for all its layers."""
        if device not in self._announced:
            found = self._announced[torch.device("cpu")]
            if device.type == "cuda":  # pinned, or else the host waits for the card here
                found = (x.pin_memory() for x in found)
            self._announced[device] = _Announced(*(x.to(device, non_blocking=True) for x in found))
        return self._announced[device]

    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store key and value [batch, KV heads, positions, D] of the positions that `begin` announced."""
        self._expect(layer, key, value)
        key, value = (x.transpose(1, 2).flatten(0, 1) for x in (key, value))
        self.pool.append(layer, key, key, value, self.announced(key.device).slots, None, False)
        self._awaited.remove(layer)

    def rope_append(
        self,
        layer: int,
        query: Tensor,  # [batch, positions, heads, D], as its projection gives it
        key: Tensor,  # [batch, positions, KV heads, D]
        value: Tensor,  # [batch, positions, KV heads, D]
        rope: Rope,  # cos and sin [batch or 1, positions, rotary / 2]
        fold: bool,
    ) -> Tensor:
        """Store the positions that `begin` announced after norms and RoPE, and return the query after them, in the shape that it has; with `fold` as
        `attend` takes it `folded`."""
        self._expect(layer, key, value)
        rows = [x.flatten(0, 1) for x in (query, key, value)]
        cos, sin = (x.expand(len(query), -1, -1).flatten(0, 1) for x in rope[:2])
        slots = self.announced(key.device).slots
        out = self.pool.append(layer, *rows, slots, rope._replace(cos=cos, sin=sin), fold)
        self._awaited.remove(layer)
        return out.view(query.shape)

    def _expect(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Check what comes before a layer's append. Raises UsageError where `begin` did not, TilepressError for values that are not finite."""
        if layer not in self._awaited:
            raise UsageError(
                "the paged cache was not told of these positions", "call the causal language model, not its base model"
            )
        # On a card a decode step looks at no value: each layer would wait for the card. NaN stays NaN in its row, and so in what attention gives.
        if self._new > 1 or key.device.type == "cpu":
            check_finite(layer, key, value)
        self.pool.move(layer, key.device)

    def attend(self, layer: int, query: Tensor, scale: float, folded: bool = False, scores: Scores = PLAIN) -> Tensor:
        """Return the attention [batch, positions, heads, D] of query [batch, heads, positions, D] of the positions that `begin` announced. With `folded`
        a query of one position has the keys' scale and rotation already."""
        positions, _, table, seq_lens = self.announced(query.device)
        if query.shape[2] == 1:
            return self.pool.decode(layer, query[:, :, 0], table, seq_lens, scale, folded, scores)[:, None]
        # What a padded query gives is not used.
        padded = positions if self.padded else None
        found = self.pool.prefill(layer, query, table, seq_lens, max(self.lengths), scale, padded, scores)
        return found.transpose(1, 2)

    def free(self) -> None:
        """Give all pages back."""
        for table in getattr(self, "tables", []):
            self.pool.give(table)
        self.tables: list[list[int]] = []  # of each sequence
        self.real = torch.empty(0, 0, dtype=torch.bool)  # [batch, columns]
        self._awaited: set[int] = set()  # layers that have not appended this pass's positions
        self._new = 0  # positions of this pass
        self._announced: dict[torch.device, _Announced] = {}  # of this pass, on each device: see `begin`

    reset = free

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make sequence i what beam_idx[i] is, with which it shares pages until one of them writes."""
        chosen = beam_idx.tolist()
        tables = [list(self.tables[i]) for i in chosen]
        for table in tables:
            self.pool.share(table)
        for table in self.tables:
            self.pool.give(table)
        self.tables, self.real = tables, self.real[chosen]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(len(self.tables)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last -tokens_to_remove positions of every sequence away; a positive number is the length to keep."""
        count = -tokens_to_remove if tokens_to_remove < 0 else self.columns - tokens_to_remove
        if tokens_to_remove == 0 or count <= 0:
            return
        self.real = self.real[:, : max(0, self.columns - count)]
        for length, table in zip(self.lengths, self.tables, strict=True):
            keep = -(-length // PAGE_TOKENS)
            self.pool.give(table[keep:])
            del table[keep:]

    def __repr__(self) -> str:
        used = self.pool.total - len(self.pool.free)
        return f"PagedCache({self.calibration.name}, {len(self.tables)} sequences, {used} of {self.pool.total} pages)"


def check_finite(layer: int, key: Tensor, value: Tensor) -> None:
    """Check that keys and values are finite. Raises TilepressError naming the layer."""
    if not bool(torch.isfinite(key).all() and torch.isfinite(value).all()):
        raise TilepressError(
            f"layer {layer} gives keys or values that are not finite", "the model overflows in its dtype"
        )


@dataclass
class KVState:
    """The cache's state for a model's attention modules: one object that all share."""

    calibration: KVCalibration
    mode: str = "cache"  # cache: of passes that keep one | sim: passes without a cache quantize and dequantize | off
    active: dict[int, PagedCache] = field(default_factory=dict)  # of each thread, while its pass runs
    sides: dict = field(default_factory=dict)  # moved to the devices where they are needed
    asked: dict[int, tuple[str, ...]] = field(default_factory=dict)  # layers' `Scores.extras`, where a pass told them

    @property
    def current(self) -> PagedCache | None:
        """Return the cache of the pass that this thread runs."""
        return self.active.get(threading.get_ident())


@contextlib.contextmanager
def cache_mode(model: torch.nn.Module, mode: str) -> Iterator[None]:
    """Put the model's cache into another mode for a while; models without one stay as they are."""
    state: KVState | None = getattr(model, "kv_state", None)
    before = state and state.mode
    try:
        if state is not None:
            state.mode = mode
        yield
    finally:
        if state is not None:
            state.mode = before


def install(model: torch.nn.Module, calibration: KVCalibration) -> None:
    """Make a transformers model use the paged cache wherever it would make itself a dynamic one.

    An empty DynamicCache that is given to a pass becomes a PagedCache; a filled one and other kinds of cache serve as they are.
    Raises TilepressError if the calibration has other layers, heads or head dimensions than the model."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    calibration.check_model(config.num_hidden_layers, kv_heads, head_dim)
    hooks.register_attention(ATTENTION, _attention)
    model.set_attn_implementation(ATTENTION)
    model.kv_state = KVState(calibration)
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.kv_state = model.kv_state
    fused_attention.install(model)
    model.register_forward_pre_hook(_before_forward, with_kwargs=True)
    model.register_forward_hook(_after_forward, always_call=True)


def _before_forward(model, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Put our cache in the place of a new dynamic one, and announce the positions of this pass."""
    state: KVState = model.kv_state
    state.active.pop(threading.get_ident(), None)
    if args:
        kwargs = dict(inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments) | kwargs
        kwargs |= kwargs.pop("kwargs", {})
    cache, uses = kwargs.get("past_key_values"), kwargs.get("use_cache")
    if not isinstance(cache, PagedCache):
        uses = getattr(model.config.get_text_config(), "use_cache", True) if uses is None else uses
        if state.mode != "cache" or not uses:
            return None
        if cache is not None and (type(cache) is not DynamicCache or cache.get_seq_length()):
            warnings.warn(f"a {type(cache).__name__} of full precision is used, not the calibrated cache", stacklevel=2)
            return None
    if model.config._attn_implementation != ATTENTION:
        raise UsageError(
            f"the packed cache needs its own attention, the model was set to {model.config._attn_implementation!r}",
            "load the model with kv=False",
        )
    mask = kwargs.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        raise UsageError("the paged cache takes an attention mask of [batch, tokens]", "give a mask of ones and zeros")
    ids = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
    if cache is None:
        cache = PagedCache(state.calibration, ids.device)
    elif not isinstance(cache, PagedCache):  # the caller holds it and will come back with it
        cache.__class__, cache.__dict__ = PagedCache, vars(PagedCache(state.calibration, ids.device))
        for layer in cache.layers:
            layer.cache = cache
    cache.training = model.training
    real = torch.ones(ids.shape[:2], dtype=torch.bool) if mask is None else mask[:, -ids.shape[1] :].bool()
    cache.begin(real)
    state.active[threading.get_ident()] = cache
    return (), kwargs | {"past_key_values": cache, "use_cache": True}


def _after_forward(model, args: tuple, output) -> None:
    model.kv_state.active.pop(threading.get_ident(), None)


def _attention(module, query: Tensor, key: Tensor, value: Tensor, attention_mask, scaling=None, **kwargs):
    """Return the attention [batch, positions, heads, D] of query [batch, heads, positions, D], and None in place of its weights."""
    state: KVState | None = getattr(module, "kv_state", None)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if state is not None and (what := unserved(attention_mask, kwargs)) is not None:
        raise UsageError(f"{type(module).__name__} has {what}", "load the model with kv=False")
    scores = Scores.asked(kwargs)
    cache = state and state.current
    if cache is not None:
        appended, cache.appended = cache.appended, None
        if appended is None or key is not appended[0] or value is not appended[1]:
            raise UsageError(
                f"{type(module).__name__} attends to other keys or values than it keeps", "load the model with kv=False"
            )
        state.asked[module.layer_idx] = scores.extras
        return cache.attend(module.layer_idx, query, scaling, scores=scores), None
    if state is not None and state.mode == "sim":
        key, value = simulated(state, module.layer_idx, key, value)
    if scores.absolute:  # the mask has the window
        found = attend(query, key, value, attention_mask, scaling, scores, kwargs.get("dropout", 0.0))
        return found.transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


def simulated(state: KVState, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return key and value [batch, KV heads, tokens, D] as they would come back from the cache."""
    calibration, where = state.calibration, (layer, key.device)
    check_finite(layer, key, value)
    if where not in state.sides:
        state.sides[where] = calibration.layers[layer].to(key.device)
    found, there = [], state.sides[where]
    for x, side, form, rotate, feedback in (
        (key, there.key, there.form.key, there.rotate, there.feedback),
        (value, there.value, there.form.value, False, None),
    ):
        rows = x.transpose(1, 2)
        back = rounded(rows.flatten(0, 1), form, *side, rotate, calibration.refits, feedback)
        found.append(back.view(rows.shape).transpose(1, 2).to(x.dtype))
    return found[0], found[1]


def paths(model: torch.nn.Module, mode: str) -> dict[Path | str, int]:
    """Return which implementation serves how many layers in a mode of the cache."""
    calibration, device = model.kv_state.calibration, next(model.parameters()).device
    if mode == "cache":
        layers = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "config")]
        asked = {
            layer.layer_idx: Scores.of(layer, getattr(layer, "family", None)).extras for layer in layers
        } | model.kv_state.asked
        return attention.paths(calibration, device, model.dtype, len(fused_attention.modules(model)), asked)
    quantized = f"of keys and values through {calibration.name} and back " if mode == "sim" else ""
    return {f"torch attention {quantized}on {device.type}": len(calibration.layers)}
