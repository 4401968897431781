"""Writes docs/results.md, its picture and the tables of README.md from the results in benchmarks/h100: `python benchmarks/results.py`.

README keeps a table between two comments, `<!-- quality -->` and `<!-- end of quality -->`; what stands there is replaced. A test compares all of
it with the files, so that no figure drifts.
"""

import json
import re
from pathlib import Path

from tilepress.eval.report.pictures import Bar, bars, png

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "h100"

NAMES = {  # of a recipe in quality.json: as README calls it. Others stand in docs/results.md alone.
    "dense": "dense, bfloat16",
    "int8": "INT8, calibrated",
    "int8, random tokens": "INT8, calibrated on random tokens",
    "int8, no text": "INT8, not calibrated",
    "kv4, values folded": "4-bit cache",
    "int8 + kv4": "INT8 and 4-bit cache",
    "50 % zeros": "50 % zeros",
    "50 % zeros, recovered": "50 % zeros, recovered",
}
WEIGHTS = {
    "dense": "BF16",
    "w8a8": "INT8",
    "tiled-csl-80": "80 % zeros (CSL)",
    "tiled-bitmap-50": "50 % zeros (bitmap)",
}
VLLM = {
    "dense": "BF16, vLLM's own",
    "w8a8": "INT8, vLLM's own kernels",
    "tiled-csl-80": "80 % zeros (CSL)",
    "tiled-bitmap-50": "50 % zeros (bitmap)",
    "tiled-bitmap-50-int8": "50 % zeros, INT8 values",
}
VLLM_CACHES = {"bf16": "BF16, vLLM's own", "tilepress-int8": "8 bits, ours", "tilepress-int4": "4 bits, ours"}
CACHES = {"bf16": "BF16", "int4": "4 bits"}
COLOURS = {"vllm": "#94a3b8", "tilepress": "#1f5fa8"}
Table = list[list[str]]


