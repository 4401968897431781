"""Shards as tasks of a Ray cluster. What is asked of Ray is tested with a stand-in; `make test-ray` has a cluster of processes, one killed."""

import os
import socket
import sys
import time
from dataclasses import replace

import pytest
from support.fake_ray import FakeRay
from support.interruption import digest

import tilepress
from tilepress import Quantize
from tilepress.compress.run import cluster, shared
from tilepress.formats import TilepressError, UsageError

needs_ray = pytest.mark.skipif(os.environ.get("TILEPRESS_TEST_RAY") != "1", reason="`make test-ray` runs it")


@pytest.fixture
def fake(monkeypatch):
    ray = FakeRay()
    for name, module in ray.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return ray


def test_tasks_ask_for_the_plan_s_memory_and_write_the_bytes_of_one_process(checkpoint_of, tmp_path, fake):
    source, seen = checkpoint_of("llama"), []
    tilepress.compress(source, tmp_path / "one", Quantize(), device="cpu")
    run = tilepress.plan(source, tmp_path / "ray", Quantize())
    run.start("cpu", ray="local", workers=3, progress=lambda what, done, total: seen.append(done / total))
    assert digest(tmp_path / "ray") == digest(tmp_path / "one")
    asked = [options for options in fake.asked if "memory" in options]
    assert len(asked) == len(run.plan.shards) > 3
    assert all(options["memory"] >= run.plan.peak_bytes and options["max_retries"] > 0 for options in asked)
    assert fake.most_at_once == 3 and fake.started["num_cpus"] == 3 and not fake.is_up
    assert seen == sorted(seen) and seen[-1] == 1


def test_a_failed_task_ends_the_run_and_resume_goes_on(checkpoint_of, tmp_path, fake, monkeypatch):
    source = checkpoint_of("llama")
    written, real = [], cluster.write_alone

    def fail(plan, shard, *rest):
        if len(written) == 2:
            raise TilepressError("the disk is full", "free some space")
        written.append(shard.output)
        return real(plan, shard, *rest)

    monkeypatch.setattr(cluster, "write_alone", fail)
    with pytest.raises(TilepressError, match="the disk is full") as raised:
        tilepress.compress(source, tmp_path / "out", Quantize(), device="cpu", ray="local")
    assert raised.value.hint == "free some space" and not fake.is_up and not (tmp_path / "out" / "config.json").exists()
    monkeypatch.undo()
    tilepress.compress(source, tmp_path / "out", Quantize(), device="cpu", resume=True)
    tilepress.compress(source, tmp_path / "one", Quantize(), device="cpu")
    assert digest(tmp_path / "out") == digest(tmp_path / "one")


@pytest.mark.parametrize(
    "machine, words",
    [
        (("other", "0.0.1", True), "other has tilepress 0.0.1"),
        (("other", tilepress.__version__, False), "other does not see what this machine writes"),
    ],
)
def test_machines_that_are_not_alike_are_refused(checkpoint_of, tmp_path, fake, monkeypatch, machine, words):
    monkeypatch.setattr(cluster, "_look", lambda token: (*machine, 10**12))
    with pytest.raises(TilepressError, match=words):
        tilepress.compress(checkpoint_of("llama"), tmp_path / "out", Quantize(), device="cpu", ray="local")
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_a_cluster_without_memory_is_told_before_anything_waits(checkpoint_of, tmp_path, fake):
    fake.memory = 1000
    with pytest.raises(TilepressError, match=r"a task takes 0\.\d+ GB, and no machine"):
        tilepress.compress(checkpoint_of("llama"), tmp_path / "out", Quantize(), device="cpu", ray="local")


