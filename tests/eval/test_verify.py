"""`verify` and `inspect`: a sound artifact passes every check; each kind of damage is found, listed, and ends with 3."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.artifacts import prune

import tilepress
from tilepress.eval.inspect import inspect
from tilepress.formats.artifact import sha256_file
from tilepress.formats.checkpoint import Checkpoint

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def copy(artifact, tmp_path):
    path = tmp_path / "copy"
    shutil.copytree(artifact, path)
    return path


def rewrite(path, change):
    """Changes tensors and re-declares the file's hash: only looking at the words can find it."""
    shard = next(path.glob("*.safetensors"))
    tensors = load_file(shard)
    change(tensors)
    shard.unlink()
    save_file(tensors, shard, metadata={"format": "pt"})
    redeclare(path, shard.name)


def redeclare(path, name):
    manifest = json.loads((path / "tilepress.json").read_text())
    for file in manifest["files"]:
        if file["name"] == name:
            file |= {"bytes": (path / name).stat().st_size, "sha256": sha256_file(path / name)}
    (path / "tilepress.json").write_text(json.dumps(manifest))


def declare(path, change):
    manifest = json.loads((path / "tilepress.json").read_text())
    change(manifest)
    (path / "tilepress.json").write_text(json.dumps(manifest))


def flip(path):
    shard = next(path.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 4
    shard.write_bytes(data)


def truncate(path):
    shard = next(path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])


def record(manifest, name=UP):
    return next(t for t in manifest["tensors"] if t["name"] == name)


