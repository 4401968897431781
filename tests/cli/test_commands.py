"""How commands begin and look: refusals without torch, panels of help, steps in a log."""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tilepress
from tilepress.cli.commands import PANELS


def heading(text: str) -> list[str]:
    return re.findall(r"^(\S[^\n]*):$", text, re.M)


def test_commands_stand_by_workflow(cli):
    ran = cli("--help")
    assert heading(ran.out) == ["Options", "Compress and measure", "Try", "Look", "Change and share"]
    listed = re.findall(r"^  ([a-z]+) ", ran.out[ran.out.index("Compress and measure") :], re.M)
    assert {"compress", "eval", "demo", "generate", "chat", "compare", "report", "models", "verify"} <= {*listed}
    assert heading(cli("compress", "--help").out) == ["Options", "One recipe", "Several"]
    for group in ((), ("compress",), ("eval",)):  # what a command does is said in a line, whole
        out = cli(*group, "--help").out
        told = re.findall(r"^  [a-z]+ +([A-Z].*)$", out, re.M)
        assert told and all(line.endswith(".") and not line.endswith("..") for line in told), told


@pytest.mark.parametrize("words", [("compress", "prune"), ("eval", "perplexity"), ("generate",), ("inspect",)])
def test_options_stand_in_panels(cli, words):
    ran = cli(*words, "--help")
    panels = heading(ran.out)
    assert panels[0] == "Arguments" and [p for p in panels if p in PANELS] == [p for p in PANELS if p in panels]
    output = ran.out[ran.out.index("\nOutput:") :]
    assert "--json" in output and "--verbose" in output and "--log-file FILE" in output
    assert "<" not in ran.out.partition("Options:")[0] and "{" not in ran.out and "INTEGER" not in ran.out


REFUSED = [
    ("compress", "prune", "x", "-o", "y", "--sparsity", "1.5"),
    ("compress", "prune", "x", "-o", "y", "--sparsity", "0.5", "--method", "oracle"),
    ("compress", "quantize", "./nowhere", "-o", "y"),
    ("eval", "perplexity", "x", "--base", "no/where/at/all"),
    ("eval", "perplexity", "x", "--recipe", "papers"),
    ("compress", "kv", "x", "-o", "y", "--bits", "5"),
    ("generate", "x", " "),
    *((command, "nowhere") for command in ("verify", "report")),
    ("push", "nowhere", "me/model"),
    *((*words, "./nowhere") for words in (("inspect",), ("chat",), ("compare", "x"), ("demo", "--model"))),
    *(("eval", what, "./nowhere") for what in ("tasks", "speed")),
    *(("compress", what, "./nowhere", "-o", "y", "--dataset", "t") for what in ("kv", "quantize")),
    ("convert", "./nowhere", "-o", "y", "--to", "dense"),
]


def test_what_cannot_be_is_refused_before_torch_is_imported(tmp_path):
    script = (
        "import json, os, sys\nfrom tilepress.cli import app\n"
        "for words in json.loads(sys.argv[1]):\n    sys.argv[1:] = words\n    before = os.times()\n    try:\n        app.main()\n"
        "    except SystemExit as ended:\n        assert ended.code == 2, words\n    after = os.times()\n"
        "    assert 'torch' not in sys.modules, words\n    assert after.user - before.user < 0.3, words\n"
    )
    done = [sys.executable, "-c", script, json.dumps(REFUSED)]
    env = os.environ | {"TILEPRESS_DEBUG": "0", "PYTHONPATH": str(Path(tilepress.__file__).parents[1])}
    ran = subprocess.run(done, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stderr.splitlines()) == 2 * len(REFUSED) and list(tmp_path.iterdir()) == []


def test_choices_are_those_of_the_help(cli, tiny, tmp_path):
    ran = cli("compress", "prune", tiny, "-o", tmp_path / "x", "--sparsity", "0.5", "--scope", "block")
    assert ran.code == 2 and ran.err == "error: --scope block is unknown\nhint: choose one of layer, row, global\n"


def test_a_log_has_every_step_and_how_it_ended(cli, tiny, tmp_path):
    log = tmp_path / "logs" / "run.log"
    words = ("compress", "prune", tiny, "-o", tmp_path / "x", "--sparsity", "0.5", "--log-file", log, "-q")
    ran = cli(*words)
    assert ran.code == 0 and ran.err == ""
    lines = log.read_text().splitlines()
    assert sum(" pruning: " in line for line in lines) > 20 and "done in" in lines[-1]
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", line) for line in lines)
    again = cli(*words)
    assert (
        again.code == 2
        and "exists" in log.read_text().splitlines()[-1]
        and len(log.read_text().splitlines()) > len(lines)
    )


def test_verbose_says_every_step(cli, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("TILEPRESS_DEBUG", "0")
    ran = cli("compress", "prune", tiny, "-o", tmp_path / "x", "--sparsity", "0.5", "-v")
    assert ran.code == 0 and ran.err.count("pruning: ") > 20
    assert "layers.3.mlp.down_proj" in ran.err
    quiet = cli("compress", "prune", tiny, "-o", tmp_path / "y", "--sparsity", "0.5")
    assert quiet.err.count("pruning: ") < 5


def test_every_command_takes_a_log():
    from tilepress.cli.app import app, compress, evaluate

    for group in (app, compress, evaluate):
        for command in group.registered_commands:
            assert {"verbose", "log_file"} <= set(inspect.signature(command.callback).parameters), command.name
