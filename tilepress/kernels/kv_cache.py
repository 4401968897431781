"""Paged attention cache ops: quantize and append, read back; formats/kv_int4.py has rows and pages. Appending has a CUDA kernel, which gives the
reference's bits; reading back is a reference.

Appending is one opaque op: a compiler that sees its casts may drop them and change codes.
"""

import functools

import torch
from torch import Tensor

from tilepress.formats.kv_int4 import (
    KVFormat,
    check_pages,
    dequantize_rows,
    from_channels,
    page_order,
    quantize_rows,
    read_pages,
    row_bytes,
    split_row,
    to_channels,
    write_pages,
)
from tilepress.kernels import jit, library

_APPEND_THREADS = 128  # a warp for a row
_SIDE = "Tensor? {0}_channels, Tensor? {0}_fixed, float {0}_clip"
_FORM = "int bits, int group_size, bool static, bool rotate, int refits"
library.define(
    f"kv_append(Tensor(a!) pages, Tensor key, Tensor value, Tensor slots, {_SIDE.format('key')}, {_SIDE.format('value')}, {_FORM}) -> ()"
)
library.define(
    "kv_read(Tensor pages, Tensor block_table, Tensor seq_lens, int max_len, Tensor? key_channels, Tensor? key_fixed, "
    "Tensor? value_channels, Tensor? value_fixed, int head_dim, int bits, int group_size, bool static, bool rotate, ScalarType out_dtype)"
    " -> (Tensor, Tensor)"
)


def _rows(x: Tensor, form: KVFormat, channels, fixed, clip: float, rotate: bool, refits: int) -> Tensor:
    if form.bits == 16:
        return x.to(torch.bfloat16).contiguous().view(torch.uint8)
    y = to_channels(x, channels, rotate)
    codes, scales = quantize_rows(y, form, None if channels is None else channels[2], fixed, clip, refits)
    return row_bytes(codes, scales, form.bits)


def values_of(rows: Tensor, form: KVFormat, fixed: Tensor | None) -> Tensor:
    """Rows of bytes as float32, still scaled and rotated."""
    if form.bits == 16:
        return rows.contiguous().view(torch.bfloat16).float()
    codes, scales = split_row(rows, form)
    return dequantize_rows(codes, fixed if scales is None else scales)


def kv_append_ref(
    pages: Tensor,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    key_channels: Tensor | None,
    key_fixed: Tensor | None,
    key_clip: float,
    value_channels: Tensor | None,
    value_fixed: Tensor | None,
    value_clip: float,
    bits: int,
    group_size: int,
    static: bool,
    rotate: bool,
    refits: int,
) -> None:
    """Quantizes key, value [tokens, heads, D] and stores them at `slots` int64 [tokens] (page * 64 + place; -1: not at all) of
    pages uint8 [num_pages, heads, page_bytes]. `rotate` is of the keys."""
    form = _form_of(pages, key, value, bits, group_size, static)
    key_rows = _rows(key, form, key_channels, key_fixed, key_clip, rotate, refits)
    value_rows = _rows(value, form, value_channels, value_fixed, value_clip, False, refits)
    write_pages(pages, slots, key_rows, value_rows, form)


def _form_of(pages: Tensor, key: Tensor, value: Tensor, bits: int, group_size: int, static: bool) -> KVFormat:
    if not key.shape[1] == value.shape[1] == pages.shape[1]:
        raise ValueError(
            f"pages of {pages.shape[1]} heads do not hold keys of {key.shape[1]} and values of {value.shape[1]}"
        )
    return KVFormat(key.shape[-1], bits, group_size, static)


_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as kv_append.cu counts them


def append_source(form: KVFormat, dtype: torch.dtype) -> str:
    macros = {"D": form.head_dim, "BITS": form.bits, "SIZE": form.group_size or form.head_dim}
    return jit.source("kv_append.cu", **macros, STATIC=int(form.static), KIND=_KINDS[dtype], BF16=0)


@functools.cache
def _append_kernel(form: KVFormat, dtype: torch.dtype) -> jit.Kernel:
    return jit.Kernel("kv_append", append_source(form, dtype), _APPEND_THREADS, overlaps=True)


@functools.cache
def _order(form: KVFormat, device: torch.device) -> Tensor:
    return page_order(form).to(device, torch.int32)


