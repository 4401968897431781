"""A model with activation outliers that computes what its source computes: a few channels of each norm are large, the weights that read
them small. Factors are powers of two, so bfloat16 stays exact."""

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
