"""`convert`: dense is bit-identical and loads anywhere; packing it again gives the same files."""

import json

import pytest
import torch
from support.artifacts import prune, quantize
from transformers import AutoModelForCausalLM

from tilepress.formats.checkpoint import Checkpoint


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_to_dense_and_back(checkpoint_of, tmp_path, cli, family):
    source = checkpoint_of(family)
    prune(source, tmp_path / "packed", 0.6)
    prune(source, tmp_path / "masked", 0.6, format="dense")
    assert cli("convert", tmp_path / "packed", "-o", tmp_path / "dense", "--to", "dense").code == 0
    masked, dense = Checkpoint(tmp_path / "masked"), Checkpoint(tmp_path / "dense")
    assert set(masked.tensors) == set(dense.tensors) == set(Checkpoint(source).tensors)
    for name in masked.tensors:
        assert torch.equal(masked.read(name).view(torch.int16), dense.read(name).view(torch.int16)), name
    assert "quantization_config" not in dense.config
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", output_loading_info=True)
    assert not any(info.values())
    assert cli("convert", tmp_path / "dense", "-o", tmp_path / "again", "--to", "tiled-csl").code == 0
    for shard in Checkpoint(tmp_path / "packed").shards:
        assert (tmp_path / "packed" / shard).read_bytes() == (tmp_path / "again" / shard).read_bytes()


def test_to_dense_keeps_float16(checkpoint_of, tmp_path, cli):
    prune(checkpoint_of("opt", torch.float16), tmp_path / "packed", 0.5)
    assert cli("convert", tmp_path / "packed", "-o", tmp_path / "dense", "--to", "dense").code == 0
    assert {entry.dtype for entry in Checkpoint(tmp_path / "dense").tensors.values()} == {torch.float16}


def test_other_kinds_of_quantization_are_not_taken_for_ours(checkpoint_of, tmp_path, cli):
    """Asymmetric weights have zero points that would be lost."""
    quantize(checkpoint_of("llama"), tmp_path / "int8")
    config = json.loads((tmp_path / "int8" / "config.json").read_text())
    (tmp_path / "int8" / "tilepress.json").unlink()
    for change in ({"symmetric": False}, {"strategy": "group", "group_size": 32}, {"type": "float"}):
        group = {
            "group_0": {
                "targets": ["Linear"],
                "weights": config["quantization_config"]["config_groups"]["group_0"]["weights"] | change,
            }
        }
        changed = config | {"quantization_config": config["quantization_config"] | {"config_groups": group}}
        (tmp_path / "int8" / "config.json").write_text(json.dumps(changed))
        ran = cli("convert", tmp_path / "int8", "-o", tmp_path / "dense", "--to", "dense")
        assert ran.code == 1 and "quantization_config" in ran.err and not (tmp_path / "dense").exists()


def test_dense_needs_no_conversion(cli, tiny, tmp_path):
    ran = cli("convert", tiny, "-o", tmp_path / "x", "--to", "dense")
    assert ran.code == 2 and "no packed weight" in ran.err
    ran = cli("convert", tiny, "-o", tmp_path / "x", "--to", "zip")
    assert ran.code == 2 and "auto, tiled-csl, tiled-bitmap, dense" in ran.err
    ran = cli("convert", tiny, "-o", tmp_path / "x", "--to", "dense", "--ignore", "lm_head.no")
    assert ran.code == 2 and "sparse layouts" in ran.err
    assert not (tmp_path / "x").exists()