def test_no_ray_no_cluster_no_address(tiny, tmp_path, cli, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
    words = ("compress", "quantize", tiny, "-o", tmp_path / "out", "--ray")
    both = cli(*words, "local", "--rank", "0", "--world-size", "2")
    assert both.code == 2 and "ranks too" in both.err
    monkeypatch.setitem(sys.modules, "ray", None)
    ran = cli(*words, "local")
    assert ran.code == 2 and ran.err.count("\n") == 2 and "'./tilepress[ray]'" in ran.err
    for name, module in FakeRay().modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    ran = cli(*words, nobody)
    assert ran.code == 1 and ran.err.count("\n") == 2 and "no Ray cluster answers" in ran.err
    for wrong in ("nonsense", "ray://host:1", "host:port"):
        assert cli(*words, wrong).code == 2
    assert not (tmp_path / "out").exists()


def test_a_disk_that_ranks_do_not_share_is_told(checkpoint_of, tmp_path, monkeypatch):
    for name, value in (("SLURM_JOB_ID", "7"), ("SLURM_STEP_ID", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(shared.check_shared, "__defaults__", (0.3, 0.01))
    source = checkpoint_of("llama")
    with pytest.raises(TilepressError, match="sees nothing of rank 0") as raised:
        tilepress.compress(source, tmp_path / "mine", Quantize(), device="cpu", rank=1, world_size=2)
    assert "disk" in raised.value.hint and not list((tmp_path / "mine").glob("*.safetensors"))
    assert tilepress.compress(source, tmp_path / "ours", Quantize(), device="cpu", rank=0, world_size=2) is None
    assert tilepress.compress(source, tmp_path / "ours", Quantize(), device="cpu", rank=1, world_size=2)
    monkeypatch.setenv("SLURM_STEP_ID", "1")  # what an earlier start left there is none of this one's
    tilepress.compress(source, tmp_path / "again", Quantize(), device="cpu", rank=0, world_size=2)
    monkeypatch.setenv("SLURM_STEP_ID", "2")
    with pytest.raises(TilepressError, match="sees nothing of rank 0"):
        tilepress.compress(source, tmp_path / "again", Quantize(), device="cpu", rank=1, world_size=2)


@needs_ray
def test_a_machine_killed_in_the_middle_changes_no_byte(checkpoint_of, tmp_path, command, monkeypatch):
    """A head and two workers, each with processes of its own; one is killed while it writes."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_worker_niceness", "0")
    source = checkpoint_of("llama", hidden_size=512, intermediate_size=1024, num_hidden_layers=12, shard_size="3MB")
    tilepress.compress(source, tmp_path / "one", tilepress.Prune(0.6), device="cpu")
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        first, _ = (nodes.add_node(num_cpus=1) for _ in range(2))
        output = tmp_path / "out"
        words = ("compress", "prune", source, "-o", output, "--sparsity", "0.6", "--ray", nodes.address)
        process = command(*words)
        while process.poll() is None and len(list((output / ".tilepress").glob("*.done.json"))) < 3:
            time.sleep(0.002)
        assert process.poll() is None, process.communicate()
        nodes.remove_node(first, allow_graceful=False)
        left = len(list((output / ".tilepress").glob("*.done.json")))
        _, err = process.communicate()
        assert process.returncode == 0, err
        assert left < len(list(output.glob("*.safetensors"))), "nothing was left to do"
        assert digest(output) == digest(tmp_path / "one")
        again = tilepress.plan(source, tmp_path / "large", tilepress.Prune(0.6))
        again = replace(again, plan=replace(again.plan, peak_bytes=1 << 50))
        with pytest.raises(TilepressError, match="no machine of the Ray cluster"):
            again.start("cpu", ray=nodes.address)
    finally:
        nodes.shutdown()


@needs_ray
def test_a_cluster_of_its_own_on_this_machine(checkpoint_of, tmp_path):
    pytest.importorskip("ray")
    source = checkpoint_of("llama")
    tilepress.compress(source, tmp_path / "one", Quantize(), device="cpu")
    tilepress.compress(source, tmp_path / "ray", Quantize(), device="cpu", ray="local", workers=2)
    assert digest(tmp_path / "ray") == digest(tmp_path / "one")
    with pytest.raises(UsageError, match="finished artifact"):
        tilepress.compress(source, tmp_path / "ray", Quantize(), device="cpu", ray="local")
