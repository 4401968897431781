"""The folder that a run writes: one run at a time, and nothing outside of it through links."""

import multiprocessing
import os
import shutil
import time

import pytest
from support.artifacts import prune

import tilepress
from tilepress import Convert, Prune, Quantize, Recover, Text, demo
from tilepress.compress.run.lock import LOCK_NAME, Lock
from tilepress.formats import TilepressError, UsageError
from tilepress.formats.checkpoint import read_manifest


def hold(output, folder, shared, pipe):
    with Lock(output, folder, shared) as lock:
        lock.take()
        pipe.send("held")
        pipe.recv()


@pytest.fixture
def other_run():
    """Starts a process that holds a folder's lock."""
    context, started = multiprocessing.get_context("fork"), []

    def start(output, folder, shared=False):
        ours, theirs = context.Pipe()
        process = context.Process(target=hold, args=(output, folder, shared, theirs))
        process.start()
        started.append(process)
        assert ours.poll(10) and ours.recv() == "held"
        return process

    yield start
    for process in started:
        process.kill()
        process.join()


WORDS = "--sparsity", "0.6", "-q"


def test_a_second_run_is_told_of_the_first(tiny, tmp_path, cli, other_run):
    out = tmp_path / "out"
    other = other_run(out, out / ".tilepress")
    for flags in ((), ("--resume",), ("--overwrite",), ("--rank", "0", "--world-size", "2")):
        ran = cli("compress", "prune", tiny, "-o", out, *WORDS, *flags)
        assert ran.code == 2 and f"another run is writing {out}: process {other.pid} on " in ran.err, flags
    assert os.listdir(out) == [".tilepress"] and os.listdir(out / ".tilepress") == [LOCK_NAME]
    other.kill()
    other.join()
    assert cli("compress", "prune", tiny, "-o", out, *WORDS).code == 0  # a killed run leaves no lock
    assert not (out / ".tilepress").exists()


def test_overwriting_a_finished_artifact_is_one_run_too(artifact, tiny, tmp_path, other_run):
    out = tmp_path / "out"
    shutil.copytree(artifact, out)
    other_run(out, out / ".tilepress")
    with pytest.raises(UsageError, match="another run is writing"):
        tilepress.compress(tiny, out, Prune(0.5), overwrite=True)
    assert (out / "config.json").exists() and (out / "tilepress.json").exists()


def test_ranks_share_the_lock(tiny, tmp_path, other_run):
    out = tmp_path / "out"
    other_run(out, out / ".tilepress", shared=True)
    assert tilepress.compress(tiny, out, Prune(0.6), rank=0, world_size=2) is not None  # one shard: it is done
    with pytest.raises(UsageError, match="another run is writing"):
        other_run(tmp_path / "alone", tmp_path / "alone" / ".tilepress", shared=True)
        tilepress.compress(tiny, tmp_path / "alone", Prune(0.6))


def test_a_stack_holds_its_steps(tiny, tmp_path, other_run):
    out = tmp_path / "out"
    other_run(out, tmp_path / "out.steps")
    for how in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(UsageError, match=f"another run is writing {out}: process"):
            tilepress.compress(tiny, out, [Prune(0.6), Convert("dense")], **how)
    assert not out.exists()


def test_runs_that_start_at_once_make_one_artifact(tiny, tmp_path, command):
    runs = [command("compress", "prune", tiny, "-o", tmp_path / "out", *WORDS) for _ in range(2)]
    ended = [(run.communicate()[1], run.returncode) for run in runs]
    assert sorted(code for _, code in ended) == [0, 2], ended
    for err, code in ended:
        assert code == 0 or "another run is writing" in err or "holds a finished artifact" in err
    prune(tiny, tmp_path / "alone", format="auto")
    for path in (tmp_path / "alone").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_locks_that_a_disk_lacks_stop_nothing(tiny, tmp_path, monkeypatch):
    import errno
    import fcntl

    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    prune(tiny, tmp_path / "out")
    assert (tmp_path / "out" / "tilepress.json").exists()


def test_a_lock_file_that_its_holder_removed_is_not_believed(tmp_path):
    folder = tmp_path / "work"
    with Lock(tmp_path, folder) as first:
        first.take()
        shutil.rmtree(folder)  # as a run does at its end
        with Lock(tmp_path, folder) as second:
            second.take()
            assert (folder / LOCK_NAME).exists()
        assert not folder.exists()


def test_a_pipe_in_place_of_the_lock_is_told(tiny, tmp_path):
    (tmp_path / "out" / ".tilepress").mkdir(parents=True)
    os.mkfifo(tmp_path / "out" / ".tilepress" / LOCK_NAME)
    with pytest.raises(TilepressError, match="lock is no regular file"):
        tilepress.compress(tiny, tmp_path / "out", Prune(0.6))


def test_what_a_run_reads_is_not_overwritten(tiny, tmp_path):
    base, pruned = tmp_path / "base", tmp_path / "pruned"
    tilepress.compress(tiny, base, [Prune(0.3), Convert("dense")])
    tilepress.compress(base, pruned, Prune(0.6))
    text = Text(shutil.copy(demo.TEXT, base), 2, 32)
    recover = Recover(1, batch=1, base=base)
    for model, recipe, how in (
        (pruned, recover, {"dataset": Text(str(demo.TEXT), 2, 32)}),
        (tiny, [Prune(0.6), recover], {"dataset": Text(str(demo.TEXT), 2, 32)}),
        (tiny, Quantize(activations="tensor"), {"dataset": text}),
    ):
        with pytest.raises(UsageError, match="is or holds the input"):
            tilepress.compress(model, base, recipe, device="cpu", overwrite=True, **how)
    assert tilepress.verify(base, reload=False).passed


