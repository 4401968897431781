"""Times vLLM on one model in several forms: milliseconds a token while decoding, and to the first token.

    python benchmarks/random_checkpoint.py llama-3-8b random-8b --device cuda
    python benchmarks/vllm_decode.py random-8b --work artifacts --output benchmarks/h200/vllm.json

Each form runs in a process of its own. All start together, which is most of the time, and are then measured one after
another, vLLM's own dense BF16 first; a row's `over_dense_bf16` compares with it. A token's time is the difference of a
long and a short answer divided by their lengths, so that the prompt cancels out; prompts are in the prefix cache then. A
row's `share` says what the card did in a token's time, by the names of its kernels, in parts of that time: ours, attention,
products of vLLM's (the head; all of them where weights are not ours), the rest, and the time without a kernel. The first
token is timed on prompts that are not cached; `card_ms` is what its kernels take together, `launches` how often kernels
and graphs were launched, and `host_ms` where the host spent most of it, in one more run under a profiler (of the
shortest and the longest prompt). Forms that exist in --work are not made again.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
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
SHORT, LONG, RUNS = 8, 136, 5
PROFILED = 32  # tokens
CACHE = 3 << 30  # bytes of vLLM's cache: room for the largest case
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the profiler sees the engine's kernels
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
KINDS = {  # of kernels, by words of their names; the first that fits
    "ours": ("tiled_", "tilepress", "w8a8_", "w8a16_", "fused_quant"),
    "attention": ("flash", "attn", "attention", "reshape_and_cache", "kv_append", "cutlass::device_kernel<flash"),
    "products": ("gemm", "nvjet", "cutlass", "cublas", "gemv", "splitk", "scaled_mm"),
}


def kind_of(kernel: str) -> str:
    return next((kind for kind, words in KINDS.items() if any(word in kernel.lower() for word in words)), "rest")


def engine(folder: str, cases: tuple[tuple[int, int], ...] = CASES, cache: int = CACHE, **options):
    """Return vLLM's engine, with room for all cases, and the seconds that it took to start.

    Imports vLLM and goes on as soon as a line comes in; says "ready" when it has started, and goes on as soon as another comes in."""
    from vllm import LLM

    sys.stdin.readline()
    began = time.perf_counter()
    most = max(context for _, context in cases) + LONG + 8
    sizes = {batch for batch, _ in cases} | {n for n in FIRST if n <= 512}
    settings = {
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "max_model_len": max(most, max(FIRST) + 8),
        "max_num_seqs": max(batch for batch, _ in cases),
        "gpu_memory_utilization": 0.1,  # what the engines find beside one another; the cache's size is given
        "kv_cache_memory_bytes": cache,
        "compilation_config": {"cudagraph_capture_sizes": sorted(sizes)},
        "enable_prefix_caching": True,
        "seed": 0,
    }
    llm = LLM(model=folder, **settings | options)
    started = time.perf_counter() - began
    print("ready", flush=True)
    sys.stdin.readline()
    return llm, started


def measure(llm, cases: tuple[tuple[int, int], ...] = CASES, runs: int = RUNS) -> dict:
    """Return an engine's figures: `decode` rows with batch, context and tpot_ms, `first` with context and ttft_ms."""
    from torch.profiler import ProfilerActivity, profile
    from vllm import SamplingParams

    vocabulary, numbers = llm.llm_engine.model_config.get_vocab_size(), random.Random(0)

    def prompts(count: int, length: int) -> list[dict]:
        return [{"prompt_token_ids": [numbers.randrange(3, vocabulary) for _ in range(length)]} for _ in range(count)]

    def seconds(asked: list[dict], tokens: int) -> float:
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        llm.generate(asked, sampling, use_tqdm=False)
        return time.perf_counter() - started

    def kernels(asked: list[dict], tokens: int) -> Counter:
        """Return the milliseconds on the card by kernel."""
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            seconds(asked, tokens)
        return Counter({event.key: event.self_device_time_total / 1e3 for event in found.key_averages()})

    decode, first, found_in = [], [], {}
    for batch, context in cases:
        asked = found_in[batch, context] = prompts(batch, context)
        seconds(asked, SHORT)  # fills the prefix cache
        found = [(seconds(asked, LONG) - seconds(asked, SHORT)) / (LONG - SHORT) for _ in range(runs)]
        tpot = 1e3 * statistics.median(found)
        spread = (max(found) - min(found)) * 1e3 / tpot
        decode.append({"batch": batch, "context": context, "tpot_ms": tpot, "spread": spread})
    for context in FIRST:
        found = [seconds(asked, 1) for asked in (prompts(1, context) for _ in range(runs + 1))][1:]
        first.append({"batch": 1, "context": context, "ttft_ms": 1e3 * statistics.median(found)})
    # A profiler may leave something behind that makes launches slower, so all times are taken before it is used.
    for row in decode:
        asked, tpot = found_in[row["batch"], row["context"]], row["tpot_ms"]
        seconds(asked, SHORT)  # other prompts may have taken its place in the prefix cache
        spent = kernels(asked, SHORT + PROFILED)
        spent.subtract(kernels(asked, SHORT))
        kinds: Counter = Counter()
        for name, ms in spent.items():
            kinds[kind_of(name)] += ms / PROFILED
        kinds["idle"] = tpot - kinds.total()
        most_of_it = {name[:120]: ms / PROFILED for name, ms in spent.most_common(12)}
        row |= {"share": {kind: ms / tpot for kind, ms in kinds.items()}, "kernels_ms": most_of_it}
    for row in (first[0], first[-1]):
        row |= of_host_and_card(lambda asked: seconds(asked, 1), prompts(1, row["context"]))
    return {"decode": decode, "first": first}


