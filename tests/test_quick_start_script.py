"""benchmarks/quick_start.py: rows of the quick start's commands, each measured in a process of its own."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "quick_start.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("quick_start", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.thorough
def test_rows_of_the_commands(script, tmp_path):
    out = tmp_path / "rows.json"
    words = [
        "--shape",
        "llama-tiny",
        "--scratch",
        str(tmp_path),
        "--device",
        "cpu",
        "--nsamples",
        "2",
        "--seqlen",
        "64",
    ]
    script.main(["-o", str(out), *words])
    told = json.loads(out.read_text())
    quantize, kv = told["rows"]
    assert quantize["bytes"] < quantize["source_bytes"] and kv["bytes"] == kv["source_bytes"] == quantize["bytes"]
    assert kv["bytes_per_token"] < kv["bytes_per_token_bfloat16"]
    assert all(0.05 < row["host_gib"] < 10 and row["seconds"] > 0 for row in told["rows"])
    assert quantize["command"].startswith("tilepress compress quantize random-llama-tiny -o int8 --dataset")
    assert "calibrating" in (tmp_path / "rows.quantize.log").read_text()


def test_a_command_over_its_time_is_stopped_and_told(script, tmp_path):
    words = [sys.executable, "-c", "import time\nprint('begun', flush=True)\ntime.sleep(60)"]
    row, out = script.timed(words, 2.0, tmp_path / "log")
    assert "failed" in row and row["seconds"] < 30 and out in ("", "begun\n")
