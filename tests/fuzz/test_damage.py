"""A byte that changes, anywhere in an artifact: `verify` finds it, and loading refuses the folder or gives a model that runs.

Looked at are the first, a middle and the last byte of every structure: each file, each header, each tensor. The suite takes some
of them, `DAMAGE=all` every one (`make kills`).
"""

import json
import os
import random
import shutil
import struct

import pytest
import torch
from support.artifacts import PACKED, prune, quantize

from tilepress.eval.verify import verify
from tilepress.formats import TilepressError
from tilepress.formats.checkpoint import Checkpoint
from tilepress.runtime.loader import load

MAKE = {
    "tiled-csl": (lambda source, out: prune(source, out, 0.9),),
    "tiled-bitmap": (lambda source, out: prune(source, out, 0.5, "tiled-bitmap"),),
    "int8+kv4": (quantize, *PACKED),
}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
SOME = 4  # structures of an artifact that the suite damages


@pytest.fixture(scope="module")
def artifact_of(checkpoint_of, tmp_path_factory):
    def make(kind: str):
        path = checkpoint_of("llama", **SIZES)
        for number, step in enumerate(MAKE[kind]):
            step(path, out := tmp_path_factory.mktemp("damage") / f"out-{number}")
            path = out
        return path

    return make


def structures(folder) -> list[tuple]:
    """(file, first byte, end) of every file, of every header in them, and of every stored tensor."""
    found = [(path, 0, path.stat().st_size) for path in sorted(folder.rglob("*")) if path.is_file()]
    for path, *_ in list(found):
        if path.suffix == ".safetensors":
            length = struct.unpack("<Q", path.read_bytes()[:8])[0]
            found += [(path, 0, 8), (path, 8, 8 + length)]
    checkpoint = Checkpoint(folder)
    for shard in checkpoint.shards:
        data = (folder / shard).read_bytes()
        length = struct.unpack("<Q", data[:8])[0]
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                found.append((folder / shard, 8 + length + begin, 8 + length + end))
    return [(path.relative_to(folder), begin, end) for path, begin, end in found if end > begin]


@pytest.mark.parametrize("kind", MAKE)
def test_a_changed_byte_is_found(artifact_of, tmp_path, kind):
    sound, damaged, rng = artifact_of(kind), tmp_path / "damaged", random.Random(kind)
    assert verify(sound, reload=False).passed
    places = structures(sound)
    assert len(places) > 40
    looked_at = places if os.environ.get("DAMAGE") == "all" else rng.sample(places, SOME)
    count = refused = 0
    shutil.copytree(sound, damaged)
    for name, begin, end in looked_at:
        whole = (sound / name).read_bytes()
        for at in {begin, (begin + end) // 2, end - 1}:
            data = bytearray(whole)
            data[at] ^= 1 << rng.randrange(8)
            (damaged / name).write_bytes(data)
            try:
                found = not verify(damaged, reload=False).passed
            except TilepressError:  # no artifact any more
                found = True
            assert found, f"{name}, byte {at}"
            try:
                with torch.inference_mode():
                    load(damaged)(torch.arange(8)[None])
            except TilepressError:
                refused += 1
            count += 1
        (damaged / name).write_bytes(whole)
    print(f"{kind}: {count} bytes in {len(looked_at)} structures, all found; loading refused {refused}")
