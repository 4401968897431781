"""Coverage-guided fuzzing of the readers in readers.py: `make fuzz`, or `python tests/fuzz/run.py READER --seconds 600`.

It needs atheris. It starts from seeds/READER and found/READER, and writes bytes that a reader does not survive (an exception
that is no TilepressError, 20 seconds, 2 GB) to found/READER, where the test suite plays them from then on.
"""

import argparse
import random
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("readers", nargs="*", metavar="READER", help="one of them; none to list them")
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument(
        "--write-seeds", action="store_true", help="write seeds/ anew, after a form has changed on purpose"
    )
    asked = parser.parse_args()
    if len(asked.readers) == 1:
        fuzz(asked.readers[0], asked.seconds)
        return
    from fuzz.readers import READERS

    if asked.write_seeds:
        for name, reader in READERS.items():
            (HERE / "seeds" / name).mkdir(parents=True, exist_ok=True)
            for seed, data in reader.seeds().items():
                (HERE / "seeds" / name / seed).write_bytes(data)
    print(*READERS)


def fuzz(name: str, seconds: int) -> None:
    """Fuzz one reader in this process, which ends with it: with 0 if nothing was found."""
    import atheris
    import torch

    with atheris.instrument_imports(include=["tilepress"]):
        from fuzz.readers import READERS, read
    from fuzz.mutate import mutated_json

    torch.set_num_threads(1)
    found = HERE / "found" / name
    found.mkdir(parents=True, exist_ok=True)
    corpus = tempfile.mkdtemp(prefix=f"fuzz-{name}-")
    seeds = READERS[name].seeds()
    for seed, data in seeds.items():
        (Path(corpus) / seed).write_bytes(data)
    sound = list(seeds.values())
    limits = [f"-max_total_time={seconds}", "-timeout=20", "-rss_limit_mb=2048", "-max_len=20000"]
    words = [sys.argv[0], *limits, f"-artifact_prefix={found}/", "-print_final_stats=1", corpus, str(found)]

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.3:  # else a reader of few branches is soon left with inputs that it refuses at once
            data = rng.choice(sound)
        made = mutated_json(name, data, rng) if rng.random() < 0.7 else None
        return atheris.Mutate(data, most) if made is None or len(made) > most else made

    def test(data: bytes) -> None:
        read(name, data)

    atheris.Setup(words, test, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
