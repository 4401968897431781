"""Readers on what fuzzing begins with, on what it once found, and on a few hundred mutations of both.

`make fuzz` looks for more, guided by coverage, for ten minutes a reader. What it finds is put into found/READER.
"""

import random
from pathlib import Path

import pytest
from fuzz.mutate import mutated, mutated_json
from fuzz.readers import READERS, read

FOUND = Path(__file__).parent / "found"
SEEDS = Path(__file__).parent / "seeds"
CASES = [(path.parent.name, path) for folder in (SEEDS, FOUND) for path in sorted(folder.glob("*/*"))]


@pytest.mark.parametrize("name", READERS)
def test_seeds_are_those_that_are_stored_and_are_taken(name):
    seeds = READERS[name].seeds()
    stored = {path.name: path.read_bytes() for path in (SEEDS / name).iterdir()}
    assert seeds.keys() == stored.keys()
    for seed, data in seeds.items():
        assert stored[seed] == data, (
            f"a form has changed: `python tests/fuzz/run.py --write-seeds`, or look why ({seed})"
        )
        assert read(name, data) == (name != "config" or seed.startswith("int8")), seed  # others are no INT8 scheme


@pytest.mark.parametrize("name,path", CASES, ids=[f"{name}-{path.name}" for name, path in CASES])
def test_nothing_but_refusals(name, path):
    read(name, path.read_bytes())


@pytest.mark.parametrize("name", READERS)
def test_mutations_are_refused_or_taken(name):
    rng, seeds = random.Random(name), list(READERS[name].seeds().values())
    for _ in range(100):
        data = rng.choice(seeds)
        read(name, mutated(data, rng))
        if (made := mutated_json(name, data, rng)) is not None:
            read(name, made)


@pytest.mark.parametrize("name", READERS)
def test_every_cut_is_refused_or_taken(name):
    for seed in READERS[name].seeds().values():
        for end in range(0, len(seed), max(1, len(seed) // 20)):
            read(name, seed[:end])
