"""Appending to the paged attention cache: quantize rows (formats/kv_int4.py) and store them in pages (kv_pages.py); kv_read.py reads them back. The CUDA kernel
gives the reference's bits.

Appending is one opaque op: a compiler that sees its casts may drop them and change codes.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tilepress.formats.kv_int4 import (
    PAGE_TOKENS,
    Forms,
    KVFormat,
    dequantize_rows,
    forms_of,
    quantize_rows,
    row_bytes,
    split_row,
    to_channels,
)
from tilepress.formats.kv_pages import check_pages, page_tokens, write_pages
from tilepress.kernels import jit, library
from tilepress.kernels.arch import Path
from tilepress.kernels.jit import VARIES, Launch
from tilepress.kernels.once import Planned, gathering

THREADS = 128  # a warp for a row
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as kv_rows.cuh counts them
CACHE_TAKES = "pages* slots* key_channels* value_channels* key_fixed* value_fixed* key_feedback* key_clip value_clip norm tokens num_pages"
CALIBRATION = "key_channels", "value_channels", "key_fixed", "value_fixed"  # tensors, as kernels take them
_SIDE = "Tensor? {0}_channels, Tensor? {0}_fixed, float {0}_clip"
# 0 bits: values are stored as keys are.
VALUE_FORM = "int value_bits=0, int value_group_size=0, bool value_static=False"
# Why references append and read where keys and values have unlike forms; None: kernels do, which compile and wait for a card that compares all of them.
UNLIKE: str | None = "keys and values of unlike forms, whose kernel waits for a comparison on a card"
QUANTIZATION = (
    f"{_SIDE.format('key')}, {_SIDE.format('value')}, int bits, int group_size, bool static, bool rotate, int refits, "
    f"{VALUE_FORM}, Tensor? key_feedback=None"
)
library.define(f"kv_append(Tensor(a!) pages, Tensor key, Tensor value, Tensor slots, {QUANTIZATION}) -> ()")


def _rows(
    x: Tensor, form: KVFormat, channels, fixed, clip: float, rotate: bool, refits: int, feedback: Tensor | None = None
) -> Tensor:
    if form.bits == 16:
        return x.to(torch.bfloat16).contiguous().view(torch.uint8)
    y = to_channels(x, channels, rotate) + 0.0  # no -0, which would be a row's least number, and its shift, by chance
    codes, scales = quantize_rows(y, form, None if channels is None else channels[2], fixed, clip, refits, feedback)
    return row_bytes(codes, scales, form.bits)


def values_of(rows: Tensor, form: KVFormat, fixed: Tensor | None) -> Tensor:
    """Rows of bytes as float32, still scaled and rotated."""
    if form.bits == 16:
        return rows.contiguous().view(torch.bfloat16).float()
    codes, scales = split_row(rows, form)
    return dequantize_rows(codes, fixed if scales is None else scales)


class Steps(NamedTuple):
    """The steps that an append takes: what kv_quantize.cuh is compiled with."""

    channels: bool
    rotate: bool
    refits: int
    feedback: bool = False

    @property
    def macros(self) -> dict[str, int]:
        told = {"CHANNELS": self.channels, "ROTATE": self.rotate, "REFITS": self.refits, "FEEDBACK": self.feedback}
        return {name: int(number) for name, number in told.items()}


class Quantization(NamedTuple):
    """An append's last arguments, in their order: how it makes rows of keys and values. channels float32 [3, heads, D] are mean, scale and error weight,
    fixed float16 [heads, groups, 2] a static format's (scale, shift); `rotate` and `key_feedback` int8 [heads, D / 4, D, 4] (kv_int4.py) are of the keys.
    Values have the keys' format unless `value_bits` is given."""

    key_channels: Tensor | None
    key_fixed: Tensor | None
    key_clip: float
    value_channels: Tensor | None
    value_fixed: Tensor | None
    value_clip: float
    bits: int
    group_size: int
    static: bool
    rotate: bool
    refits: int
    value_bits: int = 0
    value_group_size: int = 0
    value_static: bool = False
    key_feedback: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self, name) for name in CALIBRATION)

    def check(self, pages: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> Forms:
        """Return the formats of rows. Raises ValueError for what does not fit together; looks at no number, which would wait for a card."""
        if not key.shape[1] == value.shape[1] == pages.shape[1]:
            raise ValueError(
                f"pages of {pages.shape[1]} heads do not hold keys of {key.shape[1]} and values of {value.shape[1]}"
            )
        tokens, heads, dim = key.shape
        form = forms_for(dim, self.bits, self.group_size, self.static, *value_form(self))
        check_pages(pages, heads, form)
        if key.shape != value.shape or slots.shape != (tokens,):
            raise ValueError(f"keys {list(key.shape)}, values {list(value.shape)} and {list(slots.shape)} slots")
        check_calibration(self.tensors, heads, form)
        if self.key_feedback is not None:
            self._check_feedback(heads, form.key)
        given = key, value, slots, *self.tensors, self.key_feedback
        if any(t is not None and t.device != pages.device for t in given):
            raise ValueError("the arguments are on several devices")
        return form

    def _check_feedback(self, heads: int, form: KVFormat) -> None:
        wanted = heads, form.head_dim // 4, form.head_dim, 4
        fed = self.key_feedback
        if form.bits != 4 or fed.shape != wanted or fed.dtype != torch.int8:
            raise ValueError(
                f"feedback {list(fed.shape)} of {fed.dtype} for {form.name} keys: int8 {list(wanted)} of 4-bit ones"
            )

    def suits_kernels(self, pages: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> bool:
        """Return whether arguments, already checked, lie as kv_rows.cuh reads and writes them, on a card with kernels."""
        if UNLIKE and is_unlike(self):
            return False
        return (
            jit.why_not(pages.device) is None
            and key.dtype == value.dtype
            and key.dtype in KINDS
            and slots.dtype == torch.int64
            and pages.is_contiguous()
            and pages.data_ptr() % 32 == 0
            and calibration_suits_kernels(self.tensors)
            and (self.key_feedback is None or self.key_feedback.is_contiguous())
        )

    def steps(self, form: Forms) -> Steps:
        sides = form.key, form.value
        if all(side.bits == 16 for side in sides):
            return Steps(False, False, 0)
        channels = self.key_channels is not None or self.value_channels is not None
        refits = self.refits if any(side.bits == 4 and not side.static for side in sides) else 0
        return Steps(channels, self.rotate, refits, self.key_feedback is not None)

    def store(self, pages: Tensor, key: Tensor, value: Tensor, slots: Tensor, form: Forms) -> None:
        """The reference of what kv_quantize.cuh does."""
        rows = (
            _rows(key, form.key, *self[:3], self.rotate, self.refits, self.key_feedback),
            _rows(value, form.value, *self[3:6], False, self.refits),
        )
        write_pages(pages, slots, *rows, form)

    def launch_arguments(self, pages: Tensor, slots: Tensor, form: Forms) -> tuple[object, ...]:
        """Return the first arguments of a kernel that appends, as CACHE_TAKES names them."""
        return (
            VARIES,
            VARIES,
            *(0 if x is None else VARIES for x in (*self.tensors, self.key_feedback)),
            jit.float_bits(0.5 * self.key_clip),
            jit.float_bits(0.5 * self.value_clip),
            norm_of(form),
            slots.shape[0],
            pages.shape[0],
        )

    def given(self, first: int) -> list[int]:
        """Return the numbers of a kernel's tensors that are given, in their order, where these are an op's arguments from `first` on."""
        names = (*CALIBRATION, "key_feedback")
        return [first + self._fields.index(name) for name in names if getattr(self, name) is not None]


def norm_of(form: Forms) -> int:
    """Return the bits of what a Hadamard matrix of the rows is multiplied with."""
    return jit.float_bits((form.head_dim & -form.head_dim) ** -0.5)


@functools.lru_cache(maxsize=4096)
def forms_for(
    dim: int, bits: int, group_size: int, static: bool, value_bits: int, value_group_size: int, value_static: bool
) -> Forms:
    """Return the formats that an op's arguments name. Raises UsageError for what is none, ValueError for a value's form without `value_bits`."""
    key = KVFormat(dim, bits, group_size, static)
    if not value_bits:
        if value_group_size or value_static:
            raise ValueError("the values' groups or static scales were given without value_bits")
        return key
    return forms_of(key, KVFormat(dim, value_bits, value_group_size, value_static))


def is_unlike(arguments) -> bool:
    """Return whether an op's arguments give values another form than keys."""
    keys = arguments.bits, arguments.group_size, arguments.static
    return arguments.value_bits > 0 and value_form(arguments) != keys


def value_form(arguments) -> tuple[int, int, bool]:
    """Return what VALUE_FORM names, of an op's arguments."""
    return arguments.value_bits, arguments.value_group_size, arguments.value_static


def op_forms(form: Forms) -> tuple[tuple[int, int, bool], tuple[int, int, bool]]:
    """Return the formats as ops take them: bits, group_size, static of keys, and what VALUE_FORM names."""
    numbers = [(side.bits, side.group_size, side.static) for side in (form.key, form.value)]
    return numbers[0], (0, 0, False) if numbers[0] == numbers[1] else numbers[1]


def check_calibration(tensors: tuple[Tensor | None, ...], heads: int, form: Forms) -> None:
    """Check key_channels, value_channels, key_fixed, value_fixed. Raises ValueError where they do not fit the formats."""
    dim, sides = form.head_dim, (form.key, form.value)
    sizes = [(3, heads, dim), (3, heads, dim), *((heads, side.groups, 2) for side in sides)]
    if any(t is not None and t.shape != size for t, size in zip(tensors, sizes, strict=True)):
        groups = " and ".join(str(n) for n in dict.fromkeys(side.groups for side in sides))
        raise ValueError(f"the calibration is not of {heads} heads of {dim} channels in {groups} groups")
    if any(s.static and s.bits < 16 and fixed is None for s, fixed in zip(sides, tensors[2:], strict=True)):
        raise ValueError("a static format needs its scales")


def calibration_suits_kernels(tensors: tuple[Tensor | None, ...]) -> bool:
    """Return whether key_channels, value_channels, key_fixed, value_fixed lie as kv_rows.cuh reads them."""
    wanted = torch.float32, torch.float32, torch.float16, torch.float16
    return all(
        t is None or (t.dtype == dtype and t.is_contiguous()) for t, dtype in zip(tensors, wanted, strict=True)
    ) and all(t is None or t.data_ptr() % 32 == 0 for t in tensors[:2])


def row_macros(form: Forms, dtype: torch.dtype, size: int = PAGE_TOKENS) -> dict[str, int]:
    """Return what kv_rows.cuh is compiled with for inputs of a dtype and pages of `size` tokens."""
    macros = {"D": form.head_dim, "UNLIKE": int(form.key != form.value)}
    for name, side in (("KEY", form.key), ("VALUE", form.value)):
        numbers = {"BITS": side.bits, "SIZE": side.group_size or side.head_dim, "STATIC": int(side.static)}
        macros |= {f"{name}_{what}": number for what, number in numbers.items()}
    return macros | {"PAGE_TOKENS": size, "KIND": KINDS[dtype], "BF16": 0}


def kv_append_ref(pages: Tensor, key: Tensor, value: Tensor, slots: Tensor, *quantization) -> None:
    """Quantizes key, value [tokens, heads, D] and stores them at `slots` int64 [tokens] (page * its tokens + place; -1: not at all) of
    pages uint8 [num_pages, heads, page_bytes]; the rest are `Quantization`'s. Raises ValueError for what does not fit together, IndexError
    for slots beyond the pages."""
    how = Quantization(*quantization)
    how.store(pages, key, value, slots, how.check(pages, key, value, slots))


def append_source(form: Forms, dtype: torch.dtype, steps: Steps, size: int = PAGE_TOKENS) -> str:
    return jit.source("sm80_kv_append.cu", **row_macros(form, dtype, size), **steps.macros)


@functools.cache
def _append_kernel(form: Forms, dtype: torch.dtype, steps: Steps, size: int = PAGE_TOKENS) -> jit.Kernel:
    takes = f"{CACHE_TAKES} key* value* key_token:8 key_head:8 value_token:8 value_head:8 heads"
    return jit.Kernel("kv_append", append_source(form, dtype, steps, size), takes, THREADS, overlaps=True)


def _plan(pages: Tensor, key: Tensor, value: Tensor, slots: Tensor, *quantization) -> Callable:
    """The reference's, but slots beyond the pages are skipped: looking at them would wait for the card."""
    how = Quantization(*quantization)
    form, fits = how.check(pages, key, value, slots), how.suits_kernels(pages, key, value, slots)
    if not fits:
        return kv_append_ref
    tokens, heads, _ = key.shape
    if tokens == 0:
        return lambda *_: None
    width = channels_of_lane(form)
    if scattered := [i for i, x in ((1, key), (2, value)) if not is_in_rows(x, width)] + [3] * (
        not slots.is_contiguous()
    ):
        return gathering(_append_cuda, scattered)
    strides = *key.stride()[:2], *value.stride()[:2]
    cache, given = how.launch_arguments(pages, slots, form), [0, 3, *how.given(4), 1, 2]
    args, size = (*cache, VARIES, VARIES, *strides, heads), page_tokens(pages, form)
    kernel = _append_kernel(form, key.dtype, how.steps(form), size)
    return jit.filling(Launch(kernel, pages.device, blocks(tokens * heads * 2), args), given, [], 0)


_append_cuda = Planned(_plan)


def channels_of_lane(form: Forms) -> int:
    """Return how many channels of a lane kv_rows.cuh loads at once."""
    return form.head_dim // 32 if form.head_dim & (form.head_dim - 1) == 0 else 1


def is_in_rows(x: Tensor, width: int) -> bool:
    """Return whether the channels of x lie in rows that begin at multiples of `width` elements."""
    *strides, last = x.stride()
    return x.numel() == 0 or (
        last == 1 and x.data_ptr() // x.itemsize % width == 0 and all(stride % width == 0 for stride in strides)
    )


def blocks(rows: int, threads: int = THREADS) -> int:
    """Return the blocks of a kernel with a warp for a row."""
    return -(-rows // (threads // 32))


library.impl("kv_append", kv_append_ref, "CPU")
library.impl("kv_append", _append_cuda, "CUDA")


@torch.library.register_fake("tilepress::kv_append")
def _(pages, *_):
    return None


def path(device: torch.device, form: Forms | None = None) -> Path:
    """Return which implementation serves a device."""
    return Path("kv_append", device.type, why_not(device, form), unlike_name(form))


def why_not(device: torch.device, form: Forms | None) -> str | None:
    """Return why the reference appends or reads back ("" for the CPU), or None where a kernel does; without a form, of any that kernels take."""
    why = jit.why_not(device)
    return UNLIKE if why is None and unlike_name(form) else why


def unlike_name(form: Forms | None) -> str:
    """Return what tells a path of unlike forms from the others, "" for those."""
    return "" if form is None or form.key == form.value else form.name
