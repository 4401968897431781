"""Try several recipes on one model, and print bytes against KL divergence: which one is worth it for you?

python examples/compare_recipes.py
python examples/compare_recipes.py MODEL --text text.jsonl --held-out held-out.jsonl --nsamples 128 --seqlen 2048
"""

import argparse
import tempfile
from pathlib import Path

import tilepress
from tilepress import demo

RECIPES = {
    "INT8": [tilepress.Quantize()],
    "INT8 weights alone": [tilepress.Quantize(activations="none")],
    "8-bit cache": [tilepress.KVCache(bits=8)],
    "30 % zeros": [tilepress.Prune(0.3, method="sparsegpt")],
    "50 % zeros": [tilepress.Prune(0.5, method="sparsegpt")],
    "50 % zeros of INT8": [tilepress.Prune(0.5, method="sparsegpt", value_dtype="int8")],
}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", default=str(demo.MODEL), help="folder or hub id; default: the embedded one")
parser.add_argument("--text", default=str(demo.TEXT), help="to calibrate on")
parser.add_argument("--held-out", default=str(demo.TEXT), help="to measure on: give other text than --text")
parser.add_argument("--nsamples", type=int, default=8)
parser.add_argument("--seqlen", type=int, default=256)
parser.add_argument("--recipes", default=",".join(RECIPES), help="names with commas; default: all")


def main(words: list[str] | None = None) -> None:
    how = parser.parse_args(words)
    text = tilepress.Text(how.text, nsamples=how.nsamples, seqlen=how.seqlen)
    print(f"{'recipe':<26}{'MB':>10}{'perplexity':>12}{'KL':>10}")
    for name in how.recipes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            artifact = Path(folder) / "artifact"
            made = tilepress.compress(how.model, artifact, RECIPES[name], dataset=text)
            cost = tilepress.perplexity(artifact, how.held_out, base=how.model, seqlen=how.seqlen, limit=16)
        kl = cost.comparison.kl_divergence["mean"]
        print(f"{name:<26}{made.bytes / 1e6:>10.1f}{cost.perplexity:>12.3f}{kl:>10.4f}", flush=True)


if __name__ == "__main__":
    main()
