"""The sidecar `kv_cache/` of an artifact: what was calibrated for its attention cache. Drawn in docs/format.md.

A value of a channel is stored as x = mean + scale * (code * s + z), see kernels/kv_cache.py. The sidecar holds mean, scale and error
weight of every channel, clip of every layer and, for static formats, (s, z). It belongs to the weights that it was calibrated with: a hash
over names, shapes, dtypes and a sample of all tensors says which.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from tilepress.formats import TilepressError, UsageError, dtype_name, first_line
from tilepress.formats.checkpoint import Checkpoint
from tilepress.formats.files import read_json, regular
from tilepress.formats.kv_int4 import LEAST_SCALE, KVFormat

FOLDER = "kv_cache"
CONFIG_KEY = "tilepress_kv_cache"  # of config.json, names the folder
FACTS_NAME, TENSORS_NAME = "kv_cache.json", "scales.safetensors"
VERSION = 1
_MOST_REFITS = 8
_AGAIN = "calibrate again: `tilepress compress kv`"


class Side(NamedTuple):
    """Keys' or values' part of a layer, in the order in which the ops of kernels/kv_cache.py take it."""

    # float32 [3, KV heads, D]: mean, scale, weight of squared errors; None: nothing is calibrated.
    channels: Tensor | None
    fixed: Tensor | None = None  # float16 [KV heads, groups, 2]: (scale, shift) of static formats
    clip: float = 1.0

    def to(self, device: torch.device | str) -> "Side":
        moved = (None if tensor is None else tensor.to(device) for tensor in self[:2])
        return Side(*moved, self.clip)


@dataclass(frozen=True)
class KVCalibration:
    """Calibration of a model's attention cache. `facts` are the settings and what was measured, for people to read."""

    form: KVFormat
    kv_heads: int
    layers: tuple[tuple[Side, Side], ...]  # (keys, values) of each decoder layer
    rotate: bool = False  # keys by a Hadamard matrix
    refits: int = 0
    facts: dict | None = None

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.form.row_bytes * self.kv_heads * len(self.layers)


def uncalibrated(form: KVFormat, kv_heads: int, layers: int) -> KVCalibration:
    """Rows by their own extremes, nothing known beforehand: the baseline, and 16 bits."""
    return KVCalibration(form, kv_heads, ((Side(None), Side(None)),) * layers)


def weights_hash(checkpoint: Checkpoint) -> str:
    """The hash of a checkpoint's weights, however they are split into files.

    It covers each tensor's name, dtype, shape and 256 of its elements, in the order of names.
    """
    digest = hashlib.sha256()
    for name, entry in sorted(checkpoint.tensors.items()):
        flat = checkpoint.read(name).reshape(-1)
        sample = flat[:: max(1, flat.numel() // 256)][:256].contiguous().view(torch.uint8)
        digest.update(f"{name} {dtype_name(entry.dtype)} {list(entry.shape)}\n".encode() + bytes(sample.tolist()))
    return digest.hexdigest()


def to_files(calibration: KVCalibration, weights: str) -> dict[str, bytes]:
    """The sidecar's files by their names in the artifact."""
    tensors = {}
    for number, sides in enumerate(calibration.layers):
        for what, side in zip(("key", "value"), sides, strict=True):
            for part, tensor in zip(("mean", "scale", "weight"), side.channels, strict=True):
                tensors[f"layers.{number}.{what}_{part}"] = tensor.float().cpu().contiguous()
            if side.fixed is not None:
                tensors[f"layers.{number}.{what}_fixed"] = side.fixed.cpu().contiguous()
    form = calibration.form
    facts = {
        "format_version": VERSION,
        "bits": form.bits,
        "group_size": form.group_size or form.head_dim,
        "mode": "static" if form.static else "dynamic",
        "head_dim": form.head_dim,
        "kv_heads": calibration.kv_heads,
        "layers": len(calibration.layers),
        "rotation": "hadamard" if calibration.rotate else "none",
        "refits": calibration.refits,
        "clip": [[key.clip, value.clip] for key, value in calibration.layers],
        "weights_sha256": weights,
    } | (calibration.facts or {})
    return {
        f"{FOLDER}/{FACTS_NAME}": (json.dumps(facts, indent=2) + "\n").encode(),
        f"{FOLDER}/{TENSORS_NAME}": save(tensors, metadata={"format": "pt"}),
    }


def read_facts(folder: Path) -> dict | None:
    """`kv_cache.json` of an artifact, checked as far as its readers rely on it; None where there is no sidecar.

    Raises TilepressError saying what is wrong."""
    path = folder / FOLDER / FACTS_NAME
    if not path.exists():
        return None
    facts = read_json(path)
    if facts.get("format_version") != VERSION:
        raise TilepressError(
            f"{FACTS_NAME} has format version {facts.get('format_version')!r}, this tilepress reads {VERSION}",
            "upgrade tilepress",
        )
    numbers = ("bits", "group_size", "head_dim", "kv_heads", "layers", "refits")
    sound = all(type(facts.get(name)) is int and facts[name] >= 0 for name in numbers)
    sound = (
        sound
        and facts["refits"] <= _MOST_REFITS
        and facts.get("mode") in ("dynamic", "static")
        and facts.get("rotation") in ("none", "hadamard")
    )
    clip = facts.get("clip")
    sound = sound and facts["bits"] in (4, 8) and isinstance(clip, list) and len(clip) == facts["layers"]
    sound = sound and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(x, int | float) and 0 < x <= 1 for x in pair)
        for pair in clip
    )
    if sound:
        try:
            form_of(facts)
        except UsageError:
            sound = False
    if not sound:
        raise TilepressError(f"{FACTS_NAME} does not describe a calibration", _AGAIN)
    return facts


