"""Pages of an attention cache: 64 tokens of one KV head, keys and values, in the order in which a decode kernel's lanes read them (`page_order`).
Every byte belongs to one token, so that an append writes and never reads. Rows are those of kv_int4.py, keys' of the same form as values' or of another.
Pages of 16 and 32 tokens, as engines have them, are shorter in the same way: how many bytes a page has says how many tokens. Drawn in docs/format.md.
"""

from functools import cache

import torch
from torch import Tensor

from tilepress.formats.kv_int4 import PAGE_TOKENS, Forms, KVFormat

UNIT_TOKENS = 32  # what a kernel loads at once
SIZES = (16, 32, 64)  # tokens of a page


@cache
def page_order(form: Forms, page_tokens: int = PAGE_TOKENS) -> tuple[Tensor, Tensor]:
    """The place in its page of each byte of each token's key row and value row: int64 [page_tokens, row_bytes] each.

    Together a permutation of the page's bytes. In a unit of 32 tokens, or the whole page of 16: key codes, value codes, key scales, value scales.
    """
    key, value, unit = form.key, form.value, min(UNIT_TOKENS, page_tokens)
    codes = unit * (key.code_bytes + value.code_bytes)
    keys, values = [_key_plane(key, unit)], [_value_plane(value, unit) + unit * key.code_bytes]
    if key.scale_bytes:
        keys.append(_scale_plane(key, unit, key=True) + codes)
    if value.scale_bytes:
        values.append(_scale_plane(value, unit, key=False) + codes + unit * key.scale_bytes)
    starts = range(page_tokens // unit)
    return tuple(
        torch.cat([torch.cat(planes, 1) + i * unit * (key.row_bytes + value.row_bytes) for i in starts])
        for planes in (keys, values)
    )


def _inverse(stored: Tensor, count: int) -> Tensor:
    """`stored` lists (token, byte) numbers in the order they stand; returns [unit, count] positions."""
    where = torch.empty(stored.numel(), dtype=torch.int64)
    where[stored.reshape(-1)] = torch.arange(stored.numel())
    return where.view(-1, count)


def _key_plane(form: KVFormat, unit: int) -> Tensor:
    """The order of key codes.

    Per 8 tokens: chunks of 64 bytes of a row (of the largest power of two that divides it, if it is shorter), in each
    the 8 tokens.
    """
    count = form.code_bytes
    chunk = min(64, count & -count)
    numbers = torch.arange(unit * count).view(-1, 8, count // chunk, chunk)
    return _inverse(numbers.transpose(1, 2), count)


def _value_plane(form: KVFormat, unit: int) -> Tensor:
    """Tokens in pairs, so that a 32-bit word holds the same channels of both.

    What is interleaved is 4 channels of 4 bits (2 bytes), 1 of 8 bits, 1 of 16 bits. Per 8 tokens, with 16 g + ... the channel:
    4 bits [g][pair][4 words][token of pair], 8 bits [half of 16][g][pair][4 words][2 channels][token of pair],
    16 bits [quarter of 16][g][pair][4 channels][token of pair].
    """
    count, g = form.code_bytes, form.head_dim // 16
    numbers = torch.arange(unit * count)
    if form.bits == 4:
        stored = numbers.view(-1, 4, 2, g, 4, 2).permute(0, 3, 1, 4, 2, 5)
    elif form.bits == 8:
        stored = numbers.view(-1, 4, 2, g, 2, 4, 2).permute(0, 4, 3, 1, 5, 6, 2)
    else:
        stored = numbers.view(-1, 4, 2, g, 4, 4, 2).permute(0, 4, 3, 1, 5, 2, 6)
    return _inverse(stored, count)


def _scale_plane(form: KVFormat, unit: int, key: bool) -> Tensor:
    """Row-wise, and keys' in groups: [token mod 8][group][token div 8] of (scale, shift); values' in groups: per 16 tokens
    [group][pair mod 4][pair div 4][scale, shift][token of pair]."""
    count, groups = form.scale_bytes, form.groups
    numbers = torch.arange(unit * count)
    by_row = numbers.view(-1, 8, groups, 4).permute(1, 2, 0, 3)
    by_pair = numbers.view(-1, 2, 4, 2, groups, 2, 2).permute(0, 4, 2, 1, 5, 3, 6)
    return _inverse(by_row if key or groups == 1 else by_pair, count)


def write_pages(pages: Tensor, slots: Tensor, key_rows: Tensor, value_rows: Tensor, form: Forms) -> None:
    """Stores rows uint8 [tokens, heads, row_bytes], keys' and values', at `slots` int64 [tokens] (page * page's tokens + place in the page; -1 is skipped; no
    slot twice) of pages uint8 [num_pages, heads, page_bytes], in place. Raises IndexError for a slot beyond the pages, ValueError for pages of
    another format or number of heads."""
    size = check_pages(pages, key_rows.shape[1], form)
    if slots.numel() and not (int(slots.min()) >= -1 and int(slots.max()) < pages.shape[0] * size):
        raise IndexError(f"slots {int(slots.min())} .. {int(slots.max())} are beyond {pages.shape[0]} pages of {size}")
    keep = slots >= 0
    slots = slots[keep]
    heads = torch.arange(pages.shape[1], device=pages.device)[None, :, None]
    for order, rows in zip(page_order(form, size), (key_rows, value_rows), strict=True):
        places = order.to(pages.device)[slots % size][:, None]
        pages[(slots // size)[:, None, None], heads, places] = rows[keep]


def read_pages(pages: Tensor, table: Tensor, length: int, form: Forms) -> tuple[Tensor, Tensor]:
    """The key rows and the value rows uint8 [length, heads, row_bytes] of the first `length` tokens of the pages listed in `table`.

    Raises IndexError for a table that is too short or names no page, ValueError for pages of another format."""
    size = check_pages(pages, pages.shape[1], form)
    check_table(table[None], [length], len(pages), size)
    used = table[: -(-length // size)].long()
    return tuple(rows[0, :length] for rows in gather_pages(pages, used[None], form))


def gather_pages(pages: Tensor, numbers: Tensor, form: Forms) -> tuple[Tensor, Tensor]:
    """The key rows and the value rows uint8 [sequences, n * page's tokens, heads, row_bytes] of pages that int64 [sequences, n] names, unchecked."""
    size, gathered = page_tokens(pages, form), pages[numbers]
    return tuple(gathered[..., order.to(pages.device)].movedim(2, 3).flatten(1, 2) for order in page_order(form, size))


def check_table(table: Tensor, lengths: list[int], num_pages: int, size: int, first: list[int] | None = None) -> None:
    """Raises IndexError where tables [sequences, n] of pages of `size` tokens have no room for `lengths`, or name what is no page from their `first` column on
    up to the lengths' end."""
    for i, length in enumerate(lengths):
        if not 0 <= length <= table.shape[1] * size:
            raise IndexError(f"{length} tokens, the block table has {table.shape[1]} pages of {size}")
        used = table[i, first[i] if first else 0 : -(-length // size)]
        if used.numel() and not (int(used.min()) >= 0 and int(used.max()) < num_pages):
            raise IndexError(f"the block table names a page that is none of 0..{num_pages - 1}")


def pages_from_serialized(
    key_cache: Tensor, value_cache: Tensor, seq_lens: Tensor, form: KVFormat
) -> tuple[Tensor, Tensor, Tensor]:
    """The paged form of a contiguous cache of serialized rows, bit for bit: key_cache, value_cache uint8 [batch, T, heads, 4 G + D / 2], of which
    sequences use seq_lens int [batch] tokens -> pages uint8 [n, heads, page_bytes], block_table int32 [batch, most], seq_lens int32 [batch].

    A sequence's pages follow each other, its table ends in zeros, unused places are zero. Raises ValueError for caches that are not of `form`, a
    dynamic one of 4 bits, and for lengths beyond T."""
    check_serialized(key_cache, value_cache, seq_lens, form)
    lengths, device = seq_lens.to(key_cache.device, torch.int64), key_cache.device
    counts = -(-lengths // PAGE_TOKENS)
    first, place = (counts.cumsum(0) - counts)[:, None], torch.arange(key_cache.shape[1], device=device)
    used = place < lengths[:, None]
    pages = key_cache.new_zeros(int(counts.sum()), key_cache.shape[2], form.page_bytes)
    ours = (stored[used].roll(-form.scale_bytes, -1) for stored in (key_cache, value_cache))
    write_pages(pages, (first * PAGE_TOKENS + place)[used], *ours, form)
    number = torch.arange(int(counts.max()) if len(counts) else 0, device=device)
    table = torch.where(number < counts[:, None], first + number, 0)
    return pages, table.to(torch.int32), lengths.to(torch.int32)


def serialized_from_pages(
    pages: Tensor, block_table: Tensor, seq_lens: Tensor, max_len: int, form: KVFormat
) -> tuple[Tensor, Tensor]:
    """The inverse: key and value cache uint8 [batch, max_len, heads, 4 G + D / 2], zero beyond a sequence's end. Raises ValueError for another
    form than a dynamic one of 4 bits and for lengths beyond max_len, and as `read_pages` does."""
    shape = (len(seq_lens), max_len, pages.shape[1], form.row_bytes)
    caches = pages.new_zeros(2, *shape)
    check_serialized(*caches, seq_lens, form)
    for i, length in enumerate(seq_lens.tolist()):
        for stored, rows in zip(caches, read_pages(pages, block_table[i], length, form), strict=True):
            stored[i, :length] = rows.roll(form.scale_bytes, -1)
    return caches[0], caches[1]


def check_serialized(key_cache: Tensor, value_cache: Tensor, seq_lens: Tensor, form: KVFormat) -> None:
    """Raises ValueError for caches that do not hold serialized rows of `form`, and for lengths that they cannot have."""
    if form.bits != 4 or form.static:
        raise ValueError(f"serialized rows have 4 bits and scales of their own, the format is {form.name}")
    for stored in (key_cache, value_cache):
        if stored.dtype != torch.uint8 or stored.dim() != 4 or stored.shape[-1] != form.row_bytes:
            raise ValueError(
                f"a cache {list(stored.shape)} of {stored.dtype} does not hold serialized {form.name} rows of {form.head_dim} channels: "
                f"uint8 [batch, T, heads, {form.row_bytes}]"
            )
    if key_cache.shape != value_cache.shape:
        raise ValueError(f"the key cache is {list(key_cache.shape)}, the value cache {list(value_cache.shape)}")
    if seq_lens.shape != key_cache.shape[:1] or seq_lens.is_floating_point():
        raise ValueError(f"lengths {list(seq_lens.shape)} of {seq_lens.dtype} for {len(key_cache)} sequences")
    if seq_lens.numel() and not 0 <= int(seq_lens.min()) <= int(seq_lens.max()) <= key_cache.shape[1]:
        raise ValueError(
            f"lengths {int(seq_lens.min())} .. {int(seq_lens.max())}, the cache has room for {key_cache.shape[1]} tokens"
        )


def page_tokens(pages: Tensor, form: Forms) -> int:
    """The tokens of a page, by its bytes; 0 where they are of no size that there is."""
    size, rest = divmod(pages.shape[-1], form.key.row_bytes + form.value.row_bytes)
    return size if rest == 0 and size in SIZES else 0


def check_pages(pages: Tensor, heads: int, form: Forms) -> int:
    """Return the tokens of a page. Raises ValueError for pages of another format or number of heads."""
    if (
        pages.dtype == torch.uint8
        and pages.dim() == 3
        and pages.shape[1] == heads
        and (size := page_tokens(pages, form))
    ):
        return size
    raise ValueError(
        f"pages {list(pages.shape)} of {pages.dtype} do not hold {form.name} rows of {heads} heads: uint8 [n, {heads}, {form.page_bytes}]"
    )
