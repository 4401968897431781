"""Times vLLM on one model with several attention caches, and compares what they answer.

    python benchmarks/random_checkpoint.py llama-3-8b random-8b --device cuda
    python benchmarks/vllm_cache.py random-8b --output benchmarks/h100/vllm_cache.json
    python benchmarks/vllm_cache.py demo --untimed --forms dense+bf16,dense+tilepress-int8,dense+tilepress-int8/eager

A form is weights and a cache, `/eager` behind it for an engine without CUDA graphs, which is only asked, not timed. Each
runs in a process of its own. As many start together as the card has room for, and are then asked and timed one after
another, as vllm_decode.py does it; a row's `over_same_weights_bf16_kv` and `over_dense_bf16` compare with the forms that
they name. Answers are greedy, with log-probabilities, to prompts that all forms get, several at a time: `answers` has how
far those of each form lie from another one's, as far as both chose the same tokens. `demo` is the trained model that the
package has. Weights and caches that exist in --work are not made again; caches are calibrated on MODEL.jsonl. Figures
that --work has of other forms, from an earlier call, count too.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from vllm_decode import FORMS as WEIGHTS, LONG, RUNS, child, engine, environment, make, measure, tell, wait_until_ready

VLLMS = {  # caches of vLLM's: bytes, parts of those in 16 bits, at most
    "bf16": 1.0,
    "fp8": 0.5,
    "int8_per_token_head": 0.6,
    "fp8_per_token_head": 0.6,
    "int4_per_token_head": 0.4,
    "turboquant_4bit_nc": 0.4,
}
OURS = {"tilepress-int4": (["--bits", "4"], 0.3), "tilepress-int8": (["--bits", "8"], 0.55)}
CASES = "1x2048,16x8192"  # batch and context
FORMS = "dense+bf16,dense+tilepress-int4,dense+fp8,dense+turboquant_4bit_nc"
BESIDE = 5 << 30  # bytes of an engine beside its weights and its cache
ASKED = (5, 64, 65, 130, 300, 700, 1100, 1500)  # tokens of prompts that are answered
ANSWER = 24


class Form:
    """Weights and a cache."""

    def __init__(self, name: str, model: Path, work: Path):
        both, _, kind = name.partition("/")
        self.name, self.is_eager = name, kind == "eager"
        self.weights, _, self.kv = both.partition("+")
        self.base = model if WEIGHTS[self.weights] is None else work / self.weights
        self.folder = work / f"{self.weights}_{self.kv}" if self.kv in OURS else self.base
        self.log, self.part = (work / f"of_{name.replace('/', '-').replace('+', '_')}.{end}" for end in ("log", "json"))

    @property
    def options(self) -> dict:
        dtype = {} if self.kv in OURS or self.kv == "bf16" else {"kv_cache_dtype": self.kv}
        return dtype | ({"enforce_eager": True} if self.is_eager else {})

    def cache_bytes(self, cases: list[tuple[int, int]]) -> int:
        config = json.loads((self.base / "config.json").read_text())
        heads, width = config["num_attention_heads"], config["hidden_size"]
        numbers = 2 * config["num_hidden_layers"] * config.get("num_key_value_heads", heads)
        numbers *= config.get("head_dim") or width // heads
        tokens = max(batch * (context + LONG + 128) for batch, context in cases) + 4096
        return int(2 * numbers * tokens * (OURS[self.kv][1] if self.kv in OURS else VLLMS[self.kv]))

    def needs(self, cases: list[tuple[int, int]]) -> int:
        """Return the bytes of the card that an engine takes."""
        weights = sum(file.stat().st_size for file in self.folder.resolve().glob("*.safetensors"))
        return weights + self.cache_bytes(cases) + BESIDE


def answers(llm) -> list[dict]:
    """Return the tokens of greedy answers, and of each the most probable ones' log-probabilities: alone and all together."""
    from vllm import SamplingParams

    config, numbers = llm.llm_engine.model_config, random.Random(1)
    lengths = [n for n in ASKED if n + ANSWER <= config.max_model_len]
    prompts = [[numbers.randrange(3, config.get_vocab_size()) for _ in range(length)] for length in lengths]
    sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER, logprobs=5, ignore_eos=True, detokenize=False)
    found = []
    for asked in (prompts, prompts[-1:], [*prompts[::-1], *prompts]):  # new, cached, and both in another order
        for request in llm.generate([{"prompt_token_ids": ids} for ids in asked], sampling, use_tqdm=False):
            told = [{token: p.logprob for token, p in each.items()} for each in request.outputs[0].logprobs]
            found.append({"tokens": list(request.outputs[0].token_ids), "told": told})
    return found


