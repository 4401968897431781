"""The command line: two-line errors, exit codes, what the demo shows, progress without a terminal."""

import json
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
import torch

from tilepress import demo
from tilepress.cli import terminal as screen
from tilepress.cli.app import main
from tilepress.cli.terminal import Bar, size, table


@pytest.mark.parametrize(
    "words,code",
    [
        (("compress", "prune", "nowhere/at/all", "-o", "x", "--sparsity", "0.5"), 2),
        (("compress", "prune", "x", "-o", "y"), 2),
        (("compress", "prune", "x", "-o", "y", "--sparsity", "half"), 2),
        (("compress", "prune", "x", "-o", "y", "--sparsity", "0.5", "--scope", "block"), 2),
        (("compress", "prune", "x", "-o", "y", "--sparsity", "0.5", "--method", "oracle"), 2),
        (("compress", "prune", "x", "-o", "y", "--sparsity", "0.5", "--format", "zip"), 2),
        (("compress", "prune", "x", "-o", "y", "--sparsity", "0.5", "--dtype", "int3"), 2),
        (("eval", "perplexity", "nowhere/at/all"), 2),
        (("inspect", "nowhere/at/all"), 2),
        (("verify", "nowhere/at/all"), 2),
        (("convert", "nowhere/at/all", "-o", "y", "--to", "dense"), 2),
        (("frobnicate",), 2),
        (("inspect", "--frobnicate", "x"), 2),
    ],
)
def test_wrong_usage_is_two_lines(cli, tmp_path, monkeypatch, words, code):
    monkeypatch.chdir(tmp_path)
    ran = cli(*words)
    assert ran.code == code and ran.out == ""
    lines = ran.err.strip().splitlines()
    assert len(lines) == 2 and lines[0].startswith("error: ") and lines[1].startswith("hint: ")
    assert list(tmp_path.iterdir()) == []


def test_device_that_is_not_there(cli, tiny, tmp_path):
    for device in ("cuda:77", "abacus"):
        ran = cli("compress", "prune", tiny, "-o", tmp_path / "x", "--sparsity", "0.5", "--device", device)
        assert ran.code == 2 and device in ran.err and not (tmp_path / "x").exists()


def test_the_next_command_reads_the_same_text(cli, tiny, text, tmp_path):
    out, copy = tmp_path / "a b", tmp_path / "it's.jsonl"
    copy.write_bytes(text.read_bytes())
    words = ("--activations", "none", "--dataset", copy, "--nsamples", "2", "--seqlen", "32")
    ran = cli("compress", "quantize", tiny, "-o", out, *words)
    assert ran.code == 0, ran.err
    told = shlex.split(ran.err.splitlines()[-1].removeprefix("next: tilepress "))
    assert told == ["eval", "perplexity", str(out), "--base", str(tiny), "--dataset", str(copy)]


@pytest.mark.parametrize("value", ["inf", "nan", "-1", "0"])
def test_sizes_of_memory_are_finite(cli, tiny, value):
    ran = cli("inspect", tiny, "--memory", value)
    assert ran.code == 2 and "--memory" in ran.err


def test_output_that_cannot_be_written_is_told():
    with open("/dev/full", "w") as full:
        ran = subprocess.run([sys.executable, "-m", "tilepress", "--version"], stdout=full, stderr=subprocess.PIPE)
    assert ran.returncode == 1 and ran.stderr.startswith(b"error: the output cannot be written: No space left")
    assert len(ran.stderr.splitlines()) == 2


def test_too_little_memory_is_told(cli, monkeypatch):
    for error in (MemoryError(), RuntimeError("1\n[enforce] DefaultCPUAllocator: can't allocate memory")):

        def fail(error=error):
            raise error

        monkeypatch.setattr(torch, "get_num_threads", fail)
        ran = cli("env")
        assert ran.code == 1 and "there is not enough memory" in ran.err and len(ran.err.splitlines()) == 2