def _append_cuda(
    pages: Tensor,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    key_channels: Tensor | None,
    key_fixed: Tensor | None,
    key_clip: float,
    value_channels: Tensor | None,
    value_fixed: Tensor | None,
    value_clip: float,
    bits: int,
    group_size: int,
    static: bool,
    rotate: bool,
    refits: int,
) -> None:
    """The reference's, but slots beyond the pages are skipped: looking at them would wait for the card."""
    form = _form_of(pages, key, value, bits, group_size, static)
    check_pages(pages, key.shape[1], form)
    calibration = key_channels, key_fixed, value_channels, value_fixed
    wanted = torch.float32, torch.float16, torch.float32, torch.float16
    fits = all(
        t is None or (t.dtype == dtype and t.is_contiguous()) for t, dtype in zip(calibration, wanted, strict=True)
    )
    known = key.dtype == value.dtype and key.dtype in _KINDS and slots.dtype == torch.int64
    if jit.why_not(pages.device) is not None or not (fits and known and pages.is_contiguous()):
        sides = key_channels, key_fixed, key_clip, value_channels, value_fixed, value_clip
        return kv_append_ref(pages, key, value, slots, *sides, bits, group_size, static, rotate, refits)
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    tokens, heads, dim = key.shape
    if key.shape != value.shape or slots.shape != (tokens,):
        raise ValueError(f"keys {list(key.shape)}, values {list(value.shape)} and {list(slots.shape)} slots")
    sizes = (3, heads, dim), (heads, form.groups, 2), (3, heads, dim), (heads, form.groups, 2)
    if any(t is not None and t.shape != size for t, size in zip(calibration, sizes, strict=True)):
        raise ValueError(f"the calibration is not of {heads} heads of {dim} channels in {form.groups} groups")
    if form.static and form.bits < 16 and (key_fixed is None or value_fixed is None):
        raise ValueError("a static format needs its scales")
    if any(t is not None and t.device != pages.device for t in (key, value, slots, *calibration)):
        raise ValueError("the arguments are on several devices")
    if tokens == 0:
        return None
    slots, order = slots.contiguous(), _order(form, pages.device)
    _append_kernel(form, key.dtype)(
        pages.device,
        -(-tokens * heads * 2 // (_APPEND_THREADS // 32)),
        pages.data_ptr(),
        slots.data_ptr(),
        order.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        *(0 if t is None else t.data_ptr() for t in (key_channels, value_channels, key_fixed, value_fixed)),
        *(key.stride(0), key.stride(1), value.stride(0), value.stride(1)),
        *(jit.float_bits(0.5 * clip) for clip in (key_clip, value_clip)),
        jit.float_bits(2 / form.max_code),
        jit.float_bits((dim & -dim) ** -0.5),
        int(rotate),
        refits,
        tokens,
        heads,
        len(pages),
    )
    return None


def kv_read_ref(
    pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_len: int,
    key_channels: Tensor | None,
    key_fixed: Tensor | None,
    value_channels: Tensor | None,
    value_fixed: Tensor | None,
    head_dim: int,
    bits: int,
    group_size: int,
    static: bool,
    rotate: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Keys and values [batch, heads, max_len, D] of sequences of seq_lens int [batch] tokens in the pages block_table int [batch, most];
    0 beyond a sequence's end."""
    form = KVFormat(head_dim, bits, group_size, static)
    shape = (len(seq_lens), pages.shape[1], max_len, head_dim)
    keys, values = (pages.new_zeros(shape, dtype=out_dtype) for _ in range(2))
    for i, length in enumerate(seq_lens.tolist()):
        key, value = read_pages(pages, block_table[i], length, form)
        keys[i, :, :length] = from_channels(values_of(key, form, key_fixed), key_channels, rotate).transpose(0, 1)
        values[i, :, :length] = from_channels(values_of(value, form, value_fixed), value_channels, False).transpose(
            0, 1
        )
    return keys, values


library.impl("kv_append", kv_append_ref, "CPU")
library.impl("kv_append", _append_cuda, "CUDA")
for _key in ("CPU", "CUDA"):
    library.impl("kv_read", kv_read_ref, _key)


@torch.library.register_fake("tilepress::kv_append")
def _(pages, *_):
    return None


@torch.library.register_fake("tilepress::kv_read")
def _(pages, block_table, seq_lens, max_len, kc, kf, vc, vf, head_dim, bits, group_size, static, rotate, out_dtype):
    shape = (seq_lens.shape[0], pages.shape[1], max_len, head_dim)
    return pages.new_empty(shape, dtype=out_dtype), pages.new_empty(shape, dtype=out_dtype)
