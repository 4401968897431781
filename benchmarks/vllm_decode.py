"""Times vLLM on one model in several forms: milliseconds a token while decoding, and to the first token.

    python benchmarks/random_checkpoint.py llama-3-8b random-8b --device cuda
    python benchmarks/vllm_decode.py random-8b --work artifacts --output benchmarks/h200/vllm.json

Each form runs in a process of its own, vLLM's own dense BF16 first; a row's `over_dense_bf16` compares with it. A token's
time is the difference of a long and a short answer divided by their lengths, so that the prompt cancels out; prompts are
in the prefix cache then. The first token is timed on prompts that are not. Forms that exist in --work are not made again.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

FORMS = {
    "dense": None,
    "w8a8": ["quantize"],
    "tiled-csl-80": ["prune", "--sparsity", "0.8", "--format", "tiled-csl"],
    "tiled-bitmap-50": ["prune", "--sparsity", "0.5", "--format", "tiled-bitmap"],
    "tiled-bitmap-50-int8": ["prune", "--sparsity", "0.5", "--format", "tiled-bitmap", "--value-dtype", "int8"],
}
CASES = ((1, 2048), (16, 1024))  # batch and context
FIRST = (32, 128, 512, 2048)  # tokens of prompts whose first token is timed
SHORT, LONG, RUNS = 8, 136, 3


def measure(folder: str, weights: str) -> dict:
    """Return the figures of one form: `decode` rows with batch, context and tpot_ms, `first` with context and ttft_ms."""
    import torch
    from vllm import LLM, SamplingParams

    most = max(context for _, context in CASES) + LONG + 8
    llm = LLM(
        model=folder,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=max(most, max(FIRST) + 8),
        max_num_seqs=max(batch for batch, _ in CASES),
        gpu_memory_utilization=0.8,
        enable_prefix_caching=True,
        seed=0,
    )
    vocabulary, numbers = llm.llm_engine.model_config.get_vocab_size(), random.Random(0)

    def prompts(count: int, length: int) -> list[dict]:
        return [{"prompt_token_ids": [numbers.randrange(3, vocabulary) for _ in range(length)]} for _ in range(count)]

    def seconds(asked: list[dict], tokens: int) -> float:
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        llm.generate(asked, sampling, use_tqdm=False)
        return time.perf_counter() - started

    decode, first = [], []
    for batch, context in CASES:
        asked = prompts(batch, context)
        seconds(asked, SHORT)  # fills the prefix cache
        found = [(seconds(asked, LONG) - seconds(asked, SHORT)) / (LONG - SHORT) for _ in range(RUNS)]
        spread = (max(found) - min(found)) / statistics.median(found)
        decode.append({"batch": batch, "context": context, "tpot_ms": 1e3 * statistics.median(found), "spread": spread})
    for context in FIRST:
        found = [seconds(asked, 1) for asked in (prompts(1, context) for _ in range(RUNS + 1))][1:]
        first.append({"batch": 1, "context": context, "ttft_ms": 1e3 * statistics.median(found)})
    return {
        "weights": weights,
        "decode": decode,
        "first": first,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def make(model: str, folder: Path, words: list[str]) -> None:
    command = [sys.executable, "-m", "tilepress", "compress", words[0], model, "-o", str(folder), *words[1:]]
    subprocess.run([*command, "--device", "cuda", "-q"], check=True)


def rows(found: list[dict]) -> list[dict]:
    """Return a row for each form and case, with times over those of vLLM's own dense BF16."""
    made, dense = [], {}
    for form in found:
        for row in (*form["decode"], *form["first"]):
            case, name = (row["batch"], row["context"]), "tpot_ms" if "tpot_ms" in row else "ttft_ms"
            if form["weights"] == "dense":
                dense[case, name] = row[name]
            ratio = {"over_dense_bf16": dense[case, name] / row[name]} if (case, name) in dense else {}
            made.append({"weights": form["weights"], "kv": "bf16"} | row | ratio)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a dense checkpoint")
    parser.add_argument("--work", type=Path, default=Path("artifacts"), help="where compressed forms are, or are made")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--output", type=Path, default=Path("vllm.json"))
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each form")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        asked.output.write_text(json.dumps(measure(asked.model, asked.one)))
        return
    found, notes = [], {}
    asked.work.mkdir(parents=True, exist_ok=True)
    for form in asked.forms.split(","):
        folder = Path(asked.model)
        if FORMS[form] is not None:
            folder = asked.work / form
            if not (folder / "tilepress.json").exists():
                make(asked.model, folder, FORMS[form])
        part = asked.work / f"{form}.json"
        part.unlink(missing_ok=True)
        words = [sys.executable, __file__, str(folder), "--one", form, "--output", str(part)]
        try:
            subprocess.run(words, check=True, timeout=asked.timeout)
            found.append(json.loads(part.read_text()))
        except (subprocess.SubprocessError, OSError) as error:
            notes[form] = repr(error)
        asked.output.write_text(
            json.dumps({"env": environment(), "failed": notes, "rows": rows(found)}, indent=1) + "\n"
        )


def environment() -> dict:
    """Return the card and the versions; nothing of CUDA is started in this process before the others end."""
    from importlib.metadata import version

    from tilepress.runtime.vllm.compat import installed

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    card, _, driver = subprocess.run(query, capture_output=True, text=True).stdout.strip().partition(", ")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    versions = {name: version(name) for name in ("torch", "transformers", "tilepress")}
    return {"card": card, "driver": driver, "vllm": installed(), "commit": commit} | versions


if __name__ == "__main__":
    main()
