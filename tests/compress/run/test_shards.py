"""The writer: killed anywhere and resumed it gives the same bytes; several workers do; little memory; nothing half-written loads."""

import errno
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.artifacts import prune, run_recipe
from support.families import byte_tokenizer
from support.interruption import digest, stop_anywhere_and_resume
from transformers import AutoModelForCausalLM, LlamaConfig

from tilepress import Prune, Quantize, demo
from tilepress.cli.terminal import size
from tilepress.compress.run import plan as planning, shards
from tilepress.compress.run.finish import finish
from tilepress.compress.run.output import open_output
from tilepress.compress.run.plan import Inputs, make_plan
from tilepress.formats import TilepressError, UsageError
from tilepress.formats.checkpoint import Checkpoint, read_manifest

CODES = ("--sparsity", "0.6", "--value-dtype", "int8")


def plan_for(source, output, sparsity=0.6, **settings):
    return make_plan(Inputs(Checkpoint(source)), output, Prune(sparsity, **settings))


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_stopped_after_any_step_then_resumed_gives_the_same_bytes(checkpoint_of, tmp_path, monkeypatch, scope):
    def nothing_loads(output):
        if not (output / "config.json").exists():
            with pytest.raises(Exception, match=r"config\.json|model_type"):
                AutoModelForCausalLM.from_pretrained(output)

    recipe = Prune(0.6, scope)
    assert stop_anywhere_and_resume(recipe, checkpoint_of("llama"), tmp_path, monkeypatch, nothing_loads) > 8


@pytest.mark.parametrize("recipe", [Prune(0.6), Prune(0.6, "global"), Quantize()], ids=["auto", "global", "int8"])
def test_each_weight_is_transformed_once(checkpoint_of, tmp_path, monkeypatch, recipe):
    asked, real = [], type(recipe).transform

    def transform(self, target, weight, state):
        asked.append(target.name)
        return real(self, target, weight, state)

    monkeypatch.setattr(type(recipe), "transform", transform)
    manifest = run_recipe(recipe, checkpoint_of("llama"), tmp_path / "out")
    changed = [tensor["name"] for tensor in manifest["tensors"] if tensor["layout"] != "dense"]
    assert sorted(asked) == changed and len(changed) == 14


LONG = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "shard_size": "3MB",
}  # enough to pack that a signal finds it at work


def test_sigkill_then_resume(checkpoint_of, tmp_path, command):
    """A real process, killed at several moments of its work."""
    source = checkpoint_of("llama", **LONG)
    prune(source, tmp_path / "whole", format="auto")
    expected, killed_early = digest(tmp_path / "whole"), 0
    for number in range(2):
        output = tmp_path / f"killed-{number}"
        words = ("compress", "prune", source, "-o", output, "--sparsity", "0.6", "-q")
        process = command(*words)
        while process.poll() is None and len(list((output / ".tilepress").glob("*.done.json"))) < number:
            time.sleep(0.002)
        while process.poll() is None and number == 0 and not list((output / ".tilepress").glob("model*.tmp")):
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed_early += not (output / "tilepress.json").exists()
        with pytest.raises(Exception, match=r"config\.json|model_type"):
            AutoModelForCausalLM.from_pretrained(output)
        again = command(*words, "--resume")
        _, err = again.communicate()
        assert again.returncode == 0, err
        assert digest(output) == expected
    assert killed_early == 2


