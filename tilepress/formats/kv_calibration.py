"""The sidecar `kv_cache/` of an artifact: what was calibrated for its attention cache. Drawn in docs/format.md.

A value of a channel is stored as x = mean + scale * (code * s + z), see kernels/kv_cache.py. The sidecar holds mean, scale and error
weight of every channel, clip of every layer, for static formats (s, z), and for 4-bit keys the feedback of their rounding errors. It belongs to the
weights that it was calibrated with: a hash over names, shapes, dtypes and a sample of all tensors says which.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from tilepress.formats import TilepressError, UsageError, dtype_name, first_line
from tilepress.formats.checkpoint import Checkpoint
from tilepress.formats.files import read_json, regular
from tilepress.formats.kv_int4 import LEAST_SCALE, Forms, KVFormat, feeds_forward, forms_of

FOLDER = "kv_cache"
CONFIG_KEY = "tilepress_kv_cache"  # of config.json, names the folder
FACTS_NAME, TENSORS_NAME = "kv_cache.json", "scales.safetensors"
VERSION, MIXED_VERSION = 1, 2  # 2: `KVCalibration.is_mixed`
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

    def of_heads(self, first: int, end: int) -> "Side":
        """The part of some KV heads."""
        channels = None if self.channels is None else self.channels[:, first:end].contiguous()
        return Side(channels, None if self.fixed is None else self.fixed[first:end].contiguous(), self.clip)


class CachedLayer(NamedTuple):
    """One decoder layer's part of a cache."""

    key: Side
    value: Side
    form: Forms
    rotate: bool = False  # keys by a Hadamard matrix
    feedback: Tensor | None = None  # of keys' rounding errors: int8 [KV heads, D / 4, D, 4], see kv_int4.py

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.key, self.value

    def to(self, device: torch.device | str) -> "CachedLayer":
        feedback = None if self.feedback is None else self.feedback.to(device)
        return self._replace(key=self.key.to(device), value=self.value.to(device), feedback=feedback)

    def of_heads(self, first: int, end: int) -> "CachedLayer":
        """The part of some KV heads, such as a rank's."""
        feedback = None if self.feedback is None else self.feedback[first:end].contiguous()
        key, value = (side.of_heads(first, end) for side in self.sides)
        return self._replace(key=key, value=value, feedback=feedback)


@dataclass(frozen=True)
class KVCalibration:
    """Calibration of a model's attention cache. `facts` are the settings and what was measured, for people to read."""

    kv_heads: int
    layers: tuple[CachedLayer, ...]
    refits: int = 0  # of dynamic 4-bit scales
    facts: dict | None = None

    @property
    def head_dim(self) -> int:
        return self.layers[0].form.head_dim

    def check_model(self, layers: int, kv_heads: int, head_dim: int) -> None:
        """Raise TilepressError for a model of other layers, heads or head dimensions."""
        found, declared = (layers, kv_heads, head_dim), (len(self.layers), self.kv_heads, self.head_dim)
        if found != declared:
            raise TilepressError(
                "the cache was calibrated for {} layers with {} KV heads of {}, the model has {} with {} of {}".format(
                    *declared, *found
                ),
                _AGAIN,
            )

    @property
    def is_mixed(self) -> bool:
        """Whether layers, or a layer's keys and values, differ in form or rotation, or are stored in 16 bits: what version 1 of the sidecar cannot say."""
        first = self.layers[0]
        return first.form.key.bits == 16 or any(
            (layer.form.key, layer.form.value, layer.rotate) != (first.form.key, first.form.key, first.rotate)
            for layer in self.layers
        )

    @property
    def name(self) -> str:
        return name_of([layer.form for layer in self.layers])

    @property
    def bits_per_element(self) -> float:
        return bits_per_element([layer.form for layer in self.layers])

    @property
    def bytes_per_token(self) -> int:
        return self.kv_heads * sum(layer.form.key.row_bytes + layer.form.value.row_bytes for layer in self.layers)


