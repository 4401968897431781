"""Keys and values of an attention cache in 4, 8 or 16 bits: rows, their serialized form, and pages. Drawn in docs/format.md.

A row is one token's key or value of one KV head, `head_dim` numbers. Quantized, it is codes 0 .. 2^bits - 1 in groups of consecutive
channels, each group with a float16 (scale, shift) = (s, z). Static formats keep s and z outside. A value stands for
x = mean + scale * (code * s + z), with mean and scale calibrated per channel or 0 and 1.

s and z start from the row's extremes, drawn together by `clip`. Those of dynamic 4-bit formats are refitted `refits` times: by least squares to the
codes that they gave, weighted by how much an error in each channel matters, and twice as far, where the next refits would lead. Errors and weights
become whole numbers first, whose sums are exact in any order, so that a kernel gives the same bits.

A page holds 64 tokens of one KV head, keys and values, in the order in which a decode kernel's lanes read them (`page_order`): every byte
belongs to one token, so that an append writes and never reads.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tilepress.formats import UsageError

PAGE_TOKENS = 64
UNIT_TOKENS = 32  # what a kernel loads at once
BITS = (4, 8, 16)
LEAST_SCALE = 2.0**-24  # of float16
_FLOAT16_MAX = 65504.0
# A refit counts errors in parts of a step, up to _FAR steps beyond the codes: parts times a group's size have so many bits, sums 31.
_PART_BITS, _FAR, _STRETCH = 20, 2, 2


@dataclass(frozen=True)
class KVFormat:
    """The storage format of keys and values. Raises UsageError for a head dimension or group size that does not fit.

    `group_size` 0 means one group, the whole row, and so does the head dimension. 16 bits are bfloat16, without groups.
    """

    head_dim: int
    bits: int = 4
    group_size: int = 0
    static: bool = False  # scales are the calibration's, none with the tokens

    def __post_init__(self):
        if self.bits not in BITS:
            raise UsageError(f"--bits {self.bits} is unknown", f"choose one of {', '.join(map(str, BITS))}")
        if self.head_dim not in range(32, 1025, 32):
            raise UsageError(
                f"the head dimension {self.head_dim} is no multiple of 32 up to 1024",
                "leave this model's cache as it is",
            )
        if self.group_size == self.head_dim:
            object.__setattr__(self, "group_size", 0)
        size = self.group_size
        if size < 0 or (size and (size % 32 or self.head_dim % size)):
            raise UsageError(
                f"groups of {size} do not divide the head dimension {self.head_dim}",
                f"use --group-size {' or '.join(str(n) for n in _group_sizes(self.head_dim))}",
            )
        if self.bits != 4 and self.groups > 1:
            raise UsageError(f"{self.bits}-bit rows have one group", "leave --group-size out")

    @property
    def groups(self) -> int:
        return self.head_dim // self.group_size if self.group_size else 1

    @property
    def max_code(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def refits(self) -> int:
        """The number of times that a calibration refits scales."""
        return 1 if self.bits == 4 and not self.static else 0

    @property
    def code_bytes(self) -> int:
        """Bytes of codes in one row."""
        return self.head_dim * self.bits // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales and shifts in one row."""
        return 0 if self.static or self.bits == 16 else 4 * self.groups

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: one token's key or value of one head."""
        return self.code_bytes + self.scale_bytes

    @property
    def page_bytes(self) -> int:
        """Keys and values of 64 tokens of one head: a multiple of 16."""
        return 2 * PAGE_TOKENS * self.row_bytes

    @property
    def name(self) -> str:
        if self.bits == 16:
            return "bfloat16"
        kind = "static" if self.static else "dynamic"
        return f"int{self.bits} {kind}, " + (f"groups of {self.group_size}" if self.groups > 1 else "row-wise")


def _group_sizes(head_dim: int) -> list[int]:
    return [n for n in range(head_dim, 31, -32) if head_dim % n == 0]


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [..., D] -> bytes [..., D * bits / 8]: of 4 bits the even channel is the low half of a byte."""
    return codes if bits == 8 else codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_codes`."""
    return packed if bits == 8 else torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def dequantize_rows(codes: Tensor, scales: Tensor) -> Tensor:
    """uint8 codes [..., D] and float16 (scale, shift) [..., G, 2] -> float32 [..., D]."""
    scale, shift = scales.float().unbind(-1)
    grouped = codes.unflatten(-1, (scale.shape[-1], -1)).float()
    return (grouped * scale[..., None] + shift[..., None]).flatten(-2)


