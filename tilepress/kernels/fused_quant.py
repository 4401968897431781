"""Fused kernels between two INT8 GEMMs, which quantize their result: ops under `tilepress::` and their references.

    quantize_int8            x -> codes, scale                        per token or per tensor, scale found at run time
    quantize_int8_static     x -> codes                               with a calibrated scale and zero point
    rms_norm_int8            x -> RMSNorm -> codes, scale
    add_rms_norm_int8        x + residual -> codes, scale, the sum    the residual stream stays in x's dtype
    layer_norm_int8          the two with LayerNorm
    add_layer_norm_int8
    silu_mul_int8            [gate | up] -> silu(gate) * up -> codes, scale
    activation_int8          x -> relu, gelu, gelu_tanh or gelu_new -> codes, scale

`mode` is 0 per token, 1 per tensor. With `scale` given (static) it does not matter, and a copy of `scale` is returned. A given scale is one number
[1], or one of each token [..., 1] without zero point: of tokens that several cards have parts of. Codes are int8 of x's shape, scales float32
[..., 1] or [1]. Roundings are those of transformers' own modules: the sum, the normalized value and the product are rounded to x's dtype before
they are quantized. A NaN or an infinity makes a scale found at run time NaN or infinite, and so what is multiplied with it; with a given scale NaN
becomes 0, infinities saturate (formats/int8.py).

On cards from sm_80 on sm80_fused_quant.cu does each op in one pass, for bfloat16 and float16, rows of up to MOST_COLUMNS and scales of tokens or
given ones. The rest runs by the references.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, relu, silu

from tilepress.formats import int8
from tilepress.kernels import arch, jit, library
from tilepress.kernels.arch import Path
from tilepress.kernels.jit import VARIES, Launch
from tilepress.kernels.once import Planned, gathering
from tilepress.kernels.w8a8_gemm import KINDS

PER_TOKEN, PER_TENSOR = 0, 1

library.define("quantize_int8(Tensor x, int mode) -> (Tensor, Tensor)")
library.define("quantize_int8_static(Tensor x, Tensor scale, Tensor? zero_point) -> Tensor")
library.define(
    "rms_norm_int8(Tensor x, Tensor weight, float eps, int mode, Tensor? scale, Tensor? zero_point) -> (Tensor, Tensor)"
)
library.define(
    "add_rms_norm_int8(Tensor x, Tensor residual, Tensor weight, float eps, int mode, Tensor? scale, Tensor? zero_point) "
    "-> (Tensor, Tensor, Tensor)"
)
library.define(
    "layer_norm_int8(Tensor x, Tensor weight, Tensor bias, float eps, int mode, Tensor? scale, Tensor? zero_point) -> (Tensor, Tensor)"
)
library.define(
    "add_layer_norm_int8(Tensor x, Tensor residual, Tensor weight, Tensor bias, float eps, int mode, Tensor? scale, "
    "Tensor? zero_point) -> (Tensor, Tensor, Tensor)"
)
library.define("silu_mul_int8(Tensor gate_up, int mode, Tensor? scale, Tensor? zero_point) -> (Tensor, Tensor)")
library.define(
    "activation_int8(Tensor x, str activation, int mode, Tensor? scale, Tensor? zero_point) -> (Tensor, Tensor)"
)
MOST_COLUMNS = 32768  # that a block of threads holds in registers


def quantize_int8_ref(x: Tensor, mode: int) -> tuple[Tensor, Tensor]:
    """x [..., n] floating -> codes int8 [..., n], scale float32 [..., 1] (mode 0) or [1] (mode 1)."""
    x = x.contiguous()
    scale = int8.dynamic_scale(x, mode == PER_TOKEN)
    return int8.quantize(x, scale), scale


def quantize_int8_static_ref(x: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """x [..., n], scale [1] or [..., 1], zero_point int8 [1] or None -> codes int8 [..., n]."""
    return int8.quantize(x.contiguous(), scale, zero_point)


def _quantize(x: Tensor, mode: int, scale: Tensor | None, zero_point: Tensor | None) -> tuple[Tensor, Tensor]:
    if scale is None:
        return quantize_int8_ref(x, mode)
    return quantize_int8_static_ref(x, scale, zero_point), scale.float().clone()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute RMSNorm with the roundings of transformers' modules for Llama and similar models."""
    wide = x.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normal.to(x.dtype)


