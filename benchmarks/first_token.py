"""Times the first token of a model, by CUDA graphs and op by op, and says where the host's time goes.

    python benchmarks/first_token.py random-8b/w8a8 --output first.json
    python benchmarks/first_token.py llama-3-8b --recipe dense,w8a8+kv4,tiled-csl-80+kv4,tiled-bitmap-50+kv4

MODEL is a folder, or a shape of `tilepress demo --shape`: then random weights are made on the device, for each of --recipe. A prompt of random tokens is
prefilled alone, again and again; the time ends when the host knows the token. `host_ms` ends when everything is launched, `card_ms` is what kernels take,
`launches` how many there are. By graphs `logits_differ` is the largest difference from logits op by op, relative to the largest logit. `together` are
several prompts of a length at once. On a CPU nothing is captured, and numbers only show that the script runs.
"""

import argparse
import cProfile
import gc
import json
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

import tilepress
from tilepress.bench.kernels import environment
from tilepress.bench.shapes import SHAPES, Artifact, config_of, random_model
from tilepress.bench.steps import times_without_overlap
from tilepress.kernels import packed
from tilepress.runtime.decode.batch import Batch, Prompt

ROOM = 16  # tokens of a sequence beyond its prompt
LONGEST = 12  # functions that are told of the host's time


def models(asked: str, recipes: str, longest: int, device: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield each model and its name."""
    if asked not in SHAPES:
        yield asked, tilepress.load(asked, device=device)
        return
    for name in recipes.split(","):
        yield f"{asked} {name}", random_model(config_of(asked, longest), Artifact.parse(name), device)[0]


def synchronize(batch: Batch) -> None:
    if batch.device.type == "cuda":
        torch.cuda.synchronize(batch.device)


def prompts_of(batch: Batch, length: int, count: int) -> list[Prompt]:
    vocabulary = batch.model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(vocabulary, (count, length), generator=generator)
    return [Prompt(i, row, length + ROOM) for i, row in enumerate(tokens)]


def timed(batch: Batch, prompts: list[Prompt], runs: int) -> dict:
    """Return medians of milliseconds to the first token, and of those that the host needs to launch everything."""
    first, host = [], []
    for _ in range(runs):
        synchronize(batch)
        started = time.perf_counter()
        batch.prefill_all(prompts)
        launched = time.perf_counter()
        batch.tokens[: len(prompts)].tolist()
        first.append(1e3 * (time.perf_counter() - started))
        host.append(1e3 * (launched - started))
        batch.clear()
    spread = (max(first) - min(first)) / statistics.median(first)
    return {"ttft_ms": statistics.median(first), "ttft_ms_spread": spread, "host_ms": statistics.median(host)}


def kernels(batch: Batch, prompts: list[Prompt]) -> dict:
    """Return how many kernels a prefill is, what they take, and the longest by name."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    if batch.device.type != "cuda":
        return {}
    synchronize(batch)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        batch.prefill_all(prompts)
        synchronize(batch)
    batch.clear()
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in found.events()
        if event.device_type == DeviceType.CUDA
    ]
    times = sorted(times_without_overlap(spans).items(), key=lambda item: -item[1])
    whole = max(end for *_, end in spans) - min(begin for _, begin, _ in spans)
    longest = [{"kernel": name[:90], "us": us} for name, us in times[:LONGEST]]
    return {
        "launches": len(spans),
        "card_ms": sum(us for _, us in times) / 1e3,
        "card_span_ms": whole / 1e3,
        "kernels": longest,
    }


def host_profile(batch: Batch, prompts: list[Prompt], launches: int | None) -> dict:
    """Return the functions that have most of the host's own time in a prefill. The profiler itself slows calls down: shares tell more than sums."""
    profile = cProfile.Profile()
    synchronize(batch)
    profile.enable()
    batch.prefill_all(prompts)
    profile.disable()
    synchronize(batch)
    batch.clear()
    stats = pstats.Stats(profile)
    entries = sorted(stats.stats.items(), key=lambda item: -item[1][2])
    total = sum(entry[2] for _, entry in entries)
    rows = [
        {
            "function": f"{Path(file).name}:{line} {name}",
            "calls": entry[1],
            "us": 1e6 * entry[2],
            "share": entry[2] / total,
        }
        for (file, line, name), entry in entries[:LONGEST]
    ]
    found = {"profiled_ms": 1e3 * total, "calls": stats.total_calls, "functions": rows}
    return found | ({"profiled_us_per_launch": 1e6 * total / launches} if launches else {})


