"""The examples run, and print what they promise."""

import importlib.util
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from support.interruption import digest

import tilepress

pytestmark = pytest.mark.thorough
EXAMPLES = Path(__file__).parents[1] / "examples"
EXAMPLE_SUFFIXES = (".py", ".ipynb", ".sh", ".yaml")


def run(name: str, *words: str) -> None:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main([*words])


def test_compress_and_measure(capsys, tmp_path):
    run("compress_and_measure", "--nsamples", "2", "--seqlen", "64", "-o", str(tmp_path / "small"))
    out = capsys.readouterr().out
    before, after = map(float, re.search(r"([\d.]+) MB became ([\d.]+) MB", out).groups())
    dense, compressed = map(float, re.search(r"perplexity ([\d.]+) became ([\d.]+)", out).groups())
    assert after < before and compressed == pytest.approx(dense, rel=0.2)
    assert (tmp_path / "small" / "kv_cache").is_dir()


def test_compare_recipes(capsys):
    run("compare_recipes", "--nsamples", "2", "--seqlen", "64", "--recipes", "8-bit cache,50 % zeros")
    lines = capsys.readouterr().out.splitlines()
    costs = {line[:26].strip(): float(line.split()[-1]) for line in lines[1:]}
    assert 0 <= costs["8-bit cache"] < costs["50 % zeros"]


def test_generate(capsys, artifact):
    run("generate", str(artifact), "--prompt", "import os", "--prompt", "def main(", "--new-tokens", "3")
    out = capsys.readouterr().out
    assert "import os" in out and "def main(" in out and out.count("---") == 2
    run("generate", str(artifact), "--prompt", "import os", "--new-tokens", "3", "--stream", "--device", "cpu")
    assert "3 tokens in" in capsys.readouterr().out


def test_the_notebook(capsys):
    book = json.loads((EXAMPLES / "first_steps.ipynb").read_text())
    names: dict = {}
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec("".join(cell["source"]).replace("seqlen=256", "seqlen=64"), names)
    divergence, floor = map(
        float, re.search(r"KL divergence ([\d.]+), noise floor ([\d.]+)", capsys.readouterr().out).groups()
    )
    assert 0 < floor < divergence < 0.1


def test_each_is_named_in_the_list():
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"`{path.name}`" in listed for path in EXAMPLES.iterdir() if path.suffix in EXAMPLE_SUFFIXES)


def slurm_words(folder: Path, model: Path, output: Path, index: int, count: int) -> list[str]:
    """The command that the script starts as one job of an array whose numbers begin at 3; SLURM also tells it that it is rank 0 of 1."""
    started = folder / "tilepress"
    started.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    started.chmod(0o755)
    told = {"ARRAY_TASK_ID": index + 3, "ARRAY_TASK_MIN": 3, "ARRAY_TASK_COUNT": count, "PROCID": 0, "NTASKS": 1}
    env = {f"SLURM_{name}": str(value) for name, value in told.items()} | {"PATH": f"{folder}:{os.environ['PATH']}"}
    words = ["bash", EXAMPLES / "slurm_array.sh", model, output]
    return subprocess.run(words, env=env, check=True, capture_output=True, text=True).stdout.splitlines()


def kubernetes_words(model: Path, output: Path, count: int) -> list[str]:
    """The command of the job's container, with its own variables put in as Kubernetes does."""
    job = yaml.safe_load((EXAMPLES / "kubernetes_job.yaml").read_text())["spec"]
    assert job["completionMode"] == "Indexed"  # without it pods have no number
    (container,) = job["template"]["spec"]["containers"]
    words = container["command"]
    assert words[words.index("--world-size") + 1] == str(job["completions"])
    assert {variable["name"] for variable in container["env"]} >= {"MODEL", "OUTPUT"}
    asked = {"$(MODEL)": str(model), "$(OUTPUT)": str(output), str(job["completions"]): str(count)}
    return [asked.get(word, word) for word in words]


@pytest.mark.parametrize("scheduler", ["slurm", "kubernetes"])
def test_workers_of_a_cluster_write_each_shard_once(checkpoint_of, tmp_path, cli, monkeypatch, scheduler):
    source, output, count, written = checkpoint_of("llama"), tmp_path / "out", 3, {}
    for index in range(count):
        if scheduler == "slurm":
            words = slurm_words(tmp_path, source, output, index, count)
            monkeypatch.setenv("SLURM_PROCID", "0")
            monkeypatch.setenv("SLURM_NTASKS", "1")
        else:
            words = kubernetes_words(source, output, count)
            assert words.pop(0) == "tilepress"
            monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
        assert not (output / "config.json").exists()
        ran = cli(*words)
        assert ran.code == 0, ran.err
        written[index] = {path.name for path in output.glob("*.safetensors")} - set().union(*written.values())
    shards = len(list(output.glob("*.safetensors")))
    sizes = [len(range(index, shards, count)) for index in range(count)]
    assert [len(found) for found in written.values()] == sizes and (output / "tilepress.json").exists()
    tilepress.compress(source, tmp_path / "one", tilepress.Quantize(), device="cpu")
    assert digest(output) == digest(tmp_path / "one")
