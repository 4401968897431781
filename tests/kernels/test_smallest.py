"""Every kernel in its smallest cases, in the forms and sizes of block that differ, against its op's reference on the CPU.

This is what `make sanitize` runs under NVIDIA's checkers: the other tests look for wrong results, these are few enough for a tool that makes kernels a
hundred times slower. Weights and pages are ragged, and small enough that blocks share what they add up.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import pytest
import torch
from support.attention_cases import Case, Drawn
from support.cards import HOPPER, take_for_older
from support.stub_card import stubbed

from tilepress.formats import tiled_bitmap, tiled_csl
from tilepress.formats.int8 import quantize, weight_scale
from tilepress.formats.kv_int4 import Forms, KVFormat, forms_of
from tilepress.kernels import (  # noqa: F401
    arch,
    argmax,
    decode_attention,
    fused_norm,
    jit,
    kv_cache,
    kv_read,
    read_bandwidth,
    rope_append,
    tiled_bitmap_spmm,
    tiled_csl_mma,
    tiled_csl_spmm,
    w8a8_gemm,
    w8a16_gemm,
)
from tilepress.kernels.fused_quant import ACTIVATIONS, PER_TOKEN

ops = torch.ops.tilepress
BF16 = torch.bfloat16


class Smallest(NamedTuple):
    """A call of an op that one kernel serves."""

    kernel: str
    op: str
    arguments: Callable[[], tuple]  # on the CPU
    older: bool = False  # the card is taken for one without wgmma
    changes: tuple = ()  # (module, name, value), which choose a size of block
    tolerance: float = 1e-2  # of the largest element, for floating results


def numbers(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def codes(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)


def sparse(rows: int, cols: int, sparsity: float, dtype: torch.dtype = BF16) -> torch.Tensor:
    keep = torch.rand(rows, cols, generator=torch.Generator().manual_seed(1)) >= sparsity
    return torch.where(keep, numbers(rows, cols, dtype=dtype), 0)


# --- sparse products ---

ROWS, COLS = 300, 1003  # three row blocks and sixteen tiles of columns, neither whole


def csl(n: int, sparsity: float) -> tuple:
    packed = tiled_csl.pack(sparse(ROWS, COLS, sparsity))
    return numbers(n, COLS), packed.words, packed.offsets, numbers(ROWS, seed=2), ROWS, BF16


def csl_decode(sparsity: float) -> tuple:
    packed = tiled_csl.pack(sparse(ROWS, COLS, sparsity))
    return packed.words, packed.offsets, ROWS, COLS, BF16


def packed_bitmap(sparsity: float, int8: bool, group: int) -> tiled_bitmap.TiledBitmap:
    weight = sparse(ROWS, COLS, sparsity)
    if not int8:
        return tiled_bitmap.pack(weight, group)
    scale = weight_scale(weight, "channel", weight.dtype)
    return tiled_bitmap.pack(quantize(weight, scale), group, scale.view(-1))


def bitmap(n: int, int8: bool = False, group: int = 1, sparsity: float = 0.6) -> tuple:
    packed = packed_bitmap(sparsity, int8, group)
    bias = numbers(ROWS, seed=2)
    return numbers(n, COLS), packed.words, packed.offsets, packed.scale, bias, ROWS, packed.dtype, group


def bitmap_decode(int8: bool, group: int) -> tuple:
    packed = packed_bitmap(0.6, int8, group)
    return packed.words, packed.offsets, packed.scale, ROWS, COLS, packed.dtype, group


def of_sparse() -> Iterator[tuple[str, Smallest]]:
    for columns in tiled_csl_spmm.COLUMNS:
        size = (tiled_csl_spmm, "columns_for", lambda *_, columns=columns: columns)
        changes = size, (tiled_csl_spmm, "_planned", tiled_csl_spmm._planned.__wrapped__)
        call = partial(csl, columns - 3, 0.8)
        yield f"{columns} columns", Smallest("tiled_csl_spmm", "tiled_csl_spmm", call, changes=changes)
    for sparsity in (0.0, 0.5, 0.7, 0.95):
        yield f"{sparsity} zeros", Smallest("tiled_csl_spmm", "tiled_csl_spmm", partial(csl, 8, sparsity))
    yield "two passes", Smallest("tiled_csl_spmm", "tiled_csl_spmm", partial(csl, 300, 0.5))
    for n in tiled_csl_mma.BLOCKS:
        yield f"{n} columns", Smallest("tiled_csl_mma", "tiled_csl_spmm", partial(csl, n - 3, 0.8), older=True)
    for sparsity in (0.5, 0.95):
        call = partial(csl_decode, sparsity)
        yield f"{sparsity} zeros", Smallest("tiled_csl_decode", "tiled_csl_decode", call, tolerance=0)
    for columns in tiled_bitmap_spmm.COLUMNS:
        call = partial(bitmap, columns - 3)
        yield f"{columns} columns", Smallest("tiled_bitmap_spmm", "tiled_bitmap_spmm", call)
        yield f"{columns} columns", Smallest("tiled_bitmap_mma", "tiled_bitmap_spmm", call, older=True)
    wide = (
        (tiled_bitmap_spmm, "_WIDE_TILES", 0),
        (tiled_bitmap_spmm, "_planned", tiled_bitmap_spmm._planned.__wrapped__),
    )
    for int8, group in ((False, 1), (False, 2), (True, 1), (True, 2)):
        name = f"{'int8' if int8 else 'bfloat16'} in groups of {group}"
        call = partial(bitmap, 5, int8, group)
        yield name, Smallest("tiled_bitmap_spmm", "tiled_bitmap_spmm", call)
        yield f"{name}, older", Smallest("tiled_bitmap_mma", "tiled_bitmap_spmm", call, older=True)
        call = partial(bitmap, 100, int8, group)
        yield f"{name}, pairs", Smallest("tiled_bitmap_spmm", "tiled_bitmap_spmm", call, changes=wide)
        call = partial(bitmap, 300, int8, group)
        many = "tiled_bitmap_spmm" if int8 or group > 1 else "tiled_bitmap_prefill"
        yield f"{name}, many rows", Smallest(many, "tiled_bitmap_spmm", call)
        call = partial(bitmap_decode, int8, group)
        yield name, Smallest("tiled_bitmap_decode", "tiled_bitmap_decode", call)


# --- INT8 products ---


def w8a8(m: int, n: int, k: int, zero_point: int | None = None) -> tuple:
    zero = None if zero_point is None else torch.tensor([zero_point], dtype=torch.int8)
    x_scale = torch.rand(m, 1, generator=torch.Generator().manual_seed(3)) + 0.1
    return codes(m, k), x_scale, zero, codes(n, k, seed=1), numbers(n, 1).abs() + 0.1, numbers(n, seed=2), BF16


def w8a16(m: int, n: int, k: int) -> tuple:
    return numbers(m, k), codes(n, k, seed=1), numbers(n, 1).abs() / 100 + 0.01, numbers(n, seed=2)


W8A8 = (
    w8a8_gemm.Configuration(1, 8, 2, 10),
    w8a8_gemm.Configuration(1, 16, 4, 5),
    w8a8_gemm.Configuration(1, 32, 2, 8, 2),
    w8a8_gemm.Configuration(1, 64, 2, 4, 4),
    w8a8_gemm.Configuration(1, 128, 1, 4, 2),
    w8a8_gemm.Configuration(2, 128, 1, 6),
    w8a8_gemm.Configuration(2, 256, 1, 4, together=4),
)


def of_int8() -> Iterator[tuple[str, Smallest]]:
    for chosen in W8A8:
        changes = ((w8a8_gemm, "configuration_for", lambda *_, chosen=chosen: chosen),)
        name = f"{chosen.groups}x{chosen.tokens}, split {chosen.split}"
        call = partial(w8a8, chosen.tokens + 3, 200, 1040, 5)
        yield name, Smallest("w8a8_gemm", "w8a8_gemm", call, changes=changes)
    for m, n, k in ((3, 7, 5), (70, 136, 272)):
        yield f"{m}x{n}x{k}", Smallest("w8a8_mma", "w8a8_gemm", partial(w8a8, m, n, k, 5), older=True)
    for m in (5, 13, 30, 60, 100, 140):  # each size of block, and more rows than a launch takes
        yield f"{m} rows", Smallest("w8a16_gemm", "w8a16_gemm", partial(w8a16, m, 200, 1040))
    for m in (5, 13, 30, 60):
        yield f"{m} rows", Smallest("w8a16_mma", "w8a16_gemm", partial(w8a16, m, 200, 1040), older=True)
    yield "600 rows", Smallest("dequantize", "w8a16_gemm", partial(w8a16, 600, 136, 272))


# --- rows ---


def of_rows() -> Iterator[tuple[str, Smallest]]:
    for columns in (9, 300, 8200):
        yield (
            f"{columns} columns",
            Smallest("argmax", "argmax", partial(lambda n: (numbers(5, n),), columns), tolerance=0),
        )

    def row(n: int, op: str, mode: str) -> tuple:
        """Arguments of a fused op, in its schema's order."""
        x, residual, weight, bias = numbers(5, n), numbers(5, n, seed=1), numbers(n, seed=2), numbers(n, seed=3)
        given = {
            "rms_norm": (x, weight, 1e-5),
            "add_rms_norm": (x, residual, weight, 1e-5),
            "layer_norm": (x, weight, bias, 1e-5),
            "add_layer_norm": (x, residual, weight, bias, 1e-5),
            "silu_mul": (torch.cat([x, residual], 1),),
            "quantize": (x,),
        } | {f"activation-{name}": (x, name) for name in ACTIVATIONS}
        scale, zero = torch.tensor([0.02]), torch.tensor([-7], dtype=torch.int8)
        if op == "quantize" and mode == "static":
            return *given[op], scale, zero
        asked = {"float": (), "token": (PER_TOKEN, None, None), "static": (PER_TOKEN, scale, zero)}[mode]
        return *given[op], *(asked[:1] if op == "quantize" else asked)

    norms = ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "silu_mul")
    for name in norms:
        for n in (100, 1000):  # read one by one, and by vectors
            yield f"{name} of {n}", Smallest("fused_quant", name, partial(row, n, name, "float"))
    for name in (*norms, *(f"activation-{name}" for name in ACTIVATIONS)):
        op = f"{name.partition('-')[0]}_int8"
        for n, mode in ((100, "static"), (1000, "token")):
            yield f"{name} of {n}, {mode}", Smallest("fused_quant", op, partial(row, n, name, mode))
    yield "codes, static", Smallest("fused_quant", "quantize_int8_static", partial(row, 100, "quantize", "static"))
    yield "codes, token", Smallest("fused_quant", "quantize_int8", partial(row, 8200, "quantize", "token"))