def row_bytes(codes: Tensor, scales: Tensor | None, bits: int) -> Tensor:
    """Rows as bytes [..., code_bytes + scale_bytes]: packed codes, then (scale, shift) of each group."""
    packed = pack_codes(codes, bits)
    if scales is None:
        return packed
    return torch.cat([packed, scales.to(torch.float16).contiguous().view(torch.uint8).flatten(-2)], -1)


def split_row(row: Tensor, form: KVFormat) -> tuple[Tensor, Tensor | None]:
    """The inverse of `row_bytes`: codes [..., D] uint8 and (scale, shift) [..., G, 2] float16 (None for static formats)."""
    codes = unpack_codes(row[..., : form.code_bytes], form.bits)
    if not form.scale_bytes:
        return codes, None
    scales = row[..., form.code_bytes :].contiguous().view(torch.float16)
    return codes, scales.unflatten(-1, (form.groups, 2))


def to_serialized(codes: Tensor, scales: Tensor) -> Tensor:
    """4-bit rows as PyTorch's FBGEMM lays them out for `gqa_attn_splitk`: (scale, shift) of each group, then the codes.

    codes uint8 [..., D] in 0..15, scales float16 [..., G, 2] -> bytes [..., 4 G + D / 2].
    """
    return torch.cat([scales.to(torch.float16).contiguous().view(torch.uint8).flatten(-2), pack_codes(codes, 4)], -1)


