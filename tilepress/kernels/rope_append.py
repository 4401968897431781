"""The op between attention's projections and attention: biases, norms of queries and keys, RoPE, the append to the
paged cache.

    query, key, value -> + bias -> RMS norm over a head -> RoPE -> the query
                                   (queries and keys)          key and value into their pages, as kv_append stores them

Bits are those of transformers' modules one after the other: the sum, the normalized number and its product with the weight, the two products of RoPE and
their sum are each rounded to the inputs' dtype. Two things have an order of our own, so that a kernel can give the same bits: the norm's squares are added
by `fold`, and the inverse root is 1 / sqrt(x), both rounded correctly.

RoPE turns the first `rotary` of D channels, rotary / 2 being the columns of cos and sin: channel i with i + rotary / 2 (Llama), or `interleaved` with its
neighbour (GPT-J). With cos and sin in float32 beside 16-bit inputs it is computed in float32 and rounded once.

With `fold` the query comes back as the stored keys want it, times the keys' scale and rotated as they are, and attention needs neither key_channels nor
rotate: the query as above, then in float32, rounded once more. 16-bit keys are stored as they are: nothing is folded.

On cards from sm_80 on sm80_rope_append.cu does it in one launch, to the reference's bits where they are finite; the rest runs by the reference.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tilepress.formats.kv_int4 import Forms, hadamard
from tilepress.formats.kv_pages import page_tokens
from tilepress.kernels import jit, library
from tilepress.kernels.arch import Path
from tilepress.kernels.jit import VARIES, Launch
from tilepress.kernels.kv_cache import (
    CACHE_TAKES,
    KINDS,
    QUANTIZATION,
    Quantization,
    Steps,
    blocks,
    channels_of_lane,
    is_in_rows,
    row_macros,
    unlike_name,
    why_not,
)
from tilepress.kernels.once import Planned, gathering

library.define(
    "rope_append(Tensor(a!) pages, Tensor query, Tensor key, Tensor value, Tensor? query_bias, Tensor? key_bias, Tensor? value_bias, "
    "Tensor? query_norm, Tensor? key_norm, float eps, Tensor cos, Tensor sin, bool interleaved, bool fold, Tensor slots, "
    f"{QUANTIZATION}) -> Tensor"
)

_SHAPE = (
    "HEADS",
    "KV_HEADS",
    "ROTARY",
    "INTERLEAVED",
    "WIDE",
    "BIASES",
    "NORMS",
    "FOLD",
)  # macros of sm80_rope_append.cu
_TAKES = (
    f"{CACHE_TAKES} out* query* key* value* query_token:8 query_head:8 key_token:8 key_head:8 value_token:8 value_head:8 "
    "query_bias* key_bias* value_bias* query_norm* key_norm* eps cosines* sines* cosine_token:8 sine_token:8"
)
_THREADS = 192  # a warp for a row: few blocks start sooner than many, small ones end sooner


def fold(x: Tensor) -> Tensor:
    """The sum over the last dimension, kept with size 1: halves are added while the size is even, the rest from left to right."""
    while x.shape[-1] % 2 == 0:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    total = x[..., :1]
    for i in range(1, x.shape[-1]):
        total = total + x[..., i : i + 1]
    return total


def normalized(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D] -> the RMS norm over a head."""
    wide = x.float()
    mean = fold(wide * wide) * (1 / x.shape[-1])
    root = torch.sqrt((mean + eps).double()).float()  # float32's own is not rounded correctly everywhere (MKL)
    return weight * (wide * (1 / root)).to(x.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x [tokens, heads, D] after RoPE; cos and sin [tokens, rotary / 2]."""
    half = cos.shape[-1]
    turning, rest = x[..., : 2 * half].to(cos.dtype), x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    if interleaved:
        cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
        partner = torch.stack([-turning[..., 1::2], turning[..., 0::2]], -1).flatten(-2)
    else:
        cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
        partner = torch.cat([-turning[..., half:], turning[..., :half]], -1)
    return torch.cat([(turning * cos + partner * sin).to(x.dtype), rest], -1)


_ROWS = "query", "key", "value"
_WEIGHTS = "query_bias", "key_bias", "value_bias", "query_norm", "key_norm"


class _Rows(NamedTuple):
    """The op's arguments between the pages and the cache's own, in their order."""

    query: Tensor  # [tokens, query heads, D], float32, bfloat16 or float16, as all of them
    key: Tensor  # [tokens, KV heads, D]
    value: Tensor  # [tokens, KV heads, D]
    query_bias: Tensor | None  # [query heads * D]
    key_bias: Tensor | None  # [KV heads * D]
    value_bias: Tensor | None  # [KV heads * D]
    query_norm: Tensor | None  # [D]
    key_norm: Tensor | None  # [D]
    eps: float
    cos: Tensor  # [tokens, rotary / 2], also float32
    sin: Tensor  # [tokens, rotary / 2]
    interleaved: bool
    fold: bool
    slots: Tensor  # int64 [tokens]

    @property
    def weights(self) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self, name) for name in _WEIGHTS)

    def check(self, pages: Tensor, how: Quantization) -> Forms:
        """Return the formats of rows. Raises ValueError for what does not fit together."""
        query, key, cos, sin = self.query, self.key, self.cos, self.sin
        if not query.dim() == key.dim() == self.value.dim() == 3:
            raise ValueError(
                f"queries {list(query.shape)}, keys {list(key.shape)}, values {list(self.value.shape)}: [tokens, heads, D]"
            )
        form = how.check(pages, key, self.value, self.slots)
        tokens, heads, dim = query.shape
        if (tokens, dim) != (len(key), key.shape[2]):
            raise ValueError(f"queries {list(query.shape)} do not go with keys {list(key.shape)}")
        if heads == 0 or heads % key.shape[1]:
            raise ValueError(f"{heads} query heads are no multiple of {key.shape[1]} KV heads")
        if cos.shape != sin.shape or cos.dim() != 2 or len(cos) != tokens or 2 * cos.shape[1] > dim:
            raise ValueError(
                f"cos {list(cos.shape)} and sin {list(sin.shape)} are not [{tokens}, up to {dim // 2}] for {tokens} tokens of {dim} channels"
            )
        sizes = heads * dim, key.shape[1] * dim, key.shape[1] * dim, dim, dim
        wrong = [
            f"{name} {list(weight.shape)}, not [{size}]"
            for name, weight, size in zip(_WEIGHTS, self.weights, sizes, strict=True)
            if weight is not None and weight.shape != (size,)
        ]
        if wrong:
            raise ValueError("; ".join(wrong))
        given = [x for x in (query, key, self.value, *self.weights) if x is not None]
        if key.dtype not in KINDS or len({x.dtype for x in given}) > 1:
            dtypes = ", ".join(sorted({str(x.dtype) for x in given}))
            raise ValueError(f"inputs, biases and norms are of {dtypes}: give all float32, bfloat16 or float16")
        if cos.dtype != sin.dtype or cos.dtype not in (key.dtype, torch.float32):
            raise ValueError(f"cos of {cos.dtype} and sin of {sin.dtype}, not of {key.dtype} or torch.float32")
        if any(x.device != pages.device for x in (*given, cos, sin)):
            raise ValueError("the arguments are on several devices")
        return form

    def reference(self, pages: Tensor, how: Quantization, form: Forms) -> Tensor:
        rows = []
        for x, bias, norm, turns in (
            (self.query, self.query_bias, self.query_norm, True),
            (self.key, self.key_bias, self.key_norm, True),
            (self.value, self.value_bias, None, False),
        ):
            x = x if bias is None else x + bias.view(-1, form.head_dim)
            x = x if norm is None else normalized(x, norm, self.eps)
            rows.append(turned(x, self.cos, self.sin, self.interleaved) if turns else x)
        query, key, value = rows
        how.store(pages, key, value, self.slots, form)
        return (_folded(query, how) if self.fold and form.key.bits < 16 else query).contiguous()

    def scattered(self, form: Forms) -> list[int]:
        """Return the numbers of the op's arguments that do not lie as sm80_rope_append.cu reads them."""
        width = channels_of_lane(form)
        angles = max(1, width // 2) if self.interleaved else width
        of_angles = angles if self.cos.shape[1] % angles == 0 else 1
        widths = {"cos": of_angles, "sin": of_angles} | dict.fromkeys((*_ROWS, *_WEIGHTS), width)
        lie = {name: getattr(self, name) is None or is_in_rows(getattr(self, name), widths[name]) for name in widths}
        return [_NUMBER[name] for name in lie if not lie[name]] + [_NUMBER["slots"]] * (not self.slots.is_contiguous())

    def launch(self, pages: Tensor, how: Quantization, form: Forms) -> Callable:
        """Return what runs the op for arguments like these."""
        (tokens, heads, _), kv_heads, dtype = self.query.shape, self.key.shape[1], self.key.dtype
        out = jit.like(self.query.shape, dtype, pages.device)
        biases, norms = (any(x is not None for x in some) for some in (self.weights[:3], self.weights[3:]))
        shape = heads, kv_heads, 2 * self.cos.shape[1], self.interleaved, self.cos.dtype != dtype, biases, norms
        strides = *self.query.stride()[:2], *self.key.stride()[:2], *self.value.stride()[:2]
        weights = [0 if x is None else VARIES for x in self.weights]
        args = (
            *how.launch_arguments(pages, self.slots, form),
            *(VARIES, VARIES, VARIES, VARIES, *strides),
            *(*weights, jit.float_bits(self.eps)),
            *(VARIES, VARIES, self.cos.stride(0), self.sin.stride(0)),
        )
        kernel = _kernel(form, dtype, how.steps(form), page_tokens(pages, form), *shape, self.fold)
        grid = tokens * (heads + 2 * kv_heads)
        given = [_NUMBER[name] for name in _WEIGHTS if getattr(self, name) is not None]
        order = [0, _NUMBER["slots"], *how.given(1 + _BETWEEN), -1, *(_NUMBER[name] for name in _ROWS), *given]
        order += [_NUMBER["cos"], _NUMBER["sin"]]
        return jit.filling(Launch(kernel, pages.device, blocks(grid, _THREADS), args), order, [out], 1)


def _folded(query: Tensor, how: Quantization) -> Tensor:
    wide = query.float()
    if how.key_channels is not None:
        scale = how.key_channels[1]
        wide = (wide.unflatten(1, (len(scale), -1)) * scale[:, None]).flatten(1, 2)
    return (hadamard(wide) if how.rotate else wide).to(query.dtype)


_BETWEEN = len(_Rows._fields)
_NUMBER = {name: number for number, name in enumerate(_Rows._fields, 1)}  # of the op's arguments, behind the pages


def _taken(arguments: tuple) -> tuple[_Rows, Quantization]:
    return _Rows(*arguments[:_BETWEEN]), Quantization(*arguments[_BETWEEN:])


def rope_append_ref(pages: Tensor, *arguments) -> Tensor:
    """Stores keys and values in pages uint8 [num_pages, KV heads, page_bytes] (formats/kv_pages.py) as kv_append does, and returns the queries
    [tokens, query heads, D] of the inputs' dtype, also of tokens whose slot is -1. The rest are those of `_Rows` and `Quantization`. Raises ValueError
    for what does not fit together, IndexError for slots beyond the pages."""
    rows, how = _taken(arguments)
    return rows.reference(pages, how, rows.check(pages, how))


def source(form: Forms, dtype: torch.dtype, steps: Steps, size: int, *shape: int) -> str:
    """Return the source of a kernel for pages of `size` tokens; `shape` has what `_SHAPE` names."""
    macros = {name: int(number) for name, number in zip(_SHAPE, shape, strict=True)}
    macros |= {**row_macros(form, dtype, size), **steps.macros, "WARPS": _THREADS // 32}
    return jit.source("sm80_rope_append.cu", **macros)


@functools.cache
def _kernel(*what) -> jit.Kernel:
    return jit.Kernel("rope_append", source(*what), _TAKES, _THREADS, overlaps=True)


def _plan(pages: Tensor, *arguments) -> Callable:
    """The reference's, but slots beyond the pages are skipped: looking at them would wait for the card."""
    rows, how = _taken(arguments)
    form, fits = rows.check(pages, how), how.suits_kernels(pages, rows.key, rows.value, rows.slots)
    if not fits or not all(x is None or x.is_contiguous() for x in rows.weights) or len(rows.query) == 0:
        return rope_append_ref
    scattered = rows.scattered(form)
    return gathering(_rope_append_cuda, scattered) if scattered else rows.launch(pages, how, form)


_rope_append_cuda = Planned(_plan)


library.impl("rope_append", rope_append_ref, "CPU")
library.impl("rope_append", _rope_append_cuda, "CUDA")


@torch.library.register_fake("tilepress::rope_append")
def _(pages, query, *_):
    return query.new_empty(query.shape)


def path(device: torch.device, form: Forms | None = None) -> Path:
    """Return which implementation serves a device."""
    return Path("rope_append", device.type, why_not(device, form), unlike_name(form))
