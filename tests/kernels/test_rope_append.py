"""rope_append against transformers' own modules and kv_append, one after the other, to the bit; on a card against the reference, to the bit."""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from support.feedback import random_feedback
from support.kernel_costs import cost
from torch import Tensor
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from tilepress.formats.kv_int4 import KVFormat, hadamard
from tilepress.kernels import jit, rope_append
from tilepress.kernels.kv_cache import Steps

ops = torch.ops.tilepress
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
COMPILER = pytest.mark.skipif(jit.missing() is not None, reason="needs cuda-core")
KV_HEADS = 2
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS = [
    KVFormat(128),
    KVFormat(64),
    KVFormat(96),
    KVFormat(128, 4, 32),
    KVFormat(64, 4, 32),
    KVFormat(96, 4, 32),
    KVFormat(256, 4, 64),
    KVFormat(128, 4, 0, True),
    KVFormat(64, 4, 32, True),
    KVFormat(128, 8),
    KVFormat(96, 8),
    KVFormat(64, 8, 0, True),
    KVFormat(64, 16),
    KVFormat(96, 16),
    KVFormat(128, 16),
]


@dataclass(frozen=True)
class Case:
    """One call. A KV head has `group` query heads, `rotary` of the channels turn, `wide` cosines are float32."""

    form: KVFormat = FORMS[1]
    dtype: torch.dtype = torch.float32
    tokens: int = 7
    group: int = 2
    rotary: int = 64
    interleaved: bool = False
    wide: bool = False
    bias: bool = True
    norm: bool = False
    fold: bool = False
    rotate: bool = False
    refits: int = 2
    calibrated: bool = True
    feedback: bool = False  # of 4-bit keys' errors

    def parts(self) -> dict:
        generator, heads, dim = torch.Generator().manual_seed(self.tokens), KV_HEADS * self.group, self.form.head_dim

        def numbers(*shape, spread=1.0):
            return (torch.randn(shape, generator=generator) * spread).to(self.dtype)

        both, sizes = heads + 2 * KV_HEADS, [heads, KV_HEADS, KV_HEADS]
        qkv = numbers(self.tokens, both * dim + 3)  # a GEMM's output, and more beyond it
        query, key, value = (
            part.unflatten(1, (-1, dim)) for part in qkv[:, : both * dim].split([n * dim for n in sizes], 1)
        )
        key[0, 0], value[0, 1, :5] = 0, 300  # a row of zeros, outliers
        angles = torch.rand(self.tokens, self.rotary, generator=generator) * 7  # twice as wide: strided
        kind = torch.float32 if self.wide else self.dtype
        slots = torch.randperm(64 * self.pages, generator=generator)[: self.tokens]
        slots[3::7] = -1

        def side():
            if self.form.bits == 16 or not self.calibrated:
                return None
            return torch.rand(3, KV_HEADS, dim, generator=generator) + 0.5

        fixed = torch.tensor([8.0 / self.form.max_code, -4.0], dtype=torch.float16)
        fixed = fixed.expand(KV_HEADS, self.form.groups, 2).contiguous() if self.form.static else None
        return {
            "query": query,
            "key": key,
            "value": value,
            **{
                f"{name}_bias": numbers(n * dim) if self.bias else None
                for name, n in zip(("query", "key", "value"), sizes, strict=True)
            },
            **{f"{name}_norm": numbers(dim, spread=0.3) + 1 if self.norm else None for name in ("query", "key")},
            "eps": 1e-6,
            "cos": angles.cos().to(kind)[:, : self.rotary // 2],
            "sin": angles.sin().to(kind)[:, : self.rotary // 2],
            "interleaved": self.interleaved,
            "fold": self.fold,
            "slots": slots,
            "key_channels": side(),
            "key_fixed": fixed,
            "key_clip": 0.95,
            "value_channels": side(),
            "value_fixed": fixed,
            "value_clip": 0.9,
            "bits": self.form.bits,
            "group_size": self.form.group_size,
            "static": self.form.static,
            "rotate": self.rotate,
            "refits": self.refits,
            **dict(zip(("value_bits", "value_group_size", "value_static"), (0, 0, False), strict=True)),
            "key_feedback": random_feedback(KV_HEADS, dim) if self.feedback and self.form.bits == 4 else None,
        }

    @property
    def pages(self) -> int:
        return -(-self.tokens // 64) + 1

    def blank(self, device="cpu") -> Tensor:
        shape = self.pages, KV_HEADS, self.form.page_bytes
        return torch.full(shape, 0xA5, dtype=torch.uint8, device=device)


def run(parts: dict, pages: Tensor) -> Tensor:
    """The query; on the pages' device."""
    there = (x.to(pages.device) if isinstance(x, Tensor) else x for x in parts.values())
    return ops.rope_append(pages, *there)


def by_kv_append(pages: Tensor, key: Tensor, value: Tensor, parts: dict) -> Tensor:
    rest = list(parts.values())[list(parts).index("slots") :]
    ops.kv_append(pages, key, value, *rest)
    return pages


def biased(parts: dict) -> list[Tensor]:
    rows = ((parts[name], parts[f"{name}_bias"]) for name in ("query", "key", "value"))
    return [x if bias is None else x + bias.view(x.shape[1:]) for x, bias in rows]


def as_llama(query: Tensor, key: Tensor, parts: dict) -> tuple[Tensor, Tensor]:
    cos, sin = (torch.cat([parts[name]] * 2, -1) for name in ("cos", "sin"))
    turning = cos.shape[-1]
    turned = modeling_llama.apply_rotary_pos_emb(query[..., :turning], key[..., :turning], cos, sin)
    return tuple(torch.cat([t, x[..., turning:]], -1) for t, x in zip(turned, (query, key), strict=True))


def as_gptj(query: Tensor, key: Tensor, parts: dict) -> tuple[Tensor, Tensor]:
    turning = 2 * parts["cos"].shape[-1]
    sin, cos = parts["sin"][None], parts["cos"][None]
    return tuple(
        torch.cat([modeling_gptj.apply_rotary_pos_emb(x[None, ..., :turning], sin, cos)[0], x[..., turning:]], -1)
        for x in (query, key)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary", [64, 48, 16, 2, 0])
@pytest.mark.parametrize("interleaved,transformers", [(False, as_llama), (True, as_gptj)])
def test_bits_of_transformers_and_kv_append(interleaved, transformers, rotary, dtype):
    for form, bias in ((KVFormat(64), True), (KVFormat(64, 4, 32), False), (KVFormat(64, 16), True)):
        case = Case(form, dtype, rotary=rotary, interleaved=interleaved, bias=bias)
        parts, pages = case.parts(), case.blank()
        query, key, value = biased(parts)
        query, key = transformers(query, key, parts)
        out = run(parts, pages)
        assert torch.equal(out, query) and out.dtype == dtype and out.is_contiguous()
        assert torch.equal(pages, by_kv_append(case.blank(), key, value, parts))
        assert not torch.equal(pages, case.blank())


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_qwens_within_a_rounding(dtype):
    case = Case(KVFormat(128, 16), dtype, rotary=128, norm=True)
    parts, pages = case.parts(), case.blank()
    rows = []
    for x, weight in zip(biased(parts), (parts["query_norm"], parts["key_norm"], None), strict=True):
        norm = Qwen3RMSNorm(128, parts["eps"]).to(dtype)
        if weight is not None:
            norm.weight.data = weight
        rows.append(x if weight is None else norm(x).detach())
    query, key = as_llama(*rows[:2], parts)
    bound = {torch.float32: 1e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}[dtype]
    torch.testing.assert_close(run(parts, pages), query, rtol=bound, atol=4 * bound)
    stored = by_kv_append(case.blank(), key, rows[2], parts).view(torch.bfloat16).float()
    torch.testing.assert_close(pages.view(torch.bfloat16).float(), stored, rtol=2**-6, atol=2**-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_by_hand(dtype):
    """The norm in float64, before anything turns."""
    case = Case(KVFormat(96, 16), dtype, rotary=0, norm=True, bias=False)
    parts = case.parts()
    x, weight = parts["query"].double(), parts["query_norm"].double()
    exact = weight * (x / (x.square().mean(-1, keepdim=True) + parts["eps"]).sqrt())
    bound = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(run(parts, case.blank()).double(), exact, rtol=bound, atol=1e-7)


def test_wide_angles_are_rounded_once():
    case = Case(dtype=torch.bfloat16, wide=True, bias=False)
    parts, pages = case.parts(), case.blank()
    query, key = as_llama(parts["query"].float(), parts["key"].float(), parts)
    assert torch.equal(run(parts, pages), query.bfloat16())
    assert torch.equal(pages, by_kv_append(case.blank(), key.bfloat16(), parts["value"], parts))


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_folded_query(dtype, rotate):
    case = Case(dtype=dtype, rotate=rotate)
    plain, folded = case.parts(), replace(case, fold=True).parts()
    pages, other = case.blank(), case.blank()
    query = run(plain, pages).float()
    scale = plain["key_channels"][1].repeat_interleave(case.group, 0)
    expected = hadamard(query * scale) if rotate else query * scale
    assert torch.equal(run(folded, other), expected.to(dtype)) and torch.equal(pages, other)


def test_folded_queries_attend_alike():
    """decode_attention of the folded query without the keys' channels and rotation is that of the plain one with them."""
    case = Case(tokens=2, rotate=True)
    parts, pages = {**case.parts(), "slots": torch.tensor([0, 1])}, case.blank()
    query = run(parts, pages)
    folded = run({**parts, "fold": True}, case.blank())
    table, lengths = torch.zeros(2, 1, dtype=torch.int32), torch.tensor([2, 2], dtype=torch.int32)
    keys, values = (parts["key_channels"], None), (parts["value_channels"], None)
    plain = ops.decode_attention(query, pages, table, lengths, 0.125, *keys, *values, 4, 0, False, True)
    other = ops.decode_attention(folded, pages, table, lengths, 0.125, None, None, *values, 4, 0, False, False)
    torch.testing.assert_close(other, plain, rtol=1e-5, atol=1e-5)


def test_sixteen_bit_keys_fold_nothing():
    case = Case(KVFormat(64, 16), torch.bfloat16, fold=True, rotate=True)
    plain = replace(case, fold=False, rotate=False)
    assert torch.equal(run(case.parts(), case.blank()), run(plain.parts(), case.blank()))


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_without_a_slot_have_queries(device):
    case = Case()
    parts, pages = case.parts(), case.blank(device)
    expected = run(parts, pages)
    pages = case.blank(device)
    assert torch.equal(run({**parts, "slots": torch.full_like(parts["slots"], -1)}, pages), expected)
    assert torch.equal(pages, case.blank(device))
    none = {name: x[:0] if name in ("query", "key", "value", "cos", "sin", "slots") else x for name, x in parts.items()}
    assert run(none, pages).shape == (0, KV_HEADS * case.group, 64)


def variants():
    """Variants of everything but form and dtype: what share of the channels turns, and the rest."""
    yield 1.0, Case()
    yield 1.0, Case(interleaved=True, norm=True, fold=True)
    yield 1.0, Case(tokens=1, group=1, bias=False, calibrated=False, refits=0)
    yield 0.5, Case(norm=True, bias=False, wide=True)
    yield 0.25, Case(interleaved=True, group=7, rotate=True, fold=True)
    yield 0.25, Case(rotate=True, norm=True, fold=True, refits=3)
    yield 0.75, Case(rotate=True, wide=True, interleaved=True)
    yield 0.75, Case(tokens=200, group=4)
    yield 0.125, Case(norm=True, fold=True, calibrated=False)
    yield 0.0, Case(norm=True)
    yield 1.0, Case(rotate=True, fold=True, tokens=70, feedback=True)
    yield 0.5, Case(norm=True, interleaved=True, tokens=70, feedback=True)
    yield 1.0, Case(rotate=True, tokens=1, group=4, feedback=True, bias=False, fold=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_bit_is_the_same_on_a_card(form, dtype):
    first = FORMS.index(form) + DTYPES.index(dtype)  # each form has all variants, in one dtype or another
    for share, case in [*variants()][first % 3 :: 3]:
        case = replace(case, form=form, dtype=dtype, rotary=int(form.head_dim * share) // 2 * 2)
        parts, expected, found = case.parts(), case.blank(), case.blank("cuda")
        query = run(parts, expected)
        assert torch.equal(run(parts, found).cpu(), query), case
        wrong = int((found.cpu() != expected).sum())
        assert wrong == 0, (case, wrong)


@pytest.mark.gpu
def test_on_a_card_views_stay_views_and_slots_beyond_the_pages_are_skipped():
    case = Case(dtype=torch.bfloat16, rotary=32)
    parts = case.parts()
    there = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in parts.items()}
    whole = torch.cat([parts[name].flatten(1) for name in ("query", "key", "value")], 1).cuda()
    split = whole.split([parts[name][0].numel() for name in ("query", "key", "value")], 1)
    views = {name: x.unflatten(1, (-1, 64)) for name, x in zip(("query", "key", "value"), split, strict=True)}
    turned = {name: torch.stack([there[name]] * 2, -1)[..., 0] for name in ("cos", "sin")}  # channels are not in a row
    pages, expected = case.blank("cuda"), case.blank()
    query = run(parts, expected)
    for changes in (
        views,
        turned,
        {"key_channels": there["key_channels"].transpose(1, 2).contiguous().transpose(1, 2)},
    ):
        assert torch.equal(ops.rope_append(pages.fill_(0xA5), *{**there, **changes}.values()).cpu(), query)
        assert torch.equal(pages.cpu(), expected)
    beyond = there["slots"] * 0 + torch.tensor([64 * case.pages, -5, 1 << 40, -1, -2, 1 << 62, 64 * 99]).cuda()
    pages = case.blank("cuda")
    assert torch.equal(ops.rope_append(pages, *{**there, "slots": beyond}.values()).cpu(), query)
    assert torch.equal(pages.cpu(), case.blank())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "changes,message",
    [
        ({"query": torch.randn(7, 3, 64)}, "3 query heads are no multiple of 2 KV heads"),
        ({"query": torch.randn(6, 4, 64)}, "do not go with keys"),
        ({"query": torch.randn(7, 256)}, r"\[tokens, heads, D\]"),
        ({"key": torch.randn(7, 1, 64)}, "do not hold keys of 1"),
        ({"value": torch.randn(6, 2, 64)}, "keys .* values"),
        ({"slots": torch.zeros(6, dtype=torch.int64)}, r"\[6\] slots"),
        ({"query_bias": torch.randn(64), "key_norm": torch.ones(32)}, r"query_bias \[64\], not \[256\]; key_norm"),
        ({"value_bias": torch.randn(128).half()}, "torch.float16, torch.float32: give all"),
        ({"cos": torch.randn(7, 33), "sin": torch.randn(7, 33)}, "up to 32"),
        ({"cos": torch.randn(7, 16)}, r"cos \[7, 16\] and sin \[7, 32\]"),
        ({"cos": torch.randn(7, 32).half()}, "cos of torch.float16"),
        ({"key_channels": torch.rand(3, 2, 32)}, "the calibration is not of 2 heads"),
        ({"bits": 8}, "do not hold int8"),
        ({"static": True}, "do not hold int4 static"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message, device):
    case = Case()
    pages = case.blank(device)
    with pytest.raises(ValueError, match=message):
        run({**case.parts(), **changes}, pages)
    assert torch.equal(pages, case.blank(device))


def test_slots_beyond_the_pages_are_refused():
    case = Case()
    for slot in (-2, 64 * case.pages):
        with pytest.raises(IndexError, match="are beyond"):
            run({**case.parts(), "slots": torch.full((7,), slot)}, case.blank())


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(KVFormat(64, 8, 0, True), torch.bfloat16, interleaved=True, norm=True, bias=False),
        Case(KVFormat(64, 16), rotary=16, fold=True),
    ],
    ids=("int4", "int8 static", "bfloat16"),
)
def test_opcheck(case):
    torch.library.opcheck(ops.rope_append.default, (case.blank(), *case.parts().values()))


def test_in_a_compiled_function_the_bytes_are_the_same():
    case = Case(dtype=torch.bfloat16, norm=True)
    names, parts, one, other = ("query", "key", "value"), case.parts(), case.blank(), case.blank()
    expected = run(parts, one)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda p, *rows: run({**parts, **dict(zip(names, rows, strict=True))}, p), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(other, *(parts[name] for name in names)), expected) and torch.equal(one, other)


@pytest.mark.thorough
@COMPILER
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_kernel_keeps_rows_in_registers(arch):
    for form, dtype, rotary, interleaved, wide in (
        (KVFormat(128), torch.bfloat16, 128, False, False),
        (KVFormat(128, 4, 32), torch.float16, 64, True, False),
        (KVFormat(64, 8, 0, True), torch.bfloat16, 16, False, True),
        (KVFormat(96, 16), torch.float32, 80, False, False),
    ):
        for every in (False, True):
            steps = Steps(every, every, form.refits, every and form.bits == 4)
            source = rope_append.source(form, dtype, steps, 64, 32, 8, rotary, interleaved, wide, every, every, every)
            found = cost(jit.compile_cubin("rope_append", source, arch)[1])
            assert found["spills"] == found["stack"] == 0, (form, found)
            assert found["registers"] <= (100 if steps.feedback else 80), (form, found)


@pytest.mark.parametrize("dim", [32, 64, 96, 128])
def test_fold_adds_up(dim):
    x = torch.randn(5, 3, dim)
    torch.testing.assert_close(rope_append.fold(x)[..., 0].double(), x.double().sum(-1), rtol=1e-5, atol=1e-5)


def test_paths_say_what_serves():
    assert str(rope_append.path(torch.device("cpu"))) == "rope_append reference on cpu"
    assert len({*itertools.chain(Case().parts())}) == 29  # the schema's arguments, the pages aside
