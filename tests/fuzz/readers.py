"""Every reader of files as a function of bytes, for a fuzzer: it may refuse them with a TilepressError, and nothing else.

A reader that takes a file alone gets the bytes as that file, in a folder that is sound otherwise. A packed weight is given as
its tensors one behind the other, with their lengths before them. What passes a reader's own check must be usable: a weight
without a problem decodes, and to as many non-zeros as were counted.
"""

import json
import shutil
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import save, save_file

from tilepress.compress.run.lock import holder_of
from tilepress.compress.run.plan import done_record
from tilepress.eval import other_tools
from tilepress.formats import TilepressError, int8_rules, kv_calibration, tiled_bitmap, tiled_csl
from tilepress.formats.checkpoint import (
    DTYPE_NAMES,
    INDEX_NAME,
    MANIFEST_NAME,
    Checkpoint,
    read_header,
    read_json,
    read_manifest,
)
from tilepress.formats.int8 import Int8Scheme, scheme_of
from tilepress.formats.int8_packed import to_words
from tilepress.formats.kv_int4 import KVFormat
from tilepress.formats.layout import layout_named
from tilepress.formats.stripes import nonzeros
from tilepress.models.families import ONE_PRODUCT
from tilepress.text import documents

_MOST_ELEMENTS = 1 << 22  # of a weight that is decoded: a larger one is refused or told, by its reader, before


@dataclass(frozen=True)
class Reader:
    """A reader, and sound bytes to begin with."""

    read: Callable[[bytes], object]
    seeds: Callable[[], dict[str, bytes]]


@cache
def folder() -> Path:
    """A small checkpoint that is sound: two shards, an index, a config."""
    made = Path(tempfile.mkdtemp(prefix="readers-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": torch.ones(4, 8).bfloat16() for i in range(2)}
    for number, (name, tensor) in enumerate(tensors.items(), 1):
        save_file({name: tensor}, made / f"model-0000{number}-of-00002.safetensors", {"format": "pt"})
    (made / INDEX_NAME).write_bytes(_index()["sound"])
    (made / "config.json").write_bytes(_config()["dense"])
    return made


def _as_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """A reader of one file of a checkpoint, which otherwise is sound."""

    @cache
    def own() -> Path:
        return Path(shutil.copytree(folder(), tempfile.mkdtemp(dir=folder().parent), dirs_exist_ok=True))

    def given(data: bytes) -> object:
        path = own() / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        return read(path)

    return given


# --- files ---


def _headers() -> dict[str, bytes]:
    tensors = {"a": torch.arange(6).view(2, 3).int(), "b.weight": torch.ones(2).half(), "empty": torch.ones(0, 4)}
    return {"sound": save(tensors, {"format": "pt"}), "one": save({"x": torch.zeros(1)})}


def _index() -> dict[str, bytes]:
    names = {f"model.layers.{i}.mlp.up_proj.weight": f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)}
    return {"sound": json.dumps({"metadata": {"total_size": 128}, "weight_map": names}).encode()}


def _open(path: Path) -> object:
    return Checkpoint(path.parent).weights


def _config() -> dict[str, bytes]:
    dense = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "text_config": {"vocab_size": 4}}
    found = {
        "dense": dense,
        "sparse": dense | {"quantization_config": {"quant_method": "tilepress", "format_version": 1}},
    }
    for activations in ("token", "tensor-asym", "none"):
        scheme = Int8Scheme("channel", activations)
        found[f"int8-{activations}"] = dense | {"quantization_config": scheme.quantization_config(["lm_head"])}
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    }
    other = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    found["4-bits"] = dense | {"quantization_config": other}
    return {name: json.dumps(config).encode() for name, config in found.items()}


def _look_at_config(path: Path) -> None:
    checkpoint = Checkpoint(path.parent)
    quantization = checkpoint.config.get("quantization_config", {})
    assert isinstance(checkpoint.text_config, dict)
    tensors = {e.name: (DTYPE_NAMES[e.dtype], e.shape) for e in checkpoint.tensors.values()}
    layer = "model.layers.0.mlp.up_proj"
    tensors |= {f"{layer}.weight": ("I8", (4, 8)), f"{layer}.weight_scale": ("BF16", (4, 1))}
    tensors |= {"x.weight_packed": ("I32", (4, 1)), "x.weight_shape": ("I64", (2,)), "x.weight_scale": ("F32", (4, 1))}
    values = {"x.weight_shape": torch.tensor([4, 8])}

    def value(name: str) -> torch.Tensor:
        return values.get(name, torch.ones(1))

    int8_rules.vllm_findings(quantization, tensors, {f"{layer}.weight": layer}, value, ONE_PRODUCT)
    if other_tools.is_of_compressed_tensors(checkpoint.config):
        other_tools.why_not_ours(quantization)
        other_tools.check(quantization, tensors, value)
    scheme_of(quantization)


