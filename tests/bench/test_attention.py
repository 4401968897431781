"""`eval kernels attention`: its cases and lengths, what it finds wrong, its rows by the references with times made up, and a small run on a card."""

import json

import pytest
import torch
from support.cards import HAS_WGMMA
from torch.nn.attention import SDPBackend

from tilepress.bench import attention
from tilepress.bench.attention import KINDS, Shape, cases, form_of, lengths
from tilepress.cli.kernels import SHAPES, kernels_text
from tilepress.formats import TilepressError, UsageError
from tilepress.kernels.arch import Path

ops = torch.ops.tilepress
SMALL = Shape(5, 8, 2, 70, 64, True)
DECODE = {
    "op",
    "B",
    "HQ",
    "HKV",
    "T",
    "D",
    "kv",
    "dtype",
    "variable_lengths",
    "us",
    "us_spread",
    "us_bf16_best",
    "bf16_best",
    "speedup",
}
DECODE |= {"q_tokens", "window", "arch", "bytes", "gbps", "share_of_read", "rel_err", "path"}
FRONT = {
    "op",
    "B",
    "HQ",
    "HKV",
    "D",
    "kv",
    "dtype",
    "us",
    "us_spread",
    "us_eager",
    "bytes",
    "us_floor",
    "us_allowed",
    "rel_err",
    "path",
}


def test_the_usual_cases():
    shapes = [Shape.parse(text) for text in SHAPES["attention"].split(",")]
    heads = [(32, 8, b) for b in (1, 4, 16, 64)] + [(8, 1, b) for b in (32, 128, 512)]
    assert [(s.head_dim, s.query_heads, s.kv_heads, s.batch) for s in shapes] == [
        (d, *each) for d in (128, 64) for each in heads
    ]
    assert {s.tokens for s in shapes} == {8192}
    assert [(s.batch, s.head_dim) for s in shapes if s.variable] == [(16, 128), (64, 128), (512, 128)]
    found = list(cases([SMALL, SMALL, shapes[0]], ["int4", "bf16", "int4"]))
    both = [(SMALL, kind, variable) for kind in ("int4", "bf16") for variable in (False, True)]
    assert found == [*both, (shapes[0], "int4", False), (shapes[0], "bf16", False)]
    assert shapes[3].front == (64, 32, 8, 128) == attention.FRONTS[0]


def test_the_command_asks_for_what_its_flags_say(cli, monkeypatch, tmp_path):
    asked = []
    row = {"op": "rope_append", "B": 1, "HQ": 8, "HKV": 1, "D": 64, "kv": "int8", "dtype": "bfloat16", "us": 3.0}
    found = {"env": {"card": "none", "torch": "2"}, "read_gbps": 4000.0}
    found["rows"] = [row | {"us_eager": None, "us_floor": 0.5, "us_allowed": 2.65}]
    monkeypatch.setattr(attention, "attention", lambda *args: asked.append(args) or found)
    ran = cli("eval", "kernels", "attention", "-q", "--json")
    assert ran.code == 0 and ran.json == found
    words = [
        "--shapes",
        "3x8x1x500x64v,3x8x1x700x64",
        "--kv",
        "int8,bf16",
        "--dtype",
        "float16",
        "-o",
        tmp_path / "a.json",
    ]
    ran = cli("eval", "kernels", "attention", *words)
    assert ran.code == 0 and "2.65" in ran.out and json.loads((tmp_path / "a.json").read_text()) == found
    (shapes, kinds, dtypes, _, fronts), given = asked
    assert len(shapes) == 14 and kinds == list(KINDS) and dtypes == [torch.bfloat16] and fronts == attention.FRONTS
    assert given[0] == [Shape(3, 8, 1, 500, 64, True), Shape(3, 8, 1, 700, 64)] and given[1] == ["int8", "bf16"]
    assert given[2] == [torch.float16] and given[4] == [(3, 8, 1, 64)] * 2


def test_kinds_of_caches():
    sizes = {kind: form_of(kind, 128).row_bytes for kind in KINDS}
    assert sizes == {"int4": 68, "int4-g32": 80, "int4-static": 64, "int8": 132, "bf16": 256}
    assert form_of("int4-g32", 64).groups == 2
    with pytest.raises(UsageError, match="--kv fp8 is unknown"):
        form_of("fp8", 128)


@pytest.mark.parametrize("batch,tokens", [(1, 8192), (2, 1), (16, 8192), (64, 8192), (512, 8192), (1000, 3)])
def test_lengths_that_vary_have_the_same_total(batch, tokens):
    assert lengths(batch, tokens, False).tolist() == [tokens] * batch
    varied = lengths(batch, tokens, True)
    assert varied.dtype == torch.int32 and varied.shape == (batch,) and int(varied.sum()) == batch * tokens
    assert int(varied.min()) >= 1 and int(varied.max()) <= 2 * tokens
    assert torch.equal(varied, lengths(batch, tokens, True))
    if batch >= 64 and tokens > 3:  # spread over all of 1 .. 2 tokens
        counts = torch.histc(varied.float(), 4, 0, 2 * tokens)
        assert int(varied.min()) < tokens / 8 and float(counts.min()) > batch / 8