def test_ranks_and_workers_write_the_same_bytes(checkpoint_of, tmp_path, cli, monkeypatch):
    source = checkpoint_of("llama")
    for scope in ("layer", "global"):
        settings = ("--sparsity", "0.6", "--scope", scope)
        prune(source, tmp_path / f"one-{scope}", format="auto", scope=scope)
        two = tmp_path / f"two-{scope}"
        monkeypatch.setenv("SLURM_NTASKS", "2")
        monkeypatch.setenv("SLURM_PROCID", "1")
        first = cli("compress", "prune", source, "-o", two, *settings)
        assert first.code == 0 and "rank 1 of 2" in first.err and not (two / "config.json").exists()
        assert cli("compress", "prune", source, "-o", two, *settings, "--rank", "0", "--world-size", "2").code == 0
        monkeypatch.delenv("SLURM_NTASKS")
        monkeypatch.delenv("SLURM_PROCID")
        assert digest(two) == digest(tmp_path / f"one-{scope}")
    assert cli("compress", "prune", source, "-o", tmp_path / "pool", "--sparsity", "0.6", "--workers", "2").code == 0
    assert digest(tmp_path / "pool") == digest(tmp_path / "one-layer")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    ran = cli("compress", "prune", source, "-o", tmp_path / "job", "--sparsity", "0.6")
    assert ran.code == 2 and "--world-size" in ran.err
    assert cli("compress", "prune", source, "-o", tmp_path / "job", "--sparsity", "0.6", "--world-size", "1").code == 0
    wrong = "--rank", "3", "--world-size", "2"
    assert cli("compress", "prune", source, "-o", tmp_path / "job2", "--sparsity", "0.6", *wrong).code == 2


def test_output_in_the_way(checkpoint_of, tmp_path, cli):
    source = checkpoint_of("llama")
    done = tmp_path / "done"
    words = ("compress", "prune", source, "-o", done, "--sparsity", "0.5")
    assert cli(*words).code == 0
    before = digest(done)
    ran = cli(*words)
    assert ran.code == 2 and "finished artifact" in ran.err and "--overwrite" in ran.err
    ran = cli(*words[:-1], "0.7", "--resume")
    assert ran.code == 2 and "another run" in ran.err
    assert cli(*words, "--resume").code == 0 and digest(done) == before  # complete already
    assert cli(*words[:-1], "0.7", "--overwrite").code == 0 and digest(done) != before
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    for flag in ("--overwrite", "--resume"):
        ran = cli(*words[:4], foreign, *words[5:], flag)
        assert ran.code == 2 and (foreign / "thesis.txt").read_text() == "mine"
    assert cli(*words[:4], source, *words[5:], "--overwrite").code == 2  # output is input
    assert Checkpoint(source).weights


