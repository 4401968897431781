"""Host memory of a load: tensors go where they belong one by one, with accelerate and without."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.artifacts import prune, quantize

from tilepress.formats.checkpoint import Checkpoint

MIB = 1 << 20
WIDE = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 4}
SCRIPT = """
import json, sys, threading
accelerate, *loads = sys.argv[1:]
if not int(accelerate):
    sys.modules["accelerate"] = None
import torch, transformers.models.llama.modeling_llama, tilepress.runtime.loader
if any("cuda" in load for load in loads):
    torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")

def anonymous():
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))

def watch():
    while not ended.wait(0.001):
        seen.append(anonymous())

for load in loads:
    device, dtype, path = json.loads(load)
    seen, ended = [anonymous()], threading.Event()
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    model = tilepress.runtime.loader.load(path, device=device, dtype=dtype)
    ended.set()
    watcher.join()
    tensors = [*model.parameters(), *model.buffers()]
    devices, wide = sorted({t.device.type for t in tensors}), model.dtype == torch.float32
    print(json.dumps([max(seen) - seen[0], sum(t.nbytes for t in tensors), devices, wide]))
    del model, tensors
"""


def load(accelerate: bool, *loads: tuple[str, str, Path]) -> list[tuple[int, int]]:
    """Bytes of anonymous memory at most and bytes of the model, of each load (device, dtype, path) of a process of their own."""
    words = [json.dumps([device, dtype, str(path)]) for device, dtype, path in loads]
    ran = subprocess.run([sys.executable, "-c", SCRIPT, str(int(accelerate)), *words], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines()[-len(loads) :]]
    for (device, dtype, _), (_, _, devices, wide) in zip(loads, found, strict=True):
        assert devices == [device] and wide == (dtype == "float32")
    return [(most, size) for most, size, _, _ in found]


def largest_shard(path) -> int:
    files = [(path / name).stat().st_size for name in Checkpoint(path).shards]
    assert len(files) > 2
    return max(files)


@pytest.fixture(scope="module")
def artifacts(checkpoint_of, tmp_path_factory):
    source, folder = checkpoint_of("llama", shard_size="8MB", **WIDE), tmp_path_factory.mktemp("loads")
    for layout in ("tiled-csl", "tiled-bitmap"):
        prune(source, folder / layout, 0.5, layout)
    quantize(source, folder / "int8")
    (folder / "dense").symlink_to(source)
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("dtype,accelerate", [("auto", True), ("float32", False)])
def test_the_host_holds_no_more_than_a_shard(artifacts, dtype, accelerate):
    """The device `meta` takes tensors as a card does, and keeps none. The last load shows what would be seen of a model that is converted in
    host memory."""
    paths = [artifacts / kind for kind in ("dense", "tiled-csl", "tiled-bitmap", "int8")]
    *found, (most, size) = load(accelerate, *(("meta", dtype, path) for path in paths), ("cpu", "float32", paths[0]))
    assert most > 0.9 * size > largest_shard(paths[0])
    for path, (most, size) in zip(paths, found, strict=True):
        limit = largest_shard(path)
        assert most < limit and size > 2 * limit, path


@pytest.mark.gpu
def test_a_large_model_on_a_card(checkpoint_of):
    source = checkpoint_of("llama", shard_size="50MB", num_hidden_layers=28, **WIDE)
    ((most, size),) = load(False, ("cuda", "float32", source))
    assert most < largest_shard(source) + 500 * MIB < 0.7 * size


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", "tiled-csl", "tiled-bitmap", "int8"])
def test_loads_on_a_card_give_the_same_tensors(artifacts, kind):
    import tilepress

    on_card, here = (tilepress.load(artifacts / kind, device=device) for device in ("cuda", "cpu"))
    assert on_card.state_dict().keys() == here.state_dict().keys()
    for name, tensor in here.state_dict().items():
        found = on_card.state_dict()[name]
        assert found.is_cuda and found.dtype == tensor.dtype and torch.equal(found.cpu(), tensor), name
