"""A paged attention cache of 16, 8 or 4 bits inside transformers' models.

Each layer has a pool of pages; a sequence owns the pages that its block table lists, the same in every layer, and takes another when its
last is full. Tokens are stored without padding: a padded position has slot -1 and is stored nowhere, so that a sequence in a batch sees
exactly what it sees alone. `install` makes a model use it: a hook before the model's forward pass finds out which of the new positions
are real and gives them slots, and an attention function of our own reads the pages. Whatever the attention sees is what the cache holds, in
prefill too, so that results do not depend on how a text is cut into pieces.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from tilepress.formats import TilepressError, UsageError
from tilepress.formats.kv_calibration import KVCalibration
from tilepress.formats.kv_int4 import PAGE_TOKENS, fake_quantize
from tilepress.kernels import kv_cache as kernels

ops = torch.ops.tilepress
ATTENTION = "tilepress_kv"


class PagePool:
    """The pages of all layers: uint8 [num_pages, KV heads, page_bytes] each. Fixed in number, or doubling when they run out."""

    def __init__(self, calibration: KVCalibration, device: torch.device | str, num_pages: int | None = None):
        self.grows, form = num_pages is None, calibration.form
        self.pages = [
            torch.empty(num_pages or 0, calibration.kv_heads, form.page_bytes, dtype=torch.uint8, device=device)
            for _ in calibration.layers
        ]
        self.free = list(range(num_pages or 0))[::-1]

    @property
    def total(self) -> int:
        return self.pages[0].shape[0]

    def take(self, count: int) -> list[int]:
        """Raises TilepressError, and takes nothing, if there are not so many."""
        if count > len(self.free):
            lacking = count - len(self.free)
            if not self.grows:
                raise TilepressError(
                    f"the cache needs {self.total + lacking} pages of {PAGE_TOKENS} tokens, it has {self.total}",
                    "give it more pages, or fewer and shorter sequences",
                )
            self._grow(max(lacking, self.total))
        return [self.free.pop() for _ in range(count)]

    def give(self, pages: list[int]) -> None:
        """Back, to be used again."""
        assert not set(pages) & set(self.free)
        self.free += pages

    def _grow(self, count: int) -> None:
        self.free = [*range(self.total, self.total + count)][::-1] + self.free
        for i, old in enumerate(self.pages):
            self.pages[i] = torch.cat([old, old.new_empty(count, *old.shape[1:])])


class _Layer(CacheLayerMixin):
    """One layer's view of a `PagedCache`, as transformers wants to see it."""

    is_sliding = False

    def __init__(self, cache: "PagedCache", number: int):
        super().__init__()
        self.cache, self.number, self.is_initialized = cache, number, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.cache.append(self.number, key_states, value_states)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.columns

    def get_max_length(self) -> int:
        return -1 if self.cache.pool.grows else self.cache.pool.total * PAGE_TOKENS