def test_changed_source_is_done_again(checkpoint_of, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(checkpoint_of("llama"), source)
    plan = plan_for(source, tmp_path / "out")
    open_output(plan, resume=False, overwrite=False)
    shards.run_shards(plan)
    assert all(planning.done_record(plan, shard) for shard in plan.shards)
    touched = source / plan.shards[0].source
    os.utime(touched, ns=(1, 1))
    assert [planning.done_record(plan, shard) is None for shard in plan.shards] == [True] + [False] * (
        len(plan.shards) - 1
    )


def test_too_little_disk_is_told_before_the_work(checkpoint_of, tmp_path, cli, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    ran = cli("compress", "prune", checkpoint_of("llama"), "-o", tmp_path / "out", "--sparsity", "0.5")
    assert ran.code == 1 and "are needed" in ran.err and "are free" in ran.err and not (tmp_path / "out").exists()


def test_disk_that_fills_up_leaves_nothing_that_loads(checkpoint_of, tmp_path, cli, monkeypatch):
    def full(self, name, shape, pieces):
        with shards_disk_errors(self.path):
            raise OSError(errno.ENOSPC, "No space left on device")

    from tilepress.formats.artifact import disk_errors as shards_disk_errors

    monkeypatch.setattr(shards.ShardWriter, "add", full)
    words = ("compress", "prune", checkpoint_of("llama"), "-o", tmp_path / "out", "--sparsity", "0.5")
    ran = cli(*words)
    assert ran.code == 1 and "disk is full" in ran.err and "--resume" in ran.err
    assert not list((tmp_path / "out").glob("*.safetensors")) and not list((tmp_path / "out").glob("*.tmp"))
    monkeypatch.undo()
    assert cli(*words, "--resume").code == 0


def test_dry_run_plans_and_writes_nothing(checkpoint_of, tmp_path, cli):
    source = checkpoint_of("llama")
    out = tmp_path / "out"
    ran = cli("compress", "prune", source, "-o", out, "--sparsity", "0.6", "--dry-run", "--json")
    assert ran.code == 0 and not out.exists()
    prune(source, out, 0.6, "auto")
    written = sum(p.stat().st_size for p in out.glob("*.safetensors"))
    assert ran.json["disk_bytes"] == pytest.approx(written, rel=0.1)
    assert len(ran.json["layers"]) == 14 and ran.json["peak_memory_bytes"] > 0
    stored = {record["name"]: record["bytes"] for record in read_manifest(out)["tensors"]}
    for layer in ran.json["layers"]:
        assert layer["disk_bytes"] == pytest.approx(stored[layer["name"]], rel=0.1)
    words = ("compress", "prune", source, "-o", tmp_path / "x", "--sparsity", "0.6", "--dry-run")
    text = cli(*words)
    assert "nothing was written" in text.out and "left alone" in text.out and "14 weights of 7 kinds" in text.out
    rows = [line.split() for line in text.out.splitlines() if ".layers." in line and "left alone" not in line]
    assert len(rows) == 7 and all("layers.*." in row[0] and row[1] == "2" for row in rows)
    up = next(layer for layer in ran.json["layers"] if "up_proj" in layer["name"])
    row = " ".join(next(row for row in rows if "up_proj" in row[0]))
    assert f"{up['rows']} x {up['cols']} {size(2 * up['bytes'])} {size(2 * up['disk_bytes'])}" in row
    each = cli(*words, "-v").out
    assert all(layer["name"] in each for layer in ran.json["layers"]) and "layers.*." not in each


@pytest.mark.parametrize("command,flags", [("quantize", ()), ("quantize", ("--activations", "none")), ("prune", CODES)])
def test_a_plan_without_text_is_what_the_run_stores(checkpoint_of, tmp_path, cli, command, flags):
    """No weight stays in 16 bits where no text tells which: the files are as large as planned, but for their headers' padding."""
    words = ("compress", command, checkpoint_of("llama"), "-o", tmp_path / "out", *flags, "--json")
    plan = cli(*words, "--dry-run").json
    assert cli(*words).code == 0
    files = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    stored = {record["name"]: record["bytes"] for record in read_manifest(tmp_path / "out")["tensors"]}
    tolerance = 0.05 if command == "prune" else 0.0
    for layer in plan["layers"]:
        assert layer["disk_bytes"] == pytest.approx(stored[layer["name"]], rel=tolerance, abs=0)
    beside = sum(path.stat().st_size for path in checkpoint_of("llama").iterdir() if path.suffix != ".safetensors")
    assert plan["disk_bytes"] - beside == pytest.approx(files, rel=0.02)


def test_a_plan_with_text_has_room_for_what_may_stay(checkpoint_of, tmp_path, cli):
    words = ("compress", "quantize", checkpoint_of("llama"), "-o", tmp_path / "out", "--dry-run", "--json")
    text = ("--dataset", demo.TEXT, "--nsamples", "4", "--seqlen", "64")
    bare, told, few = (cli(*words, *more).json for more in ((), text, (*text, "--keep", "0")))
    elements = sum(layer["rows"] * layer["cols"] for layer in bare["layers"])
    assert bare["disk_bytes"] == few["disk_bytes"]
    assert told["disk_bytes"] - bare["disk_bytes"] == pytest.approx(0.05 * elements, rel=0.01)  # a byte more each


def test_source_that_breaks_its_own_hash_is_refused(artifact, tmp_path, cli):
    source = tmp_path / "source"
    shutil.copytree(artifact, source)
    shard = next(source.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    ran = cli("convert", source, "-o", tmp_path / "dense", "--to", "dense")
    assert ran.code == 1 and shard.name in ran.err and "hash" in ran.err


def big(path, layers: int):
    """A Llama-shaped checkpoint of one shard a layer, 18 MB each, written without building the model."""
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=300,
    )
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    config.save_pretrained(path)
    shapes = dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (2048, 1024)) | {"mlp.down_proj": (1024, 2048)}
    shapes |= dict.fromkeys(("self_attn.q_proj", "self_attn.o_proj"), (1024, 1024))
    shapes |= dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (256, 1024))
    index = {}
    generator = torch.Generator().manual_seed(0)
    for layer in range(layers):
        tensors = {
            f"model.layers.{layer}.{name}.weight": torch.randn(shape, generator=generator).to(torch.bfloat16)
            for name, shape in shapes.items()
        }
        tensors |= {
            f"model.layers.{layer}.{name}.weight": torch.ones(1024, dtype=torch.bfloat16)
            for name in ("input_layernorm", "post_attention_layernorm")
        }
        if layer == 0:
            tensors |= {"model.embed_tokens.weight": torch.ones(300, 1024, dtype=torch.bfloat16), "lm_head.weight": torch.ones(300, 1024, dtype=torch.bfloat16),
                        "model.norm.weight": torch.ones(1024, dtype=torch.bfloat16)}  # fmt: skip
        file = f"model-{layer + 1:05d}-of-{layers:05d}.safetensors"
        save_file(tensors, path / file)
        index |= dict.fromkeys(tensors, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def of_layers(tmp_path_factory) -> dict[int, Path]:
    """The checkpoints of one and of three shards."""
    folders = {layers: tmp_path_factory.mktemp(f"{layers}-layers") for layers in (1, 3)}
    for layers, folder in folders.items():
        big(folder, layers)
    return folders


CALIBRATION = ["--dataset", demo.TEXT, "--nsamples", 2, "--seqlen", 32]
COSTS = {
    "layer": ["prune", "--sparsity", "0.7"],
    "global": ["prune", "--sparsity", "0.7", "--scope", "global", "--format", "dense"],
    "int8": ["quantize"],
    "calibrated": ["quantize", "--activations", "tensor", "--smooth", "0.5", *CALIBRATION],
    "kv": ["kv", *CALIBRATION],
}


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc to read anonymous memory")
@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=() if run in ("layer", "kv") else pytest.mark.thorough) for run in COSTS]
)
def test_cost_is_linear_and_memory_does_not_grow_with_shards(of_layers, tmp_path, cli, command, run):
    found = {}
    for layers, source in of_layers.items():
        process = command("compress", *COSTS[run], source, "-o", tmp_path / str(layers), "-q")
        # Its own seconds: others that keep the machine busy do not change them.
        found[layers] = process.peak_bytes(), process.cpu_s
    assert found[3][1] < 3 * found[1][1] * 1.2 + 1.0, found
    plan = cli("compress", *COSTS[run], of_layers[3], "-o", tmp_path / "planned", "--dry-run", "--json")
    planned = plan.json["peak_memory_bytes"]
    largest_shard = max(path.stat().st_size for path in of_layers[3].glob("*.safetensors"))
    for peak, _ in found.values():
        assert peak < planned + (350 << 20)  # what torch and transformers take is about 340 MB
        assert run in ("calibrated", "kv") or peak < largest_shard + 3 * 2 * 2048 * 1024 + (400 << 20)
    assert found[3][0] < found[1][0] + (24 << 20)  # a layer of 18 MB that stayed would show twice


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_names_the_command_that_resumes(checkpoint_of, tmp_path, command, number):
    source = checkpoint_of("llama", **LONG)
    process = command("compress", "prune", source, "-o", tmp_path / "out", "--sparsity", "0.6")
    while process.poll() is None and not list((tmp_path / "out" / ".tilepress").glob("model*.tmp")):
        time.sleep(0.002)
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == 128 + number and "--resume" in err, err
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_errors_of_a_worker_process_reach_the_user(tiny, tmp_path, quick_workers):
    plan = plan_for(tiny, tmp_path / "out", 0.5)
    open_output(plan, resume=False, overwrite=False)
    (tmp_path / "out" / plan.shards[0].output).mkdir()  # in the way of the rename
    with pytest.raises(TilepressError, match="cannot write"):
        shards.run_parallel(plan, 2, 0, 1, "cpu")
    assert isinstance(UsageError("x", "y"), TilepressError)


