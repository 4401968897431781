"""`eval kernels`: what it refuses, and on a card the fields of its rows."""

import itertools
import json
import re
from dataclasses import astuple
from types import SimpleNamespace

import pytest
import torch
from support.cards import HAS_WGMMA

from tilepress.bench import int8_kernels, kernels
from tilepress.cli.kernels import kernels_text
from tilepress.formats import TilepressError
from tilepress.kernels import jit, read_bandwidth, w8a8_gemm


@pytest.mark.parametrize(
    "words,message",
    [
        (["gemm"], "no benchmark 'gemm'"),
        (["spmm", "--shapes", "8192"], "is no shape"),
        (["spmm", "--shapes", "0x64"], "is no shape"),
        (["spmm", "--columns", "1,x"], "is no list of columns"),
        (["spmm", "--sparsity", "50"], "is no share"),
        (["spmm", "--dtype", "float16,auto"], "multiply float16 and bfloat16"),
        (["spmm", "--dtype", "bf16"], "--dtype bf16 is unknown"),
        (["spmm", "--sparsity", "0.5,100%"], "zeros alone"),
        (["spmm", "--shapes", ""], "is no shape"),
        (["spmm", "--layouts", "csr"], "--layouts csr is unknown"),
        (["spmm", "--tune", "-o", "table.json"], "--tune writes a table for w8a8"),
        (["w8a8", "--tune"], "--tune writes a table for w8a8"),
        (["w8a8", "--shapes", "8192"], "is no shape"),
        (["attention", "--shapes", "64x32x8x8192"], "is no shape of attention"),
        (["attention", "--shapes", "64x32x0x8192x128"], "is no shape of attention"),
        (["attention", "--shapes", "64x32x8x8192x128w"], "is no shape of attention"),
        (["attention", "--shapes", "64x32x5x8192x128"], "32 query heads are no multiple of 5 KV heads"),
        (["attention", "--shapes", "64x32x8x8192x80"], "head dimension 80 is no multiple of 32"),
        (["attention", "--kv", "int4,fp8"], "--kv fp8 is unknown"),
        (["attention", "--dtype", "float32"], "multiply float16 and bfloat16"),
    ],
)
def test_wrong_requests_end_with_2(cli, words, message):
    ran = cli("eval", "kernels", *words)
    assert ran.code == 2 and message in ran.err and len(ran.err.strip().splitlines()) == 2


def test_an_output_that_cannot_be_written_is_told_first(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "spmm", lambda *cases: pytest.fail("ran"))
    (tmp_path / "file").write_text("")
    ran = cli("eval", "kernels", "spmm", "-o", tmp_path / "file" / "spmm.json")
    assert ran.code != 0 and "file" in ran.err


def test_wrong_results_are_found():
    x, weight = torch.randn(4, 300, dtype=torch.float16), torch.randn(50, 300).half()
    right = (x.double() @ weight.double().t()).half()
    assert kernels._error(right, x, weight) < 1e-3
    one = right.clone()
    one[2, 7] += 0.5  # too little for the norm
    missing = right.clone()
    missing[0, 0] = float("nan")
    for wrong in (one, missing, right * 1.01):
        with pytest.raises(TilepressError, match="elements are wrong"):
            kernels._error(wrong, x, weight)


