"""Plan a checkpoint of Llama-3-405B's shape (812 GB) and write one worker's shards of it, with little disk: all other shards are holes.

    python benchmarks/large_checkpoint.py FOLDER --world-size 100

It prints one JSON object: what the plan foresees, and what the worker took. FOLDER is removed; it holds the worker's shards, before and
after, about 10 GB for one of 100 workers.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from tilepress.formats.artifact import to_json

WIDTH, INNER, LAYERS, KV, VOCABULARY = 16384, 53248, 126, 1024, 128256
SHARD_BYTES = 4_600_000_000  # at most, as the published files have
_BLOCK = 1 << 24  # random numbers that are repeated: what is measured does not depend on them


def tensors() -> dict[str, tuple[int, ...]]:
    """Return every tensor's shape in the order of the files."""
    found = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        found |= {at + "self_attn.q_proj.weight": (WIDTH, WIDTH), at + "self_attn.o_proj.weight": (WIDTH, WIDTH)}
        found |= {at + f"self_attn.{name}_proj.weight": (KV, WIDTH) for name in "kv"}
        found |= {at + f"mlp.{name}_proj.weight": (INNER, WIDTH) for name in ("gate", "up")}
        found |= {at + "mlp.down_proj.weight": (WIDTH, INNER)}
        found |= {at + f"{name}_layernorm.weight": (WIDTH,) for name in ("input", "post_attention")}
    return found | {"model.norm.weight": (WIDTH,), "lm_head.weight": (VOCABULARY, WIDTH)}


def files() -> list[dict[str, tuple[int, ...]]]:
    """Return the tensors of each file."""
    found, used = [{}], 0
    for name, shape in tensors().items():
        nbytes = 2 * torch.Size(shape).numel()
        if used + nbytes > SHARD_BYTES:
            found.append({})
            used = 0
        found[-1][name] = shape
        used += nbytes
    return found


def write_hole(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write a file that has a header and takes no room behind it."""
    header, at = {}, 0
    for name, shape in shapes.items():
        end = at + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    data = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(data).to_bytes(8, "little") + data)
        file.truncate(8 + len(data) + at)


def make(folder: Path, rank: int, world_size: int) -> None:
    """Write the checkpoint with numbers in this worker's files only."""
    folder.mkdir(parents=True)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
    )
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    config.save_pretrained(folder)
    found, index = files(), {}
    block = torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0)).bfloat16().mul_(0.02)
    for number, shapes in enumerate(found):
        name = f"model-{number + 1:05d}-of-{len(found):05d}.safetensors"
        index |= dict.fromkeys(shapes, name)
        if number % world_size != rank:
            write_hole(folder / name, shapes)
            continue
        numbers = {}
        for tensor, shape in shapes.items():
            count = torch.Size(shape).numel()
            numbers[tensor] = block.repeat(-(-count // _BLOCK))[:count].view(shape)
        save_file(numbers, folder / name)
    (folder / "model.safetensors.index.json").write_bytes(to_json({"weight_map": index}))


def worker(words: list[str]) -> tuple[float, int]:
    """Run a command; return its seconds and the highest anonymous memory in bytes."""
    started, peak = time.monotonic(), 0
    process = subprocess.Popen([sys.executable, "-m", "tilepress", *words])
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            continue
        if anonymous := re.search(r"RssAnon:\s+(\d+) kB", status):
            peak = max(peak, int(anonymous[1]) * 1024)
        time.sleep(0.01)
    if process.returncode:
        sys.exit(process.returncode)
    return time.monotonic() - started, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--world-size", type=int, default=100)
    parser.add_argument("--rank", type=int, default=1)
    given = parser.parse_args()
    model, output = given.folder / "model", given.folder / "int8"
    share = ["--rank", str(given.rank), "--world-size", str(given.world_size)]
    # As an address the output needs room for the shards at hand only; a folder is refused that cannot take all of the run.
    words = ["compress", "quantize", str(model), "-o", output.absolute().as_uri()]
    os.environ["TMPDIR"] = str(given.folder.absolute())
    try:
        make(model, given.rank, given.world_size)
        started = time.monotonic()
        plan = subprocess.run(
            [sys.executable, "-m", "tilepress", *words, *share, "--dry-run", "--json"],
            check=True,
            stdout=subprocess.PIPE,
        )
        planning_s, facts = time.monotonic() - started, json.loads(plan.stdout)
        seconds, peak = worker([*words, *share, "--quiet"])
        written = sum(path.stat().st_size for path in output.glob("*.safetensors"))
    finally:
        shutil.rmtree(given.folder, ignore_errors=True)
    told = {key: facts[key] for key in ("source_bytes", "disk_bytes", "peak_memory_bytes", "shards", "forecast")}
    took = {"planning_s": round(planning_s, 1), "worker_s": round(seconds, 1), "worker_peak_bytes": peak}
    print(json.dumps(told | took | {"worker_wrote_bytes": written}, indent=1))


if __name__ == "__main__":
    main()