def measured(
    model: nn.Module, lengths: list[int], count: int, runs: int, tell: Callable[[str], None]
) -> Iterator[dict]:
    """Yield a row for each length, way of launching and number of prompts."""
    on_card = next(model.parameters()).device.type == "cuda"
    ways = {"op by op": False, "graph": None} if on_card else {"op by op": False}
    batches = {way: Batch(model, max(count, 1), max(lengths) + ROOM, graphs=graphs) for way, graphs in ways.items()}
    reserved = torch.cuda.memory_reserved() if on_card else 0  # beyond it is what passes and their graphs keep
    for length in lengths:
        logits: dict[str, torch.Tensor] = {}
        for way, batch in batches.items():
            alone = prompts_of(batch, length, 1)
            started = time.perf_counter()
            for _ in range(3):  # as it is, captured, and launched for the first time
                logits[way] = batch.prefill_all(alone)
                synchronize(batch)
                batch.clear()
            row = {"length": length, "prompts": 1, "how": way, "warm_up_s": time.perf_counter() - started}
            row |= timed(batch, alone, runs) | kernels(batch, alone)
            if way == "op by op":
                row["host"] = host_profile(batch, alone, row.get("launches"))
                if launches := row.get("launches"):
                    row["host_us_per_launch"] = 1e3 * row["host_ms"] / launches
            else:
                ours, theirs = logits[way].float(), logits["op by op"].float()
                row["logits_differ"] = float((ours - theirs).abs().max() / theirs.abs().max())
                row["same_token"] = bool(ours.argmax() == theirs.argmax())
                again = batch.prefill_all(alone)
                row["same_bits_again"] = bool(torch.equal(again, logits[way]))
                batch.clear()
                row["more_reserved_gib"] = (torch.cuda.memory_reserved() - reserved) / 2**30
            tell(told(row))
            yield row
            if count > 1:
                some = prompts_of(batch, length, count)
                for _ in range(3):
                    batch.prefill_all(some)
                    batch.clear()
                row = {"length": length, "prompts": count, "how": way} | timed(batch, some, runs)
                tell(told(row))
                yield row


def told(row: dict) -> str:
    parts = [
        f"{row['prompts']:>3} x {row['length']:>5}  {row['how']:<9} {row['ttft_ms']:8.2f} ms, host {row['host_ms']:.2f}"
    ]
    if "launches" in row:
        parts.append(f"card {row['card_ms']:.2f} in {row['launches']} launches over {row['card_span_ms']:.2f}")
    if "host_us_per_launch" in row:
        parts.append(f"{row['host_us_per_launch']:.1f} us of the host each")
    if "logits_differ" in row:
        parts.append(f"logits differ by {row['logits_differ']:.1e}, same token {row['same_token']}")
        parts.append(f"same bits again {row['same_bits_again']}")
    return ", ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or a shape such as llama-3-8b")
    parser.add_argument("--recipe", default="dense,w8a8+kv4,tiled-csl-80+kv4,tiled-bitmap-50+kv4")
    parser.add_argument("--lengths", default="32,128,512,2048")
    parser.add_argument("--together", type=int, default=8, help="prompts at once, for the rows of several; 1: none")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--decoded-rows", type=int, help="rows of a packed weight that are decoded at once for cuBLAS")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    if asked.decoded_rows:
        packed._DECODED_ROWS = asked.decoded_rows
    lengths, rows = [int(word) for word in asked.lengths.split(",")], []
    for name, model in models(asked.model, asked.recipe, max(lengths) + ROOM, asked.device):
        print(name, flush=True)
        for row in measured(model, lengths, asked.together, asked.runs, lambda text: print(f"  {text}", flush=True)):
            rows.append({"model": name} | row)
        del model
        gc.collect()
        if asked.device != "cpu":
            torch.cuda.empty_cache()
    found = {"env": environment() if asked.device != "cpu" else {"torch": torch.__version__}, "rows": rows}
    if asked.output is not None:
        asked.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