def differences(found: list[dict], others: list[dict]) -> dict:
    """Compare log-probabilities as far as both chose the same tokens, and one token further."""
    gaps, agreed, count = [], 0, 0
    for mine, theirs in zip(found, others, strict=True):
        count += len(mine["tokens"])
        for i, (token, other) in enumerate(zip(mine["tokens"], theirs["tokens"], strict=True)):
            here, there = mine["told"][i], theirs["told"][i]
            gaps += [abs(here[each] - there[each]) for each in here.keys() & there.keys()]
            if token != other:
                break
            agreed += 1
    return {"largest": max(gaps), "mean": sum(gaps) / len(gaps), "compared": len(gaps), "same_tokens": agreed / count}


def compare(found: dict[str, dict]) -> dict[str, dict]:
    """Return the differences of each form's answers: from those of 16 bits with the same weights, and with graphs from without."""
    made = {}
    for name, part in found.items():
        both, _, kind = name.partition("/")
        for other in (f"{both.partition('+')[0]}+bf16", both):
            if other in found and other != name and (not kind or other == both):
                made[f"{name} : {other}"] = differences(part["answers"], found[other]["answers"])
    return made


def rows(found: dict[str, dict]) -> list[dict]:
    made, times = [], {}
    timed = {name: part for name, part in found.items() if "decode" in part}
    for name, part in timed.items():
        weights, _, kv = name.partition("+")
        for row in (*part["decode"], *part["first"]):
            what = "tpot_ms" if "tpot_ms" in row else "ttft_ms"
            times[name, row["batch"], row["context"], what] = row[what]
            made.append({"weights": weights, "kv": kv} | row)
    for row in made:
        what = "tpot_ms" if "tpot_ms" in row else "ttft_ms"
        bases = {"over_same_weights_bf16_kv": f"{row['weights']}+bf16", "over_dense_bf16": "dense+bf16"}
        for ratio, base in bases.items():
            if (base, row["batch"], row["context"], what) in times:
                row[ratio] = times[base, row["batch"], row["context"], what] / row[what]
    return made


def waves(forms: list[Form], cases: list[tuple[int, int]], room: int) -> list[list[Form]]:
    """Return which forms start together."""
    made, free = [], 0
    for form in forms:
        need = form.needs(cases)
        if not made or need > free:
            made.append([])
            free = room
        made[-1].append(form)
        free -= need
    return made


