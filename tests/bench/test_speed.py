"""Decode speed: what a result holds and how its figures hang together, on a CPU; on a card that kernels alone are timed."""

import json
import re

import pytest
import torch
from support.artifacts import prune
from support.cards import pretend
from support.ranks import command
from transformers import LlamaConfig, LlamaForCausalLM

import tilepress
from tilepress.bench.speed import GIB, Protocol, Subject, _caches, _refuse_references, speed, stored_bytes
from tilepress.formats import UsageError
from tilepress.formats.checkpoint import Checkpoint
from tilepress.kernels import jit
from tilepress.kernels.arch import Path
from tilepress.runtime.loader import load

SMALL = Protocol((1, 3), context=20, new_tokens=2, runs=2, chunk=12)


@pytest.fixture(scope="module")
def pair(checkpoint_of, tmp_path_factory):
    source = checkpoint_of("llama", num_hidden_layers=1)
    packed = tmp_path_factory.mktemp("speed") / "packed"
    prune(source, packed, 0.6)
    return source, packed


@pytest.fixture(scope="module")
def found(pair):
    source, packed = pair
    said = []
    subjects = Subject("packed", lambda: load(packed)), Subject("dense", lambda: load(source))
    return speed(*subjects, SMALL, said.append), said


def test_rows_of_both_models(found, pair):
    result, said = found
    rows = result["rows"]
    assert [(row["model"], row["is_base"], row["batch"]) for row in rows] == [
        ("dense", True, 1),
        ("dense", True, 3),
        ("packed", False, 1),
        ("packed", False, 3),
    ]
    assert any("packed, batch 3" in line for line in said)
    for row in rows:
        runs = row["runs"]
        assert len(runs["tpot_ms"]) == len(runs["ttft_ms"]) == 2
        assert min(runs["tpot_ms"]) <= row["tpot_ms"] <= max(runs["tpot_ms"])
        assert row["tokens_per_s"] == row["tokens_per_gpu_s"]
        rates = [row["batch"] * 1000 / ms for ms in runs["tpot_ms"]]
        assert row["tokens_per_s"] == pytest.approx(sum(rates) / 2) and row["tokens_per_s_spread"] >= 0
        # a layer, 2 KV heads of 32, keys and values of 2 bytes
        assert row["kv_gib"] == pytest.approx(row["batch"] * 20 * 2 * 2 * 32 * 2 / GIB)
        assert sum(part["share"] for part in row["step"]) == pytest.approx(1)
        assert row["peak_gib"] is None and row["share_of_read"] is None and row["fits"]
    dense, packed = rows[1], rows[3]
    assert "speedup" not in dense
    assert packed["speedup"] == pytest.approx(packed["tokens_per_s"] / dense["tokens_per_s"])
    assert any("spmm reference" in path for path in packed["paths"])
    assert not any("spmm" in path for path in dense["paths"])
    tensors = Checkpoint(pair[0]).tensors.values()
    assert dense["weights_gib"] * GIB == pytest.approx(sum(entry.nbytes for entry in tensors), rel=0.01)
    assert packed["weights_gib"] < dense["weights_gib"]
    assert packed["bytes_per_step"] < dense["bytes_per_step"]


def test_the_command(cli, pair, tmp_path):
    source, packed = pair
    words = ["eval", "speed", packed, "--base", source, "--batch", "2", "--context", 9, "--new-tokens", 2, "--runs", 2]
    ran = cli(*words, "--json", "-o", tmp_path / "speed.json", "--device", "cpu", "-q")
    assert ran.code == 0 and [row["batch"] for row in ran.json["rows"]] == [2, 2] and not ran.err
    assert ran.json["protocol"]["context"] == 9 and "copied" in ran.json["protocol"]["filled"]
    words[-1] = words[6] = 1
    told = cli(*words, "--device", "cpu")
    assert told.code == 0 and "(base)" in told.out and "of a step's time" in told.out and "speed-up" in told.out
    assert cli("eval", "speed", source, "--batch", "0", "--device", "cpu").code == 2
    refused = cli("eval", "speed", source, "--batch", "fit", "--device", "cpu", "--context", 4)
    assert refused.code == 2 and "what a card holds" in refused.err


def test_no_more_tokens_than_a_model_has_positions(cli, pair):
    """Rotary embeddings go on beyond, but the speed would be one of a model that nobody runs; the hint names what does."""
    source, packed = pair
    words = ("eval", "speed", packed, "--base", source, "--batch", "1", "--new-tokens", 1, "--runs", 1, "-q")
    longest = Checkpoint(source).config["max_position_embeddings"]
    ran = cli(*words, "--device", "cpu", "--context", longest)
    assert ran.code == 2 and ran.err.count("\n") == 2 and f"{longest:,} positions" in ran.err, ran.err
    most = int(re.search(r"hint: use --context (\d+)", ran.err)[1])
    assert Protocol(context=most, new_tokens=1).most == longest
    assert "hint: use fewer --new-tokens" in cli(*words, "--new-tokens", longest).err


