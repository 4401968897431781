"""What reaches the terminal: names come out of files that anyone can write, so nothing in them may steer it."""

import io
import json
import shutil
import struct

import pytest

from tilepress.cli import terminal
from tilepress.cli.app import _explain
from tilepress.cli.terminal import Bar, left_alone, plain, table
from tilepress.formats import TilepressError

CLEAR = "\x1b[2J\x1b]0;owned\x07"
HOSTILE = [CLEAR, "a\nerror: b", "a\rb", "\x9b31m", "\u202egnp.exe", "\u2028", "\x00", "\ud800", "a\tb"]


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_steers_the_terminal(text, capsys):
    assert plain(text).isprintable()
    assert table("", ["name"], [[text]]).count("\n") == 1
    assert all(line.isprintable() for line in left_alone({text: text}).splitlines())
    assert _explain(TilepressError(f"tensor {text} is odd", f"rename {text}")) == 1
    with Bar("packing", quiet=False) as bar:
        bar._printed = 0.0
        bar.at(text, 1, 2)
    err = capsys.readouterr().err
    assert all(line.isprintable() for line in err.splitlines()) and len(err.splitlines()) == 4


def test_what_can_be_read_stays():
    for text in ("model.layers.0.weight", "層.重み", "naïve — “quoted”", "a b"):
        assert plain(text) == text
    assert plain("one\ntwo", keep="\n") == "one\ntwo" and plain("one\ntwo") == r"one\ntwo"


def test_brackets_are_no_markup(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(terminal.sys, "stderr", Terminal())
    with Bar("packing", quiet=False) as bar:
        bar.at("[/red] layers[0]", 1, 2)
        bar._live.refresh()


@pytest.mark.parametrize("text", [text for text in HOSTILE if text != "\ud800"])
def test_a_tensor_of_such_a_name_is_refused(tiny, tmp_path, cli, text):
    source = tmp_path / "source"
    shutil.copytree(tiny, source)
    header = json.dumps({text: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (source / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"x")
    for words in (("inspect", source), ("compress", "prune", source, "-o", tmp_path / "out", "--sparsity", "0.5")):
        ran = cli(*words)
        assert ran.code == 1 and "badly described" in ran.err and ran.out == ""
        assert len(ran.err.splitlines()) == 2 and all(line.isprintable() for line in ran.err.splitlines())
