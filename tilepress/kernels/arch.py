"""The limits and features of each card, and the kernel that serves an op on it.

A card is a row of `CARDS`: what to compile for, how much shared memory there is, which features. An op's kernels stand in `KERNELS`, the best
one first. `Path` says what serves a case: results print it, and code asks for its attributes.

With TILEPRESS_ARCH=sm80, or sm86, sm89 and so on, a card is taken for an older one: kernels are chosen and sized as there, to try them where none is at hand.
"""

import functools
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from tilepress.formats import UsageError

RESERVED_BYTES = 1024  # of a multiprocessor's shared memory, which the system takes for each block
OLDEST = (8, 0)  # compute capability from which on there are kernels
PLAIN_SHARED_BYTES = 48 * 1024  # of dynamic shared memory that a kernel gets without asking for more


@dataclass(frozen=True)
class Card:
    """A card, as kernels need to know it."""

    capability: tuple[int, int]  # compute capability, major and minor
    multiprocessors: int  # in a row of `CARDS`: of the largest card of that kind
    shared_bytes: int  # shared memory of one multiprocessor
    block_shared_bytes: int  # shared memory that one block can have
    has_wgmma: bool = False  # warpgroup products, TMA with tensor maps and clusters, as sm_90a has them
    has_dependent_launch: bool = False  # programmatic dependent launch: a kernel starts before the one ahead has ended

    @property
    def has_kernels(self) -> bool:
        """Return whether any kernel runs on this card."""
        return self.capability >= OLDEST

    @property
    def target(self) -> str:
        """The architecture to compile for. From sm_90 on instructions of one generation need the suffix `a`."""
        major, minor = self.capability
        return f"sm_{major}{minor}" + ("a" if major >= 9 else "")

    def runs(self, file: str) -> bool:
        """Return whether a source runs on this card, by the prefix of its name."""
        return self.has_wgmma if file.startswith("sm90_") else self.has_kernels


_KIB = 1024
CARDS = (  # CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"
    Card((8, 0), 108, 164 * _KIB, 163 * _KIB),  # A100
    Card((8, 6), 84, 100 * _KIB, 99 * _KIB),  # A10, A40, RTX 3090
    Card((8, 7), 16, 164 * _KIB, 163 * _KIB),  # Jetson Orin
    Card((8, 9), 142, 100 * _KIB, 99 * _KIB),  # L4, L40S, RTX 4090
    Card((9, 0), 132, 228 * _KIB, 227 * _KIB, has_wgmma=True, has_dependent_launch=True),  # H100, H200
    Card((10, 0), 148, 228 * _KIB, 227 * _KIB, has_dependent_launch=True),  # B200
    Card((10, 3), 148, 228 * _KIB, 227 * _KIB, has_dependent_launch=True),  # B300
    Card((12, 0), 188, 100 * _KIB, 99 * _KIB, has_dependent_launch=True),  # RTX PRO 6000, RTX 5090
)


class Source(NamedTuple):
    """A kernel that serves an op."""

    kernel: str  # its extern "C" function, which results name
    file: str  # in this folder; the prefix names the oldest card that it runs on


KERNELS = {
    "argmax": (Source("argmax", "sm80_argmax.cu"),),
    "attention_combine": (Source("attention_combine", "sm80_attention_combine.cu"),),
    "decode_attention": (
        Source("decode_attention", "sm90_decode_attention.cu"),
        Source("decode_attention_mma", "sm80_decode_attention.cu"),
    ),
    "dequantize": (Source("dequantize", "sm80_dequantize.cu"),),
    "fused_quant": (Source("fused_quant", "sm80_fused_quant.cu"),),
    "kv_append": (Source("kv_append", "sm80_kv_append.cu"),),
    "kv_read": (Source("kv_read", "sm80_kv_read.cu"),),
    "read_bandwidth": (Source("read_bandwidth", "sm80_read_bandwidth.cu"),),
    "rope_append": (Source("rope_append", "sm80_rope_append.cu"),),
    "tiled_bitmap_decode": (Source("tiled_bitmap_decode", "sm80_tiled_bitmap_decode.cu"),),
    "tiled_bitmap_prefill": (Source("tiled_bitmap_prefill", "sm90_tiled_bitmap_prefill.cu"),),
    "tiled_bitmap_spmm": (
        Source("tiled_bitmap_spmm", "sm90_tiled_bitmap_spmm.cu"),
        Source("tiled_bitmap_mma", "sm80_tiled_bitmap_spmm.cu"),
    ),
    "tiled_csl_decode": (Source("tiled_csl_decode", "sm80_tiled_csl_decode.cu"),),
    "tiled_csl_spmm": (
        Source("tiled_csl_spmm", "sm90_tiled_csl_spmm.cu"),
        Source("tiled_csl_mma", "sm80_tiled_csl_spmm.cu"),
    ),
    "w8a16_gemm": (Source("w8a16_gemm", "sm90_w8a16_gemm.cu"), Source("w8a16_mma", "sm80_w8a16_gemm.cu")),
    "w8a8_gemm": (Source("w8a8_gemm", "sm90_w8a8_gemm.cu"), Source("w8a8_mma", "sm80_w8a8_gemm.cu")),
}


