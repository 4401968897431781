"""The host's side of sm80_decode_attention.cu and sm80_attention_combine.cu: attention over pages on every card from sm_80 on, for all that the ops take.

What a block has follows from shapes alone, which the host knows: how many rows (queries of the heads that share a KV head), how many parts of a
sequence's tokens. Lengths are read on the card.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilepress.formats.kv_int4 import Forms, KVFormat
from tilepress.formats.kv_pages import UNIT_TOKENS, check_pages, page_tokens
from tilepress.kernels import arch, jit
from tilepress.kernels.attention_ref import Cache
from tilepress.kernels.jit import VARIES, Launch
from tilepress.kernels.kv_cache import check_calibration

HEAD_DIMS = (64, 96, 128, 256)
_TAKES = (
    "query* pages* table* lens* starts* out* lse* parts* weights* key_channels* key_fixed* value_channels* value_fixed* sinks* slopes* "
    "out_scale* queries batch kv_heads group table_stride table_pages num_pages tiles splits window softcap scale"
)
_COMBINE_TAKES = (
    "parts* weights* starts* out* lse* value_channels* value_fixed* sinks* out_scale* rows batch kv_heads group splits "
    "is_capped"
)
# Tiles of a warp, warps for rows and warps for tokens, by the rows of a block.
_SHAPES = {8: (1, 1, 4), 16: (2, 1, 4), 32: (2, 2, 2), 64: (2, 4, 1)}
_SHAPES_OF_WIDE_HEADS = {8: (1, 1, 4), 16: (1, 2, 2), 32: (1, 4, 1)}
ROWS = tuple(_SHAPES)
_MOST_SPLITS = 32  # a warp's lanes look at them
_WAVES = 4  # blocks for each multiprocessor, where there is work for so many
_WAVES_OF_PIECES = 2  # the same of pieces of a prompt: as many blocks as a multiprocessor holds
_LEAST_UNITS = 4  # of a part, for each warp: LEAST in the kernel


@dataclass(frozen=True)
class Configuration:
    """The configuration that a kernel is compiled for."""

    key: KVFormat
    value: KVFormat
    page_tokens: int
    dtype: torch.dtype  # of queries
    tiles: int  # of 8 rows, of a warp
    row_warps: int  # which share a ring of units
    token_warps: int
    stages: int  # units of a ring
    rotate: bool = False
    int8: bool = False  # output

    @property
    def rows(self) -> int:
        return 8 * self.tiles * self.row_warps

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.token_warps

    @property
    def shared_bytes(self) -> int:
        unit = min(UNIT_TOKENS, self.page_tokens) * (self.key.row_bytes + self.value.row_bytes)
        pieces = self.rows * (4 * (self.key.head_dim + 4) + 16)
        return self.token_warps * max(self.stages * unit, pieces)

    @property
    def output_macros(self) -> dict[str, int]:
        """Return what attention_output.cuh is compiled with."""
        return {
            "D": self.key.head_dim,
            "VALUE_GROUPS": self.value.groups,
            "VALUE_STATIC": int(self.value.static and self.value.bits < 16),
            "BF16": int(self.dtype == torch.bfloat16),
            "OUT8": int(self.int8),
        }


def source(chosen: Configuration) -> str:
    macros = chosen.output_macros | {
        "KEY_BITS": chosen.key.bits,
        "KEY_GROUPS": chosen.key.groups,
        "KEY_STATIC": int(chosen.key.static and chosen.key.bits < 16),
        "VALUE_BITS": chosen.value.bits,
        "PAGE_TOKENS": chosen.page_tokens,
        "TILES": chosen.tiles,
        "ROW_WARPS": chosen.row_warps,
        "TOKEN_WARPS": chosen.token_warps,
        "STAGES": chosen.stages,
        "ROTATE": int(chosen.rotate),
        "SHARED_BYTES": chosen.shared_bytes,
    }
    return jit.source("sm80_decode_attention.cu", **macros)


def combine_source(chosen: Configuration) -> str:
    return jit.source("sm80_attention_combine.cu", **chosen.output_macros)


def configuration_for(
    form: Forms,
    page_tokens: int,
    dtype: torch.dtype,
    rows: int,
    card: arch.Card,
    rotate: bool = False,
    int8: bool = False,
) -> Configuration:
    """Choose a shape for blocks that have `rows` rows, nearly: 8 to 64, for heads of more than 128 channels up to 32, since a row's sums are registers.

    As many units are on their way as leave room for two blocks in a multiprocessor; where that is less than two units of each warp, one block has all."""
    shapes = _SHAPES if form.head_dim <= 128 else _SHAPES_OF_WIDE_HEADS
    tiles, row_warps, token_warps = shapes[next((n for n in shapes if rows <= n), max(shapes))]
    half = card.shared_bytes // 2 - arch.RESERVED_BYTES
    while True:
        of = (form.key, form.value, page_tokens, dtype, tiles, row_warps, token_warps)
        found = [Configuration(*of, stages, rotate, int8) for stages in (4, 3, 2)]
        for most in (min(half, card.block_shared_bytes), card.block_shared_bytes):
            for chosen in found if most == half else found[-1:]:
                if chosen.shared_bytes <= most:
                    return chosen
        token_warps //= 2  # 16 bits: a unit is 32 KB at most


def tiles_for(batch: int, queries: int, group: int, rows: int, several: bool) -> int:
    """Tiles of `rows` rows that all sequences' queries take together at most: each sequence may have one that is not full."""
    return batch + queries * group // rows if several else batch * -(-group // rows)


