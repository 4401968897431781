"""Coverage-guided fuzzing of the readers in readers.py: `make fuzz`, or `python tests/fuzz/run.py READER --seconds 600`.

It needs atheris. It starts from seeds/READER and found/READER, and writes bytes that a reader does not survive (an exception
that is no TilepressError, 20 seconds, 2 GB) to found/READER, where the test suite plays them from then on.

Seconds are those of a processor, so that a busy machine fuzzes longer rather than less.
"""

import argparse
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
MOST_S = 20  # of a processor, for one input
# Seconds of a process, where many would take too much memory: atheris keeps what comparing tensors gives, 50 KB for an input.
PIECES_S = {"tiled-bitmap": 10, "tiled-csl": 100}
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("readers", nargs="*", metavar="READER", help="one of them; none to list them")
    parser.add_argument(
        "--seconds",
        type=int,
        default=600,
        help="of a processor, without the imports; by the clock it may take twenty times as long, and then ends",
    )
    parser.add_argument(
        "--corpus",
        type=Path,
        help="folder that keeps the inputs that reached new code, so that another run goes on from them",
    )
    parser.add_argument(
        "--write-seeds", action="store_true", help="write seeds/ anew, after a form has changed on purpose"
    )
    asked = parser.parse_args()
    if len(asked.readers) == 1:
        corpus = asked.corpus or Path(tempfile.mkdtemp(prefix="fuzz-"))
        piece_s = PIECES_S.get(asked.readers[0], asked.seconds)
        if asked.seconds <= piece_s:
            fuzz(asked.readers[0], asked.seconds, corpus)
        for begin in range(0, asked.seconds, piece_s):
            piece = "--seconds", str(min(piece_s, asked.seconds - begin)), "--corpus", str(corpus)
            if code := subprocess.run([sys.executable, __file__, *asked.readers, *piece]).returncode:
                sys.exit(code)
        return
    from fuzz.readers import READERS

    if asked.write_seeds:
        for name, reader in READERS.items():
            (HERE / "seeds" / name).mkdir(parents=True, exist_ok=True)
            for seed, data in reader.seeds().items():
                (HERE / "seeds" / name / seed).write_bytes(data)
    print(*READERS)


def fuzz(name: str, seconds: int, corpus: Path) -> None:
    """Fuzz one reader in this process, which ends with it: with 0 if nothing was found in so many seconds of a processor."""
    import atheris
    import torch

    with atheris.instrument_imports(include=["tilepress"]):
        from fuzz.readers import READERS, read
    from fuzz.mutate import mutated_json

    torch.set_num_threads(1)
    found = HERE / "found" / name
    found.mkdir(parents=True, exist_ok=True)
    corpus.mkdir(parents=True, exist_ok=True)
    seeds = READERS[name].seeds()
    for seed, data in seeds.items():
        (corpus / seed).write_bytes(data)
    sound = list(seeds.values())
    limits = [f"-max_total_time={20 * seconds}", f"-timeout={20 * MOST_S}", "-rss_limit_mb=2048", "-max_len=20000"]
    words = [sys.argv[0], *limits, f"-artifact_prefix={found}/", "-print_final_stats=1", str(corpus), str(found)]

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.3:  # else a reader of few branches is soon left with inputs that it refuses at once
            data = rng.choice(sound)
        made = mutated_json(name, data, rng) if rng.random() < 0.7 else None
        return atheris.Mutate(data, most) if made is None or len(made) > most else made

    def test(data: bytes) -> None:
        nonlocal until
        began = time.process_time()
        read(name, data)
        ended = time.process_time()
        assert ended - began < MOST_S, f"{ended - began:.1f} s of a processor"
        if ended > until:
            print(f"{name}: {ended - began_all:.0f} s of a processor", flush=True)
            until = math.inf
            os.kill(os.getpid(), signal.SIGUSR1)  # libFuzzer then prints its figures and ends with 0

    atheris.Setup(words, test, custom_mutator=mutate)
    began_all = time.process_time()
    until = began_all + seconds
    atheris.Fuzz()


if __name__ == "__main__":
    main()
