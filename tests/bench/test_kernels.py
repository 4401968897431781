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


@pytest.mark.gpu
def test_rows_of_a_small_run():
    if not HAS_WGMMA:
        pytest.skip("needs a Hopper card")
    cases = [(1024, 2048)], [1, 16, 4096], [0.8], [torch.bfloat16], lambda _: None
    found = json.loads(json.dumps(kernels.spmm(list(kernels.LAYOUTS), *cases)))
    assert found["env"].keys() == {"card", "driver", "cuda", "torch", "commit"} and 500 < found["read_gbps"] < 10_000
    assert [row["N"] for row in found["rows"]] == 3 * [1, 16, 4096]
    stored = [(row["layout"], row["value_dtype"], row["dtype"]) for row in found["rows"][::3]]
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
    cases = [(row["M"], row["op"]) for row in found["rows"]]
    assert cases == list(itertools.product((1, 100), ("w8a8_gemm", "w8a16_gemm")))
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