def name_of(forms: Sequence[Forms]) -> str:
    """The name of the layers' formats: the format's own where all have one."""
    rows = {row for form in forms for row in (form.key, form.value)}
    return rows.pop().name if len(rows) == 1 else f"mixed, {bits_per_element(forms):.3f} bits a number"


def bits_per_element(forms: Sequence[Forms]) -> float:
    """The mean bits of a stored number of keys and values, scales counted."""
    rows = [row for form in forms for row in (form.key, form.value)]
    return 8 * sum(row.row_bytes for row in rows) / sum(row.head_dim for row in rows)


def uncalibrated(form: Forms, kv_heads: int, layers: int) -> KVCalibration:
    """Rows by their own extremes, nothing known beforehand: the baseline, and 16 bits."""
    return KVCalibration(kv_heads, (CachedLayer(Side(None), Side(None), form),) * layers)


def weights_hash(checkpoint: Checkpoint, changed: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor) -> str:
    """The hash of a checkpoint's weights, however they are split into files.

    It covers each tensor's name, dtype, shape and 256 of its elements, in the order of names. `changed` gives a tensor as it will be.
    """
    digest = hashlib.sha256()
    for name, entry in sorted(checkpoint.tensors.items()):
        flat = changed(name, checkpoint.read(name)).reshape(-1)
        sample = flat[:: max(1, flat.numel() // 256)][:256].contiguous().view(torch.uint8)
        digest.update(f"{name} {dtype_name(entry.dtype)} {list(entry.shape)}\n".encode() + bytes(sample.tolist()))
    return digest.hexdigest()


def to_files(calibration: KVCalibration, weights: str) -> dict[str, bytes]:
    """The sidecar's files by their names in the artifact."""
    tensors = {}
    for number, layer in enumerate(calibration.layers):
        for what, side in zip(("key", "value"), layer.sides, strict=True):
            if side.channels is None:  # 16 bits
                continue
            for part, tensor in zip(("mean", "scale", "weight"), side.channels, strict=True):
                tensors[f"layers.{number}.{what}_{part}"] = tensor.float().cpu().contiguous()
            if side.fixed is not None:
                tensors[f"layers.{number}.{what}_fixed"] = side.fixed.cpu().contiguous()
        if layer.feedback is not None:
            tensors[f"layers.{number}.key_feedback"] = layer.feedback.cpu().contiguous()
    layers, mixed = calibration.layers, calibration.is_mixed
    rotations = ["hadamard" if layer.rotate else "none" for layer in layers]
    told = [[_told(layer.form.key), _told(layer.form.value)] for layer in layers]
    facts = {
        "format_version": MIXED_VERSION if mixed else VERSION,
        **({"forms": told} if mixed else told[0][0]),
        "head_dim": calibration.head_dim,
        "kv_heads": calibration.kv_heads,
        "layers": len(layers),
        "rotation": rotations if mixed else rotations[0],
        "refits": calibration.refits,
        "clip": [[layer.key.clip, layer.value.clip] for layer in layers],
        "weights_sha256": weights,
    } | (calibration.facts or {})
    return {
        f"{FOLDER}/{FACTS_NAME}": (json.dumps(facts, indent=2) + "\n").encode(),
        f"{FOLDER}/{TENSORS_NAME}": save(tensors, metadata={"format": "pt"}),
    }


def _told(form: KVFormat) -> dict:
    """A format in the words of `kv_cache.json`."""
    mode = "static" if form.static else "dynamic"
    return {"bits": form.bits, "group_size": form.group_size or form.head_dim, "mode": mode}


def read_facts(folder: Path) -> dict | None:
    """`kv_cache.json` of an artifact, checked as far as its readers rely on it; None where there is no sidecar.

    Raises TilepressError saying what is wrong."""
    path = folder / FOLDER / FACTS_NAME
    if not path.exists():
        return None
    facts = read_json(path)
    version = facts.get("format_version")
    if version not in (VERSION, MIXED_VERSION):
        raise TilepressError(
            f"{FACTS_NAME} has format version {version!r}, this tilepress reads {VERSION} and {MIXED_VERSION}",
            "upgrade tilepress",
        )
    if not _is_sound(facts):
        raise TilepressError(f"{FACTS_NAME} does not describe a calibration", _AGAIN)
    return facts


def _is_sound(facts: dict) -> bool:
    numbers = [facts.get(name) for name in ("head_dim", "kv_heads", "layers", "refits")]
    if not all(type(number) is int and number >= 0 for number in numbers) or numbers[-1] > _MOST_REFITS:
        return False
    layers, clip, mixed = facts["layers"], facts.get("clip"), facts["format_version"] == MIXED_VERSION
    rotations, told = (facts.get(name) if mixed else [facts.get(name)] for name in ("rotation", "forms"))
    told = told if mixed else [[{name: facts.get(name) for name in ("bits", "group_size", "mode")}] * 2]
    count = layers if mixed else 1
    sound = layers > 0 and all(isinstance(each, list) for each in (clip, rotations, told)) and len(clip) == layers
    sound = sound and len(rotations) == len(told) == count
    sound = sound and all(rotation in ("none", "hadamard") for rotation in rotations)
    sound = sound and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(x, int | float) and 0 < x <= 1 for x in pair)
        for pair in clip
    )
    sound = sound and all(isinstance(pair, list) and len(pair) == 2 for pair in told)
    return sound and all(
        _is_form(row, facts["head_dim"], (4, 8, 16) if mixed else (4, 8)) for pair in told for row in pair
    )