# --- the attention cache ---

FORMS = (KVFormat(64), KVFormat(128, 4, 32), KVFormat(128, 4, 0, True), KVFormat(64, 8), KVFormat(128, 16))


def sides(form: KVFormat, heads: int) -> list:
    """Channels, a static format's numbers and a clip, of keys and of values."""
    found = []
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        channels = None if form.bits == 16 else torch.rand(3, heads, form.head_dim, generator=generator) + 0.5
        fixed = (
            torch.tensor([8.0 / form.max_code, -4.0], dtype=torch.float16).expand(heads, form.groups, 2).contiguous()
        )
        found += [channels, fixed if form.static else None, 0.95]
    return found


def appended(form: KVFormat, rotate: bool) -> tuple:
    pages = torch.full((3, 2, form.page_bytes), 0xA5, dtype=torch.uint8)
    key, value = numbers(7, 2, form.head_dim), numbers(7, 2, form.head_dim, seed=1)
    slots = torch.tensor([0, 63, 64, -1, 150, 191, 2])
    return pages, key, value, slots, *sides(form, 2), form.bits, form.group_size, form.static, rotate, form.refits


def read_back(form: KVFormat, rotate: bool) -> tuple:
    pages = torch.randint(
        0, 120, (4, 2, form.page_bytes), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    table, lens = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32), torch.tensor([70, 3], dtype=torch.int32)
    (kc, kf, _, vc, vf, _), shape = sides(form, 2), (form.bits, form.group_size, form.static)
    return pages, table, lens, 75, kc, kf, vc, vf, form.head_dim, *shape, rotate, BF16


