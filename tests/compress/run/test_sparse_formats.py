"""The sparse layouts through every command: pruned, quantized, converted, verified, inspected, loaded."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.artifacts import prune, quantize
from transformers import AutoModelForCausalLM

import tilepress
from tilepress.eval.verify import verify
from tilepress.formats import TilepressError, tiled_bitmap
from tilepress.formats.checkpoint import Checkpoint, read_manifest
from tilepress.formats.layout import layouts as known_layouts
from tilepress.kernels.tiled_bitmap_spmm import tiled_bitmap_spmm_ref
from tilepress.runtime.linear.sparse import TiledBitmapLinear
from tilepress.runtime.loader import paths

REGROUPED = [("llama", "auto", "int8", 0.5), ("gpt2", "tiled-bitmap", "int8", 0.5), ("llama", "auto", "auto", 0.8)]
FAMILIES = ["llama", "gpt2", "mixtral"]
IDS = torch.arange(40).view(2, 20) + 7
UP = "model.layers.0.mlp.up_proj.weight"


def logits(model):
    with torch.inference_mode():
        return model(IDS).logits.float()


def layouts(path):
    return {w.layout for w in Checkpoint(path).weights.values() if w.layout != "dense"}


def failed(path, base=None):
    return {c.name: c.findings for c in verify(path, base).checks if not c.passed}


def same_weights(one, other):
    one, other = Checkpoint(one), Checkpoint(other)
    assert one.weights.keys() == other.weights.keys()
    for name, weight in one.weights.items():
        mine, theirs = one.dense(weight), other.dense(other.weights[name])
        assert mine.dtype == theirs.dtype and torch.equal(mine.view(torch.int16), theirs.view(torch.int16)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", [*FAMILIES, "llama-tied", "opt"])
def test_a_bitmap_model_equals_the_masked_dense_one(checkpoint_of, tmp_path, family, dtype):
    source = checkpoint_of(family, dtype)
    prune(source, tmp_path / "packed", 0.5, "tiled-bitmap")
    prune(source, tmp_path / "dense", 0.5, "dense")
    same_weights(tmp_path / "packed", tmp_path / "dense")
    packed = tilepress.load(tmp_path / "packed", dtype=torch.float32)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    torch.testing.assert_close(logits(packed), logits(dense), rtol=1e-4, atol=1e-4)
    expected = sum(w.layout == "tiled-bitmap" for w in Checkpoint(tmp_path / "packed").weights.values())
    assert paths(packed)["tiled_bitmap_spmm reference on cpu"] == expected > 0
    assert not failed(tmp_path / "packed", source)


@pytest.mark.parametrize("value_dtype", ["auto", "int8"])
@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "mixtral"])
def test_saving_again_gives_equal_tensors_that_load(checkpoint_of, tmp_path, family, value_dtype):
    prune(checkpoint_of(family), tmp_path / "packed", 0.5, "tiled-bitmap", value_dtype=value_dtype)
    model = tilepress.load(tmp_path / "packed")
    model.save_pretrained(tmp_path / "again", max_shard_size="100KB")
    before, after = Checkpoint(tmp_path / "packed"), Checkpoint(tmp_path / "again")
    assert set(before.tensors) == set(after.tensors)
    assert all(torch.equal(before.read(name), after.read(name)) for name in before.tensors)
    assert torch.equal(logits(tilepress.load(tmp_path / "again")), logits(model))


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_converting_between_all_layouts_changes_no_value(checkpoint_of, tmp_path, cli, family):
    source, first = checkpoint_of(family), tmp_path / "dense"
    prune(source, first, 0.6, "dense")
    chain = ["tiled-bitmap", "tiled-csl", "auto", "dense", "tiled-csl", "tiled-bitmap"]
    before = first
    for number, to in enumerate(chain):
        after = tmp_path / f"{number}-{to}"
        assert cli("convert", before, "-o", after, "--to", to).code == 0
        assert layouts(after) == ({"tiled-bitmap"} if to == "auto" else set() if to == "dense" else {to})
        same_weights(after, first)
        assert not failed(after, first)
        before = after
    names = list(Checkpoint(before).shards)
    assert all((before / n).read_bytes() == (tmp_path / "0-tiled-bitmap" / n).read_bytes() for n in names)


@pytest.mark.parametrize(
    "sparsity,expected", [(0.05, set()), (0.3, {"tiled-bitmap"}), (0.7, {"tiled-bitmap"}), (0.9, {"tiled-csl"})]
)
def test_auto_chooses_by_sparsity(checkpoint_of, tmp_path, sparsity, expected):
    source = checkpoint_of("llama")
    prune(source, tmp_path / "auto", sparsity, "auto")
    prune(source, tmp_path / "masked", sparsity, "dense")
    assert layouts(tmp_path / "auto") == expected
    same_weights(tmp_path / "auto", tmp_path / "masked")
    assert not failed(tmp_path / "auto", source)


def test_auto_looks_at_each_weight(checkpoint_of, tmp_path, cli):
    """A global threshold, ties and all: the zeros are those of the dense result, whatever is asked how often."""
    source = checkpoint_of("llama")
    uneven = tmp_path / "uneven"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            layer.mlp.up_proj.weight.mul_(100.0)  # stays dense
            layer.mlp.down_proj.weight.copy_((layer.mlp.down_proj.weight * 8).round() / 64 / (1 + number))  # ties
    model.save_pretrained(uneven, max_shard_size="100KB")
    prune(uneven, tmp_path / "auto", 0.6, "auto", scope="global")
    prune(uneven, tmp_path / "masked", 0.6, "dense", scope="global")
    same_weights(tmp_path / "auto", tmp_path / "masked")
    found = {}
    for tensor in read_manifest(tmp_path / "auto")["tensors"]:
        if "zeros" in tensor:
            density = tensor["nonzeros"] / (tensor["shape"][0] * tensor["shape"][1])
            bitmap_from, dense_from = known_layouts()["tiled-bitmap"].densities
            expected = "dense" if density > dense_from else "tiled-bitmap" if density > bitmap_from else "tiled-csl"
            assert tensor["layout"] == expected
            found[expected] = found.get(expected, 0) + 1
    assert len(found) >= 2 and "dense" in found and len(Checkpoint(uneven).shards) > 1
    assert not failed(tmp_path / "auto", uneven)
    assert torch.isfinite(logits(tilepress.load(tmp_path / "auto"))).all()


def test_values_that_round_to_zero_are_counted_as_zeros(tiny, tmp_path):
    """A row with an outlier has a scale that others vanish under."""
    source = tmp_path / "outlier"
    shutil.copytree(tiny, source)
    for file in source.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith("down_proj.weight"):
                tensor[3, 5] = 30
        save_file(tensors, file, {"format": "pt"})
    manifest = prune(source, tmp_path / "out", 0.5, "auto", value_dtype="int8")
    assert not failed(tmp_path / "out", source)
    assert any(2 * t["zeros"] > t["shape"][0] * t["shape"][1] for t in manifest["tensors"] if "zeros" in t)


def test_int8_bitmaps_are_quantized_already(tiny, tmp_path, cli):
    prune(tiny, tmp_path / "int8", 0.5, "auto", value_dtype="int8")
    for words in (["prune", "--sparsity", "0.6"], ["quantize"], ["quantize", "--activations", "none"]):
        ran = cli("compress", words[0], tmp_path / "int8", "-o", tmp_path / "out", *words[1:])
        assert ran.code == 2 and "is quantized already (int8)" in ran.err


def test_float32_scales_of_bitmaps_are_refused(tiny, tmp_path, cli):
    prune(tiny, tmp_path / "pruned", 0.5, "auto")
    ran = cli(
        "compress",
        "quantize",
        tmp_path / "pruned",
        "-o",
        tmp_path / "out",
        "--activations",
        "none",
        "--dtype",
        "float32",
    )
    assert ran.code == 2 and "the sparse layouts store bfloat16 and float16" in ran.err


def test_inspect_tells_int8_values_without_a_manifest(tiny, tmp_path, cli):
    prune(tiny, tmp_path / "int8", 0.5, "auto", value_dtype="int8")
    tilepress.load(tmp_path / "int8").save_pretrained(tmp_path / "again")
    assert "int8 x bfloat16" in cli("inspect", tmp_path / "again").out


@pytest.mark.parametrize(
    "part,value,message",
    [
        ("_scale", -1.0, "a scale is not a positive number"),
        ("_scale", float("nan"), "a scale is not a positive number"),
        ("_bitmap", 1, "as a Conv1D's"),
    ],
)
def test_bad_scales_and_turned_weights_do_not_load(tiny, tmp_path, part, value, message):
    prune(tiny, tmp_path / "int8", 0.5, "auto", value_dtype="int8")
    tilepress.load(tmp_path / "int8").save_pretrained(tmp_path / "bad")
    file = next((tmp_path / "bad").glob("*.safetensors"))
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if name.endswith(f"o_proj.weight{part}"))
    tensors[name][-1] = value
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(TilepressError, match=message):
        tilepress.load(tmp_path / "bad")


@pytest.mark.parametrize("family", FAMILIES)
def test_int8_values(checkpoint_of, tmp_path, cli, family):
    source = checkpoint_of(family)
    prune(source, tmp_path / "int8", 0.5, "auto", value_dtype="int8")
    prune(source, tmp_path / "masked", 0.5, "dense")
    assert layouts(tmp_path / "int8") == {"tiled-bitmap"} and not failed(tmp_path / "int8", source)
    packed, masked, dense = (Checkpoint(folder) for folder in (tmp_path / "int8", tmp_path / "masked", source))
    records = {t["name"]: t for t in read_manifest(tmp_path / "int8")["tensors"]}
    for name, weight in packed.weights.items():
        if weight.layout != "tiled-bitmap":
            continue
        ours, exact = packed.dense(weight).float(), masked.dense(masked.weights[name]).float()
        error = float((ours - exact).norm() / exact.norm())
        assert 0 < error < 0.01 and not bool(ours[exact == 0].any())
        original = dense.dense(dense.weights[name]).float()
        of_both = float((ours - original).norm() / original.norm())
        assert records[name]["value_dtype"] == "int8" and records[name]["error"] == pytest.approx(of_both, rel=1e-3)
        scale = packed.packed(weight).scale
        assert scale.shape == (records[name]["shape"][0],) and scale.dtype == torch.bfloat16
    dense, int8 = (logits(tilepress.load(tmp_path / n, dtype=torch.float32)) for n in ("masked", "int8"))
    assert float((int8 - dense).norm() / dense.norm()) < 0.05
    assert cli("convert", tmp_path / "int8", "-o", tmp_path / "rounded", "--to", "dense").code == 0
    same_weights(tmp_path / "int8", tmp_path / "rounded")
    ran = cli("convert", tmp_path / "int8", "-o", tmp_path / "again", "--to", "auto")
    assert ran.code == 2 and "bitmap already" in ran.err + ran.out
    assert cli("convert", tmp_path / "int8", "-o", tmp_path / "csl", "--to", "tiled-csl").code == 0
    same_weights(tmp_path / "int8", tmp_path / "csl")


@pytest.mark.parametrize("family,to,value_dtype,sparsity", REGROUPED)
def test_converting_groups_bitmaps_for_another_card(checkpoint_of, tmp_path, cli, family, to, value_dtype, sparsity):
    """A bit an element becomes a bit a pair and back; codes, scales and values stay to the bit, and so do products."""
    source = checkpoint_of(family)
    for card in ("h100", "h200"):
        prune(source, tmp_path / card, sparsity, "tiled-bitmap", value_dtype=value_dtype, card=card)
    words = ("-o", tmp_path / "again", "--to", to, "--card", "h200")
    assert cli("convert", tmp_path / "h100", *words).code == 0 and not failed(tmp_path / "again", tmp_path / "h100")
    first, wanted, again = (Checkpoint(tmp_path / name) for name in ("h100", "h200", "again"))
    changed = 0
    for name, weight in first.weights.items():
        if weight.layout == "tiled-bitmap":
            packed, sought, found = (each.packed(each.weights[name]) for each in (first, wanted, again))
            assert (packed.group, found.group) == (1, 2) and torch.equal(found.words, sought.words)
            assert torch.equal(tiled_bitmap.unpack_values(packed), tiled_bitmap.unpack_values(found))
            assert packed.scale is None or torch.equal(packed.scale, found.scale)
            x = torch.randn(3, packed.cols, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
            one, other = (
                tiled_bitmap_spmm_ref(x, p.words, p.offsets, p.scale, None, p.rows, p.dtype, p.group)
                for p in (packed, found)
            )
            assert torch.equal(one, other)
            changed += 1
    assert changed
    back = ("-o", tmp_path / "back", "--to", to, "--card", "h100")
    assert cli("convert", tmp_path / "again", *back).code == 0
    for file in sorted((tmp_path / "h100").glob("*.safetensors")):
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes()
    if value_dtype == "int8":
        ran = cli("convert", tmp_path / "again", "-o", tmp_path / "none", "--to", to, "--card", "h200")
        assert ran.code == 2 and "for --card h200" in ran.err and ran.err.count("\n") == 2


@pytest.mark.parametrize("weights", ["channel", "tensor"])
@pytest.mark.parametrize("before", ["tiled-csl", "tiled-bitmap"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_quantizing_a_pruned_artifact_keeps_it_sparse(checkpoint_of, tmp_path, family, before, weights):
    source = checkpoint_of(family)
    prune(source, tmp_path / "pruned", 0.5, before)
    quantize(tmp_path / "pruned", tmp_path / "stacked", activations="none", weights=weights)
    assert layouts(tmp_path / "stacked") == {"tiled-bitmap"}
    assert not failed(tmp_path / "stacked", tmp_path / "pruned")
    manifest = read_manifest(tmp_path / "stacked")
    assert len(manifest["report"]["layers"]) == sum(t.get("value_dtype") == "int8" for t in manifest["tensors"]) > 0
    if weights == "channel":
        prune(source, tmp_path / "direct", 0.5, "tiled-bitmap", value_dtype="int8")
        same_weights(tmp_path / "stacked", tmp_path / "direct")
    assert isinstance(
        next(m for m in tilepress.load(tmp_path / "stacked").modules() if hasattr(m, "group")), TiledBitmapLinear
    )


def test_a_quantized_mixture_of_sparse_and_dense_weights_loads(checkpoint_of, tmp_path):
    source = checkpoint_of("llama")
    prune(source, tmp_path / "pruned", 0.5, "tiled-bitmap", ignore=("lm_head", "*.mlp.*"))
    quantize(tmp_path / "pruned", tmp_path / "mixed", activations="none")
    assert layouts(tmp_path / "mixed") == {"tiled-bitmap", "int8-packed"}
    assert not failed(tmp_path / "mixed", tmp_path / "pruned")
    dense, mixed = (logits(tilepress.load(tmp_path / n, dtype=torch.float32)) for n in ("pruned", "mixed"))
    assert float((mixed - dense).norm() / dense.norm()) < 0.05


def test_other_activations_make_ordinary_int8(checkpoint_of, tmp_path):
    prune(checkpoint_of("llama"), tmp_path / "pruned", 0.5, "tiled-bitmap")
    quantize(tmp_path / "pruned", tmp_path / "int8", activations="token")
    assert layouts(tmp_path / "int8") == {"int8"} and not failed(tmp_path / "int8", tmp_path / "pruned")


@pytest.mark.parametrize(
    "words,message",
    [
        (["--format", "zip"], "--format zip is unknown"),
        (["--value-dtype", "int4"], "--value-dtype int4 is unknown"),
        (["--value-dtype", "int8", "--format", "tiled-csl"], "has no int8 values"),
        (["--value-dtype", "int8", "--format", "dense"], "has no int8 values"),
        (["--dtype", "float32", "--format", "tiled-bitmap"], "float32"),
    ],
)
def test_what_cannot_be_stored_is_refused(cli, tiny, tmp_path, words, message):
    ran = cli("compress", "prune", tiny, "-o", tmp_path / "x", "--sparsity", "0.5", *words)
    assert ran.code == 2 and message in ran.err and len(ran.err.strip().splitlines()) == 2


def test_the_command_tells_what_it_stores(cli, tiny, tmp_path):
    ran = cli("compress", "prune", tiny, "-o", tmp_path / "x", "--sparsity", "0.5")
    assert ran.code == 0
    text = cli("inspect", tmp_path / "x")
    assert text.code == 0 and "tiled-bitmap" in text.out and "filled" in text.out
    row = next(r for r in cli("inspect", tmp_path / "x", "--json").json["rows"] if r["name"] == UP)
    assert row["layout"] == "tiled-bitmap" and 0.9 < row["filled"] <= 1 and row["bytes"] < 0.62 * 2 * 768 * 256
    assert "as tiled bitmaps" in (tmp_path / "x" / "README.md").read_text()
    planned = cli("compress", "prune", tiny, "-o", tmp_path / "y", "--sparsity", "0.5", "--dry-run", "--json").json
    made = sum(f.stat().st_size for f in (tmp_path / "x").rglob("*") if f.is_file())
    assert 0.9 < planned["disk_bytes"] / made < 1.1


def damaged(path, change):
    shard = next(s for s in path.glob("*.safetensors") if UP in load_file(s))
    tensors = load_file(shard)
    change(tensors)
    save_file(tensors, shard, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "change,finding",
    [
        (lambda t: t[UP].__setitem__(slice(0, 8), -1), "point|share|belong|zero"),
        (lambda t: t[UP + "_offsets"].__setitem__(1, 0), "tile 0 has"),
        (lambda t: t[UP + "_bitmap"].__setitem__(5, 3), "out of range"),
        (lambda t: t.pop(UP + "_bitmap"), "no shard has it"),
    ],
)
def test_damage_is_found(tiny, tmp_path, cli, change, finding):
    prune(tiny, tmp_path / "x", 0.5, "tiled-bitmap")
    damaged(tmp_path / "x", change)
    (tmp_path / "x" / "tilepress.json").unlink()  # its hashes alone would tell
    ran = cli("verify", tmp_path / "x")
    assert ran.code in (1, 3) and re.search(finding, ran.out + ran.err), ran.out + ran.err


def test_a_run_that_points_outside_does_not_load(tiny, tmp_path):
    prune(tiny, tmp_path / "x", 0.5, "tiled-bitmap")
    starts = tiled_bitmap.header_bytes(1) // 4 - 128
    damaged(tmp_path / "x", lambda t: t[UP].__setitem__(starts, 0x7FF07FF0))
    (tmp_path / "x" / "tilepress.json").unlink()
    with pytest.raises(Exception, match="points outside"):
        tilepress.load(tmp_path / "x")


def test_bitmaps_for_a_card(tiny, tmp_path, cli):
    """--card is part of the settings where it is given, and decides how the bits of each weight are grouped."""
    for card, group in (("any", 1), ("h200", 2)):
        words = () if card == "any" else ("--card", card)
        ran = cli("compress", "prune", tiny, "-o", tmp_path / card, "--sparsity", "0.8", *words, "--json", "-q")
        assert ran.code == 0, ran.err
        manifest = json.loads((tmp_path / card / "tilepress.json").read_text())
        assert {t["group"] for t in manifest["tensors"] if t["layout"] == "tiled-bitmap"} == {group}
        assert manifest["settings"].get("card", "any") == card
    refused = cli("convert", tmp_path / "any", "-o", tmp_path / "x", "--to", "tiled-bitmap", "--card", "b200")
    assert refused.code == 2 and "--card b200 is unknown" in refused.err and "any, h100, h200" in refused.err