def from_serialized(row: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """The inverse of `to_serialized`."""
    scales = row[..., : 4 * groups].contiguous().view(torch.float16).unflatten(-1, (groups, 2))
    return unpack_codes(row[..., 4 * groups :], 4), scales


def hadamard(x: Tensor) -> Tensor:
    """x [..., D] float32 times a block-diagonal orthogonal Hadamard matrix; blocks of the largest power of two in D. Its own inverse."""
    size = x.shape[-1] & -x.shape[-1]
    y, step = x.unflatten(-1, (-1, size)), 1
    while step < size:
        a, b = y.unflatten(-1, (-1, 2, step)).unbind(-2)
        y, step = torch.stack([a + b, a - b], -2).flatten(-3), 2 * step
    return (y * size**-0.5).flatten(-2)


def to_channels(x: Tensor, channels: Tensor | None, rotate: bool) -> Tensor:
    """x [..., heads, D] as (x - mean) / scale in float32, rotated; channels float32 [3, heads, D] are mean, scale and error weight."""
    y = x.float()
    if channels is not None:
        y = (y - channels[0]) * (1 / channels[1])
    return hadamard(y) if rotate else y


def from_channels(y: Tensor, channels: Tensor | None, rotate: bool) -> Tensor:
    """The inverse of `to_channels`."""
    y = hadamard(y) if rotate else y
    return y if channels is None else y * channels[1] + channels[0]


def quantize_rows(
    y: Tensor,
    form: KVFormat,
    weight: Tensor | None = None,
    fixed: Tensor | None = None,
    clip: float = 1.0,
    refits: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """y [..., heads, D] float32 -> codes uint8 of the same shape and float16 (scale, shift) [..., heads, G, 2], None for static formats.

    weight [heads, D] of squared errors; fixed [heads, G, 2] the (scale, shift) of static formats; refits of dynamic 4-bit ones.
    """
    grouped = y.unflatten(-1, (form.groups, -1))
    if form.static:
        scale, shift = fixed.float().unsqueeze(-2).unbind(-1)
        return _codes(grouped, scale, shift, form).to(torch.uint8).flatten(-2), None
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    middle, reach = (low + high) * 0.5, (high - low) * (0.5 * clip)
    scale, shift = _in_reach(reach * (2 / form.max_code), middle - reach)
    if refits and form.bits == 4:
        importance = _importance(y.new_ones(y.shape[-2:]) if weight is None else weight, form)
        for _ in range(refits):
            scale, shift = _refitted(grouped, importance, scale, shift, form)
    scale, shift = scale.to(torch.float16), shift.to(torch.float16)
    codes = _codes(grouped, scale.float(), shift.float(), form)
    return codes.to(torch.uint8).flatten(-2), torch.cat([scale, shift], -1)


def _importance(weight: Tensor, form: KVFormat) -> Tensor:
    """Weights [heads, D] as whole numbers [heads, G, D / G] up to 64, a group's largest at least 32 if it is not below 2^-100."""
    weight = weight.unflatten(-1, (form.groups, -1))
    exponent = torch.frexp(weight.amax(-1, keepdim=True).clamp(min=2.0**-100)).exponent
    return torch.ldexp(weight, 6 - exponent).round().long()


def _refitted(
    grouped: Tensor, importance: Tensor, scale: Tensor, shift: Tensor, form: KVFormat
) -> tuple[Tensor, Tensor]:
    """grouped [..., heads, G, D / G], scale and shift [..., heads, G, 1] float32 -> better ones, by the errors of the codes that these give."""
    step = 2 ** (_PART_BITS - max(8, (grouped.shape[-1] - 1).bit_length()))
    found = ((grouped - shift) * (1 / scale)).clamp(-_FAR, form.max_code + _FAR).nan_to_num()
    found = (found * step).round().long()
    code = ((found + step // 2) // step).clamp(0, form.max_code)
    error = importance * (found - step * code)
    weighted = importance * code
    sums = (x.sum(-1, keepdim=True).float() for x in (importance, weighted, weighted * code, error, error * code))
    sum_w, sum_c, sum_cc, sum_e, sum_ec = sums
    spread = sum_w * sum_cc - sum_c * sum_c
    stretch = 1 + (sum_w * sum_ec - sum_c * sum_e) / spread * (_STRETCH / step)
    move = (sum_cc * sum_e - sum_c * sum_ec) / spread * (_STRETCH / step)
    sound = (spread > 0) & (stretch > 0)
    return _in_reach(torch.where(sound, scale * stretch, scale), torch.where(sound, shift + scale * move, shift))


def _in_reach(scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and shifts clamped to the range that float16 can round."""
    return scale.clamp(LEAST_SCALE, _FLOAT16_MAX), shift.clamp(-_FLOAT16_MAX, _FLOAT16_MAX)


def _codes(grouped: Tensor, scale: Tensor, shift: Tensor, form: KVFormat) -> Tensor:
    return ((grouped - shift) / scale).round().clamp(0, form.max_code)


def clamped_share(x: Tensor, form: KVFormat, channels: Tensor, fixed: Tensor) -> float:
    """The share of x [..., heads, D] that a static format cannot reach: more than half a step beyond its first or last
    code.
    """
    scale, shift = fixed.float().unsqueeze(-2).unbind(-1)
    codes = (to_channels(x, channels, False).unflatten(-1, (form.groups, -1)) - shift) / scale
    return float(((codes < -0.5) | (codes > form.max_code + 0.5)).float().mean())


def fake_quantize(
    x: Tensor, form: KVFormat, channels: Tensor | None, fixed: Tensor | None, clip: float, rotate: bool, refits: int
) -> Tensor:
    """x [..., heads, D] as it comes back from the cache, float32."""
    if form.bits == 16:
        return x.to(torch.bfloat16).float()
    y = to_channels(x, channels, rotate)
    codes, scales = quantize_rows(y, form, None if channels is None else channels[2], fixed, clip, refits)
    return from_channels(dequantize_rows(codes, fixed if scales is None else scales), channels, rotate)


@cache
def page_order(form: KVFormat) -> Tensor:
    """The place in its page of each byte of each token's rows: int64 [2 (key, value), 64 tokens, row_bytes].

    A permutation of 0 .. page_bytes - 1. In a unit of 32 tokens: key codes, value codes, key scales, value scales.
    """
    unit, codes = UNIT_TOKENS, form.code_bytes
    in_unit = torch.empty(2, unit, form.row_bytes, dtype=torch.int64)
    in_unit[0, :, :codes] = _key_plane(form)
    in_unit[1, :, :codes] = _value_plane(form) + unit * codes
    if form.scale_bytes:
        in_unit[0, :, codes:] = _scale_plane(form, key=True) + 2 * unit * codes
        in_unit[1, :, codes:] = _scale_plane(form, key=False) + 2 * unit * codes + unit * form.scale_bytes
    return torch.cat([in_unit + first * 2 * form.row_bytes for first in range(0, PAGE_TOKENS, unit)], 1)


def _inverse(stored: Tensor, count: int) -> Tensor:
    """`stored` lists (token, byte) numbers in the order they stand; returns [32, count] positions."""
    where = torch.empty(UNIT_TOKENS * count, dtype=torch.int64)
    where[stored.reshape(-1)] = torch.arange(UNIT_TOKENS * count)
    return where.view(UNIT_TOKENS, count)


def _key_plane(form: KVFormat) -> Tensor:
    """The order of key codes.

    Per 8 tokens: chunks of 64 bytes of a row (of the largest power of two that divides it, if it is shorter), in each
    the 8 tokens.
    """
    count = form.code_bytes
    chunk = min(64, count & -count)
    numbers = torch.arange(UNIT_TOKENS * count).view(-1, 8, count // chunk, chunk)
    return _inverse(numbers.transpose(1, 2), count)


def _value_plane(form: KVFormat) -> Tensor:
    """Tokens in pairs, so that a 32-bit word holds the same channels of both.

    What is interleaved is 4 channels of 4 bits (2 bytes), 1 of 8 bits, 1 of 16 bits. Per 8 tokens, with 16 g + ... the channel:
    4 bits [g][pair][4 words][token of pair], 8 bits [half of 16][g][pair][4 words][2 channels][token of pair],
    16 bits [quarter of 16][g][pair][4 channels][token of pair].
    """
    count, g = form.code_bytes, form.head_dim // 16
    numbers = torch.arange(UNIT_TOKENS * count)
    if form.bits == 4:
        stored = numbers.view(-1, 4, 2, g, 4, 2).permute(0, 3, 1, 4, 2, 5)
    elif form.bits == 8:
        stored = numbers.view(-1, 4, 2, g, 2, 4, 2).permute(0, 4, 3, 1, 5, 6, 2)
    else:
        stored = numbers.view(-1, 4, 2, g, 4, 4, 2).permute(0, 4, 3, 1, 5, 2, 6)
    return _inverse(stored, count)


def _scale_plane(form: KVFormat, key: bool) -> Tensor:
    """Row-wise, and keys' in groups: [token mod 8][group][token div 8] of (scale, shift); values' in groups: per 16 tokens
    [group][pair mod 4][pair div 4][scale, shift][token of pair]."""
    count, groups = form.scale_bytes, form.groups
    numbers = torch.arange(UNIT_TOKENS * count)
    by_row = numbers.view(4, 8, groups, 4).permute(1, 2, 0, 3)
    by_pair = numbers.view(2, 2, 4, 2, groups, 2, 2).permute(0, 4, 2, 1, 5, 3, 6)
    return _inverse(by_row if key or groups == 1 else by_pair, count)


def write_pages(pages: Tensor, slots: Tensor, key_rows: Tensor, value_rows: Tensor, form: KVFormat) -> None:
    """Stores rows uint8 [tokens, heads, row_bytes] at `slots` int64 [tokens] (page * 64 + place in the page; -1 is skipped; no slot twice)
    of pages uint8 [num_pages, heads, page_bytes], in place. Raises IndexError for a slot beyond the pages, ValueError for pages of another
    format or number of heads."""
    check_pages(pages, key_rows.shape[1], form)
    if slots.numel() and not (int(slots.min()) >= -1 and int(slots.max()) < pages.shape[0] * PAGE_TOKENS):
        raise IndexError(
            f"slots {int(slots.min())} .. {int(slots.max())} are beyond {pages.shape[0]} pages of {PAGE_TOKENS}"
        )
    keep = slots >= 0
    slots = slots[keep]
    order, heads = page_order(form).to(pages.device), torch.arange(pages.shape[1], device=pages.device)[None, :, None]
    for which, rows in enumerate((key_rows[keep], value_rows[keep])):
        pages[(slots // PAGE_TOKENS)[:, None, None], heads, order[which, slots % PAGE_TOKENS][:, None]] = rows


def read_pages(pages: Tensor, table: Tensor, length: int, form: KVFormat) -> tuple[Tensor, Tensor]:
    """The key and value rows uint8 [length, heads, row_bytes] of the first `length` tokens of the pages listed in `table`.

    Raises IndexError for a table that is too short or names no page, ValueError for pages of another format."""
    check_pages(pages, pages.shape[1], form)
    used = table[: -(-length // PAGE_TOKENS)].long()
    if not 0 <= length <= table.numel() * PAGE_TOKENS:
        raise IndexError(f"{length} tokens, the block table has {table.numel()} pages of {PAGE_TOKENS}")
    if used.numel() and not (int(used.min()) >= 0 and int(used.max()) < pages.shape[0]):
        raise IndexError(f"the block table names a page that is none of 0..{pages.shape[0] - 1}")
    order = page_order(form).to(pages.device)
    gathered = pages[used][:, :, order.reshape(-1)].view(len(used), pages.shape[1], 2, PAGE_TOKENS, form.row_bytes)
    rows = gathered.permute(2, 0, 3, 1, 4).reshape(2, -1, pages.shape[1], form.row_bytes)
    return rows[0, :length], rows[1, :length]


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


def check_pages(pages: Tensor, heads: int, form: KVFormat) -> None:
    """Raises ValueError for pages of another format or number of heads."""
    if pages.dtype != torch.uint8 or pages.dim() != 3 or pages.shape[1:] != (heads, form.page_bytes):
        raise ValueError(
            f"pages {list(pages.shape)} of {pages.dtype} do not hold {form.name} rows of {heads} heads: uint8 [n, {heads}, {form.page_bytes}]"
        )