def prepare(forms: list[Form], model: Path, text: Path, end: float) -> None:
    """Make the weights that are missing, then the caches, each side by side."""
    bases = {form.base: (model, WEIGHTS[form.weights]) for form in forms if WEIGHTS[form.weights]}
    of_text = ["--dataset", str(text), "--nsamples", "4", "--seqlen", "512"]
    caches = {form.folder: (form.base, ["kv", *OURS[form.kv][0], *of_text]) for form in forms if form.kv in OURS}
    for wanted in (bases, caches):
        missing = [folder for folder in wanted if not (folder / "tilepress.json").exists()]
        for process in [make(str(wanted[folder][0]), folder, wanted[folder][1]) for folder in missing]:
            try:
                process.wait(timeout=max(1.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a dense checkpoint, or demo")
    parser.add_argument("--work", type=Path, default=Path("artifacts"), help="where forms are, or are made")
    parser.add_argument("--text", type=Path, help="for calibration; by default MODEL.jsonl")
    parser.add_argument("--forms", default=FORMS)
    parser.add_argument("--cases", default=CASES, help="BATCHxCONTEXT")
    parser.add_argument("--untimed", action="store_true", help="compare answers only")
    parser.add_argument("--room", type=float, default=76.0, help="gigabytes of the card that engines take together")
    parser.add_argument("--output", type=Path, default=Path("vllm_cache.json"))
    parser.add_argument("--prepare", type=float, default=200.0, help="seconds for what is missing to be made")
    parser.add_argument("--start", type=float, default=240.0, help="seconds for engines that start together")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for a form to be asked and timed")
    parser.add_argument("--runs", type=int, default=RUNS, help="of each case, of which the median counts")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    model, text = Path(asked.model), asked.text
    if asked.model == "demo":
        from tilepress import demo

        model, text, asked.work = demo.MODEL, text or demo.MODEL.parent / "text.jsonl", asked.work / "demo"
    text = text or model.with_name(model.name + ".jsonl")
    cases = [tuple(map(int, case.split("x"))) for case in asked.cases.split(",")]
    if asked.one:
        run(Form(asked.one, model, asked.work), cases, asked.untimed, asked.runs)
    asked.work.mkdir(parents=True, exist_ok=True)
    forms = [Form(name, model, asked.work) for name in asked.forms.split(",")]
    prepare(forms, model, text, time.monotonic() + asked.prepare)
    env, found = environment(), {}
    for part in map(json.loads, [file.read_text() for file in asked.work.glob("of_*.json")]):
        found[part.pop("form")] = part
    for form in forms:
        found.pop(form.name, None)
        form.part.unlink(missing_ok=True)
    notes = {form.name: "was not made" for form in forms if not (form.folder / "config.json").exists()}
    all_waves, processes = waves([f for f in forms if f.name not in notes], cases, int(asked.room * 1e9)), {}
    for form in (form for together in all_waves for form in together):  # vLLM is imported by all of them at once
        words = [__file__, *sys.argv[1:], "--one", form.name]
        processes[form] = child(words, form.log, TILEPRESS_VLLM_KV="packed" if form.kv in OURS else "plain")
    for together in all_waves:
        running = {form: processes[form] for form in together}
        for process in running.values():
            tell(process)
        end = time.monotonic() + asked.start
        ready = {form: wait_until_ready(process, end) for form, process in running.items()}
        for form, process in running.items():
            try:
                if not ready[form]:
                    raise TimeoutError(f"no engine, see {form.log.name}")
                process.communicate("go\n", timeout=asked.timeout)
                if process.returncode:
                    raise ChildProcessError(f"ended with {process.returncode}, see {form.log.name}")
            except (subprocess.SubprocessError, OSError) as error:
                notes[form.name] = repr(error)
            process.kill()
            process.wait()
            if form.part.exists():  # what it had before it ended
                found[form.name] = json.loads(form.part.read_text())
            sizes = {name: part["token_bytes"] for name, part in found.items()}
            told = {"env": env, "failed": notes, "token_bytes": sizes, "answers": compare(found), "rows": rows(found)}
            asked.output.write_text(json.dumps(told, indent=1) + "\n")
            print(form.name, notes.get(form.name, "was measured"), flush=True)
    for pair, gaps in compare(found).items():
        print(pair, {name: round(value, 4) for name, value in gaps.items()})
    for row in rows(found):
        print({name: round(v, 3) if isinstance(v, float) else v for name, v in row.items() if name != "kernels_ms"})
    sys.exit(bool(notes))


def run(form: Form, cases: list[tuple[int, int]], is_untimed: bool, runs: int) -> None:
    """Ask and time one form, in a process of its own."""
    config = json.loads((form.folder / "config.json").read_text())
    cases = [(batch, min(context, config["max_position_embeddings"] - LONG - 8)) for batch, context in cases]
    cache = form.cache_bytes(cases)
    llm, started = engine(str(form.folder), cases, cache, **form.options)
    blocks = llm.llm_engine.vllm_config.cache_config
    token_bytes = cache / blocks.num_gpu_blocks / blocks.block_size
    found = {"form": form.name, "started_s": started, "token_bytes": token_bytes}
    found["answers"] = answers(llm)
    form.part.write_text(json.dumps(found))
    if not (is_untimed or form.is_eager):
        form.part.write_text(json.dumps(found | measure(llm, cases, runs)))
    os._exit(0)  # an engine's own end takes long and says much


if __name__ == "__main__":
    main()
