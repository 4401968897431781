"""Attention over the paged cache: queries of one token a sequence, of a few (speculation), or of a piece of a prompt, mixed as they come. The reference
stands in attention_ref.py, with what the arguments mean; the kernel's design and figures: docs/kernels/decode_attention.md.
"""

import functools
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilepress.formats import int8
from tilepress.formats.kv_int4 import PAGE_TOKENS, Forms, KVFormat
from tilepress.formats.kv_pages import check_pages, page_tokens
from tilepress.kernels import arch, decode_attention_mma, jit, library
from tilepress.kernels.arch import Path
from tilepress.kernels.attention_ref import Cache, attend as _attend
from tilepress.kernels.jit import VARIES, Launch
from tilepress.kernels.kv_cache import VALUE_FORM, check_calibration
from tilepress.kernels.once import Planned, gathering

_ARGUMENTS = (
    "Tensor query, Tensor pages, Tensor block_table, Tensor seq_lens, float scale, Tensor? key_channels, Tensor? key_fixed, "
    "Tensor? value_channels, Tensor? value_fixed, int bits, int group_size, bool static, bool rotate"
)
_MORE = (
    f"{VALUE_FORM}, Tensor? cu_query_lens=None, int window=0, float softcap=0., Tensor? sinks=None, Tensor? slopes=None"
)
library.define(f"decode_attention({_ARGUMENTS}, {_MORE}) -> Tensor")
library.define(f"decode_attention_lse({_ARGUMENTS}, {_MORE}) -> (Tensor, Tensor)")
library.define(f"decode_attention_int8({_ARGUMENTS}, Tensor out_scale, {_MORE}) -> Tensor")
library.define(f"decode_attention_into({_ARGUMENTS}, Tensor(a!) out, {_MORE}) -> ()")
_OUT = 13  # the number of out_scale and of out


def decode_attention_ref(query: Tensor, *args) -> Tensor:
    """query [queries, query heads, D] over the tokens of their sequences -> the same shape and dtype; zeros where there are no tokens.

    The arguments are those of `Cache`. A sequence's queries are its last tokens, in order, and each sees the tokens up to itself. Query heads are a multiple
    of the pages' heads, neighbours share one (GQA). Computed in float32. Raises ValueError for shapes that do not fit, IndexError for lengths and
    tables beyond the pages."""
    return _attend(query, Cache(*args))[0].to(query.dtype)


def decode_attention_lse_ref(query: Tensor, *args) -> tuple[Tensor, Tensor]:
    """Return the same, and float32 [queries, query heads]: the natural logarithm of the sum of the exponentials of all scores, sinks among them, -inf
    where there are none.
    With it, attention over parts of a sequence can be put together; a sink belongs to one of them."""
    out, lse = _attend(query, Cache(*args))
    return out.to(query.dtype), lse


def decode_attention_int8_ref(query: Tensor, *args) -> Tensor:
    """The output as int8 codes of `out_scale` [1], the argument before those with defaults: what a W8A8 projection takes."""
    cache, out_scale = _without_out(args)
    return int8.quantize(_attend(query, cache)[0], out_scale.float())


def decode_attention_into_ref(query: Tensor, *args) -> None:
    """Write the output into `out`, of the query's shape and dtype, the argument before those with defaults."""
    cache, out = _without_out(args)
    _is_plain(out, query)
    out.copy_(_attend(query, cache)[0])


def _without_out(args: tuple) -> tuple[Cache, Tensor]:
    return Cache(*args[: _OUT - 1], *args[_OUT:]), args[_OUT - 1]


REFERENCES = {
    "decode_attention": decode_attention_ref,
    "decode_attention_lse": decode_attention_lse_ref,
    "decode_attention_int8": decode_attention_int8_ref,
    "decode_attention_into": decode_attention_into_ref,
}


@dataclass(frozen=True)
class Configuration:
    """The configuration that a kernel is compiled for."""

    form: KVFormat
    dtype: torch.dtype  # of queries
    tiles: int  # of 8 query heads that share a load of the pages
    passes: int = 1  # over a KV head's query heads
    rotate: bool = False
    lse: bool = False
    int8: bool = False  # output
    blocks: int = arch.HOPPER.multiprocessors  # of the card
    warps: int = 8  # of a block
    unit: int = 32  # tokens that a warp loads at once

    @property
    def shared_bytes(self) -> int:
        ring = self.warps * _STAGES * (2 * self.unit * self.form.row_bytes + 8)
        pieces = 2 * self.warps * 4 * self.tiles * (4 * (2 * self.form.head_dim + 4) + 16)
        return ring + pieces + 2 * self.warps * 16 + 8 + self.warps * 4 + 4 * (_MOST + 1)