def test_copies_are_more_than_twice_the_cache(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(L2_cache_size=50 << 20))
    assert [kernels.copies_of(n << 20) for n in (1, 30, 100, 500)] == [101, 5, 2, 2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without a card")
@pytest.mark.parametrize(
    "words", [["spmm"], ["w8a8"], ["fused"], ["attention"], ["w8a8", "--tune", "-o", "table.json"]]
)
def test_without_a_card_nothing_is_timed(cli, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = cli("eval", "kernels", *words)
    assert ran.code == 2 and "no CUDA card is visible" in ran.err


def test_reading_compiles_for_both_architectures():
    pytest.importorskip("cuda.core")
    for arch in ("sm_80", "sm_90a"):
        log = jit.compile_cubin("read_bandwidth", read_bandwidth.source(), arch)[1]
        assert "0 bytes spill stores" in log and int(re.search(r"Used (\d+)", log)[1]) <= 64


def test_cold_is_behind_a_kernel_that_reads_whose_time_is_taken_off(monkeypatch):
    ran, guesses = [], []

    def graph_of(launch, copies, guess_us):
        guesses.append(guess_us)
        first = len(ran)
        for i in range(copies):
            launch(i)
        return ran[first:], copies

    def replays(most, most_us, both, alone):
        us = {"read": 80.0, 0: 7.0, 1: 9.0}
        return [
            (sum(us[name] for name in both) + drift, sum(us[name] for name in alone) + drift - noise)
            for drift, noise in ((0.0, 0.0), (40.0, 0.5), (90.0, 0.25))
        ]

    monkeypatch.setattr(torch, "ones", lambda nbytes, **_: range(nbytes))
    monkeypatch.setattr(read_bandwidth, "read", lambda memory: ran.append("read") or len(memory) == 256 << 20 or 1 / 0)
    monkeypatch.setattr(kernels, "_graph_of", graph_of)
    monkeypatch.setattr(kernels, "_replays", replays)
    us, spread = kernels.cold_us(ran.append, 2, 5.0)
    assert ran == ["read", 0, "read", 1, "read", "read"] and guesses[0] == guesses[1] > 50
    assert us == 8.125 and 0 < spread < 0.05  # a card that slows down does so for both


def test_each_product_has_a_row_for_each_way(monkeypatch):
    monkeypatch.setattr(kernels, "WAYS", {False: lambda *work: (work[0], 0.1), True: lambda *work: (work[1], 0.2)})
    rows = list(kernels.timed_rows({"op": "spmm"}, (2.0, 4.0, 9.0), {False: 3.0, True: 4.0}, 8000, 2.0))
    same = {"op": "spmm"}
    assert rows == [
        same
        | {"cold": False, "us": 2.0, "us_spread": 0.1, "us_dense": 3.0, "speedup": 1.5, "gbps": 4.0}
        | {"share_of_read": 2.0},
        same
        | {"cold": True, "us": 4.0, "us_spread": 0.2, "us_dense": 4.0, "speedup": 1.0, "gbps": 2.0}
        | {"share_of_read": 1.0},
    ]


def test_tables_say_which_rows_are_cold():
    times = {"us": 2.0, "us_dense": 3.0, "speedup": 1.5, "share_of_read": 0.5}
    sparse = {"op": "spmm", "M": 8, "K": 8, "N": 1, "sparsity": 0.5, "layout": "tiled-csl", "value_dtype": "bf16"}
    int8 = {"op": "w8a8_gemm", "N": 8, "K": 8, "M": 1, "dtype": "bfloat16", "tops": 1.0}
    for row in (sparse | {"rel_err": 0.0}, int8):
        rows = [row | times | {"cold": cold} for cold in (False, True)]
        text = kernels_text({"env": {"card": "card", "torch": "2"}, "read_gbps": 4000.0, "rows": rows})
        assert [word in line for line in text.splitlines()[-2:] for word in ("overlapped", "cold")] == [1, 0, 0, 1]


@pytest.mark.gpu
def test_rows_of_a_small_run():
    if not HAS_WGMMA:
        pytest.skip("needs a Hopper card")
    cases = [(1024, 2048)], [1, 16, 4096], [0.8], [torch.bfloat16], lambda _: None
    found = json.loads(json.dumps(kernels.spmm(list(kernels.LAYOUTS), *cases)))
    assert found["env"].keys() == {"card", "driver", "cuda", "torch", "commit"} and 500 < found["read_gbps"] < 10_000
    assert [(row["N"], row["cold"]) for row in found["rows"]] == 3 * list(
        itertools.product((1, 16, 4096), (False, True))
    )
    stored = [(row["layout"], row["value_dtype"], row["dtype"]) for row in found["rows"][::6]]
    assert stored == [
        (*kind, "bf16") for kind in (("tiled-csl", "bf16"), ("tiled-bitmap", "bf16"), ("tiled-bitmap", "int8"))
    ]
    for row in found["rows"]:
        name = row["layout"].replace("-", "_")
        kernel = f"{name}_spmm kernel" if row["N"] <= 16 else f"{name}_decode kernel and cuBLAS"
        assert row["op"] == "spmm" and row["path"] == kernel + " on cuda" and row["rel_err"] < 8e-3
        assert 1 < row["us"] < 100 and row["speedup"] == pytest.approx(row["us_dense"] / row["us"])
        assert row["gbps"] == pytest.approx(row["bytes"] / row["us"] / 1000) and 0 <= row["us_spread"] < 1
        assert row["share_of_read"] == pytest.approx(row["gbps"] / found["read_gbps"])


@pytest.mark.gpu
def test_rows_of_a_small_run_of_int8():
    found = int8_kernels.gemm([(1024, 2048)], [1, 100], [torch.bfloat16], lambda _: None)
    cases = [(row["M"], row["op"], row["cold"]) for row in found["rows"]]
    assert cases == list(itertools.product((1, 100), ("w8a8_gemm", "w8a16_gemm"), (False, True)))
    for row in found["rows"]:
        assert row["speedup"] == pytest.approx(row["us_dense"] / row["us"]) and "on cuda" in row["path"]
    assert "w8a16_gemm" in kernels_text(found)


@pytest.mark.gpu
def test_rows_of_a_small_run_of_fused_ops():
    found = int8_kernels.fused([(50, 1000)], [torch.float16], lambda _: None)
    assert len(found["rows"]) == 10 and "silu_mul_int8" in kernels_text(found)
    for row in found["rows"]:
        assert 0 < row["us_floor"] < row["us"] < row["us_dense"], row


@pytest.mark.gpu
def test_a_tuned_table_is_read_back(tmp_path, monkeypatch):
    if not HAS_WGMMA:
        pytest.skip("needs a Hopper card")
    found = int8_kernels.tune([(1024, 2048)], [8], lambda _: None)
    int8_kernels.write_table(found, tmp_path / "w8a8_gemm.json")
    monkeypatch.setattr(w8a8_gemm.jit, "FOLDER", tmp_path)
    w8a8_gemm._table.cache_clear()
    w8a8_gemm.configuration_for.cache_clear()
    try:
        assert list(astuple(w8a8_gemm.configuration_for(3, 1024, 2048))) == found["rows"][0][3:-1]
    finally:
        w8a8_gemm._table.cache_clear()
        w8a8_gemm.configuration_for.cache_clear()