def test_overwrite_removes_only_what_tilepress_wrote(checkpoint_of, tiny, tmp_path, cli):
    out = tmp_path / "art"
    words = ("compress", "prune", tiny, "-o", out, "--sparsity", "0.5")
    assert cli(*words).code == 0
    (out / "mine.txt").write_text("mine")
    shutil.copytree(tiny, out / "sub")
    assert cli(*words, "--overwrite").code == 0
    assert (out / "mine.txt").read_text() == "mine" and Checkpoint(out / "sub").weights
    ran = cli("compress", "prune", out / "sub", *words[3:], "--overwrite")
    assert ran.code == 2 and "holds the input" in ran.err and Checkpoint(out / "sub").weights
    ran = cli(*words, "--overwrite", "--rank", "1", "--world-size", "2")
    assert ran.code == 2 and "several ranks" in ran.err and (out / "tilepress.json").exists()
    assert cli(*words, "--overwrite", "--resume").code == 2 and (out / "tilepress.json").exists()


def test_resume_notices_a_source_that_changed_and_a_shard_that_rotted(checkpoint_of, tmp_path, cli):
    source = tmp_path / "source"
    shutil.copytree(checkpoint_of("llama"), source)
    words = ("compress", "prune", source, "-o", tmp_path / "out", "--sparsity", "0.5", "--resume")
    assert cli(*words).code == 0
    shard = source / Checkpoint(source).shards[0]
    data = bytearray(shard.read_bytes())
    data[-2] ^= 1
    shard.write_bytes(data)
    ran = cli(*words)
    assert ran.code == 2 and "has changed since" in ran.err

    plan = plan_for(source, tmp_path / "half")
    open_output(plan, resume=False, overwrite=False)
    shards.run_shards(plan)
    rotten = tmp_path / "half" / plan.shards[0].output
    data = bytearray(rotten.read_bytes())
    data[-2] ^= 1
    rotten.write_bytes(data)
    shards.run_shards(plan)
    finish(plan)
    assert cli("verify", tmp_path / "half").code == 0