_TAKES = (
    "query* pages* table* lens* out* lse* parts* started* ticket:8 key_channels* key_fixed* value_channels* value_fixed* "
    "out_scale* batch kv_heads group table_stride table_pages num_pages scale"
)
_STAGES = 2  # units on their way to each warp
_MANY = 16384  # tokens of a block that are worth longer units
_MOST = 1024  # sequences of a launch
_SPARE = 256  # counters that are made at once
_COUNTER_BYTES = 32
_counters: dict[tuple[int, int, int], tuple[int, int]] = {}  # addresses and tickets, of device, stream and capture
_spare: dict[int, list[int]] = {}  # addresses, of each device
_lock = threading.Lock()


def _counter_of(device: torch.device) -> tuple[int, int] | None:
    """The address of a counter of blocks, for good, and its ticket. Launches of a stream follow one another and share one; graphs run beside streams and
    each other, so each stream of a capture has one of its own, made before: None where there was none."""
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    capture = jit.capture_number(stream)
    key = device.index, stream, capture
    if (known := _counters.get(key)) is not None:
        return known
    with _lock:
        spare = _spare.setdefault(device.index, [])
        if not capture and len(spare) < _SPARE // 4:
            first = jit.zeros_for_good(device, _SPARE * _COUNTER_BYTES)
            spare += range(first, first + _SPARE * _COUNTER_BYTES, _COUNTER_BYTES)
        if key not in _counters and spare:
            _counters[key] = spare.pop(), secrets.randbits(62)
        return _counters.get(key)


def source(chosen: Configuration) -> str:
    form = chosen.form
    macros = {
        "D": form.head_dim,
        "BITS": form.bits,
        "GROUPS": form.groups,
        "STATIC": int(form.static and form.bits < 16),
    }
    macros |= {"TILES": chosen.tiles, "BF16": int(chosen.dtype == torch.bfloat16), "OUT8": int(chosen.int8)}
    macros |= {
        "LSE": int(chosen.lse),
        "PASSES": chosen.passes,
        "ROTATE": int(chosen.rotate),
        "WARPS": chosen.warps,
        "STAGES": _STAGES,
    }
    return jit.source(
        "sm90_decode_attention.cu",
        **macros,
        UNIT=chosen.unit,
        MOST=_MOST,
        SHARED_BYTES=chosen.shared_bytes,
        BLOCKS=chosen.blocks,
    )


def shape_for(form: KVFormat, tiles: int, tokens: int) -> tuple[int, int]:
    """Warps of a block and tokens of a unit, where a block has so many tokens of heads at most. Units of 4 KB and more keep the memory busy; longer
    ones cost less time each, but with little work they are unevenly shared."""
    warps = 8 if tiles == 1 or form.bits == 4 else 4
    if form.bits == 16:
        return warps, 16 * 128 // form.head_dim
    short = form.head_dim * form.bits <= 256  # a row's codes are 32 bytes
    fits = tiles == 1 and form.row_bytes <= 68
    return warps, 64 if short or (fits and tokens > _MANY) else 32


@functools.cache
def _load(chosen: Configuration, device: torch.device) -> None:
    """Load both shapes: which one serves depends on the batch and the table's width, and a graph cannot load one."""
    for tokens in (0, 1 << 40):
        warps, unit = shape_for(chosen.form, chosen.tiles, tokens)
        _kernel(replace(chosen, warps=warps, unit=unit)).load(device)


@functools.cache
def _kernel(chosen: Configuration) -> jit.Kernel:
    threads = 32 * chosen.warps
    return jit.Kernel("decode_attention", source(chosen), _TAKES, threads, chosen.shared_bytes, overlaps=True)


def why_not(device: torch.device, form: Forms, dtype: torch.dtype) -> str | None:
    """Return why sm90_decode_attention.cu does not serve one query a sequence over all its tokens ("" for the CPU), or None where it does."""
    if (why := jit.why_not(device)) is not None:
        return why
    if form.key != form.value:
        return "keys and values of unlike forms, the kernel takes one form"
    if arch.kernel_for("decode_attention", device) != "decode_attention":
        return "the kernel needs a Hopper card"
    if form.head_dim not in (64, 128):
        return f"heads of {form.head_dim}, the kernel takes 64 and 128"
    return None if dtype in (torch.bfloat16, torch.float16) else f"{dtype} queries"