def card_of(major: int, minor: int) -> Card:
    """The row of a compute capability. One that is not in `CARDS` has what the row before it has, without wgmma, and its own target."""
    older = [row for row in CARDS if row.capability <= (major, minor)]
    row = older[-1] if older else CARDS[0]
    if row.capability == (major, minor):
        return row
    return replace(row, capability=(major, minor), has_wgmma=False)


HOPPER = card_of(9, 0)


@functools.cache
def _card(index: int) -> Card:
    found = torch.cuda.get_device_properties(index)
    here = replace(card_of(found.major, found.minor), multiprocessors=found.multi_processor_count)
    return here if (older := forced()) is None else as_older(here, older)


def forced() -> Card | None:
    """The row of the card that TILEPRESS_ARCH names, or None. Raises UsageError for a name that is none."""
    name = os.environ.get("TILEPRESS_ARCH")
    if not name:
        return None
    digits = re.fullmatch(r"sm_?(\d+)(\d)a?", name)
    row = next((row for row in CARDS if digits and row.capability == (int(digits[1]), int(digits[2]))), None)
    if row is None:
        names = ", ".join("sm{}{}".format(*row.capability) for row in CARDS)
        raise UsageError(f"TILEPRESS_ARCH={name} names no card", f"choose one of {names}, or unset it")
    return row


def as_older(here: Card, older: Card) -> Card:
    """What is left of a card where kernels are those for an older one. It is still compiled for what it is."""
    shared, of_block = (min(getattr(here, n), getattr(older, n)) for n in ("shared_bytes", "block_shared_bytes"))
    return replace(here, shared_bytes=shared, block_shared_bytes=of_block, has_wgmma=here.has_wgmma and older.has_wgmma)


def card(device: torch.device) -> Card:
    """The row of a CUDA device, with the multiprocessors that it really has."""
    return _card(torch.cuda.current_device() if device.index is None else device.index)


def kernel_for(op: str, device: torch.device) -> str | None:
    """The kernel that serves an op of `KERNELS` best on a CUDA device, or None where none does."""
    here = card(device)
    return next((source.kernel for source in KERNELS[op] if here.runs(source.file)), None)


@dataclass(frozen=True)
class Path:
    """The path that serves a case: a kernel, or the reference of an op. `str` gives the sentence that results show."""

    kernel: str  # the op's name where its reference serves
    device: str  # "cpu" or "cuda"
    why: str | None = None  # why the reference serves, "" where there is nothing to say; None where the kernel does
    form: str = ""  # what else tells cases apart: a cache's format, how a reference multiplies
    decodes: bool = False  # the kernel only decodes a weight, cuBLAS multiplies it

    @property
    def is_reference(self) -> bool:
        return self.why is not None

    def __str__(self) -> str:
        role = "reference" if self.is_reference else "kernel and cuBLAS" if self.decodes else "kernel"
        form, why = (f" ({note})" if note else "" for note in (self.form, self.why))
        return f"{self.kernel} {role}{form} on {self.device}{why}"


def references(paths: Iterable["Path | str"]) -> list[Path]:
    """The paths among these where a reference serves. Strings tell of what is no kernel's, e.g. torch's own linear layers."""
    return [path for path in paths if isinstance(path, Path) and path.is_reference]