def _manifest() -> dict[str, bytes]:
    name = "model.layers.0.mlp.up_proj.weight"
    tensor = {
        "name": name,
        "layout": "dense",
        "shape": [4, 8],
        "dtype": "bfloat16",
        "nonzeros": 32,
        "bytes": 64,
        "error": 0.0,
    }
    packed = tensor | {
        "layout": "tiled-csl",
        "zeros": 3,
        "densest_tile": 9,
        "wavefronts": 8,
        "slots": 16,
        "transposed": False,
    }
    found = {
        "format_version": 1, "tilepress": "0", "command": "compress prune", "settings": {"sparsity": 0.6, "ignore": ["lm_head"]},
        "fingerprint": "0" * 64, "versions": {}, "source": {"name": "m", "files": []},
        "left_alone": [{"name": "model.norm.weight", "reason": "not a matrix"}], "tensors": [tensor, packed | {"name": "x"}],
        "files": [{"name": "config.json", "bytes": 3, "sha256": "0" * 64}],
    }  # fmt: skip
    return {"sound": json.dumps(found).encode()}


@cache
def _calibration() -> dict[str, bytes]:
    form = KVFormat(head_dim=32, bits=4, group_size=32, static=False)
    keys, values = (kv_calibration.Side(torch.full((3, 1, 32), number)) for number in (1.0, 2.0))
    found = kv_calibration.KVCalibration(1, (kv_calibration.CachedLayer(keys, values, form),))
    files = kv_calibration.to_files(found, kv_calibration.weights_hash(Checkpoint(folder())))
    return {path.rpartition("/")[2]: data for path, data in files.items()}


def _calibrated(path: Path) -> object:
    for name, data in _calibration().items():
        if name != path.name:
            (path.parent / name).write_bytes(data)
    return kv_calibration.load(Checkpoint(path.parents[1]))


def _jsonl() -> dict[str, bytes]:
    lines = [{"text": "one"}, {"text": "zwei ü", "more": [1, {"x": None}]}]
    return {"sound": "\n".join(json.dumps(line) for line in lines).encode()}


def _done() -> dict[str, bytes]:
    file = {"name": "a", "bytes": 3, "sha256": "0"}
    record = {
        "fingerprint": "f",
        "source_mtime_ns": 1,
        "source": file,
        "file": file,
        "weight_map": {"a": "b"},
        "tensors": [],
    }
    return {"sound": json.dumps(record).encode()}


def _look_at_record(path: Path) -> object:
    here = path.parent
    (here / "a").write_bytes(b"abc")
    plan = SimpleNamespace(output=here, work=here, source=here, fingerprint="f")
    return done_record(plan, SimpleNamespace(output="shard", source="a"), hashed=True)


def _look_at_lock(path: Path) -> str:
    with open(path, "rb") as file:
        return holder_of(file.fileno())


# --- packed weights ---


def joined(parts: list[np.ndarray]) -> bytes:
    """Tensors as bytes: how many elements each has, then the tensors."""
    return struct.pack(f"<{len(parts)}H", *(p.size for p in parts)) + b"".join(p.tobytes() for p in parts)


def apart(data: bytes, dtypes: list) -> list[torch.Tensor]:
    """The same back; what the bytes do not fill is left out."""
    sizes = struct.unpack_from(f"<{len(dtypes)}H", data.ljust(2 * len(dtypes), b"\0"))
    at, found = 2 * len(dtypes), []
    for size, dtype in zip(sizes, dtypes, strict=True):
        piece = data[at : at + size * np.dtype(dtype).itemsize]
        at += size * np.dtype(dtype).itemsize
        whole = len(piece) // np.dtype(dtype).itemsize * np.dtype(dtype).itemsize
        found.append(torch.from_numpy(np.frombuffer(piece[:whole], dtype).copy()))
    return found


def _decode(layout_name: str, parts: dict[str, torch.Tensor]) -> None:
    """Check a packed weight, and decode it if nothing is wrong with it."""
    layout = layout_named(layout_name)
    packed = layout.assemble("x.weight", {f"x.{name}": part for name, part in parts.items()})
    form = layout.form(packed)
    if layout.problem(packed):
        return
    assert form.elements <= 64 * sum(part.numel() for part in parts.values()) + 128 * 128 * 64, (
        "memory beyond the bytes"
    )
    found, problems = layout.examine(packed)
    if form.elements <= _MOST_ELEMENTS:
        matrix = layout.matrix(packed)
        assert tuple(matrix.shape) == (form.rows, form.cols)
        scale = getattr(packed, "scale", None)
        if not problems and (scale is None or bool((scale.float().abs() > 1e-30).all())):
            assert nonzeros(matrix) == found["nonzeros"], (nonzeros(matrix), found)


def _weight(rows: int, cols: int, count: int) -> torch.Tensor:
    weight = torch.zeros(rows * cols, dtype=torch.bfloat16)
    weight[torch.randperm(rows * cols, generator=torch.Generator().manual_seed(0))[:count]] = 1.5
    return weight.view(rows, cols)


def _ints(*tensors: torch.Tensor) -> list[np.ndarray]:
    return [tensor.numpy().reshape(-1) for tensor in tensors]