def of_host_and_card(run, asked: list[dict]) -> dict:
    """Return what a profiler sees of one run: the card's time, launches, and the host's longest functions."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        run(asked)
    events = found.key_averages()
    on_card = [event for event in events if event.device_type == DeviceType.CUDA]
    on_host = Counter({event.key[:80]: event.self_cpu_time_total / 1e3 for event in events})
    return {
        "card_ms": sum(event.self_device_time_total for event in on_card) / 1e3,
        "launches": {event.key: event.count for event in events if "Launch" in event.key},
        "host_ms": dict(on_host.most_common(8)),
    }


def make(model: str, folder: Path, words: list[str]) -> subprocess.Popen:
    command = [sys.executable, "-m", "tilepress", "compress", words[0], model, "-o", str(folder), *words[1:]]
    return subprocess.Popen([*command, "--device", "auto", "-q"])


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
    parser.add_argument(
        "--timeout", type=float, default=400.0, help="seconds for all engines to start, and for each to be measured"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        llm, started = engine(asked.model)
        asked.output.write_text(json.dumps({"weights": asked.one, "started_s": started} | measure(llm)))
        os._exit(0)  # an engine's own end takes long and says much
    forms = {form: Path(asked.model) if FORMS[form] is None else asked.work / form for form in asked.forms.split(",")}
    asked.work.mkdir(parents=True, exist_ok=True)
    missing = [form for form in forms if FORMS[form] and not (forms[form] / "tilepress.json").exists()]
    if any(process.wait() for process in [make(asked.model, forms[form], FORMS[form]) for form in missing]):
        sys.exit("a form could not be made")
    running = {form: start(form, folder, asked.work) for form, folder in forms.items()}
    for process in running.values():
        tell(process)
    end = time.monotonic() + asked.timeout
    ready = {form: wait_until_ready(process, end) for form, process in running.items()}
    found, notes = [], {}
    for form, process in running.items():
        try:
            if not ready[form]:
                raise TimeoutError(f"no engine after {asked.timeout:.0f} s, see {form}.log")
            process.communicate("go\n", timeout=asked.timeout)
            found.append(json.loads((asked.work / f"{form}.json").read_text()))
        except (subprocess.SubprocessError, OSError) as error:
            notes[form] = repr(error)
        process.kill()
        asked.output.write_text(
            json.dumps({"env": environment(), "failed": notes, "rows": rows(found)}, indent=1) + "\n"
        )


def start(form: str, folder: Path, work: Path) -> subprocess.Popen:
    """Start the process that measures one form; what it has to say goes to a log beside its figures."""
    (part := work / f"{form}.json").unlink(missing_ok=True)
    return child([__file__, str(folder), "--one", form, "--output", str(part)], work / f"{form}.log")


def child(words: list[str], log: Path, **environment: str) -> subprocess.Popen:
    with open(log, "w") as file:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": file, "text": True}
        return subprocess.Popen([sys.executable, *words], env=ENVIRONMENT | os.environ | environment, **pipes)


def tell(process: subprocess.Popen) -> None:
    """Have an engine start that waits to. One that has ended already is found out about later."""
    try:
        process.stdin.write("start\n")
        process.stdin.flush()
    except OSError:
        pass


def wait_until_ready(process: subprocess.Popen, end: float) -> bool:
    """Read what a process says until it is ready; False where it ends before, or the time does."""
    watch = threading.Timer(max(end - time.monotonic(), 0), process.kill)
    watch.start()
    try:
        return any(line.strip() == "ready" for line in process.stdout)
    finally:
        watch.cancel()


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
