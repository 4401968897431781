"""Shared fixtures: synthetic checkpoints of several families, one pruned artifact, and a runner for the command line."""

import gc
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run beside each other instead

import pytest
import torch
from support.commands import Commands
from support.optional import pytest_make_collect_report  # noqa: F401
from support.ranks import Ranks, forking
from support.stock import Stock

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from support.artifacts import CARD, STACKED, WIDE_OPT, few_words, prune

from tilepress import demo
from tilepress.cli import terminal as screen
from tilepress.text import Text

screen.quiet_libraries()


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA card"))


def pytest_collection_finish():
    """What torch, transformers and the tests are made of stays: the collector need not look through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch):
    """What else runs here changes no output: commands give a hint on a busy machine."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))


@pytest.fixture(autouse=True)
def same_numbers():
    """Tests that draw without a generator of their own draw the same in every run."""
    torch.manual_seed(0)


@dataclass
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict:
        return json.loads(self.out)


@pytest.fixture
def cli(capfd):
    """Runs a command in this process as `main` does: exit code, stdout, stderr."""
    pytest.importorskip("typer")
    from tilepress.cli.app import _explain, app

    def run(*words) -> Ran:
        capfd.readouterr()
        try:
            code = app([str(word) for word in words], standalone_mode=False) or 0
        except Exception as error:
            code = _explain(error)
        out, err = capfd.readouterr()
        return Ran(code, out, err)

    return run


@pytest.fixture(scope="session")
def command(tmp_path_factory):
    """Starts the command line as a process of its own."""
    started = Commands(tmp_path_factory.mktemp("commands"))
    yield started
    started.close()


@pytest.fixture(scope="session")
def two():
    """Two ranks on a CPU."""
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture
def quick_workers(monkeypatch):
    """Workers that need not import torch each: one test of theirs does without, as users' runs do."""
    from tilepress.compress.run import shards

    monkeypatch.setattr(shards, "multiprocessing", SimpleNamespace(get_context=lambda method: forking()))


@pytest.fixture(scope="session")
def two_cards():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two cards")
    ranks = Ranks(2, "cuda")
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def tiny() -> Path:
    return demo.MODEL


@pytest.fixture(scope="session")
def text() -> Path:
    return demo.TEXT


@pytest.fixture(scope="session")
def halves(tmp_path_factory) -> tuple[Text, Path]:
    """Text to calibrate with, and other text to measure on."""
    folder, documents = tmp_path_factory.mktemp("halves"), demo.TEXT.read_text().splitlines(keepends=True)
    for name, part in (("calibration", documents[:4]), ("held-out", documents[4:])):
        (folder / f"{name}.jsonl").write_text("".join(part))
    return few_words(12, 512, folder / "calibration.jsonl"), folder / "held-out.jsonl"


@pytest.fixture(scope="session")
def stock(tmp_path_factory):
    """Plain transformers, with the compressed-tensors package where `make test` has installed it."""
    package = Path(sys.prefix) / "compressed-tensors" / "0.20.0"
    process = Stock(tmp_path_factory.mktemp("stock"), package if package.exists() else None)
    yield process
    process.close()


@pytest.fixture(scope="session")
def artifact(tmp_path_factory, tiny) -> Path:
    """`tiny` pruned to 60 %: read only."""
    path = tmp_path_factory.mktemp("artifact") / "tiny-60"
    prune(tiny, path)
    return path


@pytest.fixture(scope="session")
def made(checkpoint_of, tmp_path_factory):
    """Artifacts of `STACKED`, of shapes that every kernel takes: read only."""
    found = {}

    def make(family: str, kind: str) -> Path:
        if (family, kind) not in found:
            path = checkpoint_of(family, **(WIDE_OPT if family == "opt" else CARD))
            for i, step in enumerate(STACKED[kind]):
                step(path, out := tmp_path_factory.mktemp(kind.replace(" ", "-")) / f"out-{i}")
                path = out
            found[family, kind] = path
        return found[family, kind]

    return make


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory):
    """Makes a random checkpoint of a family, once for each request of the same arguments."""
    from support.families import build

    made = {}

    def make(family: str, dtype: torch.dtype = torch.bfloat16, shard_size: str = "200KB", **changes) -> Path:
        key = (family, dtype, shard_size, tuple(sorted(changes.items())))
        if key not in made:
            made[key] = build(tmp_path_factory.mktemp(family) / family, family, dtype, shard_size, changes)
        return made[key]

    return make
