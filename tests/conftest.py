"""Shared fixtures: synthetic checkpoints of several families, one pruned artifact, and a runner for the command line."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run beside each other instead

import pytest
import torch
from commands import Commands
from ranks import Ranks
from stock import Stock

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tilepress import demo, screen
from tilepress.cli import _explain, app
from tilepress.compress.calibration import Text
from tilepress.compress.finish import finish
from tilepress.compress.kv import KVRecipe
from tilepress.compress.plan import Recipe, make_plan, open_output
from tilepress.compress.prune import PruneRecipe
from tilepress.compress.quantize import QuantizeRecipe
from tilepress.compress.shards import run_shards
from tilepress.formats.checkpoint import Checkpoint, read_manifest
from tilepress.formats.kv_calibration import uncalibrated
from tilepress.formats.kv_int4 import KVFormat
from tilepress.runtime import kv_cache
from tilepress.runtime.loader import load

screen.quiet_libraries()


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA card"))


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


@pytest.fixture(scope="session")
def two_cards():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two cards")
    ranks = Ranks(2, "cuda")
    yield ranks
    ranks.close()


def run_recipe(recipe: Recipe, source: Path, output: Path, device: str = "cpu", resume: bool = False) -> dict:
    """Writes an artifact through the library; returns the manifest."""
    checkpoint = Checkpoint(source)
    targets, left = recipe.find_targets(checkpoint)
    recipe.check(checkpoint, targets, left)
    plan = make_plan(checkpoint, output, recipe, targets, left)
    if open_output(plan, resume, overwrite=False):
        run_shards(plan, device=device)
        return finish(plan)
    return read_manifest(output)


def prune(source: Path, output: Path, sparsity: float = 0.6, format: str = "tiled-csl", **settings) -> dict:
    return run_recipe(PruneRecipe(sparsity, format=format, **settings), source, output)


def quantize(source: Path, output: Path, device: str = "cpu", **settings) -> dict:
    return run_recipe(QuantizeRecipe(**settings), source, output, device)


def few_words(nsamples: int = 8, seqlen: int = 64, dataset: Path = demo.TEXT) -> Text:
    """Text to calibrate random models with."""
    return Text(str(dataset), nsamples, seqlen)


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


def with_cache(source: Path, form: KVFormat):
    """The model in float32 with a cache whose rows are quantized by their own extremes."""
    model = load(source, dtype=torch.float32, kv=False)
    config = model.config
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    kv_cache.install(model, uncalibrated(form, kv_heads, config.num_hidden_layers))
    return model


@pytest.fixture(scope="session")
def artifact(tmp_path_factory, tiny) -> Path:
    """`tiny` pruned to 60 %: read only."""
    path = tmp_path_factory.mktemp("artifact") / "tiny-60"
    prune(tiny, path)
    return path


CARD = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE_OPT = {"hidden_size": 256, "ffn_dim": 256, "word_embed_proj_dim": 256, "num_attention_heads": 4}
ALONE = {  # what an artifact is made by, one after the other
    "tiled-csl": (lambda source, out: prune(source, out, 0.6, "tiled-csl"),),
    "tiled-bitmap": (lambda source, out: prune(source, out, 0.6, "tiled-bitmap"),),
    "int8": (quantize,),
    "int8 weights": (lambda source, out: quantize(source, out, activations="none"),),
    "dense": (),
}
PACKED = (lambda source, out: run_recipe(KVRecipe(few_words(4, 64)), source, out),)
STACKED = ALONE | {f"{name}+kv4": (*steps, *PACKED) for name, steps in ALONE.items()}


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
    from families import build

    made = {}

    def make(family: str, dtype: torch.dtype = torch.bfloat16, shard_size: str = "200KB", **changes) -> Path:
        key = (family, dtype, shard_size, tuple(sorted(changes.items())))
        if key not in made:
            made[key] = build(tmp_path_factory.mktemp(family) / family, family, dtype, shard_size, changes)
        return made[key]

    return make