def rms_norm_int8_ref(x, weight, eps, mode, scale, zero_point) -> tuple[Tensor, Tensor]:
    """x [..., n], weight [n] -> codes int8 [..., n], scale."""
    return _quantize(rms_norm(x, weight, eps), mode, scale, zero_point)


def add_rms_norm_int8_ref(x, residual, weight, eps, mode, scale, zero_point) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual [..., n], weight [n] -> codes int8 [..., n], scale, x + residual."""
    total = (x + residual).contiguous()
    return *_quantize(rms_norm(total, weight, eps), mode, scale, zero_point), total


def layer_norm_int8_ref(x, weight, bias, eps, mode, scale, zero_point) -> tuple[Tensor, Tensor]:
    """x [..., n], weight, bias [n] -> codes int8 [..., n], scale."""
    return _quantize(layer_norm(x, weight.shape, weight, bias, eps), mode, scale, zero_point)


def add_layer_norm_int8_ref(x, residual, weight, bias, eps, mode, scale, zero_point) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual [..., n], weight, bias [n] -> codes int8 [..., n], scale, x + residual."""
    total = (x + residual).contiguous()
    return *layer_norm_int8_ref(total, weight, bias, eps, mode, scale, zero_point), total


def check_even(gate_up: Tensor) -> None:
    if gate_up.shape[-1] % 2:
        raise ValueError(f"a gate and what it gates do not share {gate_up.shape[-1]} columns")