@pytest.mark.parametrize("kind", KINDS)
def test_pages_are_filled_at_random_places_and_wrong_results_are_found(kind, monkeypatch):
    monkeypatch.setattr(attention, "_DEVICE", torch.device("cpu"))
    monkeypatch.setattr(attention, "_APPENDED", 60)  # several slices
    form, lens = form_of(kind, 64), torch.tensor([64, 1, 130, 7], dtype=torch.int32)
    fixed = attention._fixed(form, 2)
    assert (fixed is None) == (kind != "int4-static")
    table = attention._table(lens)
    pages = attention._filled(form, lens, table, 2, fixed)
    assert len(pages) == 6 and table.dtype == torch.int32 and table.shape == (4, 3)
    named = table[table < 6].tolist()
    assert sorted(named) == list(range(6)) and int((table == attention._NO_PAGE).sum()) == 6
    assert bool((pages[table[1, 0]] == 0xFF).any()) and not bool((pages[table[0, 0]] == 0xFF).all())
    query = torch.randn(4, 6, 64)
    shape = form.bits, form.group_size, form.static, False
    out = ops.decode_attention(query, pages, table, lens, 64**-0.5, None, fixed, None, fixed, *shape)
    assert attention._error(out, query, pages, table, lens, form, fixed) < 1e-5
    nan, swapped = out.clone(), out.clone()
    nan[2, 3, 5] = float("nan")
    swapped[[0, 3]] = out[[3, 0]]
    for wrong in (nan, swapped, out * 1.01):
        with pytest.raises(TilepressError, match="sequences of 1 .. 130 tokens"):
            attention._error(wrong, query, pages, table, lens, form, fixed)


@pytest.fixture
def pretended(monkeypatch):
    """A card whose launches all take 10 us, 12 where lengths vary; the ops run by their references."""
    monkeypatch.setattr(attention, "_DEVICE", torch.device("cpu"))
    for name, result in {
        "check_card": None,
        "environment": {"card": "none", "torch": "2"},
        "read_gbps": 4000.0,
    }.items():
        monkeypatch.setattr(attention, name, lambda result=result: result)
    monkeypatch.setattr(attention, "copies_of", lambda nbytes: 2)
    monkeypatch.setattr(attention, "dense_best", lambda shape, dtype: (40.0, "cuDNN, enable_gqa"))
    monkeypatch.setattr(attention, "_eager_us", lambda launch, copies: [launch(1)][1:] or None)
    times = iter([10.0, 12.0] * 5 + [3.0] * 5)
    monkeypatch.setattr(
        attention, "time_us", lambda launch, copies, guess: [launch(copies - 1)] and (next(times), 0.01)
    )
    monkeypatch.setattr(attention, "arch_name", lambda: "sm90")
    monkeypatch.setattr(attention.decode_attention, "path", lambda *_: Path("decode_attention", "cuda"))
    monkeypatch.setattr(attention.rope_append, "path", lambda *_: Path("rope_append", "cuda"))
    monkeypatch.setattr(attention.kv_read, "path", lambda *_: Path("kv_read", "cuda"))


def test_rows_by_the_references(pretended):
    said = []
    found = attention.attention([SMALL], list(KINDS), [torch.bfloat16], said.append, [(6, 8, 2, 64)])
    found = json.loads(json.dumps(found))
    decode, fronts = found["rows"][:10], found["rows"][10:]
    assert [(row["kv"], row["variable_lengths"]) for row in decode] == [
        (kind, v) for kind in KINDS for v in (False, True)
    ]
    for row in decode:
        assert row.keys() == DECODE | ({"over_equal"} if row["variable_lengths"] else set())
        assert [row[name] for name in ("op", "B", "HQ", "HKV", "T", "D", "dtype")] == [
            "decode_attention",
            5,
            8,
            2,
            70,
            64,
            "bfloat16",
        ]
        assert row["us_bf16_best"] == 40 and row["speedup"] == 40 / row["us"] and row["rel_err"] < 5e-3
        assert row["bytes"] == 5 * 70 * 2 * 2 * form_of(row["kv"], 64).row_bytes + 2 * 5 * 8 * 64 * 2
        assert row["gbps"] == row["bytes"] / row["us"] / 1000 and row["share_of_read"] == row["gbps"] / 4000
        assert row.get("over_equal", 1.2) == 1.2
    assert [row["kv"] for row in fronts] == list(KINDS)
    for row in fronts:
        written = 6 * 2 * 2 * form_of(row["kv"], 64).row_bytes
        assert row.keys() == FRONT and row["bytes"] == 2 * 6 * 64 * (12 + 8) + written + 2 * 6 * 32 * 2
        assert row["us_floor"] == pytest.approx(row["bytes"] / 4.3e6) and row["us_allowed"] == 1.3 * row["us_floor"] + 2
        assert row["us"] == 3 and row["us_eager"] is None and row["rel_err"] == 0
    text = kernels_text(found)
    assert "1..140" in text and "1.20" in text and "RoPE and append" in text and len(text.splitlines()) == 22
    assert len(said) == 16 and said[0].startswith("dense attention") and said[2].endswith("variable lengths")