def test_unforeseen_errors_have_two_lines_too(monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["tilepress", "env"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1 / 0)
    monkeypatch.delenv("TILEPRESS_DEBUG", raising=False)
    with pytest.raises(SystemExit) as ended:
        main()
    err = capfd.readouterr().err
    assert ended.value.code == 1 and len(err.strip().splitlines()) == 2 and "TILEPRESS_DEBUG=1" in err
    monkeypatch.setenv("TILEPRESS_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):  # Python prints its traceback
        main()


def test_more_workers_than_shards_are_not_started(cli, tiny, tmp_path):
    ran = cli("compress", "quantize", tiny, "-o", tmp_path / "out", "--workers", "99999999999999999999")
    assert ran.code == 0, ran.err


def test_results_on_stdout_words_on_stderr(cli, tiny, tmp_path):
    ran = cli("compress", "prune", tiny, "-o", tmp_path / "x", "--sparsity", "0.5", "--json")
    facts = json.loads(ran.out)
    assert (
        facts["sparsity"] == 0.5
        and facts["targets"] == 28
        and "pruning: done" in ran.err
        and "next: tilepress eval perplexity" in ran.err
    )
    quiet = cli("compress", "prune", tiny, "-o", tmp_path / "y", "--sparsity", "0.5", "-q")
    assert quiet.err == "" and "50.00% of 28 linear weights" in quiet.out and "left alone 1 x embedding" in quiet.out


def test_env(cli):
    found = cli("env", "--json").json
    assert found["tilepress"] and found["torch"] and "tiled bitmap linears run on" in found
    assert found["attention over packed pages runs on"].startswith("decode_attention")
    assert "transformers" in cli("env").out


def test_demo_shows_the_whole_path(tmp_path, cli, monkeypatch):
    """With two of its sparsities, on a tenth of its text."""
    part = tmp_path / "text.jsonl"
    part.write_text("".join(demo.TEXT.read_text().splitlines(keepends=True)[3:5]))
    monkeypatch.setattr(demo, "TEXT", part)
    started = time.monotonic(), time.process_time()
    ran = cli("demo", "-o", tmp_path / "demo", "--sparsity", "0.5,0.6")
    assert ran.code == 0, ran.err
    # Seconds, or CPU seconds: others may keep the machine busy, or many threads may wait.
    assert min(time.monotonic() - started[0], time.process_time() - started[1]) < 120
    lines = [line.split() for line in ran.out.splitlines() if line.startswith("  magnitude")]
    perplexities = [float(line[6]) for line in lines]
    assert len(lines) == 2 and perplexities == sorted(perplexities)
    for command in ("compress prune", "verify", "eval perplexity"):
        assert ran.err.count(f"$ tilepress {command}") == 2
    assert (tmp_path / "demo" / "tiny-60" / "tilepress.json").exists()
    again = cli("demo", "-o", tmp_path / "demo")
    assert again.code == 2 and "holds files" in again.err


def test_demo_takes_a_pretrained_model(tmp_path, cli, checkpoint_of):
    """Each row is what the commands that it names find."""
    source = checkpoint_of("llama")
    ran = cli("demo", "--model", source, "-o", tmp_path / "demo", "--device", "cpu")
    assert ran.code == 0, ran.err
    rows = [re.split(r"  +", line.strip()) for line in ran.out.splitlines() if " bits  " in line]
    assert [row[0] for row in rows] == ["dense bf16", "INT8", "4-bit cache"]
    assert [row[3] for row in rows] == ["16 bits"] * 2 + ["5 bits"]  # 4, and two float16 for 32 numbers
    assert rows[1][2] != "100.0%" == rows[2][2]
    for number, name in enumerate(("int8", "4-bit-cache"), 1):
        (line,) = (line for line in ran.err.splitlines() if line.startswith("$ tilepress eval") and f"/{name} " in line)
        again = cli(*line.split()[2:], "--device", "cpu", "--json").json
        assert rows[number][4].startswith(f"{again['perplexity']:.4f}")
        assert rows[number][5] == f"{again['kl_divergence']['mean']:.3f}"
    wrong = cli("demo", "--model", source, "--sparsity", "0.5")
    assert wrong.code == 2 and "embedded model" in wrong.err


def test_plain_progress_names_the_item_and_the_time_left(capsys, monkeypatch):
    monkeypatch.setattr(screen, "_PLAIN_EVERY_S", -1)
    with Bar("pruning", quiet=False) as bar:
        bar.at("layers.0", 5, 10)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("pruning: 50 %  layers.0  about ") and lines[1].startswith("pruning: done in")


def test_bar_on_a_terminal(monkeypatch):
    import io

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Bar("pruning", quiet=False) as bar:
        bar.at("layers.0.up_proj", 5, 10)
        bar._live.refresh()
    assert "layers.0.up_proj" in terminal.getvalue() and "left" in terminal.getvalue()


def test_tables_and_sizes():
    assert table("t", ["a", "b"], [["x", "1"], ["long", "22"]]) == "t\n\n  a      b\n  x      1\n  long  22"
    assert [size(n) for n in (5, 5000, 8_390_000, 2e10)] == ["5 B", "5.00 kB", "8.39 MB", "20.00 GB"]