def form_of(facts: dict) -> KVFormat:
    """The format that `read_facts` describes."""
    return KVFormat(facts["head_dim"], facts["bits"], facts["group_size"], facts["mode"] == "static")


def load(checkpoint: Checkpoint) -> KVCalibration | None:
    """A checkpoint's calibration, or None. Raises TilepressError for one that is damaged or belongs to other weights."""
    facts = read_facts(checkpoint.path)
    if facts is None:
        if CONFIG_KEY in checkpoint.config:
            raise TilepressError(
                f"config.json of {checkpoint.name} names a calibrated cache, but {FOLDER}/{FACTS_NAME} is missing",
                f"copy {FOLDER}/ too, {_AGAIN.split(':')[0]}, or take {CONFIG_KEY!r} out of config.json",
            )
        return None
    if facts.get("weights_sha256") != weights_hash(checkpoint):
        raise TilepressError(
            f"{FOLDER}/ of {checkpoint.name} belongs to other weights: their hash differs",
            f"{_AGAIN}, or remove {FOLDER}/",
        )
    form, heads = form_of(facts), facts["kv_heads"]
    try:
        tensors = load_file(regular(checkpoint.path / FOLDER / TENSORS_NAME))
    except Exception as error:
        raise TilepressError(f"cannot read {FOLDER}/{TENSORS_NAME}: {first_line(error)}", _AGAIN) from error

    def take(name: str, shape: tuple[int, ...], dtype: torch.dtype, least: float) -> Tensor:
        tensor = tensors.pop(name, None)
        if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != dtype:
            found = "missing" if tensor is None else f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
            raise TilepressError(
                f"{FOLDER}/{TENSORS_NAME}: {name} is {found}, not {dtype_name(dtype)} {list(shape)}", _AGAIN
            )
        bounded = tensor[..., 0] if dtype == torch.float16 else tensor  # of (scale, shift) the scale
        if not bool(torch.isfinite(tensor).all() and (bounded >= least).all()):
            raise TilepressError(f"{FOLDER}/{TENSORS_NAME}: {name} holds values that no calibration gives", _AGAIN)
        return tensor

    layers = []
    for number, clips in enumerate(facts["clip"]):
        sides = []
        for what, clip in zip(("key", "value"), clips, strict=True):
            stem, rows = f"layers.{number}.{what}", (heads, form.head_dim)
            parts = (("mean", -torch.inf), ("scale", 1e-20), ("weight", 0.0))
            channels = torch.stack([take(f"{stem}_{part}", rows, torch.float32, least) for part, least in parts])
            groups = (heads, form.groups, 2)
            fixed = take(f"{stem}_fixed", groups, torch.float16, LEAST_SCALE) if form.static else None
            sides.append(Side(channels, fixed, float(clip)))
        layers.append(tuple(sides))
    if tensors:
        raise TilepressError(f"{FOLDER}/{TENSORS_NAME}: {min(tensors)} is of no layer", _AGAIN)
    return KVCalibration(form, heads, tuple(layers), facts["rotation"] == "hadamard", facts["refits"], facts)