def _is_form(told, head_dim: int, bits: tuple[int, ...]) -> bool:
    """Whether an entry describes a format of rows."""
    numbers = isinstance(told, dict) and [told.get("bits"), told.get("group_size")]
    if not numbers or not all(type(number) is int and number >= 0 for number in numbers) or numbers[0] not in bits:
        return False
    if told.get("mode") not in ("dynamic", "static"):
        return False
    try:
        _form(told, head_dim)
    except UsageError:
        return False
    return True


def _form(told: dict, head_dim: int) -> KVFormat:
    return KVFormat(head_dim, told["bits"], told["group_size"], told["mode"] == "static")


def forms_in(facts: dict) -> list[Forms]:
    """The formats of each layer that `read_facts` describes."""
    dim = facts["head_dim"]
    if facts["format_version"] == VERSION:
        return [_form(facts, dim)] * facts["layers"]
    return [forms_of(*(_form(row, dim) for row in pair)) for pair in facts["forms"]]


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
    forms, heads, dim, rotations = forms_in(facts), facts["kv_heads"], facts["head_dim"], facts["rotation"]
    path = regular(checkpoint.path / FOLDER / TENSORS_NAME)
    try:
        tensors = load_file(path)
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
    rotations = rotations if isinstance(rotations, list) else [rotations] * len(forms)
    for number, (clips, form, rotation) in enumerate(zip(facts["clip"], forms, rotations, strict=True)):
        sides = []
        for what, clip, row in zip(("key", "value"), clips, (form.key, form.value), strict=True):
            stem, rows = f"layers.{number}.{what}", (heads, dim)
            if row.bits == 16:
                sides.append(Side(None))
                continue
            parts = (("mean", -torch.inf), ("scale", 1e-20), ("weight", 0.0))
            channels = torch.stack([take(f"{stem}_{part}", rows, torch.float32, least) for part, least in parts])
            groups = (heads, row.groups, 2)
            fixed = take(f"{stem}_fixed", groups, torch.float16, LEAST_SCALE) if row.static else None
            sides.append(Side(channels, fixed, float(clip)))
        feedback = None
        if form.key.bits == 4 and (name := f"layers.{number}.key_feedback") in tensors:
            feedback = take(name, (heads, dim // 4, dim, 4), torch.int8, -127)
            if not feeds_forward(feedback):
                raise TilepressError(f"{FOLDER}/{TENSORS_NAME}: {name} moves channels that are rounded before", _AGAIN)
        layers.append(CachedLayer(*sides, form, rotation == "hadamard", feedback))
    if tensors:
        raise TilepressError(f"{FOLDER}/{TENSORS_NAME}: {min(tensors)} is of no layer", _AGAIN)
    return KVCalibration(heads, tuple(layers), facts["refits"], facts)