def test_names_that_are_no_text(tiny, tmp_path, cli):
    """Bytes that are not UTF-8: a text may be called so, a model not, since other packages cannot open it."""
    odd, source = os.fsdecode(b"caf\xe9"), tmp_path / "source"
    text = shutil.copy(demo.TEXT, tmp_path / f"{odd}.jsonl")
    shutil.copytree(tiny, source)
    words = "--activations", "tensor", "--dataset", text, "--nsamples", "2", "--seqlen", "32"
    assert cli("compress", "quantize", tiny, "-o", tmp_path / "out", *words).code == 0
    assert read_manifest(tmp_path / "out")["settings"]["dataset"].endswith("caf?.jsonl")
    for words in ((tmp_path / odd, "-o", tmp_path / "other"), (source, "-o", tmp_path / odd)):
        (tmp_path / odd).mkdir(exist_ok=True)
        ran = cli("compress", "prune", *words, *WORDS)
        assert ran.code == 2 and "is not UTF-8" in ran.err, ran.err
    (source / f"{odd}.txt").write_text("x")
    ran = cli("compress", "prune", source, "-o", tmp_path / "other", *WORDS)
    assert ran.code == 2 and "is no text" in ran.err and not (tmp_path / "other").exists()


def test_side_files_that_link_out_of_the_model_are_refused(tiny, tmp_path, cli):
    secret = tmp_path / "id_rsa"
    secret.write_text("a private key")
    source = tmp_path / "source"
    shutil.copytree(tiny, source)
    (source / "chat_template.jinja").symlink_to(secret)
    ran = cli("compress", "prune", source, "-o", tmp_path / "out", *WORDS)
    assert ran.code == 2 and "chat_template.jinja is a link to" in ran.err and str(secret) in ran.err
    assert not (tmp_path / "out").exists()
    (source / "chat_template.jinja").unlink()
    (source / "template.txt").write_text("inside")
    (source / "chat_template.jinja").symlink_to("template.txt")
    assert cli("compress", "prune", source, "-o", tmp_path / "out", *WORDS).code == 0
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "inside"
    assert not (tmp_path / "out" / "chat_template.jinja").is_symlink()


def test_snapshots_of_the_hub_link_to_their_blobs(tiny, tmp_path):
    repository = tmp_path / "models--someone--tiny"
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, file in enumerate(tiny.iterdir()):
        shutil.copy(file, repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    prune(snapshot, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("flag", ["--overwrite", "--resume"])
def test_a_linked_subfolder_of_the_output_is_left_alone(artifact, tiny, tmp_path, cli, flag):
    elsewhere, source, out = tmp_path / "elsewhere", tmp_path / "source", tmp_path / "out"
    elsewhere.mkdir()
    (elsewhere / "extra.json").write_text("not ours")
    shutil.copytree(tiny, source)
    (source / "more").mkdir()
    (source / "more" / "extra.json").write_text("{}")
    words = "compress", "prune", source, "-o", out, *WORDS
    assert cli(*words).code == 0
    if flag == "--resume":  # as a stopped run
        plan = tilepress.plan(source, out, Prune(0.6)).plan
        (out / "tilepress.json").unlink()
        plan.work.mkdir()
        (plan.work / "plan.json").write_text(f'{{"fingerprint": "{plan.fingerprint}"}}')
        (plan.work / "x.done.json").write_text("{}")
    shutil.rmtree(out / "more")
    (out / "more").symlink_to(elsewhere)
    ran = cli(*words, flag)
    assert ran.code == 2 and "more is a link to another folder" in ran.err
    assert (elsewhere / "extra.json").read_text() == "not ours" and os.listdir(elsewhere) == ["extra.json"]
    (out / "more").unlink()
    assert cli(*words, flag).code == 0


def test_a_linked_work_folder_is_left_alone(tiny, tmp_path, cli):
    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / LOCK_NAME).write_text("mine")
    (tmp_path / "out" / ".tilepress").symlink_to(tmp_path / "elsewhere")
    for flags in ((), ("--overwrite",), ("--resume",)):
        ran = cli("compress", "prune", tiny, "-o", tmp_path / "out", *WORDS, *flags)
        assert ran.code == 2 and ".tilepress is a link to another folder" in ran.err
    assert (tmp_path / "elsewhere" / LOCK_NAME).read_text() == "mine"


def test_the_lock_of_a_run_goes_with_it(tiny, tmp_path, command):
    process = command("compress", "prune", tiny, "-o", tmp_path / "out", *WORDS)
    while process.poll() is None and not (tmp_path / "out" / ".tilepress" / LOCK_NAME).exists():
        time.sleep(0.001)
    process.send_signal(9)
    process.communicate()
    assert process.returncode == 0 or tilepress.compress(tiny, tmp_path / "out", Prune(0.6), resume=True)
    assert not (tmp_path / "out" / ".tilepress").exists()