def _split(name: str, args: tuple) -> tuple[Cache, Tensor | None, Tensor | None]:
    """Return an op's arguments behind the query: the cache, the scale of int8 codes, the tensor that is to be written."""
    if name in ("decode_attention_int8", "decode_attention_into"):
        cache, last = _without_out(args)
        return (cache, last, None) if name == "decode_attention_int8" else (cache, None, last)
    return Cache(*args), None, None


def _is_plain(out: Tensor, query: Tensor) -> bool:
    """Return whether kernels can write into `out`. Raises ValueError where it is not of the query's shape and dtype."""
    if out.shape != query.shape or out.dtype != query.dtype or out.device != query.device:
        raise ValueError(f"queries {list(query.shape)} of {query.dtype} into {list(out.shape)} of {out.dtype}")
    return out.is_contiguous() and out.data_ptr() % 16 == 0


def _copying(*given) -> None:
    """Write the output of the op that makes one into a tensor that kernels cannot write."""
    given[_OUT].copy_(ON_CARD["decode_attention"](*given[:_OUT], *given[_OUT + 1 :]))


def _by_mma(name: str, query: Tensor, *args) -> Callable:
    """Return what runs what the kernel for Hopper does not take: the one for all cards, or the reference."""
    cache, out_scale, _ = _split(name, args)
    if jit.why_not(query.device) is not None or not decode_attention_mma.suits(query, cache):
        return REFERENCES[name]
    if decode_attention_mma.why_not(cache.form_for(query), query.dtype) is not None:
        return REFERENCES[name]
    scattered = [0] * (not query.is_contiguous() or query.data_ptr() % 16 > 0)
    scattered += [2] * (cache.block_table.stride(1) != 1) + [3] * (not cache.seq_lens.is_contiguous())
    if cache.cu_query_lens is not None and not cache.cu_query_lens.is_contiguous():
        scattered.append(next(i for i, x in enumerate(args, 1) if x is cache.cu_query_lens))
    if scattered:
        return gathering(ON_CARD[name], scattered)
    with_lse = name == "decode_attention_lse"
    attend, sums_like = decode_attention_mma.plan(query, cache, with_lse, out_scale), None
    if with_lse:
        sums_like = jit.like(query.shape[:2], torch.float32, query.device)

    def run(query: Tensor, *args):
        cache, out_scale, into = _split(name, args)
        lse = None if sums_like is None else jit.empty_like(sums_like)
        out = attend(query, cache, lse, out_scale, into)
        if into is not None:
            return None
        return out if lse is None else (out, lse)

    return run