def silu_mul_int8_ref(gate_up, mode, scale, zero_point) -> tuple[Tensor, Tensor]:
    """gate_up [..., 2 n], the gate first -> codes int8 [..., n], scale."""
    check_even(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return _quantize(silu(gate) * up, mode, scale, zero_point)


def gelu_new(x: Tensor) -> Tensor:
    """Compute GELU as transformers' NewGELUActivation, which rounds after each operation."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


ACTIVATIONS = {"relu": relu, "gelu": gelu, "gelu_tanh": partial(gelu, approximate="tanh"), "gelu_new": gelu_new}


def activation_int8_ref(x, activation, mode, scale, zero_point) -> tuple[Tensor, Tensor]:
    """x [..., n], one of ACTIVATIONS -> codes int8 [..., n], scale."""
    return _quantize(ACTIVATIONS[activation](x), mode, scale, zero_point)


# sm80_fused_quant.cu numbers so what it does to a row.
QUANTIZE, RMS_NORM, ADD_RMS_NORM, LAYER_NORM, ADD_LAYER_NORM, SILU_MUL = range(6)
_OF_TWO_ROWS = ADD_RMS_NORM, ADD_LAYER_NORM, SILU_MUL
_ACTIVATION = {"relu": 6, "gelu": 7, "gelu_tanh": 8, "gelu_new": 9}


@dataclass(frozen=True)
class Configuration:
    """Macros of sm80_fused_quant.cu for rows of a length."""

    threads: int
    parts: int  # times 8 elements a thread
    pieces: int = 1  # of a row, a block each

    def source(self, op: int, static: int, vectors: bool, dtype: torch.dtype, codes: bool = True) -> str:
        # CTAs of a multiprocessor, by their registers.
        blocks = max(1, (1024 if op in _OF_TWO_ROWS else 1280) // self.threads)
        macros = {"OP": op, "CODES": int(codes), "STATIC": int(static), "THREADS": self.threads, "V": self.parts}
        macros |= {
            "PIECES": self.pieces,
            "VECTORS": int(vectors),
            "BLOCKS": blocks,
            "BF16": int(dtype == torch.bfloat16),
        }
        return jit.source("sm80_fused_quant.cu", **macros)


TAKES = "x* residual* weight* bias* scale* scale_kind zero_point* codes* scales* total* n eps"


@functools.cache
def _kernel(chosen: Configuration, op: int, static: int, vectors: bool, dtype: torch.dtype) -> jit.Kernel:
    source = chosen.source(op, static, vectors, dtype)
    return jit.Kernel("fused_quant", source, TAKES, chosen.threads, overlaps=True)


def configuration_for(columns: int, is_full: bool) -> Configuration:
    """Return a row's configuration. A card that is full of rows has several in a multiprocessor, with as few threads each as hold it; otherwise a row
    has all threads that it can use."""
    eights = -(-columns // 8)
    least = -(-eights // 1024)
    parts = max(least, min(4, eights // 128)) if is_full else least
    return Configuration(-(-eights // parts // 32) * 32, parts)


def why_not(device: torch.device, dtype: torch.dtype, columns: int) -> str | None:
    """Return why references serve rows of a dtype ("" for the CPU), or None where the kernel does."""
    if (why := jit.why_not(device)) is not None:
        return why
    if dtype not in (torch.bfloat16, torch.float16):
        return str(dtype)
    return None if 0 < columns <= MOST_COLUMNS else f"rows of {columns}"


def path(device: torch.device, dtype: torch.dtype, columns: int, one_scale: bool = False) -> Path:
    """Return which implementation serves rows on a device; `one_scale`: a scale for a whole tensor is found at run time."""
    why = why_not(device, dtype, columns)
    return Path("fused_quant", device.type, "a scale for the whole tensor" if why is None and one_scale else why)


def looked_at(
    x: Tensor,
    n: int,
    mode: int,
    scale: Tensor | None,
    zero_point: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[bool, int, bool]:
    """Return whether the kernel takes the arguments, where scales come from as it counts (STATIC), and whether it can load 16 bytes at once. Raises
    ValueError for scales and zero points that are none."""
    given = [t for t in (residual, weight, bias) if t is not None]
    if (
        why_not(x.device, x.dtype, n) is not None
        or (scale is None and mode == PER_TENSOR)
        or any(t.dtype != x.dtype or t.device != x.device for t in given)
        or any(t is not None and (t.shape != (n,) or not t.is_contiguous()) for t in (weight, bias))
        or (residual is not None and residual.shape != x.shape)
        or (scale is not None and scale.dtype not in KINDS)
    ):
        return False, 0, False
    by_token = scale is not None and zero_point is None and scale.dim() > 1 and scale.shape == (*x.shape[:-1], 1)
    for what, t in (("scale", None if by_token else scale), ("zero point", zero_point)):
        if t is not None and (t.numel() != 1 or t.device != x.device):
            raise ValueError(f"a {what} of {list(t.shape)} on {t.device}: one number is needed, where x is")
    if by_token and scale.device != x.device:
        raise ValueError(f"scales on {scale.device}, x on {x.device}")
    if zero_point is not None and zero_point.dtype != torch.int8:
        raise ValueError(f"a zero point of {zero_point.dtype}, not int8")
    vectors = n % 8 == 0 and all(t.data_ptr() % 16 == 0 for t in (x, *given))
    return True, 0 if scale is None else 2 if by_token else 1, vectors


def _planned(op: int | None, reference: Callable, takes: str) -> Planned:
    """An op on a card, by the names of its arguments in their order; `op` None: of the activation among them. Tensors come in the kernel's order."""
    names = takes.split()

    def plan(*arguments) -> Callable:
        given = dict.fromkeys(("mode", "scale", "zero_point", "residual", "weight", "bias"))
        given |= dict(zip(names, arguments, strict=True))
        x, scale, residual = given["x"], given["scale"], given["residual"]
        if op == SILU_MUL:
            check_even(x)
        n, mode = x.shape[-1] // (1 + (op == SILU_MUL)), PER_TENSOR if given["mode"] is None else given["mode"]
        fits, static, vectors = looked_at(x, n, mode, *map(given.get, ("scale", "zero_point", *_BESIDE)))
        rows = x.numel() // max(1, x.shape[-1])
        if not fits or rows == 0:
            return reference
        if scattered := [i for i in jit.tensors_of(arguments) if not arguments[i].is_contiguous()]:
            return gathering(planned, scattered)
        device, shape = x.device, (*x.shape[:-1], n)
        likes = [jit.like(shape, torch.int8, device), jit.like(_scale_shape(shape, mode, scale), torch.float32, device)]
        if residual is not None:
            likes.append(jit.like(shape, x.dtype, device))
        chosen = configuration_for(n, rows > 2 * arch.card(device).multiprocessors)
        kernel = _kernel(chosen, _ACTIVATION[given["activation"]] if op is None else op, static, vectors, x.dtype)
        varies = [0 if given[name] is None else VARIES for name in ("x", *_BESIDE, "scale", "zero_point")]
        kind, total = 0 if scale is None else KINDS[scale.dtype], 0 if residual is None else VARIES
        numbers = n, jit.float_bits(given.get("eps", 0.0))
        launch = Launch(kernel, device, rows, (*varies[:5], kind, varies[5], VARIES, VARIES, total, *numbers))
        order = [*jit.tensors_of(arguments), *(~i for i in range(len(likes)))]
        return jit.filling(launch, order, likes, 1 if reference is quantize_int8_static_ref else len(likes))

    planned = Planned(plan)
    return planned


_BESIDE = "residual", "weight", "bias"


_STATIC = "mode scale zero_point"
_OPS = {  # the kernel's number, the reference, the arguments
    "quantize_int8": (QUANTIZE, quantize_int8_ref, "x mode"),
    "quantize_int8_static": (QUANTIZE, quantize_int8_static_ref, "x scale zero_point"),
    "rms_norm_int8": (RMS_NORM, rms_norm_int8_ref, f"x weight eps {_STATIC}"),
    "add_rms_norm_int8": (ADD_RMS_NORM, add_rms_norm_int8_ref, f"x residual weight eps {_STATIC}"),
    "layer_norm_int8": (LAYER_NORM, layer_norm_int8_ref, f"x weight bias eps {_STATIC}"),
    "add_layer_norm_int8": (ADD_LAYER_NORM, add_layer_norm_int8_ref, f"x residual weight bias eps {_STATIC}"),
    "silu_mul_int8": (SILU_MUL, silu_mul_int8_ref, f"x {_STATIC}"),
    "activation_int8": (None, activation_int8_ref, f"x activation {_STATIC}"),
}
REFERENCES = {name: reference for name, (_, reference, _) in _OPS.items()}
ON_CARD = {name: _planned(*parts) for name, parts in _OPS.items()}
for _name, _reference in REFERENCES.items():
    library.impl(_name, _reference, "CPU")
    library.impl(_name, ON_CARD[_name], "CUDA")


def _scale_shape(shape: tuple[int, ...], mode: int, scale: Tensor | None) -> tuple[int, ...]:
    if scale is not None:
        return scale.shape
    return (1,) if mode == PER_TENSOR else (*shape[:-1], 1)


def _scale_like(x: Tensor, mode: int, scale: Tensor | None = None) -> Tensor:
    return x.new_empty(_scale_shape(x.shape, mode, scale), dtype=torch.float32)


@torch.library.register_fake("tilepress::quantize_int8")
def _(x, mode):
    return x.new_empty(x.shape, dtype=torch.int8), _scale_like(x, mode)


@torch.library.register_fake("tilepress::quantize_int8_static")
def _(x, scale, zero_point):
    return x.new_empty(x.shape, dtype=torch.int8)


@torch.library.register_fake("tilepress::rms_norm_int8")
def _(x, weight, eps, mode, scale, zero_point):
    return x.new_empty(x.shape, dtype=torch.int8), _scale_like(x, mode, scale)


@torch.library.register_fake("tilepress::add_rms_norm_int8")
def _(x, residual, weight, eps, mode, scale, zero_point):
    return x.new_empty(x.shape, dtype=torch.int8), _scale_like(x, mode, scale), x.new_empty(x.shape)


@torch.library.register_fake("tilepress::silu_mul_int8")
def _(gate_up, mode, scale, zero_point):
    half = gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2), dtype=torch.int8)
    return half, _scale_like(half, mode, scale)


@torch.library.register_fake("tilepress::layer_norm_int8")
def _(x, weight, bias, eps, mode, scale, zero_point):
    return x.new_empty(x.shape, dtype=torch.int8), _scale_like(x, mode, scale)


@torch.library.register_fake("tilepress::add_layer_norm_int8")
def _(x, residual, weight, bias, eps, mode, scale, zero_point):
    return x.new_empty(x.shape, dtype=torch.int8), _scale_like(x, mode, scale), x.new_empty(x.shape)


@torch.library.register_fake("tilepress::activation_int8")
def _(x, activation, mode, scale, zero_point):
    return x.new_empty(x.shape, dtype=torch.int8), _scale_like(x, mode, scale)
