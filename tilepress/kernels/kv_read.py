"""Reading a paged attention cache back: keys and values of whole sequences as contiguous tensors, for passes of several positions, whose attention is
torch's. formats/kv_int4.py has rows, kv_pages.py pages.

On cards from sm_80 on sm80_kv_read.cu does it in one launch, to the reference's bits where they are finite. Its grid follows from `max_len`, which the host
knows; lengths and block tables are read on the card, so that a captured graph stays valid when they change. The rest runs by the reference.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tilepress.formats.kv_int4 import PAGE_TOKENS, Forms, KVFormat, fake_quantize, from_channels
from tilepress.formats.kv_pages import check_pages, page_tokens, read_pages
from tilepress.kernels import jit, kv_cache, library
from tilepress.kernels.arch import Path
from tilepress.kernels.jit import VARIES, Launch
from tilepress.kernels.kv_cache import (
    CALIBRATION,
    KINDS,
    THREADS,
    VALUE_FORM,
    blocks,
    calibration_suits_kernels,
    check_calibration,
    forms_for,
    is_unlike,
    norm_of,
    row_macros,
    unlike_name,
    value_form,
    values_of,
    why_not,
)
from tilepress.kernels.once import Planned, gathering

library.define(
    "kv_read(Tensor pages, Tensor block_table, Tensor seq_lens, int max_len, Tensor? key_channels, Tensor? key_fixed, "
    "Tensor? value_channels, Tensor? value_fixed, int head_dim, int bits, int group_size, bool static, bool rotate, ScalarType out_dtype, "
    f"{VALUE_FORM}) -> (Tensor, Tensor)"
)

_TOKENS = 8  # of a warp
_TAKES = (
    "pages* block_table* seq_lens* key_channels* value_channels* key_fixed* value_fixed* key* value* "
    "norm rotate sequences heads max_len table_stride:8 table_width num_pages"
)


class _Read(NamedTuple):
    """The op's arguments."""

    pages: Tensor  # uint8 [num_pages, heads, page_bytes]
    block_table: Tensor  # int [sequences, most]
    seq_lens: Tensor  # int [sequences]
    max_len: int
    key_channels: Tensor | None  # float32 [3, heads, D]: mean, scale and error weight
    key_fixed: Tensor | None  # float16 [heads, groups, 2]: a static format's (scale, shift)
    value_channels: Tensor | None
    value_fixed: Tensor | None
    head_dim: int
    bits: int
    group_size: int
    static: bool
    rotate: bool  # keys
    out_dtype: torch.dtype
    value_bits: int = 0  # 0: values are stored as keys are
    value_group_size: int = 0
    value_static: bool = False

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of keys and of values."""
        return self.seq_lens.shape[0], self.pages.shape[1], self.max_len, self.head_dim

    @property
    def calibration(self) -> tuple[Tensor | None, ...]:
        """The calibration's tensors in the order in which kernels take them."""
        return tuple(getattr(self, name) for name in CALIBRATION)

    def check(self) -> Forms:
        """Return the formats of rows. Raises ValueError for what does not fit together; looks at no number, which would wait for a card."""
        sequences, heads, max_len, dim = self.shape
        form = forms_for(dim, self.bits, self.group_size, self.static, *value_form(self))
        check_pages(self.pages, heads, form)
        if self.block_table.dim() != 2 or len(self.block_table) != sequences or max_len < 0:
            raise ValueError(
                f"a block table {list(self.block_table.shape)} and {sequences} lengths, of at most {max_len} tokens"
            )
        check_calibration(self.calibration, heads, form)
        given = self.block_table, self.seq_lens, *self.calibration
        if any(t is not None and t.device != self.pages.device for t in given):
            raise ValueError("the arguments are on several devices")
        return form

    @property
    def suits_kernels(self) -> bool:
        """Return whether the arguments, already checked, lie as sm80_kv_read.cu reads and writes them, on a card with
        kernels.
        """
        return (
            jit.why_not(self.pages.device) is None
            and not (kv_cache.UNLIKE and is_unlike(self))
            and self.out_dtype in KINDS
            and self.block_table.dtype == self.seq_lens.dtype == torch.int32
            and self.pages.is_contiguous()
            and self.pages.data_ptr() % 32 == 0
            and calibration_suits_kernels(self.calibration)
        )


