"""y = (x_q - zero_point) w_q^T * s_x * s_w + bias on integers: the op `tilepress::w8a8_gemm`; and W8A16, `tilepress::w8a16_gemm`.

The reference multiplies int8 by int8 into int32 (`torch._int_mm`), which is exact: the zero point is taken off as an integer too. Scales
and bias follow in float32, and one rounding to the output's dtype. It is what runs today on CPU and CUDA; results name it `reference`.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from tilepress.formats import int8
from tilepress.kernels import library

library.define(
    "w8a8_gemm(Tensor x, Tensor x_scale, Tensor? x_zero_point, Tensor weight, Tensor weight_scale, Tensor? bias, ScalarType out_dtype) "
    "-> Tensor"
)
library.define("w8a16_gemm(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias) -> Tensor")


_MOST = (1 << 31) // (128 * 128) - 1  # products of int8 that int32 holds for certain


def int_mm(x: Tensor, weight: Tensor) -> Tensor:
    """Exact integer product: x int8 [m, k], weight int8 [n, k] -> int32 [m, n], int64 where k is so large that int32 could overflow."""
    if x.shape[1] > _MOST:
        parts = zip(x.split(_MOST, 1), weight.split(_MOST, 1), strict=True)
        return sum(int_mm(a, b).long() for a, b in parts)
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


def w8a16_gemm_ref(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """x floating [..., k], weight int8 [n, k], weight_scale [n, 1] or [1] -> [..., n] of x's dtype."""
    return linear(x, int8.dequantize(weight, weight_scale).to(x.dtype), bias)


for _key in ("CPU", "CUDA"):
    library.impl("w8a8_gemm", w8a8_gemm_ref, _key)
    library.impl("w8a16_gemm", w8a16_gemm_ref, _key)


@torch.library.register_fake("tilepress::w8a8_gemm")
def _(x, x_scale, x_zero_point, weight, weight_scale, bias, out_dtype):
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype)


@torch.library.register_fake("tilepress::w8a16_gemm")
def _(x, weight, weight_scale, bias):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def path(device: torch.device, weight_only: bool) -> str:
    """Which implementation serves a device: what results report."""
    kind = "w8a16_gemm reference (dequantize)" if weight_only else "w8a8_gemm reference (torch._int_mm)"
    return f"{kind} on {device.type}"