def _csl_seeds() -> dict[str, bytes]:
    found = {}
    for name, shape in (("tile", (128, 64, 40)), ("ragged", (130, 70, 50)), ("zeros", (16, 16, 0))):
        packed = tiled_csl.pack(_weight(*shape))
        beside = packed.beside()
        found[name] = joined(_ints(beside["_offsets"], beside["_layout"], packed.words))
    return found


def _read_csl(data: bytes) -> None:
    offsets, layout, words = apart(data, [np.int32] * 3)
    _decode("tiled-csl", {"weight": words, "weight_offsets": offsets, "weight_layout": layout})


def _bitmap_seeds() -> dict[str, bytes]:
    found = {}
    for name, shape, group in (("one", (16, 16, 20), 1), ("pairs", (40, 70, 90), 2)):
        packed = tiled_bitmap.pack(_weight(*shape), group)
        beside = packed.beside()
        found[name] = joined([*_ints(beside["_offsets"], beside["_bitmap"], packed.words), np.zeros(0, np.float16)])
    codes = (_weight(16, 16, 20) * 8).to(torch.int8)
    packed = tiled_bitmap.pack(codes, 1, torch.full((16,), 0.5).half())
    beside = packed.beside()
    found["codes"] = joined(_ints(beside["_offsets"], beside["_bitmap"], packed.words, beside["_scale"]))
    return found


def _read_bitmap(data: bytes) -> None:
    offsets, bitmap, words, scale = apart(data, [np.int32, np.int32, np.int32, np.float16])
    parts = {"weight": words, "weight_offsets": offsets, "weight_bitmap": bitmap}
    _decode("tiled-bitmap", parts | ({"weight_scale": scale} if scale.numel() else {}))


def _int8_seeds() -> dict[str, bytes]:
    codes = np.arange(-12, 12, dtype=np.int8)
    return {
        "channel": joined(
            [np.array([4, 6, 0], np.int16), codes, np.full(4, 0.5, np.float32), *[np.zeros(0, np.float32)]]
        ),
        "static": joined([np.array([4, 6, 1], np.int16), codes, np.full(1, 0.5, np.float32), np.ones(1, np.float32)]),
    }


def _read_int8(data: bytes) -> None:
    shape, codes, scale, input_scale = apart(data, [np.int16, np.int8, np.float32, np.float32])
    rows, cols, kind = (*shape.tolist(), 0, 0, 0)[:3]
    if rows < 0 or cols < 0 or rows * cols != codes.numel():
        return  # safetensors has said so
    weight = codes.view(1, cols, rows) if kind & 2 else codes.view(rows, cols)
    scale = scale.view(-1, 1) if kind & 4 == 0 and scale.numel() > 1 else scale
    parts = {"weight": weight, "weight_scale": scale}
    _decode("int8", parts | ({"input_scale": input_scale} if input_scale.numel() else {}))


def _int8_packed_seeds() -> dict[str, bytes]:
    words = to_words(torch.arange(-12, 9, dtype=torch.int8).view(3, 7)).numpy()
    return {"odd": joined([np.array([3, 7]), words, np.full(3, 0.5, np.float32)])}


def _read_int8_packed(data: bytes) -> None:
    shape, words, scale = apart(data, [np.int64, np.int32, np.float32])
    rows = max(1, scale.numel())
    words = words[: words.numel() // rows * rows].view(rows, -1)
    _decode("int8-packed", {"weight_packed": words, "weight_scale": scale.view(-1, 1), "weight_shape": shape})


READERS = {
    "header": Reader(_as_file("fuzzed.bin", read_header), _headers),
    "index": Reader(_as_file(INDEX_NAME, _open), _index),
    "config": Reader(_as_file("config.json", _look_at_config), _config),
    "manifest": Reader(_as_file(MANIFEST_NAME, lambda path: read_manifest(path.parent)), _manifest),
    "json": Reader(_as_file("any.json", read_json), _manifest),
    "kv-facts": Reader(
        _as_file("kv_cache/kv_cache.json", _calibrated), lambda: {"sound": _calibration()[kv_calibration.FACTS_NAME]}
    ),
    "kv-tensors": Reader(
        _as_file(f"kv_cache/{kv_calibration.TENSORS_NAME}", _calibrated),
        lambda: {"sound": _calibration()[kv_calibration.TENSORS_NAME]},
    ),
    "jsonl": Reader(_as_file("text.jsonl", lambda path: list(documents(str(path)))), _jsonl),
    "done-record": Reader(_as_file("shard.done.json", _look_at_record), _done),
    "lock": Reader(_as_file("lock", _look_at_lock), lambda: {"sound": b'{"pid": 12, "host": "here"}'}),
    "tiled-csl": Reader(_read_csl, _csl_seeds),
    "tiled-bitmap": Reader(_read_bitmap, _bitmap_seeds),
    "int8": Reader(_read_int8, _int8_seeds),
    "int8-packed": Reader(_read_int8_packed, _int8_packed_seeds),
}


def read(name: str, data: bytes) -> bool:
    """Give bytes to a reader; return whether it takes them. Whatever else it raises than a TilepressError is a finding."""
    try:
        READERS[name].read(data)
    except TilepressError as error:
        assert error.message
        return False
    return True
