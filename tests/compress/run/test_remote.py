"""A model and an artifact in an object store, which is moto's server over HTTP: the bytes, refusals and resumed runs of folders."""

import hashlib
import shutil
import socket
import sys
import tempfile

import fsspec
import pytest
from support.fake_ray import FakeRay
from support.interruption import digest
from support.object_store import ObjectStore

import tilepress
from tilepress import KVCache, Prune, Quantize
from tilepress.compress.run import cluster, remote, shards
from tilepress.formats import TilepressError, UsageError
from tilepress.formats.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def server():
    started = ObjectStore()
    yield started
    started.close()


@pytest.fixture
def store(server, monkeypatch, tmp_path):
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    fsspec.filesystem("s3").clear_instance_cache()
    remote._model.cache_clear()
    return server


@pytest.fixture
def source(checkpoint_of, tmp_path):
    return shutil.copytree(checkpoint_of("llama"), tmp_path / "model")


def hashes(files: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def whole(source, folder, recipe=None):
    """What a run from and to folders makes."""
    tilepress.compress(source, folder, recipe or Quantize(), device="cpu")
    return digest(folder)


def test_from_a_store_to_a_store_by_the_command(source, store, tmp_path, cli):
    address = store.put(source, "one/model")
    words = ("compress", "quantize", address, "-o", "s3://bucket/one/int8")
    planned = cli(*words, "--dry-run")
    assert planned.code == 0 and "nothing was written" in planned.out and store.files("one/int8") == {}
    ran = cli(*words, "--json")
    assert ran.code == 0 and ran.json["output"] == "s3://bucket/one/int8", ran.err
    expected = whole(source, tmp_path / "here")
    assert hashes(store.files("one/int8")) == expected
    ran = cli(*words)
    assert ran.code == 2 and "s3://bucket/one/int8 exists and holds a finished artifact" in ran.err
    assert "complete already" in cli(*words, "--resume").err
    first, second, *_ = Checkpoint(source).shards
    store.write(f"one/model/{first}", (source / second).read_bytes())
    assert cli(*words, "--resume").code != 0  # made of other bytes
    store.put(source, "one/model")
    other = cli(*words[:-2], "-o", "s3://bucket/one/int8", "--activations", "none", "--overwrite")
    assert other.code == 0 and hashes(store.files("one/int8")) != expected
    assert list((tmp_path / "scratch").iterdir()) == []


def test_workers_ranks_and_folders_on_one_side(source, store, tmp_path, cli):
    address, expected = store.put(source, "two/model"), whole(source, tmp_path / "here")
    tilepress.compress(address, tmp_path / "out", Quantize(), device="cpu")
    assert digest(tmp_path / "out") == expected
    for rank in (1, 0):
        assert not any(name == "config.json" for name in store.files("two/ranks"))
        words = ("compress", "quantize", source, "-o", "s3://bucket/two/ranks", "--rank", rank, "--world-size", 2)
        assert cli(*words).code == 0
    assert hashes(store.files("two/ranks")) == expected


def test_a_task_on_another_machine_has_a_scratch_of_its_own(source, store, tmp_path, monkeypatch):
    address, expected = store.put(source, "task/model"), whole(source, tmp_path / "here")
    for name, module in FakeRay().modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    seen, real = set(), cluster.write_alone

    def elsewhere(plan, *rest):
        seen.add((plan.source, plan.output))
        return real(plan, *rest)

    monkeypatch.setattr(cluster, "write_alone", elsewhere)
    run = tilepress.plan(address, "s3://bucket/task/out", Quantize())
    run.start("cpu", ray="local")
    assert hashes(store.files("task/out")) == expected
    assert len(seen) == 1 and (run.plan.source, run.plan.output) not in seen


def test_a_killed_run_goes_on_with_what_the_store_has(source, store, tmp_path, monkeypatch):
    address, written = store.put(source, "three/model"), []
    real = shards.send_shard

    def killed(plan, shard):
        if len(written) == 3:
            raise KeyboardInterrupt
        real(plan, shard)
        written.append(shard.output)

    monkeypatch.setattr(shards, "send_shard", killed)
    with pytest.raises(KeyboardInterrupt):
        tilepress.compress(address, "s3://bucket/three/out", Quantize(), device="cpu")
    left = store.files("three/out")
    assert "config.json" not in left and len([name for name in left if name.endswith(".done.json")]) == 3
    with pytest.raises(UsageError, match="s3://bucket/three/out exists and holds an unfinished run"):
        tilepress.compress(address, "s3://bucket/three/out", Quantize(), device="cpu")
    with pytest.raises(UsageError, match="another run"):
        tilepress.compress(address, "s3://bucket/three/out", Prune(0.5), device="cpu", resume=True)
    store.write(f"three/out/{written[0]}", bytes(len(left[written[0]])))  # somebody wrote over it
    again = []
    monkeypatch.setattr(shards, "send_shard", lambda plan, shard: (again.append(shard.output), real(plan, shard)))
    tilepress.compress(address, "s3://bucket/three/out", Quantize(), device="cpu", resume=True)
    assert set(again) == {*Checkpoint(source).shards} - {*written[1:]}
    assert hashes(store.files("three/out")) == whole(source, tmp_path / "here")


def test_scratch_holds_a_shard_at_a_time(source, store, tmp_path, monkeypatch):
    address, seen, real = store.put(source, "four/model"), [], shards.send_shard

    def look(plan, shard):
        real(plan, shard)
        used = [path for path in plan.output.parent.rglob("*.safetensors") if path.stat().st_blocks * 512 > 20_000]
        seen.append(len(used))

    monkeypatch.setattr(shards, "send_shard", look)
    tilepress.compress(address, "s3://bucket/four/out", Quantize(), device="cpu")
    assert seen == [0] * 4


def test_a_shard_that_was_not_fetched_is_never_read_as_zeros(source, store, tmp_path):
    found = remote.bring_model(store.put(source, "five/model"), tmp_path / "mirror")
    name = next(iter(found.tensors))
    assert found.tensors == Checkpoint(source).tensors
    with pytest.raises(TilepressError, match="cannot read tensor"):
        found.read(name)


def test_what_a_store_refuses_is_two_lines(source, store, tmp_path, cli, monkeypatch):
    address = store.put(source, "six/model")
    local = cli("compress", "quantize", source, "-o", "s3://no-such-bucket/out")
    assert local.code == 1 and local.err.count("\n") == 2 and "no-such-bucket" in local.err
    nothing = cli("compress", "quantize", "s3://bucket/nothing", "-o", tmp_path / "out")
    assert nothing.code == 2 and "holds no files" in nothing.err
    held = cli("compress", "quantize", address, "-o", "s3://bucket/six")
    assert held.code == 2 and "is or holds the input" in held.err
    looks = cli("compress", "prune", address, "-o", tmp_path / "out", "--sparsity", "0.5", "--scope", "global")
    assert looks.code == 2 and "download" in looks.err
    with pytest.raises(UsageError, match="whole model first"):
        tilepress.compress(address, tmp_path / "out", KVCache(), device="cpu")
    assert cli("inspect", address).code == 2 and cli("compress", "quantize", "nosuch://a/b", "-o", "x").code == 2
    assert cli("compress", "quantize", "hf://owner/model", "-o", tmp_path / "out").code == 1  # tests have no network
    assert cli("compress", "quantize", address, "-o", tmp_path / "out", "--revision", "main").code == 2
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", nobody)
    fsspec.filesystem("s3").clear_instance_cache()
    away = cli("compress", "quantize", address, "-o", tmp_path / "out")
    assert away.code == 1 and away.err.count("\n") == 2 and "cannot be used" in away.err
    assert not (tmp_path / "out").exists()


def test_a_store_without_permission(source, store, tmp_path, cli):
    address = store.put(source, "seven/model")
    with store.locked():
        reading = cli("compress", "quantize", address, "-o", tmp_path / "out")
        writing = cli("compress", "quantize", source, "-o", "s3://bucket/seven/out")
    for ran in (reading, writing):
        assert ran.code == 1 and ran.err.count("\n") == 2
        assert "is not open to you" in ran.err and "credentials" in ran.err
    assert not (tmp_path / "out").exists()


def test_a_missing_package_is_named(tmp_path, cli):
    ran = cli("compress", "quantize", "gs://bucket/model", "-o", tmp_path / "out")
    assert ran.code == 2 and "gcsfs" in ran.err and ran.err.count("\n") == 2
