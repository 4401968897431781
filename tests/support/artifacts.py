"""Artifacts that tests make through the library."""

from pathlib import Path

import torch

import tilepress
from tilepress import KVCache, Prune, Quantize, demo
from tilepress.compress.run.plan import Recipe
from tilepress.formats.checkpoint import read_manifest
from tilepress.formats.kv_calibration import uncalibrated
from tilepress.formats.kv_int4 import KVFormat
from tilepress.runtime.hf import paged_cache as kv_cache
from tilepress.runtime.loader import load
from tilepress.text import Text


def run_recipe(
    recipe: Recipe, source: Path, output: Path, device: str = "cpu", resume: bool = False, text: Text | None = None
) -> dict:
    """Write an artifact through the library; return the manifest."""
    tilepress.compress(source, output, recipe, dataset=text, device=device, resume=resume)
    return read_manifest(output)


def prune(
    source: Path, output: Path, sparsity: float = 0.6, format: str = "tiled-csl", text: Text | None = None, **settings
) -> dict:
    return run_recipe(Prune(sparsity, format=format, **settings), source, output, text=text)


def quantize(source: Path, output: Path, device: str = "cpu", text: Text | None = None, **settings) -> dict:
    return run_recipe(Quantize(**settings), source, output, device, text=text)


def few_words(nsamples: int = 8, seqlen: int = 64, dataset: Path = demo.TEXT) -> Text:
    """Text to calibrate random models with."""
    return Text(str(dataset), nsamples, seqlen)


def with_cache(source: Path, form: KVFormat):
    """The model in float32 with a cache whose rows are quantized by their own extremes."""
    model = load(source, dtype=torch.float32, kv=False)
    config = model.config
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    kv_cache.install(model, uncalibrated(form, kv_heads, config.num_hidden_layers))
    return model


CARD = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE_OPT = {"hidden_size": 256, "ffn_dim": 256, "word_embed_proj_dim": 256, "num_attention_heads": 4}
ALONE = {  # what an artifact is made by, one after the other
    "tiled-csl": (lambda source, out: prune(source, out, 0.6, "tiled-csl"),),
    "tiled-bitmap": (lambda source, out: prune(source, out, 0.6, "tiled-bitmap"),),
    "int8": (quantize,),
    "int8 weights": (lambda source, out: quantize(source, out, activations="none"),),
    "dense": (),
}
PACKED = (lambda source, out: run_recipe(KVCache(), source, out, text=few_words(4, 64)),)
STACKED = ALONE | {f"{name}+kv4": (*steps, *PACKED) for name, steps in ALONE.items()}
