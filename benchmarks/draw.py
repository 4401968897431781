"""Draws docs/performance.md and its pictures from the results in benchmarks/h200: `python benchmarks/draw.py`."""

import json
from pathlib import Path

from tilepress.eval.report.pictures import png, points

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "h200"
Series = dict[str, list[tuple[float, float]]]


def rows(name: str, **wanted) -> list[dict]:
    """Rows of a result whose fields have these values, overlapped ones where kernels were timed cold too."""
    found = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return [row for row in found if not row.get("cold") and all(row.get(key) == value for key, value in wanted.items())]


def end_to_end() -> str:
    columns = "model, artifact, cards, sequences, context, tokens/s, of a card, ms a token, ms to the first, GiB of a card at most, "
    columns = (columns + "tokens per GPU-second of dense").split(", ")
    lines = [f"| {' | '.join(columns)} |", "|---|---" + "|---:" * (len(columns) - 2) + "|"]
    for row in rows("end_to_end"):
        speedup = "1" if row["is_base"] else f"{row['speedup']:.2f}" if "speedup" in row else ""
        numbers = (
            f"{row['tokens_per_s']:.0f} | {row['tokens_per_gpu_s']:.0f} | {row['tpot_ms']:.2f} | {row['ttft_ms']:.0f} | "
            f"{row['peak_gib']:.1f} | {speedup}"
        )
        what = f"{row['model']} | {row['artifact']} | {row['gpus']} | {row['batch']} | {row['context']}"
        lines.append(f"| {what} | {numbers} |")
    return "\n".join(lines)


def of_a_card(artifact: str, gpus: int) -> float:
    """Tokens per GPU-second of Llama-2-70B."""
    (row,) = rows("end_to_end", model="llama-2-70b", artifact=artifact, gpus=gpus)
    return row["tokens_per_gpu_s"]


def sparse(layout: str) -> Series:
    wanted = {"M": 28672, "K": 8192, "dtype": "bf16", "value_dtype": "bf16", "layout": layout}
    found: Series = {}
    for row in rows("spmm", **wanted):
        found.setdefault(f"{row['sparsity']:.0%} zeros", []).append((row["N"], row["speedup"]))
    return found


def attention() -> Series:
    found: Series = {}
    for row in rows("attention", op="decode_attention", dtype="bfloat16", HKV=8, D=128, variable_lengths=False):
        found.setdefault(row["kv"], []).append((row["B"], row["speedup"]))
    return found


def int8() -> Series:
    found: Series = {}
    for row in rows("w8a8", op="w8a8_gemm", dtype="bfloat16"):
        found.setdefault(f"{row['N']} x {row['K']}", []).append((row["M"], row["speedup"]))
    return found


def roofline() -> Series:
    """Bytes that a launch must move, and how many of them it moves in a second."""
    found: Series = {}
    for name, wanted in (
        ("spmm", {"dtype": "bf16", "N": 16}),
        ("w8a8", {"op": "w8a8_gemm", "dtype": "bfloat16", "M": 16}),
        ("attention", {"op": "decode_attention", "dtype": "bfloat16", "variable_lengths": False}),
        ("fused", {"dtype": "bfloat16"}),
    ):
        for row in rows(name, **wanted):
            what = row.get("layout") or {"w8a8": "W8A8", "attention": "decode attention", "fused": "norms"}[name]
            found.setdefault(what, []).append((row["gbps"] * row["us"] / 1e3, row["gbps"] / 1000))
    return found


def made_of(name: str) -> str:
    env = json.loads((RESULTS / f"{name}.json").read_text())["env"]
    commits = ", ".join(dict.fromkeys(row.get("commit", env["commit"])[:7] for row in rows(name)))
    return f"`benchmarks/h200/{name}.json`: {env['card']}, torch {env['torch']}, CUDA {env['cuda']}, commit {commits}."


def drawings() -> dict[str, tuple]:
    """What each picture shows, as `points` takes it: series, axes, a dashed line, whether points are joined."""
    read = json.loads((RESULTS / "spmm.json").read_text())["read_gbps"] / 1000
    return {
        "bitmap": (sparse("tiled-bitmap"), "rows of input", "times as fast as cuBLAS", 1.0),
        "csl": (sparse("tiled-csl"), "rows of input", "times as fast as cuBLAS", 1.0),
        "int8": (int8(), "rows of input", "times as fast as cuBLAS in bfloat16", 1.0),
        "attention": (attention(), "sequences", "times as fast as PyTorch's fastest attention", 1.0),
        "roofline": (roofline(), "MB that a launch moves (logarithmic)", "TB/s", read, False),
    }


def page() -> str:
    less = of_a_card("w8a8+kv4", 2) / of_a_card("dense", 4)
    return f"""# Performance

Drawn by `python benchmarks/draw.py` from what was measured on an H200; each picture says from which file.

## Whole models

Random weights of well-known shapes (`tilepress demo --shape`): speed does not depend on their values. The dense base
runs in the same decode loop, with cuBLAS, CUDA graphs and the faster of two attentions; `docs/decode_loop.md` says how
it is timed. OPT-30B and OPT-66B each have the largest batch that fits. Dense OPT-66B was not run: its weights alone are
122 GiB. Several cards share a model by tensor parallelism (`docs/parallel.md`). Rows without a last column were run
alone. Llama-2-70B as INT8 with a 4-bit cache on two cards makes {less:.2f} times the tokens per card of dense, which
takes four cards.

{end_to_end()}

{made_of("end_to_end")}

## Sparse weights, 28672 x 8192, bfloat16

As tiled bitmaps:

![bitmaps against rows of input](performance/bitmap.png)

As Tiled-CSL:

![Tiled-CSL against rows of input](performance/csl.png)

{made_of("spmm")}

## INT8 products

![W8A8 against rows of input](performance/int8.png)

{made_of("w8a8")}

## Decode attention, 8192 tokens a sequence, 32 query and 8 KV heads of 128

![attention against sequences](performance/attention.png)

{made_of("attention")}

## Against the memory's limit

Each point is a kernel at one size (products with 16 rows of input). The dashed line is what a kernel reads that does
nothing else. Short launches cannot reach it.

![bytes a second against bytes](performance/roofline.png)
"""


def main() -> None:
    folder = ROOT / "docs" / "performance"
    folder.mkdir(exist_ok=True)
    for name, drawn in drawings().items():
        (folder / f"{name}.png").write_bytes(png(points(*drawn), drawn))
    (ROOT / "docs" / "performance.md").write_text(page())


if __name__ == "__main__":
    main()