class PagedCache(Cache):
    """The cache of a batch of sequences. `num_pages` fixes the pool (64 tokens a page); without it the pool grows.

    `begin` announces the positions of a forward pass, then each layer appends and attends. A `pool` can be shared by caches that follow one
    another.
    """

    def __init__(self, calibration: KVCalibration, device: torch.device | str, num_pages: int | None = None):
        super().__init__(layers=[_Layer(self, i) for i in range(len(calibration.layers))])
        self.calibration, self.pool = calibration, PagePool(calibration, device, num_pages)
        self.sides = [tuple(side.to(device) for side in sides) for sides in calibration.layers]
        self.device = torch.device(device)
        self.tables: list[list[int]] = []  # of each sequence
        self.lengths: list[int] = []
        self.columns = 0  # positions announced to transformers, padding included
        self._new, self._awaited = 0, set()  # positions of this pass, layers that have not appended theirs

    def begin(self, real: Tensor) -> None:
        """Gives slots to the next positions: real bool [batch, positions], False for padding. Raises TilepressError, and changes nothing, if
        the pool is too small or the batch is another."""
        if self.tables and len(self.tables) != real.shape[0]:
            raise UsageError(
                f"the cache holds {len(self.tables)} sequences, the batch has {real.shape[0]}", "use a new cache"
            )
        tables = self.tables or [[] for _ in range(real.shape[0])]
        lengths = self.lengths or [0] * real.shape[0]
        counts = real.sum(1).tolist()
        after = [length + count for length, count in zip(lengths, counts, strict=True)]
        wanted = [-(-n // PAGE_TOKENS) - len(table) for n, table in zip(after, tables, strict=True)]
        taken = self.pool.take(sum(wanted))
        for table, count in zip(tables, wanted, strict=True):
            table += [taken.pop() for _ in range(count)]
        before = torch.tensor(lengths)[:, None]
        self.positions = (before + real.long().cpu().cumsum(1) - 1).to(self.device)  # of each query in its own sequence
        self.tables, self.lengths, self._new = tables, after, real.shape[1]
        self._awaited = set(range(len(self.sides)))
        most = max(1, *map(len, tables))
        table = torch.tensor([row + [0] * (most - len(row)) for row in tables], dtype=torch.int32, device=self.device)
        self.block_table, self.seq_lens = table, torch.tensor(after, dtype=torch.int32, device=self.device)
        pages = table.long().gather(1, (self.positions.clamp(min=0) // PAGE_TOKENS).long())
        slots = pages * PAGE_TOKENS + self.positions % PAGE_TOKENS
        self.slots = torch.where(real.to(self.device), slots, -1).reshape(-1)

    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        """key, value [batch, KV heads, positions, D] of the positions that `begin` announced."""
        if layer not in self._awaited:
            raise UsageError(
                "the paged cache was not told of these positions", "call the causal language model, not its base model"
            )
        self._awaited.remove(layer)
        if layer == 0:
            self.columns += self._new
        if key.device.type == "cpu" and not bool(torch.isfinite(key).all() and torch.isfinite(value).all()):
            raise TilepressError(
                f"layer {layer} gives keys or values that are not finite", "the model overflows in its dtype"
            )
        rows = (x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in (key, value))
        keys, values = self.sides[layer]
        form, calibration = self.calibration.form, self.calibration
        shape = (form.bits, form.group_size, form.static, calibration.rotate, calibration.refits)
        ops.kv_append(self.pool.pages[layer], *rows, self.slots, *keys, *values, *shape)

    def attend(self, layer: int, query: Tensor, scale: float) -> Tensor:
        """query [batch, heads, positions, D] of the positions that `begin` announced -> [batch, positions, heads, D]."""
        (keys, values), form = self.sides[layer], self.calibration.form
        sides = (*keys[:2], *values[:2])
        pages, shape = self.pool.pages[layer], (form.bits, form.group_size, form.static, self.calibration.rotate)
        if query.shape[2] == 1:
            args = (pages, self.block_table, self.seq_lens, scale, *sides, *shape)
            return ops.decode_attention(query[:, :, 0].contiguous(), *args)[:, None]
        most = max(self.lengths)
        args = (pages, self.block_table, self.seq_lens, most, *sides, query.shape[-1], *shape, query.dtype)
        key, value = ops.kv_read(*args)
        # A padded query attends to the first key: what it gives is not used.
        allowed = torch.arange(most, device=query.device) <= self.positions.clamp(min=0)[:, :, None]
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=allowed[:, None], scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out.transpose(1, 2)

    def free(self) -> None:
        """Gives all pages back."""
        for table in self.tables:
            self.pool.give(table)
        self.tables, self.lengths, self.columns = [], [], 0

    reset = free

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i becomes a copy of sequence beam_idx[i]."""
        chosen = beam_idx.tolist()
        copies = [self.pool.take(len(self.tables[i])) for i in chosen]
        for pages in self.pool.pages:
            for i, copy in zip(chosen, copies, strict=True):
                pages[copy] = pages[self.tables[i]]
        for table in self.tables:
            self.pool.give(table)
        self.tables, self.lengths = copies, [self.lengths[i] for i in chosen]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(len(self.tables)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def crop(self, tokens_to_remove: int) -> None:
        """Takes the last tokens of every sequence away; transformers counts them below zero."""
        count = abs(tokens_to_remove)
        self.columns -= count
        for i, table in enumerate(self.tables):
            self.lengths[i] = max(0, self.lengths[i] - count)
            keep = -(-self.lengths[i] // PAGE_TOKENS)
            self.pool.give(table[keep:])
            del table[keep:]

    def __repr__(self) -> str:
        used = self.pool.total - len(self.pool.free)
        return (
            f"PagedCache({self.calibration.form.name}, {len(self.tables)} sequences, {used} of {self.pool.total} pages)"
        )


@dataclass
class KVState:
    """What a model's attention modules know of the cache: one object that all share."""

    calibration: KVCalibration
    mode: str = (
        "cache"  # cache: generate with it | sim: every forward pass without a cache quantizes and dequantizes | off
    )
    active: PagedCache | None = None
    sides: dict = field(default_factory=dict)  # moved to the devices where they are needed


def install(model: torch.nn.Module, calibration: KVCalibration) -> None:
    """Makes a transformers model use the paged cache wherever it would make itself a dynamic one.

    Raises TilepressError if the calibration has other layers or heads than the model."""
    config = model.config.get_text_config()
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    found = (config.num_hidden_layers, kv_heads)
    declared = (len(calibration.layers), calibration.kv_heads)
    if found != declared:
        raise TilepressError(
            f"the cache was calibrated for {declared[0]} layers with {declared[1]} KV heads, the model has {found[0]} with {found[1]}",
            "calibrate again: `tilepress compress kv`",
        )
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    model.set_attn_implementation(ATTENTION)
    model.kv_state = KVState(calibration)
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.kv_state = model.kv_state
    model.register_forward_pre_hook(_before_forward, with_kwargs=True)
    model.register_forward_hook(_after_forward, always_call=True)


def _before_forward(model, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Puts our cache in the place of a new dynamic one, and announces the positions of this pass."""
    state: KVState = model.kv_state
    state.active, cache = None, kwargs.get("past_key_values")
    uses = kwargs.get("use_cache")
    uses = getattr(model.config.get_text_config(), "use_cache", True) if uses is None else uses
    if isinstance(cache, PagedCache):
        uses = True
    elif (
        state.mode != "cache"
        or not uses
        or not (cache is None or (isinstance(cache, DynamicCache) and not cache.get_seq_length()))
    ):
        return None
    ids = kwargs.get("input_ids", args[0] if args else None)
    ids = kwargs.get("inputs_embeds") if ids is None else ids
    if not isinstance(cache, PagedCache):
        cache = PagedCache(state.calibration, ids.device)
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.dim() != 2:
        raise UsageError("the paged cache takes an attention mask of [batch, tokens]", "give a mask of ones and zeros")
    real = torch.ones(ids.shape[:2], dtype=torch.bool) if mask is None else mask[:, -ids.shape[1] :].bool()
    cache.begin(real)
    state.active = cache
    return args, kwargs | {"past_key_values": cache, "use_cache": True}


def _after_forward(model, args: tuple, output) -> None:
    model.kv_state.active = None


def _attention(module, query: Tensor, key: Tensor, value: Tensor, attention_mask, scaling=None, **kwargs):
    """query [batch, heads, positions, D] -> ([batch, positions, heads, D], None)."""
    state: KVState | None = getattr(module, "kv_state", None)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if state is not None and state.active is not None:
        return state.active.attend(module.layer_idx, query, scaling), None
    if state is not None and state.mode == "sim":
        key, value = simulated(state, module.layer_idx, key, value)
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


def simulated(state: KVState, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """key, value [batch, KV heads, tokens, D] as they would come back from the cache."""
    calibration, where = state.calibration, (layer, key.device)
    if where not in state.sides:
        state.sides[where] = tuple(side.to(key.device) for side in calibration.layers[layer])
    found = []
    for x, side, rotate in zip((key, value), state.sides[where], (calibration.rotate, False), strict=True):
        rows = x.transpose(1, 2)
        back = fake_quantize(rows.flatten(0, 1), calibration.form, *side, rotate, calibration.refits)
        found.append(back.view(rows.shape).transpose(1, 2).to(x.dtype))
    return found[0], found[1]


def path(device: torch.device, calibration: KVCalibration) -> str:
    """What serves decoding on a device."""
    return kernels.path(device, calibration.form)
