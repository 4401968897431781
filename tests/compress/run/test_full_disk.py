"""A disk that fills up at any write: two lines that say so, nothing that loads, and the same bytes once there is room."""

import os
import shutil

import pytest
from support.artifacts import few_words
from support.full_disk import FullDisk
from support.interruption import digest

import tilepress
from tilepress import KVCache, Prune, Quantize
from tilepress.formats import TilepressError

RUNS = {
    "prune": (Prune(0.6, scope="global"), None),
    "quantize": (Quantize(activations="tensor"), few_words(2, 32)),
    "kv": (KVCache(), few_words(2, 32)),
    "a stack": ([Prune(0.6), Quantize()], None),
}


def run(source, output, name: str, **how) -> None:
    recipe, text = RUNS[name]
    tilepress.compress(source, output, recipe, dataset=text, device="cpu", **how)


def fill_up(source, folder, name: str, monkeypatch, most: int | None = None) -> int:
    """Run on disks that are full from the first write on, the second, …, or `most` of them; then go on with room. Return how many."""
    with FullDisk().in_place(monkeypatch) as disk:
        run(source, folder / "whole", name)
    assert disk.writes > 30
    whole, rooms = digest(folder / "whole"), range(disk.writes)
    for room in rooms if most is None else rooms[:: -(-len(rooms) // most)]:
        output = folder / f"out-{room}"
        with FullDisk(room).in_place(monkeypatch), pytest.raises(TilepressError) as told:
            run(source, output, name)
        assert "disk is full" in told.value.message and "--resume" in told.value.hint, (room, told.value)
        assert not (output / "tilepress.json").exists()
        run(source, output, name, resume=True)
        assert digest(output) == whole, f"full from write {room} on"
        shutil.rmtree(output)
    return len(rooms)


@pytest.mark.thorough
@pytest.mark.parametrize("name", RUNS)
def test_full_from_any_write_on(checkpoint_of, tmp_path, monkeypatch, name):
    """Four of a run's writes, or all with FULL_DISK=all: `make kills`."""
    most = None if os.environ.get("FULL_DISK") == "all" else 4
    count = fill_up(checkpoint_of("llama"), tmp_path, name, monkeypatch, most)
    print(f"{name}: {count} writes")
