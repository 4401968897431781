"""Arguments of the bitmap's op, the weights that they stand for in float64, and what is right."""

import functools

import torch

from tilepress.formats import tiled_bitmap
from tilepress.formats.int8 import quantize, weight_scale

KINDS = [
    (dtype, int8, group) for dtype in (torch.float16, torch.bfloat16) for int8 in (False, True) for group in (1, 2)
]


def packed_weight(weight, int8, group):
    if not int8:
        return tiled_bitmap.pack(weight, group)
    scale = weight_scale(weight, "channel", weight.dtype)
    return tiled_bitmap.pack(quantize(weight, scale), group, scale.view(-1))


def arguments(rows=70, cols=130, n=(2, 3), sparsity=0.7, kind=(torch.bfloat16, False, 1), bias=True, device="cpu"):
    """The op's arguments, and the weight that it stands for in float64."""
    return with_inputs(*random_weight(rows, cols, sparsity, kind, device), n, bias)


@functools.lru_cache(maxsize=2)
def random_weight(rows, cols, sparsity, kind, device):
    """Packed and in float64, once for the tests of a shape that follow one another: nobody writes to either."""
    dtype, int8, group = kind
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, cols, generator=generator)
    weight[torch.rand(rows, cols, generator=generator) < sparsity] = 0
    return packed_and_exact(weight.to(dtype), int8, group, device)


def packed_and_exact(weight, int8, group, device):
    packed = packed_weight(weight.to(device), int8, group)
    exact = tiled_bitmap.unpack_values(packed).double()
    if int8:
        exact *= packed.scale.double()[:, None]
    return packed, exact


def of_weight(weight, n, int8, group, bias, device):
    return with_inputs(*packed_and_exact(weight, int8, group, device), n, bias)


def with_inputs(packed, exact, n, bias):
    generator = torch.Generator().manual_seed(1)
    (rows, cols), device = exact.shape, exact.device
    x = torch.randn(*n, cols, generator=generator).to(packed.weight_dtype).to(device)
    b = torch.randn(rows, generator=generator).to(packed.weight_dtype).to(device) if bias else None
    return (x, packed.words, packed.offsets, packed.scale, b, rows, packed.dtype, packed.group), exact


def expected_of(args, weight):
    x, bias = args[0].double(), args[4]
    return x @ weight.t() + (0 if bias is None else bias.double())


def assert_right(found, args, weight):
    """Every element, with room for what float32 sums of its products lose."""
    expected, x = expected_of(args, weight), args[0].double()
    most = x.abs() @ weight.abs().t() + (0 if args[4] is None else args[4].double().abs())
    rounding = 2**-10 if found.dtype == torch.float16 else 2**-7
    wrong = (found.double() - expected).abs() > rounding * expected.abs() + 2**-16 * most + 1e-7
    assert not bool(wrong.any()) and not bool(found.isnan().any()), int(wrong.sum())