def turned(form: KVFormat, norm: bool, interleaved: bool, rotate: bool) -> tuple:
    pages, key, value, slots, *cache = appended(form, rotate)
    dim = form.head_dim
    query, angles = numbers(7, 4, dim, seed=4), numbers(7, dim // 2, seed=5).float()
    biases = (None, None, None) if norm else (numbers(4 * dim), numbers(2 * dim), numbers(2 * dim))
    norms = (numbers(dim) + 1, numbers(dim) + 1) if norm else (None, None)
    cos, sin = angles.cos().to(BF16), angles.sin().to(BF16)
    return pages, query, key, value, *biases, *norms, 1e-6, cos, sin, interleaved, False, slots, *cache


def attended(
    form: Forms, histories: tuple[int, ...], counts: tuple[int, ...] | None = None, more: Callable = tuple, **options
) -> tuple:
    plain = {"rotate": False, "window": 0, "softcap": 0.0, "has_sinks": False, "has_slopes": False, "calibrated": True}
    fixed = {"kv_heads": 2, "group": 4, "page_tokens": 64, "shared": 0}
    case = Case(Drawn(0, form, BF16, histories=histories, counts=counts, **plain | fixed | options))
    return case.query, *case.arguments, *more(), *case.options


def step() -> tuple:
    return (torch.tensor([0.01]),)


def of_cache() -> Iterator[tuple[str, Smallest]]:
    for form in FORMS:
        name, rotate = f"{form.head_dim} {form.name}", form.bits == 4 and not form.static
        yield name, Smallest("kv_append", "kv_append", partial(appended, form, rotate))
        yield name, Smallest("kv_read", "kv_read", partial(read_back, form, rotate))
        for norm in (False, True):
            yield (
                f"{name}, {'norms' if norm else 'biases'}",
                Smallest("rope_append", "rope_append", partial(turned, form, norm, norm, rotate)),
            )
    one = (1100, -1, 63, 0)  # tokens before the query; one sequence is empty
    for form in FORMS:
        both, name = forms_of(form, form), f"{form.head_dim} {form.name}"
        rotate = form.bits == 4 and not form.static
        call = partial(attended, both, one, rotate=rotate)
        yield name, Smallest("decode_attention", "decode_attention", call)
        yield name, Smallest("attention_combine", "decode_attention", call, older=True)
        call = partial(attended, both, (100, 0, 70), (40, 1, 17), rotate=rotate, page_tokens=32)
        yield f"{name}, many queries", Smallest("decode_attention_mma", "decode_attention", call, older=True)
    form = forms_of(KVFormat(128), KVFormat(128))
    for group in (4, 12):
        call = partial(attended, form, one, group=group)
        yield f"sums of {group}", Smallest("decode_attention", "decode_attention_lse", call)
        call = partial(attended, form, one, more=step, group=group)
        yield f"codes of {group}", Smallest("decode_attention", "decode_attention_int8", call)
    for older in (False, True):  # what only the kernel for all cards takes
        options = {"window": 33, "softcap": 5.0, "has_sinks": True, "has_slopes": True}
        call = partial(attended, form, (600, 20), **options)
        yield "window", Smallest("decode_attention_mma", "decode_attention_lse", call, older=older)
    unlike = forms_of(KVFormat(96, 8), KVFormat(96, 4, 32))
    yield "unlike", Smallest("decode_attention_mma", "decode_attention", partial(attended, unlike, one))
    wide = forms_of(KVFormat(256), KVFormat(256))
    yield "256", Smallest("decode_attention_mma", "decode_attention", partial(attended, wide, one))
    call = partial(attended, form, one, more=step)
    yield "codes", Smallest("attention_combine", "decode_attention_int8", call, older=True)


CASES = [
    pytest.param(case, id=f"{case.kernel}-{case.op}-{name}")
    for cases in (of_sparse, of_int8, of_rows, of_cache)
    for name, case in cases()
]


@pytest.fixture
def launched(monkeypatch) -> set[str]:
    """Names of the kernels that a test launches."""
    names, launch = set(), jit.Launch.__call__

    def noted(self, *given, **how):
        names.add(self.kernel.name)
        launch(self, *given, **how)

    monkeypatch.setattr(jit.Launch, "__call__", noted)
    return names


def results(op: str, arguments: tuple, device: str) -> list[torch.Tensor]:
    """What an op returns, and the tensors that it was given, of which it may write some; on the CPU."""
    there = [x.to(device) if isinstance(x, torch.Tensor) else x for x in arguments]
    out = getattr(ops, op)(*there)
    made = [] if out is None else list(out) if isinstance(out, (tuple, list)) else [out]
    return [x.cpu() for x in (*made, *there) if isinstance(x, torch.Tensor)]


def choose(case: Smallest, monkeypatch) -> None:
    """Have the kernel and the size of block chosen that a case is for."""
    if case.older:
        take_for_older(monkeypatch)
    for module, name, value in case.changes:
        monkeypatch.setattr(module, name, value)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("case", CASES)
def test_as_on_the_cpu(case, launched, monkeypatch):
    choose(case, monkeypatch)
    arguments = case.arguments()
    expected = results(case.op, [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments], "cpu")
    for _ in range(2):  # the first launch of a plan, and one that follows
        for found, exact in zip(results(case.op, arguments, "cuda"), expected, strict=True):
            assert found.dtype == exact.dtype and found.shape == exact.shape
            if exact.dtype == torch.int8:
                assert int((found.int() - exact.int()).abs().max()) <= 2  # as other tests of these kernels allow
            elif not exact.is_floating_point():
                assert torch.equal(found, exact)
            else:
                found, exact = found.double(), exact.double()
                assert torch.equal(found.isinf(), exact.isinf())  # the sums of empty sequences
                finite = exact.isfinite()
                apart = (found - exact)[finite].abs().max()
                assert apart <= case.tolerance * exact[finite].abs().max(), float(apart)
    assert case.kernel in launched


@pytest.mark.gpu
def test_bandwidth(launched):
    read_bandwidth.read(torch.ones(6_000_001, device="cuda"))
    torch.cuda.synchronize()
    assert launched == {"read_bandwidth"}


@pytest.mark.parametrize("case", [case for case in CASES if not case.values[0].kernel.endswith("_decode")])
def test_which_kernel_is_launched(case, launched, monkeypatch):
    """Without a card. Decoding alone has no stub."""
    arguments = case.arguments()
    with stubbed(monkeypatch):
        choose(case, monkeypatch)
        results(case.op, arguments, "cpu")
    assert case.kernel in launched


def test_no_kernel_is_left_out():
    names = {source.kernel for sources in arch.KERNELS.values() for source in sources}
    assert {case.values[0].kernel for case in CASES} | {"read_bandwidth"} == names