def test_two_ranks(pair, tmp_path, two):
    """One object tells of both, as under torchrun; each has half of the heads, and rates are divided by two."""
    source, packed = pair
    words = [
        "eval",
        "speed",
        packed,
        "--base",
        source,
        "--batch",
        "1,2",
        "--context",
        9,
        "--new-tokens",
        2,
        "--runs",
        2,
    ]
    (first, out, err), other = two(command, [*words, "--json", "-q", "-o", tmp_path / "speed.json"])
    assert first == 0 and other == (0, "", ""), err
    found = json.loads(out)
    assert found == json.loads((tmp_path / "speed.json").read_text())
    for row in found["rows"]:
        assert row["gpus"] == 2 and row["tokens_per_gpu_s"] == pytest.approx(row["tokens_per_s"] / 2)
        assert row["kv_gib"] == pytest.approx(row["batch"] * 9 * 2 * 32 * 2 / GIB)  # one KV head of two
        assert row["paths"]["sums over 2 ranks, gloo"] == 2
    dense, packed = found["rows"][1::2]
    assert packed["speedup"] == pytest.approx(packed["tokens_per_gpu_s"] / dense["tokens_per_gpu_s"])
    alone = stored_bytes(load(source)) / GIB
    assert 0.4 < dense["weights_gib"] / alone < 0.9  # the embedding is whole


def test_others_are_timed_by_their_own_pass_on_a_cpu(checkpoint_of):
    source = checkpoint_of("gemma")
    result = speed(Subject("gemma", lambda: load(source)), None, Protocol((3,), 6, 2, 2))
    (row,) = result["rows"]
    assert row["kv_gib"] is None and any("own forward pass" in path for path in row["paths"])


def test_a_card_times_no_reference():
    here, there = torch.device("cpu"), torch.device("cuda")
    reference = Path("tiled_csl_spmm", "cuda", "the card is older than sm_80")
    told = "tiled_csl_spmm reference on cuda (the card is older than sm_80)"
    for path, is_own, message in ((reference, False, told), ("transformers' own forward pass (x)", True, "own")):
        _refuse_references(here, [path], is_own)
        with pytest.raises(UsageError, match=re.escape("this card would run ") + f".*{re.escape(message)}"):
            _refuse_references(there, [path, "torch linear on cuda"], is_own)
    _refuse_references(there, [Path("tiled_csl_spmm", "cuda"), "torch linear on cuda"], False)


@pytest.mark.parametrize(
    "capability, head_dim, wanted",
    [
        ((9, 0), 64, ("bfloat16", "contiguous")),
        ((9, 0), 32, ("contiguous",)),
        ((9, 0), 40, ("contiguous",)),
        ((8, 0), 64, ("contiguous",)),  # its pages would be read by a reference, which a card does not time
    ],
)
def test_a_dense_model_is_timed_with_what_its_card_has_kernels_for(monkeypatch, capability, head_dim, wanted):
    pretend(monkeypatch, capability)
    monkeypatch.setattr(jit, "missing", lambda: None)
    with torch.device("meta"):
        config = LlamaConfig(hidden_size=128, num_attention_heads=2, num_hidden_layers=1, head_dim=head_dim)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    assert _caches(model, torch.device("cuda")) == wanted
    assert _caches(model.float(), torch.device("cuda")) == ("contiguous",)


def test_memory_that_tensors_share_counts_once(checkpoint_of):
    model = tilepress.load(checkpoint_of("llama-tied"))
    before = stored_bytes(model)
    from tilepress.runtime.decode.batch import Batch

    Batch(model, 1, 16)  # merges projections
    assert stored_bytes(model) == pytest.approx(before, rel=1e-3)


@pytest.mark.gpu
def test_on_a_card(checkpoint_of, tmp_path):
    source = checkpoint_of(
        "llama", hidden_size=512, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=4
    )
    prune(source, tmp_path / "packed", 0.7, "tiled-csl")
    subjects = (
        Subject("packed", lambda: load(tmp_path / "packed", device="cuda")),
        Subject("dense", lambda: load(source, device="cuda")),
    )
    result = speed(*subjects, Protocol((1, "fit"), context=200, new_tokens=8, runs=3))
    for row in result["rows"]:
        assert 0 < row["share_of_read"] < 1 and row["peak_gib"] > row["weights_gib"]
        assert not any("reference" in path for path in row["paths"])
    assert result["rows"][2]["speedup"] > 0 and len(result["rows"][0]["caches_tried"]) == 2
    kernels = " ".join(part["kernel"] for part in result["rows"][2]["step"])
    for name in ("tiled_csl_spmm", "decode_attention", "rope_append", "fused_quant"):
        assert name in kernels