def test_several_queries_and_windows(pretended):
    assert Shape.parse("3x8x2x70x64q5w20") == Shape(3, 8, 2, 70, 64, False, 5, 20)
    assert Shape.parse("3x8x2x70x64vw20") == Shape(3, 8, 2, 70, 64, True, 1, 20)
    for wrong in ("3x8x2x70x64q0", "3x8x2x70x64w20q5", "3x8x2x70x64q71"):
        with pytest.raises(UsageError):
            Shape.parse(wrong)
    shapes = [Shape.parse(f"3x8x2x70x64{more}") for more in ("q5w20", "q5", "w20")]
    found = attention.attention(shapes, ["int4"], [torch.bfloat16], lambda _: None, [])["rows"]
    assert [(row["q_tokens"], row["window"]) for row in found] == [(5, 20), (5, 0), (1, 20)]
    for row, seen in zip(found, (24, 70, 20), strict=True):
        assert row["rel_err"] < 5e-3
        assert row["bytes"] == 3 * seen * 2 * 2 * 36 + 2 * 3 * row["q_tokens"] * 8 * 64 * 2
    assert "70, 5 queries, window 20" in kernels_text(
        {"env": {"card": "none", "torch": "2"}, "read_gbps": 4e3, "rows": found}
    )


@pytest.mark.parametrize("which", ["decode_attention", "rope_append"])
def test_references_are_not_timed(pretended, monkeypatch, which):
    reference = Path(which, "cuda", "the kernel needs a Hopper card", "int4")
    monkeypatch.setattr(getattr(attention, which), "path", lambda *_: reference)
    with pytest.raises(
        TilepressError, match=rf"only kernels are timed.* {which} reference \(int4\) on cuda \(the kernel"
    ):
        attention.attention([SMALL], ["int4"], [torch.float16], lambda _: None)


def test_dense_attention_takes_the_fastest_call(monkeypatch):
    """The fastest of torch's backends for CPUs is taken; a call with rows gives what the one with enable_gqa gives."""
    monkeypatch.setattr(attention, "_DEVICE", torch.device("cpu"))
    monkeypatch.setattr(attention, "copies_of", lambda nbytes: 2)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    backends = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    monkeypatch.setattr(attention, "_BACKENDS", backends)
    outs, times = [], iter([5.0, 4.0, 3.0, 4.0])

    def time_us(launch, copies, guess):
        outs.append(launch(copies - 1).reshape(3, 8, 32))
        return next(times), 0.0

    monkeypatch.setattr(attention, "time_us", time_us)
    assert attention.dense_best(Shape(3, 8, 2, 50, 32), torch.float32) == (3.0, "flash, enable_gqa")
    assert len(outs) == 4
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0])
    monkeypatch.setattr(attention, "_BACKENDS", {"cuDNN": SDPBackend.CUDNN_ATTENTION})
    with pytest.raises(TilepressError, match="no attention to compare with; cuDNN, enable_gqa: "):
        attention.dense_best(Shape(3, 8, 2, 50, 32), torch.float32)


@pytest.mark.gpu
def test_rows_of_a_small_run():
    if not HAS_WGMMA:
        pytest.skip("needs a Hopper card")
    shape = Shape(16, 8, 2, 500, 128, True)
    found = attention.attention(
        [shape], ["int4", "bf16"], [torch.bfloat16, torch.float16], lambda _: None, [shape.front]
    )
    found = json.loads(json.dumps(found))
    assert [row["op"] for row in found["rows"]] == ["decode_attention"] * 8 + ["rope_append"] * 4
    for row in found["rows"][:8]:
        assert row.keys() == DECODE | ({"over_equal"} if row["variable_lengths"] else set())
        assert (
            row["rel_err"] < 5e-3 and "kernel" in row["path"] and row["bf16_best"].split(",")[0] in ("cuDNN", "flash")
        )
        assert 1 < row["us"] < 100 and 1 < row["us_bf16_best"] < 500
    for row in found["rows"][8:]:
        assert row.keys() == FRONT and 0 < row["us_floor"] < row["us"] < 50
    assert "RoPE and append" in kernels_text(found)
