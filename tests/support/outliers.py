"""A model with activation outliers that computes what its source computes: a few channels of each norm are large, the weights that read
them small. Factors are powers of two, so bfloat16 stays exact."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def add_outliers(source: Path, output: Path, channels: int = 8, seed: int = 0) -> Path:
    """Copies a Llama checkpoint, with `channels` of every norm before linear layers times 32 or 64."""
    shutil.copytree(source, output, copy_function=shutil.copyfile)
    shards = {path: load_file(path) for path in sorted(output.glob("*.safetensors"))}
    tensors = {name: tensor for shard in shards.values() for name, tensor in shard.items()}
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        stem, _, norm = name.removesuffix(".weight").rpartition(".")
        if norm in READERS:
            chosen = torch.randperm(len(tensor), generator=generator)[:channels]
            factors = torch.ones(len(tensor), dtype=tensor.dtype)
            factors[chosen] = 2.0 ** torch.randint(5, 7, (channels,), generator=generator).to(tensor.dtype)
            tensor *= factors
            for reader in READERS[norm]:
                tensors[f"{stem}.{reader}.weight"] /= factors
    for path, shard in shards.items():
        path.unlink()
        save_file(shard, path, metadata={"format": "pt"})
    return output


def add_key_outliers(source: Path, output: Path, pairs: int = 3, seed: int = 0) -> Path:
    """Copies a Llama checkpoint, with a few pairs of every KV head's key channels times 32 and the queries' that meet them smaller by as much.

    Both channels that RoPE rotates together get the factor, so that the scores stay what they were."""
    shutil.copytree(source, output, copy_function=shutil.copyfile)
    config = json.loads((source / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    generator = torch.Generator().manual_seed(seed)
    factors: dict[str, torch.Tensor] = {}
    for path in sorted(output.glob("*.safetensors")):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            layer, _, rest = name.partition(".self_attn.")
            if rest in ("q_proj.weight", "k_proj.weight"):
                if layer not in factors:
                    chosen = torch.stack(
                        [torch.randperm(dim // 2, generator=generator)[:pairs] for _ in range(kv_heads)]
                    )
                    factors[layer] = torch.ones(kv_heads, dim)
                    factors[layer].scatter_(1, torch.cat([chosen, chosen + dim // 2], 1), 32.0)
                by_row = (
                    factors[layer]
                    if rest.startswith("k")
                    else 1 / factors[layer].repeat_interleave(heads // kv_heads, 0)
                )
                tensor *= by_row.reshape(-1, 1).to(tensor.dtype)
        path.unlink()
        save_file(tensors, path, metadata={"format": "pt"})
    return output