DAMAGE = {
    "bit flip": (flip, "has sha256"),
    "truncated": (truncate, "bytes, declared"),
    "truncated, also by header": (truncate, "truncated or padded|needs .* bytes"),
    "missing shard": (lambda p: next(p.glob("*.safetensors")).unlink(), "is missing"),
    "missing tokenizer": (lambda p: (p / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "missing index": (lambda p: (p / "model.safetensors.index.json").unlink(), "index.json is missing"),
    "undeclared shard": (
        lambda p: save_file({"x": torch.ones(1)}, p / "extra.safetensors"),
        "extra.safetensors is not declared",
    ),
    "odd offset": (lambda p: rewrite(p, lambda t: t[UP].__setitem__(0, t[UP][0] | 1 << 16)), "odd offset|same element"),
    "index out of range": (
        lambda p: rewrite(p, lambda t: t[UP].__setitem__(0, 0x7FFF3F80)),
        "neither an item nor padding",
    ),
    "falling offsets": (lambda p: rewrite(p, lambda t: t[UP + "_offsets"].__setitem__(2, 0)), "offsets fall"),
    "non-finite packed value": (
        lambda p: rewrite(p, lambda t: t[UP].__setitem__(0, (t[UP][0] & -65536) | 0x7F80)),
        "not finite",
    ),
    "non-finite dense value": (
        lambda p: rewrite(p, lambda t: t["model.norm.weight"].__setitem__(0, float("nan"))),
        "model.norm.weight: non-finite",
    ),
    "fewer items": (lambda p: rewrite(p, lambda t: t[UP].__setitem__(0, 0x4000 << 16)), "nonzeros is"),
    "wrong non-zeros": (lambda p: declare(p, lambda m: record(m).update(nonzeros=5)), "nonzeros is .* declared 5"),
    "wrong shape": (lambda p: declare(p, lambda m: record(m).update(shape=[1, 2])), "shape is .* declared"),
    "wrong wavefronts": (lambda p: declare(p, lambda m: record(m).update(wavefronts=1)), "wavefronts is .* declared 1"),
    "undeclared weight": (lambda p: declare(p, lambda m: m["tensors"].remove(record(m))), "is stored but not declared"),
    "phantom weight": (
        lambda p: declare(p, lambda m: m["tensors"].append(record(m) | {"name": "ghost"})),
        "ghost is declared but not stored",
    ),
    "does not load": (
        lambda p: (
            (p / "config.json").write_text((p / "config.json").read_text().replace("768", "769")),
            redeclare(p, "config.json"),
        ),
        "loads: ",
    ),
}


def test_a_sound_artifact_passes(artifact, tiny, cli):
    ran = cli("verify", artifact, "--base", tiny, "--json")
    assert ran.code == 0 and ran.json["passed"]
    assert {c["name"] for c in ran.json["checks"]} == {
        "files and hashes",
        "headers",
        "index",
        "weights as declared",
        "values equal the base",
        "loads",
    }
    assert all(c["looked_at"] for c in ran.json["checks"])
    assert cli("verify", artifact).code == 0


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_found(copy, cli, case):
    damage, finding = DAMAGE[case]
    damage(copy)
    ran = cli("verify", copy)
    assert ran.code == 3
    assert re.search(finding, ran.out), ran.out


def test_every_finding_is_listed(copy, cli):
    flip(copy)
    (copy / "tokenizer.json").unlink()
    declare(copy, lambda m: (record(m).update(nonzeros=5), record(m, "model.norm.weight").update(dtype="int8")))
    out = cli("verify", copy).out
    for finding in ("has sha256", "tokenizer.json is missing", "declared 5", "declared int8"):
        assert finding in out


def test_another_base_is_noticed(artifact, tiny, tmp_path, cli):
    other = tmp_path / "other"
    shutil.copytree(tiny, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][5] += 1
    tensors[UP][100] *= 2
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    ran = cli("verify", artifact, "--base", other)
    assert ran.code == 3 and "model.norm.weight: 1 values differ" in ran.out and f"{UP}: " in ran.out


def test_what_is_no_artifact(tiny, tmp_path, cli):
    assert cli("verify", tiny).code == 1
    assert cli("verify", tmp_path / "nowhere").code == 2
    (tmp_path / "tilepress.json").write_text("[]")
    ran = cli("verify", tmp_path)
    assert ran.code == 3 and "JSON object" in ran.out


@pytest.mark.parametrize(
    "change,finding",
    [
        (lambda m: m.update(files="abc"), "no files"),
        (lambda m: m.update(files=["a"]), "an entry of files"),
        (lambda m: m.update(files=[{"name": "../../etc/hostname", "bytes": 1, "sha256": "x"}]), "an entry of files"),
        (lambda m: m.update(files=[{"name": "a" * 300, "bytes": 1, "sha256": "x"}]), "an entry of files"),
        (lambda m: m.update(tensors={}), "no tensors"),
        (lambda m: m["tensors"][0].pop("name"), "an entry of tensors"),
        (lambda m: m["tensors"][0].update(nonzeros="x"), "an entry of tensors"),
        (lambda m: m.update(settings=[]), "no settings"),
        (lambda m: m.update(left_alone="x"), "no left_alone"),
        (lambda m: m["settings"].update(sparsity="most"), "a step in its source"),
        (lambda m: m["settings"].update(sparsity=10**400), "a step in its source"),
        (lambda m: m["settings"].pop("method"), "a step in its source"),
        (lambda m: m["source"].update(recipe=[7]), "a step in its source"),
        (lambda m: m.update(format_version=99), "format version 99"),
    ],
)
def test_malformed_manifest_is_refused_everywhere(copy, cli, tmp_path, change, finding):
    declare(copy, change)
    ran = cli("verify", copy)
    assert ran.code == 3 and finding in ran.out
    for words in (("inspect", copy), ("convert", copy, "-o", tmp_path / "x", "--to", "dense")):
        ran = cli(*words)
        assert ran.code == 1 and finding in ran.err and len(ran.err.strip().splitlines()) == 2


def test_a_saved_again_model_is_verified_by_what_its_tensors_tell(artifact, tiny, tmp_path, cli):
    tilepress.load(artifact).save_pretrained(tmp_path / "again")
    ran = cli("verify", tmp_path / "again", "--base", tiny)
    assert ran.code == 0 and "files and hashes" not in ran.out
    shard = tmp_path / "again" / "model.safetensors"
    tensors = load_file(shard)
    tensors[UP][0] = 0x40F03F80
    save_file(tensors, shard, metadata={"format": "pt"})
    ran = cli("verify", tmp_path / "again")
    assert ran.code == 3 and "neither an item nor padding" in ran.out and "not tried" in ran.out


def test_inspect_reads_headers_and_manifest(artifact, tiny, cli):
    found = inspect(artifact)
    rows = {row.name: row for row in found.rows}
    assert (
        rows[UP].sparsity == pytest.approx(0.6, abs=1e-5)
        and rows[UP].shape == (768, 256)
        and rows[UP].layout == "tiled-csl"
    )
    assert 1.0 <= rows[UP].wavefronts_per_32 < 1.17 and 0.4 < rows[UP].densest_tile < 0.5
    assert rows["model.norm.weight"].densest_tile is None
    assert found.bytes == sum(entry.nbytes for entry in Checkpoint(artifact).tensors.values())
    text = cli("inspect", artifact)
    assert text.code == 0 and "wavefronts/32" in text.out and "sparsity=0.6" in text.out
    dense = cli("inspect", tiny, "--json").json
    assert (
        dense["made_by"] is None
        and all(row["sparsity"] is None for row in dense["rows"])
        and dense["bytes"] == sum(e.nbytes for e in Checkpoint(tiny).tensors.values())
    )


def test_inspect_reads_no_more_than_the_layouts(artifact, monkeypatch, cli):
    real, read = Checkpoint.read, []
    monkeypatch.setattr(Checkpoint, "read", lambda self, name: read.append(name) or real(self, name))
    assert cli("inspect", artifact).code == 0
    assert read and all(name.endswith("_layout") for name in read)


def test_transposed_weights_verify(checkpoint_of, tmp_path, cli):
    prune(checkpoint_of("gpt2"), tmp_path / "out", 0.5)
    assert cli("verify", tmp_path / "out", "--base", checkpoint_of("gpt2")).code == 0