def splits_for(items: int, tokens: int, queries_each: int, chosen: Configuration, multiprocessors: int) -> int:
    """Parts that each tile's tokens are cut into, `tokens` being the most that a block table has room for. The card makes fewer of short sequences.

    Long sequences of few queries are cut although there are blocks enough: lengths may differ, and the longest ends last."""
    most = max(1, tokens // (_LEAST_UNITS * chosen.token_warps * min(UNIT_TOKENS, chosen.page_tokens)))
    few = queries_each <= 16
    wanted = -(-(_WAVES if few else _WAVES_OF_PIECES) * multiprocessors // items)
    if few:
        wanted = max(wanted, min(8, -(-tokens // 8192)))
    return max(1, min(wanted, most, _MOST_SPLITS))


@functools.cache
def kernel(chosen: Configuration) -> jit.Kernel:
    return jit.Kernel(
        "decode_attention_mma", source(chosen), _TAKES, chosen.threads, chosen.shared_bytes, overlaps=True
    )


@functools.cache
def combine_kernel(chosen: Configuration) -> jit.Kernel:
    return jit.Kernel("attention_combine", combine_source(chosen), _COMBINE_TAKES, 128, overlaps=True)


def why_not(form: Forms, dtype: torch.dtype) -> str | None:
    """Return why the kernel does not serve queries of a dtype on a card that has kernels, or None."""
    if form.head_dim not in HEAD_DIMS:
        return f"heads of {form.head_dim}, the kernel takes {', '.join(map(str, HEAD_DIMS))}"
    return None if dtype in (torch.bfloat16, torch.float16) else f"{dtype} queries"


def suits(query: Tensor, cache: Cache) -> bool:
    """Return whether the arguments lie as the kernel reads them."""
    floats = cache.key_channels, cache.value_channels, cache.sinks, cache.slopes
    halves, numbers = ((cache.key_fixed, cache.value_fixed), (cache.block_table, cache.seq_lens, cache.cu_query_lens))
    kinds = ((floats, torch.float32), (halves, torch.float16), (numbers, torch.int32))
    given = [(x, dtype) for tensors, dtype in kinds for x in tensors if x is not None]
    return (
        all(x.dtype == dtype for x, dtype in given)
        and all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (*floats, *halves) if x is not None)
        and cache.pages.is_contiguous()
        and cache.pages.data_ptr() % 16 == 0
        and cache.block_table.dim() == 2
        and cache.scale > 0
        and len(cache.seq_lens) > 0
        and len(query) > 0
    )


def plan(query: Tensor, cache: Cache, with_lse: bool, out_scale: Tensor | None) -> Callable[..., Tensor]:
    """Return what runs the kernel for arguments like these: `run(query, cache, lse, out_scale, out)` gives the output, in `out` unless that is None, and
    writes the log-sum-exp to `lse`. The query is contiguous and so are lengths, starts and rows of the table.

    Lengths and tables are not checked: looking at them would wait for the card."""
    form, device = cache.form_for(query), query.device
    (queries, heads, dim), (num_pages, kv_heads, _) = query.shape, cache.pages.shape
    check_pages(cache.pages, kv_heads, form)
    calibration = cache.key_channels, cache.value_channels, cache.key_fixed, cache.value_fixed
    check_calibration(calibration, kv_heads, form)
    given = (*cache[:3], *calibration, cache.cu_query_lens, cache.sinks, cache.slopes, out_scale)
    if any(t is not None and t.device != device for t in given):
        raise ValueError("the arguments are on several devices")
    batch, group, card = len(cache.seq_lens), heads // kv_heads, arch.card(device)
    size, several = page_tokens(cache.pages, form), cache.cu_query_lens is not None
    each = -(-queries // batch) if several else 1
    chosen = configuration_for(
        form, size, query.dtype, group * each, card, cache.rotate and form.key.bits < 16, out_scale is not None
    )
    tiles = tiles_for(batch, queries, group, chosen.rows, several)
    columns = cache.block_table.shape[1] if num_pages else 0
    tokens = min(columns * size, cache.window + each) if cache.window else columns * size
    splits = splits_for(tiles * kv_heads, tokens, each, chosen, card.multiprocessors)
    attend, combine = kernel(chosen), combine_kernel(chosen)
    combine.load(device)  # which of them are needed depends on the batch, and a graph cannot load one
    rows, is_split = queries * heads, splits > 1
    out_like = jit.like(query.shape, query.dtype if out_scale is None else torch.int8, device)
    parts_like, weights_at = jit.like((splits * rows * (dim + 4),), torch.float32, device), 4 * splits * rows * dim

    def varying(*are_given: bool) -> tuple:
        return tuple(VARIES if is_given else 0 for is_given in are_given)

    tables = cache.key_channels, cache.key_fixed, cache.value_channels, cache.value_fixed, cache.sinks, cache.slopes
    are_given = (
        *(True,) * 4,
        several,
        True,
        with_lse,
        is_split,
        is_split,
        *(t is not None for t in (*tables, out_scale)),
    )
    sizes = queries, batch, kv_heads, group, cache.block_table.stride(0), columns, num_pages, tiles, splits
    numbers = cache.window, jit.float_bits(cache.softcap), jit.float_bits(cache.scale)
    grid = tiles * kv_heads * splits
    launch = Launch(attend, device, grid, (*varying(*are_given), *sizes, *numbers))
    if is_split:
        of_values = (t is not None for t in (cache.value_channels, cache.value_fixed, cache.sinks, out_scale))
        sizes = rows, batch, kv_heads, group, splits, int(cache.softcap > 0)
        taken = varying(True, True, several, True, with_lse, *of_values)
        launch_sum = Launch(combine, device, -(-rows // 4), (*taken, *sizes))

    def run(query: Tensor, cache: Cache, lse: Tensor | None, out_scale: Tensor | None, out: Tensor | None) -> Tensor:
        out = jit.empty_like(out_like) if out is None else out
        scales = None if out_scale is None else out_scale.reshape(1).float()
        starts, parts = cache.cu_query_lens, None
        pieces = []
        if is_split:
            parts = jit.empty_like(parts_like)
            pieces = [parts.data_ptr(), parts.data_ptr() + weights_at]
        first = query, cache.pages, cache.block_table, cache.seq_lens, starts, out, lse
        last = cache.key_channels, cache.key_fixed, cache.value_channels, cache.value_fixed
        launch(*_addresses(*first), *pieces, *_addresses(*last, cache.sinks, cache.slopes, scales))
        if is_split:
            last = cache.value_channels, cache.value_fixed, cache.sinks, scales
            launch_sum(*pieces, *_addresses(starts, out, lse, *last))
        return out

    return run


def _addresses(*tensors: Tensor | None) -> list[int]:
    """Return those of the tensors that are given."""
    return [x.data_ptr() for x in tensors if x is not None]
