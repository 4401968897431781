"""y = (x_q - zero_point) w_q^T * s_x * s_w + bias on integers: the op `tilepress::w8a8_gemm`, its reference and its CUDA kernels.

All multiply int8 by int8 into int32, which is exact: the zero point is taken off as an integer too. Scales and bias follow in float32, one
operation after the other, and one rounding to the output's dtype, so that kernels and reference (`int_mm`) give the same bits. On sm_90 runs
sm90_w8a8_gemm.cu. Other cards from sm_80 on, k that is no multiple of 16, n that is none of 8 and memory that is not 16-byte aligned have
sm80_w8a8_gemm.cu. Outputs of other dtypes than bfloat16 and float16 have the reference.
"""

import functools
import json
import math
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilepress.formats import TilepressError
from tilepress.kernels import arch, jit, library, ptx
from tilepress.kernels.arch import HOPPER, Path
from tilepress.kernels.jit import VARIES, Launch
from tilepress.kernels.once import OfTensors, Planned, gathering

library.define(
    "w8a8_gemm(Tensor x, Tensor x_scale, Tensor? x_zero_point, Tensor weight, Tensor weight_scale, Tensor? bias, ScalarType out_dtype) "
    "-> Tensor"
)


_MOST = (1 << 31) // (128 * 128) - 1  # products of int8 that int32 holds for certain
_MOST_WITH_ZERO_POINT = (1 << 31) // (128 * 255) - 1  # the same of x's codes less their zero point
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as scales.cuh counts them


@functools.cache
def cpu_multiplies() -> bool:
    """Return whether torch._int_mm is exact and fast on this CPU. Without VNNI instructions oneDNN adds pairs of products in 16 bits, which saturate, or torch
    has a plain loop, 15 times slower than a product of float64."""
    if platform.machine() in ("x86_64", "AMD64") and not getattr(torch.cpu, "_is_vnni_supported", lambda: True)():
        return False
    for value in (127, -128):
        x = torch.full((32, 64), value, dtype=torch.int8, device="cpu")
        if not all(bool((torch._int_mm(a, x.t()) == 64 * value**2).all()) for a in (x, x[:1])):
            return False
    return True


def int_mm(x: Tensor, weight: Tensor) -> Tensor:
    """Exact integer product: x int8 [m, k], weight int8 [n, k] -> int32 [m, n], int64 where k is so large that int32 could overflow."""
    if x.shape[1] > _MOST:
        parts = zip(x.split(_MOST, 1), weight.split(_MOST, 1), strict=True)
        return sum(int_mm(a, b).long() for a, b in parts)
    if x.device.type == "cpu" and not cpu_multiplies():
        x = x.double()  # exact, and no autocast takes it for less; some rows of the weight at a time, to spare memory
        return torch.cat([(x @ part.double().t()).int() for part in weight.split(1024)], 1)
    rows, cols = x.shape[0], weight.shape[0]
    if x.is_cuda:  # cuBLAS wants more than 16 rows, and multiples of 8
        k = -x.shape[1] % 8
        x, weight = pad(x, (0, k, 0, max(0, 32 - rows))), pad(weight, (0, k, 0, -cols % 8))
    return torch._int_mm(x.contiguous(), weight.contiguous().t())[:rows, :cols]