def _plan(name: str, query: Tensor, *arguments) -> Callable:
    """The reference's results, but lengths and tables are not checked: looking at them would wait for the card. A length beyond its block table is
    cut, a number that is no page is the last page's."""
    cache, out_scale, into = _split(name, arguments)
    form = cache.form_for(query)
    if into is not None and not _is_plain(into, query):
        return _copying
    pages, block_table, seq_lens, scale, *calibration = cache[:8]
    (batch, heads, dim), kv_heads, device = query.shape, pages.shape[1], query.device
    wanted = torch.float32, torch.float16, torch.float32, torch.float16
    plain = all(t is None or (t.dtype == d and t.is_contiguous()) for t, d in zip(calibration, wanted, strict=True))
    plain &= all(t is None or t.data_ptr() % 16 == 0 for t in (pages, cache.key_channels, cache.value_channels))
    plain &= not (name == "decode_attention_lse" and cache.static and cache.rotate)
    plain &= block_table.dtype == seq_lens.dtype == torch.int32 and pages.is_contiguous() and scale > 0
    plain &= not cache.extras and page_tokens(pages, form) == PAGE_TOKENS
    if why_not(device, form, query.dtype) is not None or not plain:
        return _by_mma(name, query, *arguments)
    check_pages(pages, kv_heads, form)
    if block_table.dim() != 2:
        raise ValueError(f"a block table is [sequences, pages], not {list(block_table.shape)}")
    check_calibration((cache.key_channels, cache.value_channels, cache.key_fixed, cache.value_fixed), kv_heads, form)
    if any(t is not None and t.device != device for t in (pages, block_table, seq_lens, *calibration, out_scale)):
        raise ValueError("the arguments are on several devices")
    out = jit.like(query.shape, query.dtype if out_scale is None else torch.int8, device)
    lse = jit.like((batch, heads), torch.float32, device) if name == "decode_attention_lse" else None
    scattered = [0] * (not query.is_contiguous() or query.data_ptr() % 16 > 0)
    scattered += [2] * (block_table.stride(1) != 1) + [3] * (not seq_lens.is_contiguous())
    if scattered:
        return gathering(ON_CARD[name], scattered)
    if out_scale is not None and (out_scale.dtype != torch.float32 or out_scale.shape != (1,)):
        return lambda *given: ON_CARD[name](*given[:_OUT], given[_OUT].reshape(1).float(), *given[_OUT + 1 :])
    group = heads // kv_heads
    blocks, tiles = arch.card(device).multiprocessors, 1 if group <= 8 else 2
    most_heads, passes = 8 * tiles, -(-group // (8 * tiles))
    tokens = min(batch, _MOST) * kv_heads * passes * block_table.shape[1] * PAGE_TOKENS // blocks
    kind = query.dtype, tiles, passes, cache.rotate, lse is not None, out_scale is not None
    chosen = Configuration(form, *kind, blocks, *shape_for(form, tiles, tokens))
    _load(chosen, device)
    optional = [0 if t is None else VARIES for t in (*calibration, out_scale)]
    width, numbers = block_table.shape[1] if len(pages) else 0, jit.float_bits(scale)
    args = [VARIES, VARIES, VARIES, VARIES, VARIES, 0 if lse is None else VARIES, VARIES, VARIES, VARIES, *optional]
    launches = [
        (first, Launch(_kernel(chosen), device, blocks, (*args, min(_MOST, batch - first), *sizes)))
        for first in range(0, batch, _MOST)
        for sizes in [(kv_heads, group, block_table.stride(0), width, len(pages), numbers)]
    ]
    # What a block leaves of a segment that goes on: 16 bytes for two of [most_heads, D] channels, and [most_heads].
    part_bytes = blocks * most_heads * (dim // 2 + 1) * 16
    parts_like = jit.like((part_bytes,), torch.uint8, device)
    given = [5 + i for i, t in enumerate(calibration) if t is not None] + [_OUT] * (out_scale is not None)
    # Bytes of a sequence in what differs between launches.
    steps = [t.stride(0) * t.itemsize for t in (query, block_table, seq_lens)]
    of_out, of_lse, is_given = heads * dim * out.itemsize, 4 * heads, into is not None

    def run(*arguments):
        made = jit.empty_like(out) if not is_given else arguments[_OUT]
        counter = _counter_of(device)
        sums = None if lse is None else jit.empty_like(lse)
        is_cleared = counter is None  # by every replay: no ticket of another stands there
        if is_cleared:
            parts = torch.zeros(part_bytes + _COUNTER_BYTES, dtype=torch.uint8, device=device)
            counter = parts.data_ptr() + part_bytes, secrets.randbits(62)
        else:
            parts = jit.empty_like(parts_like)
        query, pages, table, lengths, *_ = arguments
        begins = query.data_ptr(), table.data_ptr(), lengths.data_ptr(), made.data_ptr()
        calibration = [arguments[i].data_ptr() for i in given]
        for first, launch in launches:
            queries, tables, lens, outs = (
                begin + first * step for begin, step in zip(begins, (*steps, of_out), strict=True)
            )
            of_sums = [] if sums is None else [sums.data_ptr() + first * of_lse]
            addresses = queries, pages.data_ptr(), tables, lens, outs, *of_sums, parts.data_ptr()
            # Blocks count before earlier kernels have ended.
            launch(*addresses, *counter, *calibration, alone=is_cleared and first == 0)
        if is_given:
            return None
        return made if sums is None else (made, sums)

    return run


ON_CARD = {name: Planned(functools.partial(_plan, name)) for name in REFERENCES}
for _name, _reference in REFERENCES.items():
    library.impl(_name, _reference, "CPU")
    library.impl(_name, ON_CARD[_name], "CUDA")


@torch.library.register_fake("tilepress::decode_attention")
def _(query, *_):
    return query.new_empty(query.shape)


@torch.library.register_fake("tilepress::decode_attention_lse")
def _(query, *_):
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32)


@torch.library.register_fake("tilepress::decode_attention_into")
def _(query, *_):
    return None


@torch.library.register_fake("tilepress::decode_attention_int8")
def _(query, *_):
    return query.new_empty(query.shape, dtype=torch.int8)


def path(device: torch.device, form: Forms, dtype: torch.dtype = torch.bfloat16, extras: tuple[str, ...] = ()) -> Path:
    """Return which implementation serves queries of a dtype on a device; `extras` are `Cache.extras` of what is asked for."""
    why = why_not(device, form, dtype)
    if why is None and not extras:
        return Path("decode_attention", device.type, None, form.name)
    if jit.why_not(device) is None and (why := decode_attention_mma.why_not(form, dtype)) is None:
        return Path("decode_attention_mma", device.type, None, form.name)
    return Path("decode_attention", device.type, why, form.name)
