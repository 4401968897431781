"""Compress a model to INT8 with a 4-bit attention cache, check it, and measure what that costs.

python examples/compress_and_measure.py
python examples/compress_and_measure.py MODEL --text text.jsonl --held-out held-out.jsonl -o small --nsamples 128 --seqlen 2048
"""

import argparse
import tempfile

import tilepress
from tilepress import demo

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", default=str(demo.MODEL), help="folder or hub id; default: the embedded one")
parser.add_argument("--text", default=str(demo.TEXT), help="to calibrate on")
parser.add_argument("--held-out", default=str(demo.TEXT), help="to measure on: give other text than --text")
parser.add_argument("-o", "--output", help="folder to write; default: one that is removed at the end")
parser.add_argument("--nsamples", type=int, default=8)
parser.add_argument("--seqlen", type=int, default=256)


def main(words: list[str] | None = None) -> None:
    how = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as scratch:
        output = how.output or f"{scratch}/small"
        text = tilepress.Text(how.text, nsamples=how.nsamples, seqlen=how.seqlen)

        # A list is a stack: each recipe works on what the one before made.
        made = tilepress.compress(how.model, output, [tilepress.Quantize(), tilepress.KVCache(bits=4)], dataset=text)
        print(f"{made.source_bytes / 1e6:.1f} MB became {made.bytes / 1e6:.1f} MB in {made.seconds:.0f} s")

        assert tilepress.verify(output).passed  # hashes, headers, every code, loading

        cost = tilepress.perplexity(output, how.held_out, base=how.model, seqlen=how.seqlen, limit=16)
        dense = cost.comparison.base
        print(f"perplexity {dense.perplexity:.3f} became {cost.perplexity:.3f}")
        print(f"KL divergence {cost.comparison.kl_divergence['mean']:.4f} nats a token")


if __name__ == "__main__":
    main()
