"""What other programs see of an artifact: sizes, tools that take a path, transformers without tilepress, other tools' artifacts."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.artifacts import prune, quantize
from transformers import AutoModelForCausalLM

import tilepress
import tilepress.hf
from tilepress.eval.verify import verify
from tilepress.formats.checkpoint import INDEX_NAME, MANIFEST_NAME, Checkpoint


@pytest.mark.parametrize("kind", ["tiled-csl", "tiled-bitmap", "int8"])
def test_parameters_are_counted_as_in_the_dense_model(checkpoint_of, tmp_path, kind):
    source = checkpoint_of("llama")
    if kind == "int8":
        quantize(source, tmp_path / "out")
    else:
        prune(source, tmp_path / "out", 0.6, kind)
    ours, dense = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "out", source))
    assert ours.num_parameters() == dense.num_parameters()
    without = {"exclude_embeddings": True}
    assert ours.num_parameters(**without) == dense.num_parameters(**without) < dense.num_parameters()
    assert ours.num_parameters(only_trainable=True) < dense.num_parameters(only_trainable=True)


TOOL = """
import sys, torch, tilepress.hf
from transformers import AutoModelForCausalLM, PreTrainedModel

assert __name__ == "__main__" and PreTrainedModel.from_pretrained.__func__.__wrapped__.__module__.startswith("transformers")
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(type(model.model.layers[0].mlp.down_proj).__name__, sys.argv[1:])
sys.exit(7)
"""


@pytest.mark.thorough
def test_a_tool_that_takes_a_path_runs_on_an_artifact(artifact, tmp_path):
    (tmp_path / "made_up_tool.py").write_text(TOOL)
    words = sys.executable, "-m", "tilepress.hf", "made_up_tool", str(artifact), "--tasks", "x"
    import os
    from pathlib import Path

    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(tilepress.__file__).parents[1]), *sys.path])}
    ran = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ran.returncode == 7, ran.stderr
    assert ran.stdout.strip() == f"TiledCSLLinear {[str(artifact), '--tasks', 'x']}"


def test_a_tool_that_is_not_there(monkeypatch, capsys):
    from tilepress.runtime.hf.bridge import main

    for words in (["no_such_tool"], ["no.such.tool"], []):
        monkeypatch.setattr(sys, "argv", ["tilepress.hf", *words])
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as ended:
            main()
        err = capsys.readouterr().err
        assert ended.value.code == 2 and "error: " in err and "Traceback" not in err


def test_the_card_warns_of_ignored_shapes(artifact):
    assert "ignore_mismatched_sizes" in (artifact / "README.md").read_text()


def foreign(source, out, kind: str):
    """A checkpoint as other tools of compressed-tensors write it, in a scheme that tilepress does not run."""
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(out)
    tensors = load_file(out / "model.safetensors")
    linears = [name for name, tensor in tensors.items() if tensor.dim() == 2 and ".layers." in name]
    for name in linears:
        rows, cols = tensors[name].shape
        if kind == "4 bits":
            tensors |= {
                f"{name}_packed": torch.zeros(rows, -(-cols // 8), dtype=torch.int32),
                f"{name}_shape": torch.tensor([rows, cols]),
                f"{name}_scale": torch.ones(rows, -(-cols // 32)).bfloat16(),
            }
            del tensors[name]
        else:
            tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(rows, 1).bfloat16()}
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    if kind != "4 bits":
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "pack-quantized" if kind == "4 bits" else "float-quantized",
        "quantization_status": "compressed", "ignore": ["lm_head"], "config_groups": groups,
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return tensors, linears[0]


@pytest.mark.parametrize("kind", ["4 bits", "FP8"])
def test_verify_checks_other_tools_artifacts_by_the_rules(checkpoint_of, tmp_path, kind, cli):
    out = tmp_path / "out"
    tensors, name = foreign(checkpoint_of("llama"), out, kind)
    found = verify(out)
    assert found.passed and not (out / INDEX_NAME).exists()
    checks = {check.name: check for check in found.checks}
    assert checks["compressed-tensors' rules"].looked_at == 14 and "not tried" in checks["loads"].notes[0]
    assert cli("verify", out).code == 0
    wrong = {
        "missing": {f"{name}_scale": None},
        "is [3, 1]": {f"{name}_scale": torch.ones(3, 1)},
        "not finite": {f"{name}_scale": tensors[f"{name}_scale"] * float("nan")},
        "belongs to no": {"model.layers.0.made_up.weight_scale": torch.ones(3, 1)},
    }
    if kind == "4 bits":
        wrong |= {
            "_packed is": {f"{name}_packed": tensors[f"{name}_packed"][:, 1:].contiguous()},
            "not two whole numbers": {f"{name}_shape": torch.full((2,), torch.nan)},
        }
    for told, change in wrong.items():
        changed = {n: t for n, t in (tensors | change).items() if t is not None}
        save_file(changed, out / "model.safetensors", {"format": "pt"})
        assert any(told in text for check in verify(out).checks for text in check.findings), told


def test_verify_takes_int8_without_a_manifest(checkpoint_of, tmp_path):
    quantize(checkpoint_of("llama"), tmp_path / "out")
    (tmp_path / "out" / MANIFEST_NAME).unlink()
    found = verify(tmp_path / "out")
    assert found.passed and {"vLLM's rules", "loads"} <= {check.name for check in found.checks}


def test_dtypes_that_torch_does_not_count_pass_through(checkpoint_of, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    AutoModelForCausalLM.from_pretrained(checkpoint_of("llama")).save_pretrained(source)
    tensors = load_file(source / "model.safetensors")
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)
        save_file(tensors, source / "model.safetensors", {"format": "pt"})
        prune(source, out / str(dtype))
        checkpoint = Checkpoint(out / str(dtype))
        record = next(r for r in checkpoint.manifest["tensors"] if r["name"] == "model.norm.weight")
        assert record["nonzeros"] == len(tensors["model.norm.weight"])