def load(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(head: list[str], rows: Table) -> str:
    """A table whose columns of figures stand to the right."""
    figures = [all(re.match(r"[-+\d]|$", cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [head, ["---:" if of else "---" for of in figures], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def percent(share: float) -> str:
    return f"{100 * share:+.2f} %"


def quality_rows() -> list[dict]:
    """Rows of quality.json with `bytes` of the dense model too: a recipe of the cache leaves the weights as they are."""
    rows = [row for row in load("quality")["rows"] if "failed" not in row]
    dense = next(row["bytes"] for row in rows if row["recipe"].startswith("kv"))
    return [row | {"bytes": row["bytes"] or dense} for row in rows]


def quality(short: bool) -> str:
    """What each recipe costs the real model; `short`: those that README shows, with fewer columns."""
    found = quality_rows()
    if short:
        found = [row for name in NAMES for row in found if row["recipe"] == name]
    head = ["", "weights", "cache", "perplexity", "over dense", "KL divergence", "HellaSwag"]
    rows = []
    for row in found:
        rises = row["over_dense"] is not None
        cells = [NAMES[row["recipe"]] if short else row["recipe"], f"{row['bytes'] / 1e6:.0f} MB"]
        cells += [f"{row['bits_per_element']:.1f} bits" if row["bits_per_element"] else "16 bits"]
        cells += [f"{row['perplexity']:.3f}", percent(row["over_dense"]) if rises else "-", f"{row['kl']:.4f}"]
        cells += [f"{score:.1%}" if (score := row["hellaswag_acc_norm"]) else ""]
        if not short:
            if score:
                cells[-1] += f" ± {row['hellaswag_acc_norm_stderr']:.1%}"
            cells[3] += f" ± {row['perplexity_stderr']:.3f}"
            cells += [f"{row['same_top']:.1%}", f"{row['seconds']:.0f} s" if row["seconds"] else "-"]
        rows.append(cells)
    if not short:
        head += ["same top token", "to make"]
    return table(head, rows)


def commands() -> str:
    return table(
        ["recipe", "commands"],
        [[row["recipe"], f"`{row['command'].replace(' && ', '`<br>`')}`"] for row in quality_rows() if row["command"]],
    )


def protocol() -> str:
    found, rows = load("quality")["protocol"], quality_rows()
    (device,), (windows,), (model,) = ({row[key] for row in rows} for key in ("device", "windows", "model"))
    versions = rows[0]["versions"]
    return f"""`{model}` on an {device}, torch {versions["torch"]}, transformers {versions["transformers"]}, bfloat16.
Measured on all of `{found["evaluate"]}`: recipe {found["recipe"]}, {windows} windows of {found["seqlen"]} tokens.
Calibrated on {found["nsamples"]} windows of {found["seqlen"]} tokens of `{found["calibrate"]}`."""


def speed(batch: int, context: int) -> list[tuple[dict, float]]:
    """Rows of a batch, each with its tokens a second over those of vLLM's BF16."""
    rows = [row for row in load("decode")["rows"] if (row["batch"], row["context"]) == (batch, context)]
    (base,) = (row for row in rows if (row["engine"], row["weights"]) == ("vllm", "dense"))
    return [(row, row["tokens_per_s"] / base["tokens_per_s"]) for row in rows]


def name_of(row: dict) -> str:
    engine = "vLLM 0.24.0" if row["engine"] == "vllm" else "tilepress"
    return f"{engine}, {WEIGHTS[row['weights']]}"


def speed_table(first: int | None = None) -> str:
    """A step's time of each engine and weights; with `first` also the time to the first token of a prompt so long."""
    head = ["", "cache", "1 sequence of 2048: ms a step", "over vLLM BF16", "16 of 8192: ms a step", "over vLLM BF16"]
    rows, prompts = [], {(row["engine"], row["weights"]): row for row in served_prompts() if row["context"] == first}
    for (one, over), (many, second) in zip(speed(1, 2048), speed(16, 8192), strict=True):
        assert name_of(one) == name_of(many)
        times = [f"{one['tpot_ms']:.2f}", f"{over:.2f}", f"{many['tpot_ms']:.2f}", f"{second:.2f}"]
        prompt = prompts.get((one["engine"], one["weights"]))
        times += [f"{prompt['ttft_ms']:.1f}" if prompt else ""] if first else []
        rows.append([name_of(one), CACHES[one["kv"]], *times])
    return table([*head, *([f"ms to the first of {first}"] if first else [])], rows)


def served_prompts() -> list[dict]:
    """Rows of the first token, tilepress by CUDA graphs."""
    return [row for row in load("first_token")["rows"] if row.get("how") != "op by op"]


def first_tokens() -> str:
    """Milliseconds to the first token by the prompt's length."""
    rows, found = [], served_prompts()
    lengths = list(dict.fromkeys(row["context"] for row in found))
    for engine, weights, kv in dict.fromkeys((row["engine"], row["weights"], row["kv"]) for row in found):
        own = {row["context"]: row["ttft_ms"] for row in found if (row["engine"], row["weights"]) == (engine, weights)}
        name = name_of({"engine": engine, "weights": weights})
        rows.append([name, CACHES[kv], *(f"{own[length]:.1f}" for length in lengths)])
    return table(["ms to the first token", "cache", *(f"{length} tokens" for length in lengths)], rows)


def inside_vllm() -> str:
    """What vLLM takes with the plug-in for sparse weights, beside its own BF16 and W8A8."""
    rows, found = [], load("vllm")["rows"]
    for weights in dict.fromkeys(row["weights"] for row in found):
        own = [row for row in found if row["weights"] == weights]
        steps = [row for row in own if "tpot_ms" in row]
        first = {row["context"]: row["ttft_ms"] for row in own if "ttft_ms" in row}
        cells = [cell for row in steps for cell in (f"{row['tpot_ms']:.2f}", f"{row['over_dense_bf16']:.2f}")]
        rows.append([VLLM[weights], *cells, *(f"{ms:.1f}" for ms in first.values())])
    head = ["weights", "1 sequence of 2048: ms a step", "over BF16", "16 of 1024: ms a step", "over BF16"]
    return table([*head, *(f"ms to the first of {length} tokens" for length in first)], rows)


def caches_in_vllm() -> str:
    """What vLLM takes with its own attention cache and with ours, for the weights that were timed."""
    rows, found = [], load("vllm_cache")["rows"]
    steps = list(dict.fromkeys((row["batch"], row["context"]) for row in found if "tpot_ms" in row))
    asked = [(*step, "tpot_ms") for step in steps] + [
        (1, max(row["context"] for row in found if "ttft_ms" in row), "ttft_ms")
    ]
    for weights, kv in dict.fromkeys((row["weights"], row["kv"]) for row in found):
        own = [row for row in found if (row["weights"], row["kv"]) == (weights, kv)]
        cells = []
        for batch, context, what in asked:
            (row,) = (row for row in own if (row["batch"], row["context"]) == (batch, context) and what in row)
            cells += [f"{row[what]:.2f}", f"{row['over_same_weights_bf16_kv']:.2f}"]
        rows.append([VLLM[weights], VLLM_CACHES[kv], *cells])
    head = []
    for batch, context, what in asked:
        told = f"{batch} x {context}: ms a step" if what == "tpot_ms" else f"ms to the first of {context} tokens"
        head += [told, "over its BF16 cache"]
    return table(["weights", "cache", *head], rows)


def rates() -> tuple[list[Bar], str]:
    """What the picture shows, as `bars` takes it: tokens a second of 16 sequences."""
    told = [
        Bar(
            name_of(row),
            row["tokens_per_s"],
            f"{row['tokens_per_s']:.0f} ({over:.2f} x; cache {CACHES[row['kv']]})",
            COLOURS[row["engine"]],
        )
        for row, over in speed(16, 8192)
    ]
    return told, "Tokens a second, Llama-3-8B shape, 16 sequences of 8192, H100"


def page() -> str:
    env = load("decode")["env"]
    return f"""# Results

Written by `python benchmarks/results.py` from `benchmarks/h100`; a test holds this page to those files.

## What compression costs a real model

{protocol()}
KL divergence is the mean of a token, in nats. That of the dense row is the noise floor: what rounding alone does to the
dense model ([how](quality.md#the-noise-floor)). HellaSwag is acc_norm without examples, on 1000 of its items; recipes
without it have not been measured. Several recipes ran at once, so times to make are upper bounds.

{quality(short=False)}

{commands()}

Other models:

- an 18 M parameter Llama: [pruning](pruning.md#measured), [recovery](recovery.md#what-it-brings),
  [INT8](int8.md#schemes), [the cache](kv_cache.md)
- the embedded 4 M parameter model: `tilepress demo`, which anyone can run

## Speed beside vLLM

{env["card"]}, torch {env["torch"]}, vLLM {env["vllm"]}. The shape is Llama-3-8B's with random weights: the speed of a
step does not depend on their values. vLLM runs in its own engine, with FlashAttention 3, torch.compile, CUDA graphs
and its own W8A8. tilepress runs in the decode loop that `tilepress eval speed` times, without a server around it. It
was an independent run; no commit was recorded with it.

{speed_table()}

![tokens a second of 16 sequences](performance/h100.png)

The first token of one prompt, each engine by CUDA graphs ([how](decode_loop.md)):

{first_tokens()}

Sparse weights gain nothing from about 512 tokens on, where products are bound by arithmetic.

## Inside vLLM

The same shape in vLLM {load("vllm")["env"]["vllm"]} with the [plug-in](vllm.md), {load("vllm")["env"]["card"]}:
its engine, torch.compile and CUDA graphs, its 16-bit cache. Kernels that torch.compile writes and our products start
while those before them end, in all forms; so shares of a step by kernel (in vllm.json) add up to more than 1.

{inside_vllm()}

Attention caches in the same engine, in another run, of {load("vllm_cache")["protocol"]}. With so few layers a step
waits for the host, above all with one sequence. [More of it](vllm.md#the-attention-cache):

{caches_in_vllm()}

`benchmarks/h100`: decode.json, first_token.json, vllm.json, vllm_cache.json.
More shapes, more cards and single kernels, on an H200: [Performance](performance.md).
"""


def readme(text: str) -> str:
    """README with its tables as the results have them."""
    for name, found in (("quality", quality(short=True)), ("speed", speed_table(first=512))):
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        text, changed = re.subn(f"{begin}.*?{end}", lambda _, new=f"{begin}{found}\n{end}": new, text, flags=re.S)
        assert changed == 1, f"README.md has no place for {name}"
    return text


def main() -> None:
    (ROOT / "docs" / "results.md").write_text(page())
    (ROOT / "docs" / "performance" / "h100.png").write_bytes(png(bars(*rates()), rates()))
    file = ROOT / "README.md"
    file.write_text(readme(file.read_text()))


if __name__ == "__main__":
    main()