def kv_read_ref(*arguments) -> tuple[Tensor, Tensor]:
    """Keys and values [sequences, heads, max_len, D] of the first seq_lens tokens in the pages that block_table lists; 0 beyond a sequence's end. The
    arguments are those of `_Read`. Raises ValueError for what does not fit together, IndexError for lengths and tables beyond the pages."""
    read = _Read(*arguments)
    form = read.check()
    keys, values = (read.pages.new_zeros(read.shape, dtype=read.out_dtype) for _ in range(2))
    for i, length in enumerate(read.seq_lens.tolist()):
        if length > read.max_len:
            raise IndexError(f"{length} tokens, more than the {read.max_len} that are read")
        key, value = read_pages(read.pages, read.block_table[i], length, form)
        for out, rows, side, fixed, channels, rotate in (
            (keys, key, form.key, read.key_fixed, read.key_channels, read.rotate),
            (values, value, form.value, read.value_fixed, read.value_channels, False),
        ):
            out[i, :, :length] = from_channels(values_of(rows, side, fixed), channels, rotate).transpose(0, 1)
    return keys, values


def source(form: Forms, dtype: torch.dtype, size: int = PAGE_TOKENS) -> str:
    """Return the source of a kernel that gives keys and values in a dtype, from pages of `size` tokens."""
    return jit.source("sm80_kv_read.cu", **row_macros(form, dtype, size))


@functools.cache
def _kernel(form: Forms, dtype: torch.dtype, size: int = PAGE_TOKENS) -> jit.Kernel:
    return jit.Kernel("kv_read", source(form, dtype, size), _TAKES, THREADS, overlaps=True)


def _plan(*arguments) -> Callable:
    """The reference's, but lengths and tables are not checked: looking at them would wait for the card. A length beyond its block table or `max_len` is
    cut, a number that is no page is the last page's."""
    read = _Read(*arguments)
    form, device = read.check(), read.pages.device
    if not read.suits_kernels or 0 in read.shape:
        return kv_read_ref
    table, lengths = read.block_table, read.seq_lens
    if scattered := [1] * (table.stride(1) != 1) + [2] * (not lengths.is_contiguous()):
        return gathering(_kv_read_cuda, scattered)
    sequences, heads, max_len, _ = read.shape
    numbers = (
        norm_of(form),
        int(read.rotate),
        sequences,
        heads,
        max_len,
        table.stride(0),
        table.shape[1] if len(read.pages) else 0,
        len(read.pages),
    )
    calibration = [_Read._fields.index(name) for name in CALIBRATION if getattr(read, name) is not None]
    addresses = VARIES, VARIES, VARIES, *(0 if x is None else VARIES for x in read.calibration), VARIES, VARIES
    grid = blocks(2 * sequences * heads * -(-max_len // _TOKENS))
    kernel = _kernel(form, read.out_dtype, page_tokens(read.pages, form))
    launch = Launch(kernel, device, grid, (*addresses, *numbers))
    return jit.filling(launch, [0, 1, 2, *calibration, -1, -2], [jit.like(read.shape, read.out_dtype, device)] * 2, 2)


_kv_read_cuda = Planned(_plan)
library.impl("kv_read", kv_read_ref, "CPU")
library.impl("kv_read", _kv_read_cuda, "CUDA")


@torch.library.register_fake("tilepress::kv_read")
def _(*arguments):
    read = _Read(*arguments)
    return tuple(read.pages.new_empty(read.shape, dtype=read.out_dtype) for _ in range(2))


def rounded(
    x: Tensor,
    form: KVFormat,
    channels: Tensor | None,
    fixed: Tensor | None,
    clip: float,
    rotate: bool,
    refits: int,
    feedback: Tensor | None = None,
) -> Tensor:
    """Return x [..., heads, D] as it comes back from the cache, float32: `fake_quantize` of kv_int4.py, to the bit. On a card with kernels it is
    appended to pages and read back, two launches in place of some hundred."""
    if form.bits == 16 or x.numel() == 0 or x.dtype not in KINDS or jit.why_not(x.device) is not None:
        return fake_quantize(x, form, channels, fixed, clip, rotate, refits, feedback)
    rows, side = x.flatten(0, -3), (channels, fixed, clip)
    count, shape = len(rows), (form.bits, form.group_size, form.static, rotate)
    numbers = torch.arange(-(-count // PAGE_TOKENS), dtype=torch.int32, device=x.device)
    pages = torch.empty(len(numbers), x.shape[-2], form.page_bytes, dtype=torch.uint8, device=x.device)
    slots = torch.arange(count, device=x.device)
    torch.ops.tilepress.kv_append(pages, rows, rows, slots, *side, *side, *shape, refits, 0, 0, False, feedback)
    stored, lengths = (channels, fixed) * 2, torch.full((1,), count, dtype=torch.int32, device=x.device)
    where = pages, numbers[None], lengths, count
    keys, _ = torch.ops.tilepress.kv_read(*where, *stored, form.head_dim, *shape, torch.float32)
    return keys[0].transpose(0, 1).reshape(x.shape)


def path(device: torch.device, form: Forms | None = None) -> Path:
    """Return which implementation serves a device."""
    return Path("kv_read", device.type, why_not(device, form), unlike_name(form))
