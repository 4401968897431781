"""Keys and values of an attention cache in 4, 8 or 16 bits: rows and their serialized form. Drawn in docs/format.md; kv_pages.py has pages.

A row is one token's key or value of one KV head, `head_dim` numbers. Quantized, it is codes 0 .. 2^bits - 1 in groups of consecutive
channels, each group with a float16 (scale, shift) = (s, z). Static formats keep s and z outside. A value stands for
x = mean + scale * (code * s + z), with mean and scale calibrated per channel or 0 and 1.

s and z start from the row's extremes, drawn together by `clip`. Those of dynamic 4-bit formats are refitted `refits` times: by least squares to the
codes that they gave, weighted by how much an error in each channel matters, and twice as far, where the next refits would lead. Errors and weights
become whole numbers first, whose sums are exact in any order, so that a kernel gives the same bits.

Keys of 4 bits may have error feedback: a row's channels are rounded in FEEDBACK_BLOCKS blocks, one after the other, and each block's errors move the
channels behind it before these are rounded. What they move is calibrated (compress/kv/feedback.py), and nothing of it is stored with a row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tilepress.formats import UsageError

PAGE_TOKENS = 64
BITS = (4, 8, 16)
LEAST_SCALE = 2.0**-24  # of float16
_FLOAT16_MAX = 65504.0
# A refit counts errors in parts of a step, up to _FAR steps beyond the codes: parts times a group's size have so many bits, sums 31.
_PART_BITS, _FAR, _STRETCH = 20, 2, 2
FEEDBACK_BLOCKS, FEEDBACK_ONE = (
    8,
    64,
)  # a block's channels, one eighth of a row, are rounded together; a feedback of so much is 1
_ERROR_PARTS = 128  # of a step, in which errors are fed back, and up to so many


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

    @property
    def key(self) -> "KVFormat":
        """The format of keys: as `UnlikeForms` names it."""
        return self

    @property
    def value(self) -> "KVFormat":
        """The format of values."""
        return self


@dataclass(frozen=True)
class UnlikeForms:
    """Keys in one format and values in another. Raises UsageError for two head dimensions."""

    key: KVFormat
    value: KVFormat

    def __post_init__(self):
        if self.key.head_dim != self.value.head_dim:
            raise UsageError(
                f"keys of {self.key.head_dim} channels and values of {self.value.head_dim}",
                "leave this model's cache as it is",
            )

    @property
    def head_dim(self) -> int:
        return self.key.head_dim

    @property
    def page_bytes(self) -> int:
        """Keys and values of 64 tokens of one head: a multiple of 16."""
        return PAGE_TOKENS * (self.key.row_bytes + self.value.row_bytes)

    @property
    def name(self) -> str:
        return f"keys {self.key.name}; values {self.value.name}"


Forms = KVFormat | UnlikeForms  # of a layer: both answer `key`, `value`, `head_dim`, `page_bytes` and `name`


def forms_of(key: KVFormat, value: KVFormat) -> Forms:
    """The formats of a layer's keys and values together: the format itself where both have the same."""
    return key if key == value else UnlikeForms(key, value)


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
    feedback: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y [..., heads, D] float32 -> codes uint8 of the same shape and float16 (scale, shift) [..., heads, G, 2], None for static formats.

    weight [heads, D] of squared errors; fixed [heads, G, 2] the (scale, shift) of static formats; refits of dynamic 4-bit ones; feedback of
    4-bit rows, as `feedback_words` has it.
    """
    grouped = y.unflatten(-1, (form.groups, -1))
    if form.static:
        scale, shift = fixed.float().unsqueeze(-2).unbind(-1)
        return _fed_codes(grouped, scale, shift, form, feedback), None
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    middle, reach = (low + high) * 0.5, (high - low) * (0.5 * clip)
    scale, shift = _in_reach(reach * (2 / form.max_code), middle - reach)
    if refits and form.bits == 4:
        importance = _importance(y.new_ones(y.shape[-2:]) if weight is None else weight, form)
        for _ in range(refits):
            scale, shift = _refitted(grouped, importance, scale, shift, form)
    scale, shift = scale.to(torch.float16), shift.to(torch.float16)
    return _fed_codes(grouped, scale.float(), shift.float(), form, feedback), torch.cat([scale, shift], -1)


def feedback_words(feedback: Tensor) -> Tensor:
    """Whole numbers [heads, D, D], what an error of each channel (the columns) adds to the others (the rows), as int8 [heads, D / 4, D, 4]: four columns
    in a word, a column's rows side by side. The inverse is `feedback_matrix`."""
    return feedback.unflatten(-1, (-1, 4)).movedim(-2, 1).to(torch.int8).contiguous()


def feedback_matrix(words: Tensor) -> Tensor:
    """The inverse of `feedback_words`."""
    return words.movedim(1, -2).flatten(-2)


def feeds_forward(words: Tensor) -> bool:
    """Whether errors move channels of later blocks alone."""
    matrix = feedback_matrix(words)
    block = torch.arange(matrix.shape[-1], device=words.device) // (matrix.shape[-1] // FEEDBACK_BLOCKS)
    return not bool(matrix[:, block[:, None] <= block].any())


def _fed_codes(grouped: Tensor, scale: Tensor, shift: Tensor, form: KVFormat, feedback: Tensor | None) -> Tensor:
    """Codes uint8 [..., heads, D] of grouped [..., heads, G, D / G].

    An error is a whole number of parts of the row's largest step, so that sums of errors times feedback are exact in any order, in float32, too."""
    place = (grouped - shift) / scale
    if feedback is not None:
        matrix, size = feedback_matrix(feedback).float(), form.head_dim // FEEDBACK_BLOCKS
        step = scale.amax(-2, keepdim=True)
        parts, back = scale / step * _ERROR_PARTS, step / scale * (1 / (_ERROR_PARTS * FEEDBACK_ONE))
        for first in range(0, form.head_dim - size, size):
            block = slice(first, first + size)
            error = ((place - _nearest(place, form)) * parts).clamp(1 - _ERROR_PARTS, _ERROR_PARTS - 1).round()
            moved = torch.einsum("hrc,...hc->...hr", matrix[..., block], error.flatten(-2)[..., block])
            place = place + moved.view_as(place) * back
    return _nearest(place, form).to(torch.uint8).flatten(-2)


def _nearest(place: Tensor, form: KVFormat) -> Tensor:
    return place.round().clamp(0, form.max_code)


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


def clamped_share(x: Tensor, form: KVFormat, channels: Tensor, fixed: Tensor) -> float:
    """The share of x [..., heads, D] that a static format cannot reach: more than half a step beyond its first or last
    code.
    """
    scale, shift = fixed.float().unsqueeze(-2).unbind(-1)
    codes = (to_channels(x, channels, False).unflatten(-1, (form.groups, -1)) - shift) / scale
    return float(((codes < -0.5) | (codes > form.max_code + 0.5)).float().mean())


def fake_quantize(
    x: Tensor,
    form: KVFormat,
    channels: Tensor | None,
    fixed: Tensor | None,
    clip: float,
    rotate: bool,
    refits: int,
    feedback: Tensor | None = None,
) -> Tensor:
    """x [..., heads, D] as it comes back from the cache, float32."""
    if form.bits == 16:
        return x.to(torch.bfloat16).float()
    y = to_channels(x, channels, rotate)
    codes, scales = quantize_rows(y, form, None if channels is None else channels[2], fixed, clip, refits, feedback)
    return from_channels(dequantize_rows(codes, fixed if scales is None else scales), channels, rotate)
