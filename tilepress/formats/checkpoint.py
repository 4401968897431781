"""Reading a Hugging Face checkpoint folder: strict safetensors headers, shards, index, and weights in whatever layout they have.

Everything is planned from the headers; tensors are memory-mapped when they are read. A header is checked before any of it is
believed: sizes against the file, offsets in range, no overlap, no hole, no duplicate name. A pickle is never opened.

A *weight* here is what the model calls one: a dense tensor, or the several stored tensors of a packed layout under one name.
"""

import functools
import json
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tilepress.formats import TilepressError, UsageError, first_line
from tilepress.formats.files import REPAIR_HINT, in_utf8, read_json, regular
from tilepress.formats.hub import locate
from tilepress.formats.layout import Form, Layout, layout_named, layouts
from tilepress.formats.storage import sizes_of

FORMAT_VERSION = 1
INDEX_NAME = "model.safetensors.index.json"
MANIFEST_NAME = "tilepress.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 1 << 25
_MAX_TENSORS = 1 << 17  # of a shard: the largest models have as many in all of theirs
MAX_DIMENSIONS = 8
_MAX_NAME_BYTES = 255  # of a file, as file systems have it
MAX_SIZE = 1 << 50  # of a dimension or a file: beyond is nonsense
_READ_BY_OTHERS = (".json", ".txt", ".model", ".jinja", ".py")  # suffixes of what transformers opens for itself


@dataclass(frozen=True)
class TensorEntry:
    """One tensor as a shard's header declares it."""

    name: str
    file: str  # shard, relative to the checkpoint folder
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Weight:
    """A weight under its model name, with the stored tensors that make it up."""

    name: str
    layout: str  # the name of its layout
    entries: tuple[TensorEntry, ...]

    @property
    def stored_as(self) -> Layout:
        return layout_named(self.layout)

    @property
    def is_packed(self) -> bool:
        """The model's own module does not run it."""
        return self.stored_as.packed

    @property
    def file(self) -> str:
        return self.entries[0].file

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    @property
    def is_int8(self) -> bool:
        """Tell whether values are codes with a scale: as a matrix, or those of a sparse layout."""
        return self.stored_as.holds_codes(self.name, [entry.name for entry in self.entries])