def w8a8_gemm_ref(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """x int8 [..., k], x_scale [..., 1] or [1], x_zero_point int8 [1] or None, weight int8 [n, k], weight_scale [n, 1] or [1],
    bias [n] or None -> [..., n] of `out_dtype`."""
    total = int_mm(x.reshape(-1, x.shape[-1]), weight)
    if x_zero_point is not None:
        total = total.long() - x_zero_point.long() * weight.sum(1, dtype=torch.int64)
    y = total.float().reshape(*x.shape[:-1], weight.shape[0]) * x_scale.float() * weight_scale.float().reshape(-1)
    return (y if bias is None else y + bias.float()).to(out_dtype)


@dataclass(frozen=True)
class Configuration:
    """Macros of sm90_w8a8_gemm.cu, and what they need."""

    groups: int  # of 64 rows of w, each a consumer warpgroup's: 1 or 2
    tokens: int  # of a tile
    k_blocks: int  # of 128 columns, in a stage
    stages: int
    split: int = 1  # blocks of a cluster, which share a tile's columns
    together: int = 16  # row blocks of a group, of which all tokens come before the next group

    @property
    def threads(self) -> int:
        """Threads of consumers and a loader warp, or a group of such warps where consumers need its registers."""
        return 32 * (4 * self.groups + (4 if self.is_large else 1))

    @property
    def is_large(self) -> bool:
        return self.groups == 2 and self.tokens == 256

    @property
    def halves(self) -> bool:
        """Return whether the last tiles may be of 64 rows."""
        return self.groups == 2 and self.split == 1 and self.tokens >= 16

    @property
    def shared_bytes(self) -> int:
        stage = (64 * self.groups + self.tokens) * 128 * self.k_blocks
        # Otherwise the parts lie where the stages were.
        parts = (self.split - 1) * self.groups * 256 * self.tokens if self.tokens < 64 else 0
        return self.stages * (stage + 16) + parts + self.groups * (2 * 128 * min(self.tokens, 32) + 4 * self.tokens)

    @functools.cached_property
    def blocks(self) -> int:
        """Blocks of a multiprocessor."""
        return 2 if self.fits(2) else 1

    def fits(self, blocks: int) -> bool:
        """Return whether so many blocks have room in a multiprocessor's shared memory."""
        return blocks * (self.shared_bytes + arch.RESERVED_BYTES) <= HOPPER.shared_bytes

    def source(self, dtype: torch.dtype) -> str:
        macros = {
            "GROUPS": self.groups,
            "TOKENS": self.tokens,
            "KB": self.k_blocks,
            "STAGES": self.stages,
            "SPLIT": self.split,
            "BLOCKS": self.blocks,
            "BF16": int(dtype == torch.bfloat16),
        }
        return jit.source(
            "sm90_w8a8_gemm.cu",
            "".join(map(ptx.wgmma_int8, sorted({self.tokens, self.tokens // 2} if self.halves else {self.tokens}))),
            **macros,
        )

    def grid(self, m: int, n: int, multiprocessors: int) -> int:
        tiles = -(-m // self.tokens) * -(-n // (64 * self.groups))
        return tiles * self.split if self.split > 1 else min(tiles, multiprocessors * self.blocks)


_TAKES = "x_scale* w_scale* bias* zero_point* w_sums* kinds y* m n k"


@functools.cache
def _kernel(chosen: Configuration, dtype: torch.dtype) -> jit.Kernel:
    takes = f"w& x& {_TAKES} together"
    return jit.Kernel("w8a8_gemm", chosen.source(dtype), takes, chosen.threads, chosen.shared_bytes, overlaps=True)


@functools.cache
def _mma_kernel(dtype: torch.dtype) -> jit.Kernel:
    return jit.Kernel("w8a8_mma", mma_source(dtype), f"w* x* {_TAKES} vectors", 128)


def mma_source(dtype: torch.dtype) -> str:
    return jit.source("sm80_w8a8_gemm.cu", BF16=int(dtype == torch.bfloat16))


@functools.cache
def _table() -> dict[int, list[tuple[int, int, Configuration]]]:
    """Return by M: N, K and the configuration that was fastest for them, as `tilepress eval kernels w8a8 --tune` measured on an H200."""
    table: dict[int, list[tuple[int, int, Configuration]]] = {}
    for m, n, k, *chosen, _us in json.loads((jit.FOLDER / "w8a8_gemm.json").read_text())["rows"]:
        table.setdefault(m, []).append((n, k, Configuration(*chosen)))
    return table


@functools.lru_cache(maxsize=4096)
def configuration_for(m: int, n: int, k: int) -> Configuration:
    """Return the configuration of the nearest weight in the table, for the least M there that is not below m."""
    table = _table()
    rows = table[min((known for known in table if known >= m), default=max(table))]
    _, _, chosen = min(rows, key=lambda row: 2 * abs(math.log2(n / row[0])) + abs(math.log2(k / row[1])))
    return chosen


# The version that was last multiplied of each tensor that is a weight or has views that are, by address and shape.
_MULTIPLIED: OfTensors[dict[tuple[int, torch.Size], int]] = OfTensors()
# Rows' sums int32 [n] of the same tensors, with the version that they are of: they stay where they are, as graphs know them.
_SUMS: OfTensors[dict[tuple[int, torch.Size], tuple[int, Tensor]]] = OfTensors()


def _of_owner(facts: OfTensors, weight: Tensor) -> dict:
    """Return what is kept of a weight's owner, which views come and go over."""
    owner = weight._base
    owner = weight if owner is None else owner
    kept = facts.get(owner)
    if kept is None:
        facts.keep(owner, kept := {})
    return kept


def _version(weight: Tensor) -> int:
    return 0 if weight.is_inference() else weight._version


def is_settled(weight: Tensor) -> bool:
    """Return whether the weight was multiplied with before as it is: no earlier kernel still writes it, and it may be read before they have ended."""
    known, key, version = _of_owner(_MULTIPLIED, weight), (weight.data_ptr(), weight.shape), _version(weight)
    was, known[key] = known.get(key), version
    return was == version


def row_sums(weight: Tensor) -> Tensor:
    """int32 [n], made once for a weight as it is."""
    of_owner, key, version = _of_owner(_SUMS, weight), (weight.data_ptr(), weight.shape), _version(weight)
    summed, sums = of_owner.get(key, (None, None))
    if summed != version:
        if torch.cuda.is_current_stream_capturing():
            raise TilepressError(
                "an INT8 layer is first used inside a CUDA graph", "run the model once before capturing"
            )
        made = weight.sum(1, dtype=torch.int32)
        sums = made if sums is None else sums.copy_(made)
        of_owner[key] = version, sums
        if weight.is_cuda:
            torch.cuda.current_stream(weight.device).synchronize()  # other streams may be next
    return sums


def _looked_at(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> tuple[bool, bool]:
    """Return whether kernels take the arguments, and whether codes begin where the kernel for sm_90 reads them. Raises ValueError for what is no product."""
    n, k = weight.shape
    numbers = x_scale, weight_scale, *(() if bias is None else (bias,))
    if not _served(x.device, out_dtype, [number.dtype for number in numbers], k):
        return False, False
    if x.shape[-1] != k or x.dtype != torch.int8 or weight.dtype != torch.int8:
        raise ValueError(f"{x.dtype} {list(x.shape)} times {weight.dtype} {list(weight.shape)}")
    scales = ("x_scale", x_scale, x.numel() // k), ("weight_scale", weight_scale, n)
    check_scales(x, weight, scales, bias, n)
    if x_zero_point is not None and (
        x_zero_point.numel() != 1 or x_zero_point.dtype != torch.int8 or x_zero_point.device != x.device
    ):
        raise ValueError("a zero point is one int8 number, where x is")
    return True, x.data_ptr() % 16 == weight.data_ptr() % 16 == 0


def _plan(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Callable:
    arguments = x, x_scale, x_zero_point, weight, weight_scale, bias, out_dtype
    fits, is_aligned = _looked_at(*arguments)
    if not fits:
        return w8a8_gemm_ref
    (n, k), out = weight.shape, jit.like((*x.shape[:-1], len(weight)), out_dtype, x.device)
    if out.numel() == 0:
        return lambda *_: jit.empty_like(out)
    # A copy of a weight is not settled.
    if scattered := [i for i in jit.tensors_of(arguments) if not arguments[i].is_contiguous()]:
        return gathering(_cuda, scattered)
    m, wgmma = x.numel() // k, is_aligned and uses_wgmma(x.device, n, k)
    return multiplying(configuration_for(m, n, k) if wgmma else None, out, *arguments)


_cuda = Planned(_plan)


def multiplying(
    chosen: Configuration | None,
    out: Tensor,
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Callable:
    """Return what runs the op for contiguous arguments like these, its result like `out`: by the kernel for sm_90 as `chosen`, or None: by the one for
    sm_80."""
    (n, k), m = weight.shape, x.numel() // weight.shape[1]
    kinds = KINDS[x_scale.dtype] | KINDS[weight_scale.dtype] << 4 | (0 if bias is None else KINDS[bias.dtype] << 8)
    kinds |= (x_scale.numel() > 1) << 12 | (weight_scale.numel() > 1) << 16
    optional = [0 if t is None else VARIES for t in (bias, x_zero_point, x_zero_point)]
    args = VARIES, VARIES, VARIES, VARIES, *optional, kinds, VARIES, m, n, k
    if chosen is not None:
        of_weight = jit.TensorMaps(weight, 64 if chosen.halves else 64 * chosen.groups, 128).__getitem__
        of_x = jit.TensorMaps(x.view(m, k), chosen.tokens, 128).__getitem__
        grid = chosen.grid(m, n, arch.card(x.device).multiprocessors)
        launch = Launch(_kernel(chosen, out_dtype), x.device, grid, (*args, chosen.together))
    else:
        of_weight = of_x = int  # addresses as they are
        vectors = k % 16 == 0 and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
        launch = Launch(_mma_kernel(out_dtype), x.device, -(-n // 64) * -(-m // 64), (*args, int(vectors)))

    def run(x, x_scale, x_zero_point, weight, weight_scale, bias, _) -> Tensor:
        y = jit.empty_like(out)
        numbers = [x_scale.data_ptr(), weight_scale.data_ptr()]
        if bias is not None:
            numbers.append(bias.data_ptr())
        if x_zero_point is not None:
            numbers += x_zero_point.data_ptr(), row_sums(weight).data_ptr()
        matrices = of_weight(weight.data_ptr()), of_x(x.data_ptr())
        launch(*matrices, *numbers, y.data_ptr(), alone=not is_settled(weight))
        return y

    return run


def check_scales(
    x: Tensor, weight: Tensor, scales: Iterable[tuple[str, Tensor, int]], bias: Tensor | None, n: int
) -> None:
    """Raises ValueError unless each of (name, scale, count) is one number or `count`, and a bias [n], all and the weight where x is."""
    for what, scale, count in scales:
        if scale.numel() not in (1, count):
            raise ValueError(f"{what} of {list(scale.shape)} for {count}")
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"a bias of {list(bias.shape)} for {n} rows")
    if any(t is not None and t.device != x.device for t in (weight, *(scale for _, scale, _ in scales), bias)):
        raise ValueError("the arguments are on several devices")


def _served(device: torch.device, out_dtype: torch.dtype, number_dtypes: Iterable[torch.dtype], k: int) -> bool:
    """Return whether kernels take scales and bias of these dtypes, and k columns."""
    known = out_dtype in (torch.bfloat16, torch.float16) and all(dtype in KINDS for dtype in number_dtypes)
    return jit.why_not(device) is None and known and k <= _MOST_WITH_ZERO_POINT


def uses_wgmma(device: torch.device, n: int, k: int) -> bool:
    """Return whether the kernel for sm_90 serves a weight [n, k]."""
    return arch.kernel_for("w8a8_gemm", device) == "w8a8_gemm" and k % 16 == 0 and n % 8 == 0


library.impl("w8a8_gemm", w8a8_gemm_ref, "CPU")
library.impl("w8a8_gemm", _cuda, "CUDA")


@torch.library.register_fake("tilepress::w8a8_gemm")
def _(x, x_scale, x_zero_point, weight, weight_scale, bias, out_dtype):
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype)


def path(device: torch.device, out_dtype: torch.dtype, scale_dtype: torch.dtype, n: int, k: int) -> Path:
    """Return which implementation serves a weight int8 [n, k] on a device."""
    if not _served(device, out_dtype, (scale_dtype,), k):
        how = "torch._int_mm" if device.type != "cpu" or cpu_multiplies() else "float64"
        return Path("w8a8_gemm", device.type, jit.why_not(device) or "", how)
    return Path("w8a8_gemm" if uses_wgmma(device, n, k) else "w8a8_mma", "cuda")
