"""Times a step of recovery beside a plain training step of the same model on the same windows, and prints one JSON object.

    python benchmarks/recovery_step.py MODEL --dataset wikitext2_valid.jsonl -o benchmarks/h100/recovery.json --device cuda

The plain step is what a user would write: weights in float32, products in bfloat16 (autocast), cross-entropy of the next token, AdamW (fused),
nothing computed again. Ours is what `tilepress compress recover` does, from its own progress: the dense model as teacher, divergence and hidden
states' error, zeros held, and kernels whose sums have one order. Plain steps are timed before and after, so that a load that changes shows.
"""

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM

import tilepress
from tilepress import Prune, Recover, Text
from tilepress.text import load_tokenizer

_LOOK_EVERY = 10  # steps between two reports of recovery's progress


def plain_seconds(model: str, ids: torch.Tensor, steps: int) -> float:
    """Return the seconds of a plain training step on windows `ids` [windows, tokens], the mean of `steps` after two more."""
    device = ids.device
    student = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device)
    adam = torch.optim.AdamW(student.parameters(), lr=1e-6, fused=device.type == "cuda")
    for step in range(steps + 2):
        if step == 2:
            synchronize(device)
            started = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            logits = student(ids, use_cache=False).logits
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        adam.step()
        adam.zero_grad(set_to_none=True)
    synchronize(device)
    return (time.perf_counter() - started) / steps


def our_seconds(model: str, text: Text, batch: int, steps: int, device: str) -> float:
    """Return the seconds of a step of recovery, without the first ten."""
    seen: list[float] = []

    def progress(what: str, done: int, total: int) -> None:
        if what.startswith("step "):
            seen.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        tilepress.compress(model, out / "pruned", Prune(0.5, format="dense"), device=device)
        recipe = Recover(steps, batch=batch, base=model)
        tilepress.compress(out / "pruned", out / "recovered", recipe, dataset=text, device=device, progress=progress)
    return (seen[-1] - seen[0]) / (_LOOK_EVERY * (len(seen) - 1))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a dense model")
    parser.add_argument("--dataset", required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40, help="of recovery, in tens")
    how = parser.parse_args()
    text = Text(how.dataset, how.batch, how.seqlen)
    windows = text.windows(load_tokenizer(Path(how.model)))
    ids = torch.tensor(windows, device=how.device)
    before = plain_seconds(how.model, ids, how.steps // 4)
    ours = our_seconds(how.model, text, how.batch, how.steps, how.device)
    after = plain_seconds(how.model, ids, how.steps // 4)
    tokens = how.batch * how.seqlen
    found = {
        "model": Path(how.model).name,
        "device": torch.cuda.get_device_name() if how.device.startswith("cuda") else platform.processor() or "cpu",
        "torch": torch.__version__,
        "windows": how.batch,
        "seqlen": how.seqlen,
        "plain_tokens_per_s": [round(tokens / before), round(tokens / after)],
        "recovery_tokens_per_s": round(tokens / ours),
        "recovery_over_plain": round((before + after) / 2 / ours, 3),
    }
    how.output.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