def read_header(path: Path, whole: int | None = None) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file, checked against the file. Raises TilepressError naming the file and tensor.

    `whole` is the file's size where the file ends after its header, as those of a mirror do."""

    def refuse(why: str) -> TilepressError:
        return TilepressError(f"{path.name}: {why}", REPAIR_HINT)

    def no_duplicates(pairs: list) -> dict:
        found: dict = {}
        for name, value in pairs:
            if name in found:
                raise refuse(f"duplicate name {name[:200]!r} in the header")
            found[name] = value
        return found

    try:
        size = whole if whole is not None else regular(path).stat().st_size
        with open(path, "rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise refuse(f"truncated: {size} bytes, shorter than a header")
            length = struct.unpack("<Q", prefix)[0]
            if length > min(_MAX_HEADER_BYTES, size - 8):
                raise refuse(f"the header claims {length} bytes, the file has {size}")
            raw = file.read(length)
    except OSError as error:
        raise TilepressError(f"cannot read {path}: {error.strerror}", "check the file and its permissions") from error
    if (count := raw.count(b'"data_offsets"')) > _MAX_TENSORS:
        raise refuse(f"the header has {count} tensors, more than {_MAX_TENSORS}")
    try:
        header = json.loads(raw, object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise refuse("the header is not valid JSON") from error
    if not isinstance(header, dict):
        raise refuse("the header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise refuse("__metadata__ is not an object of strings")

    entries, spans = {}, []
    for name, info in header.items():
        try:
            dtype, shape, (begin, end) = DTYPES[info["dtype"]], tuple(info["shape"]), info["data_offsets"]
            numbers = [*shape, begin, end]
            if len(shape) > MAX_DIMENSIONS or any(type(n) is not int or not 0 <= n < MAX_SIZE for n in numbers):
                raise ValueError
            if not name.isprintable():  # it would steer terminals and break lines; a lone surrogate has no bytes
                raise ValueError
        except (KeyError, TypeError, ValueError) as error:
            raise refuse(f"tensor {name[:200]!r} is badly described: {str(info)[:120]}") from error
        nbytes = dtype.itemsize
        for n in shape:
            nbytes *= n
        if nbytes != end - begin or end > size - 8 - length:
            raise refuse(
                f"tensor {name!r} {list(shape)} needs {nbytes} bytes, declared at {begin}..{end} of {size - 8 - length}"
            )
        entries[name] = TensorEntry(name, path.name, dtype, shape, nbytes)
        spans.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            raise refuse(
                f"tensor {name!r} at {begin}..{end} {'overlaps another' if begin < position else 'leaves a hole'}"
            )
        position = end
    if position != size - 8 - length:
        raise refuse(f"truncated or padded: the tensors end at {position} of {size - 8 - length} bytes")
    return entries


def read_manifest(folder: Path) -> dict:
    """A folder's `tilepress.json`, checked as far as its readers rely on it. Raises TilepressError saying what is wrong."""
    manifest = read_json(folder / MANIFEST_NAME)
    version = manifest.get("format_version")
    if version != FORMAT_VERSION:
        raise TilepressError(
            f"{MANIFEST_NAME} has format version {version!r}, this tilepress reads {FORMAT_VERSION}",
            "upgrade tilepress",
        )
    numbers = {"bytes", "nonzeros", "zeros", "densest_tile", "wavefronts", "slots", "group"}
    for key, kind in (("settings", dict), ("source", dict), ("files", list), ("tensors", list), ("left_alone", list)):
        if not isinstance(manifest.get(key), kind):
            raise TilepressError(
                f"{MANIFEST_NAME} has no {key} that is {'an object' if kind is dict else 'a list'}", REPAIR_HINT
            )
    for key in ("files", "tensors", "left_alone"):
        for item in manifest[key]:
            sound = isinstance(item, dict) and isinstance(item.get("name"), str)
            sound = sound and all(type(value) is int for name, value in item.items() if name in numbers)
            sound = sound and (
                key != "files" or (isinstance(item.get("sha256"), str) and "bytes" in item and _inside(item["name"]))
            )
            sound = sound and (key != "left_alone" or isinstance(item.get("reason"), str))
            if not sound:
                raise TilepressError(
                    f"{MANIFEST_NAME} has an entry of {key} that is not one: {str(item)[:100]}", REPAIR_HINT
                )
    step: Any = manifest
    while step is not None:  # what made it, and what that was made from
        if not _is_step(step):
            raise TilepressError(
                f"{MANIFEST_NAME} has a step in its source that is not one: {str(step)[:100]}", REPAIR_HINT
            )
        step = step["source"].get("recipe")
    for key in ("calibration", "allocation", "kv_cache"):
        if not isinstance(manifest.get(key, {}), dict):
            raise TilepressError(f"{MANIFEST_NAME} has a {key} that is no object", REPAIR_HINT)
    return manifest


def _is_step(step: Any) -> bool:
    """Return whether a value is a step of an artifact's history: command, settings and the files that it read."""
    if not isinstance(step, dict) or not isinstance(step.get("command"), str):
        return False
    kinds = isinstance(step.get("settings"), dict), isinstance(source := step.get("source"), dict)
    files = source.get("files") if all(kinds) else None
    if not isinstance(files, list) or not all(isinstance(file, dict) for file in files):
        return False
    told = step["settings"]  # of which model cards tell
    if step["command"] == "compress prune" or "method" in told:
        method, sparsity = told.get("method"), told.get("sparsity")
        if not isinstance(method, str) or not isinstance(sparsity, int | float) or not 0 <= sparsity <= 1:
            return False
    return all(isinstance(file.get(key), str) for file in files for key in ("name", "sha256"))


def _inside(name: str) -> bool:
    parts = Path(name).parts
    fits = all(len(part.encode(errors="replace")) <= _MAX_NAME_BYTES for part in parts)
    return bool(name) and fits and not Path(name).is_absolute() and ".." not in parts


class Checkpoint:
    """A checkpoint folder: its config, the tensors that its headers declare, and the weights that they form."""

    def __init__(self, path: Path, name: str | None = None):
        """Reads config, index and headers. Raises TilepressError for anything missing, truncated or contradictory.

        `name` is what the model is called where that is not its folder's name: the hub id.
        """
        self.path = in_utf8(Path(path))
        self.name = name or self.path.resolve().name
        if not self.path.is_dir():
            raise UsageError(
                f"{self.path} is not a folder", "give a folder with config.json and *.safetensors, or a hub id"
            )
        if not (self.path / "config.json").exists():
            raise UsageError(
                f"{self.path} has no config.json",
                "give the folder that `save_pretrained` wrote"
                if not (self.path / ".tilepress").exists()
                else "the artifact is unfinished: run its command again with --resume",
            )
        for path in self.path.iterdir():
            if path.suffix in _READ_BY_OTHERS:
                regular(path)
        self.config = read_json(self.path / "config.json")
        if not isinstance(self.config.get("quantization_config", {}), dict):
            raise TilepressError(f"{self.path.name}: quantization_config in config.json is not an object", REPAIR_HINT)
        self.shards = self._find_shards()
        self.tensors: dict[str, TensorEntry] = {}
        sizes = sizes_of(self.path)
        for shard in self.shards:
            for name, entry in read_header(self.path / shard, sizes.get(shard)).items():
                if name in self.tensors:
                    raise TilepressError(
                        f"tensor {name!r} is in both {self.tensors[name].file} and {shard}", REPAIR_HINT
                    )
                self.tensors[name] = entry
        self._check_index()
        self._open: tuple[str, object] | None = None

    @property
    def text_config(self) -> dict:
        """The config of the language model: the whole one, or its `text_config`."""
        inner = self.config.get("text_config")
        return inner if isinstance(inner, dict) else self.config

    def _find_shards(self) -> list[str]:
        self.weight_map: dict[str, str] | None = None
        if (self.path / INDEX_NAME).exists():
            weight_map = read_json(self.path / INDEX_NAME).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
                raise TilepressError(f"{INDEX_NAME} has no weight_map of names to files", REPAIR_HINT)
            self.weight_map = weight_map
            shards = sorted(set(weight_map.values()))
            for shard in shards:
                is_name = Path(shard).name == shard and len(shard.encode(errors="replace")) <= _MAX_NAME_BYTES
                if not is_name or not shard.endswith(".safetensors"):
                    raise TilepressError(
                        f"{INDEX_NAME} names {shard[:100]!r}, which is no safetensors file of this folder", REPAIR_HINT
                    )
                if not (self.path / shard).is_file():
                    raise TilepressError(f"shard {shard} is missing; {INDEX_NAME} lists it", REPAIR_HINT)
            return shards
        files = sorted(p.name for p in self.path.glob("*.safetensors"))
        if "model.safetensors" in files:
            return ["model.safetensors"]
        if len(files) == 1:
            return files
        if files:
            raise TilepressError(f"{len(files)} safetensors files in {self.path} but no {INDEX_NAME}", REPAIR_HINT)
        pickles = sorted(p.name for p in self.path.iterdir() if p.suffix in PICKLE_SUFFIXES)
        if pickles:
            raise UsageError(
                f"{pickles[0]} is a pickle, which can run code when it is opened; tilepress reads safetensors only",
                "convert it where you trust it: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)",
            )
        raise UsageError(f"{self.path} has no *.safetensors file", "give a folder that holds the weights")

    def _check_index(self) -> None:
        if self.weight_map is None:
            return
        for name, shard in self.weight_map.items():
            if name not in self.tensors or self.tensors[name].file != shard:
                where = f"it is in {self.tensors[name].file}" if name in self.tensors else "no shard has it"
                raise TilepressError(f"{INDEX_NAME} puts tensor {name!r} in {shard}, but {where}", REPAIR_HINT)
        extra = next((name for name in self.tensors if name not in self.weight_map), None)
        if extra:
            raise TilepressError(
                f"{self.tensors[extra].file} holds tensor {extra!r}, which {INDEX_NAME} does not list", REPAIR_HINT
            )

    @cached_property
    def weights(self) -> dict[str, Weight]:
        """Map every weight by its model name, in name order; packed ones with all their parts."""
        found: dict[str, Weight] = {}
        packed = [layout for layout in layouts().values() if layout.packed and layout.applies(self.config)]
        for stored in self.tensors:
            for layout in packed:
                if parts := layout.parts(stored, self.tensors):
                    name = layout.weight_name(stored)
                    found[name] = Weight(name, layout.name, tuple(self.tensors[part] for part in parts))
                    break
        inner = {entry.name for weight in found.values() for entry in weight.entries}
        for name in self.tensors:
            part = any(name.endswith(suffix) for layout in packed for suffix in layout.suffixes[1:])
            if part and name not in inner:
                raise TilepressError(
                    f"tensor {name!r} belongs to a packed weight whose other parts are missing", REPAIR_HINT
                )
        dense = {name: Weight(name, "dense", (entry,)) for name, entry in self.tensors.items() if name not in inner}
        return dict(sorted((dense | found).items()))

    @cached_property
    def manifest(self) -> dict | None:
        """`tilepress.json`, or None for a checkpoint that no tilepress command finished."""
        return read_manifest(self.path) if (self.path / MANIFEST_NAME).exists() else None

    def read(self, name: str) -> Tensor:
        """Return one stored tensor, memory-mapped on the CPU."""
        return self._read(name, lambda file: file.get_tensor(name))

    def part(self, name: str, *index: slice) -> Tensor:
        """A range of one stored tensor: nothing else of it is read."""
        return self._read(name, lambda file: file.get_slice(name)[index]) if index else self.read(name)

    def _read(self, name: str, get: Callable[[safe_open], Tensor]) -> Tensor:
        file = self.tensors[name].file
        try:
            if self._open is None or self._open[0] != file:
                self._open = (file, safe_open(self.path / file, framework="pt"))
            return get(self._open[1])
        except Exception as error:
            raise TilepressError(
                f"cannot read tensor {name!r} from {file}: {first_line(error)}", REPAIR_HINT
            ) from error

    def packed(self, weight: Weight, device: torch.device | str = "cpu") -> Any:
        """A weight's stored tensors on a device as its layout puts them together, with their shapes checked."""
        return _assembled(weight, {e.name: self.read(e.name).to(device) for e in weight.entries})

    def packed_shape(self, weight: Weight) -> Any:
        """The same without its tensors: they are empty, of the declared sizes, on the meta device."""
        layout, parts = weight.stored_as, {}
        for entry in weight.entries:
            if layout.described_by and entry.name == weight.name + layout.described_by:
                parts[entry.name] = self.read(entry.name)
            else:
                parts[entry.name] = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        return _assembled(weight, parts)

    def form(self, weight: Weight) -> Form:
        """Shape and dtype of a packed weight, from its headers and small parts."""
        return weight.stored_as.form(self.packed_shape(weight))

    def examine(self, weight: Weight) -> tuple[dict, list[str]]:
        """Count anew what the manifest records of a weight, and list what is wrong with it."""
        return weight.stored_as.examine(self.packed(weight))

    def dense(self, weight: Weight, device: torch.device | str = "cpu") -> Tensor:
        """The weight as the model without us stores it: Conv1D weights are [in, out] again."""
        if not weight.is_packed:
            return self.read(weight.name).to(device)
        layout, packed = weight.stored_as, self._safe(weight, device)
        tensor = layout.matrix(packed)
        return tensor.t().contiguous() if layout.form(packed).transposed else tensor

    def codes(self, weight: Weight, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Return int8 codes [out_features, in_features] and their scale of a packed weight that holds codes."""
        return weight.stored_as.codes(self._safe(weight, device))

    def _safe(self, weight: Weight, device: torch.device | str) -> Any:
        """Return a packed weight that may be unpacked."""
        packed = self.packed(weight, device)
        if problem := weight.stored_as.problem(packed):
            raise TilepressError(f"{weight.name}: {problem}", REPAIR_HINT)
        return packed


def _assembled(weight: Weight, parts: dict[str, Tensor]) -> Any:
    try:
        return weight.stored_as.assemble(weight.name, parts)
    except TilepressError as error:  # a layout knows what is wrong with it, and not where it comes from
        raise TilepressError(error.message, error.hint or REPAIR_HINT) from error


def open_model(model: str | Path, revision: str | None = None) -> Checkpoint:
    """Open a local folder or a hub id; a model of the hub keeps its id as its name. Raises what `locate` and `Checkpoint` raise."""
    path = locate(str(model), revision)
    return Checkpoint(path, name=None if Path(model).expanduser() == path else str(model))


# Buffers that old checkpoints store and models compute themselves: masks, rotary frequencies, position ids.
COMPUTED_BUFFER = re.compile(r"\.(attn|attention)\.(masked_)?bias$|rotary_emb\.inv_freq$|(^|\.)position_ids$")


def model_names(tensor_name: str, prefix: str) -> tuple[str, str, str]:
    """The names that a model may have for a stored tensor.

    Checkpoints may leave out the base model's prefix, or have it where the model does not (`transformer.h.0…` and `h.0…`).
    """
    return tensor_name, f"{prefix}.{tensor_name}", tensor_name.removeprefix(f"{prefix}.")


def module_path(tensor_name: str, known: set[str], prefix: str) -> str | None:
    """The model's module that a stored `….weight` belongs to, or None."""
    return next((n for n in model_names(tensor_name.removesuffix(".weight"), prefix) if n in known), None)


def linear_shape(module: torch.nn.Module | None) -> tuple[int, int, bool] | None:
    """(out_features, in_features, stored transposed) of a layer that computes x W^T + b, or None for anything else.

    Those are nn.Linear, transformers' Conv1D, and subclasses of nn.Linear that a trial shows to compute the same.
    """
    if type(module).__name__ == "Conv1D":
        return module.weight.shape[1], module.weight.shape[0], True
    if isinstance(module, torch.nn.Linear) and (type(module) is torch.nn.Linear or _computes_linear(type(module))):
        return *module.weight.shape, False
    return None


@functools.cache
def _computes_linear(kind: type) -> bool:
    try:
        with torch.no_grad(), torch.device("cpu"):
            trial, x = kind(5, 3), torch.arange(10.0).view(2, 5)
            trial.weight.data, trial.bias.data = torch.arange(15.0).view(3, 5), torch.arange(3.0)
            return torch.equal(trial(x), torch.nn.functional.linear(x, trial.weight, trial.bias))
    except Exception:  # another signature, other parameters: another layer
        return False