@pytest.mark.parametrize("content", ["{}", "[]", "null", "{oops"])
def test_broken_records_of_a_run_are_not_believed(checkpoint_of, tmp_path, cli, content):
    source = checkpoint_of("llama")
    plan = plan_for(source, tmp_path / "out")
    open_output(plan, resume=False, overwrite=False)
    shards.run_shards(plan)
    (plan.work / f"{plan.shards[0].output}.done.json").write_text(content)
    assert cli("compress", "prune", source, "-o", tmp_path / "out", "--sparsity", "0.6", "--resume").code == 0
    plan = plan_for(source, tmp_path / "other")
    open_output(plan, resume=False, overwrite=False)
    shards.run_shards(plan)
    (plan.work / "plan.json").write_text(content)
    ran = cli("compress", "prune", source, "-o", tmp_path / "other", "--sparsity", "0.6", "--resume")
    assert ran.code == 2 and "--overwrite" in ran.err
    assert cli("compress", "prune", source, "-o", tmp_path / "other", "--sparsity", "0.6", "--overwrite").code == 0


def test_other_files_are_copied_but_not_checkpoints_weights_or_pipes(tiny, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(tiny, source)
    (source / "README.md").write_text("theirs")
    for name in (
        "kv_cache/scales.safetensors",
        "code/modeling.py",
        "more/extra.json",
        "onnx/model.onnx",
        "pytorch_model.bin",
        ".cache/x",
        "inner/config.json",
        "inner/notes.txt",
    ):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(b"x")
    os.mkfifo(source / "pipe")
    prune(source, source / "pruned")
    out = digest(source / "pruned")
    assert {"SOURCE_README.md", "more/extra.json", "code/modeling.py"} <= set(out)
    assert not {
        "kv_cache/scales.safetensors",
        "onnx/model.onnx",
        "pytorch_model.bin",
        "inner/config.json",
        "inner/notes.txt",
        "pipe",
    } & set(out)
    prune(source, source / "again")
    assert digest(source / "again") == out


def test_workers_end_with_the_process_that_started_them(checkpoint_of, tmp_path, command):
    source = checkpoint_of("llama", **LONG)
    process = command(
        "compress", "prune", source, "-o", tmp_path / "out", "--sparsity", "0.6", "-q", "--workers", "2", is_leader=True
    )
    while process.poll() is None and not list((tmp_path / "out" / ".tilepress").glob("model*.tmp")):
        time.sleep(0.002)
    children = [int(p) for p in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    until = time.monotonic() + 10
    while any(map(alive, children)) and time.monotonic() < until:
        time.sleep(0.1)
    assert children and not any(map(alive, children))
    again = command("compress", "prune", source, "-o", tmp_path / "out", "--sparsity", "0.6", "-q", "--resume")
    _, err = again.communicate()
    assert again.returncode == 0, err
    prune(source, tmp_path / "whole", format="auto")
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
