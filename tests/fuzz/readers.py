"""Every reader of files as a function of bytes, for a fuzzer: it may refuse them with a TilepressError, and nothing else.

A reader that takes a file alone gets the bytes as that file, in a folder that is sound otherwise. A packed weight is given as
its tensors one behind the other, with their lengths before them. What passes a reader's own check must be usable: a weight
without a problem decodes, and to as many non-zeros as were counted.
"""

import contextlib
import json
import math
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
import yaml
from safetensors.torch import save, save_file

from tilepress.compress.recipes import Steps, recipe
from tilepress.compress.run.finish import model_card
from tilepress.compress.run.lock import holder_of
from tilepress.compress.run.plan import done_record
from tilepress.eval import other_tools
from tilepress.eval.inspect import inspect
from tilepress.formats import TilepressError, int8_rules, kv_calibration, tiled_bitmap, tiled_csl
from tilepress.formats.checkpoint import (
    DTYPES,
    INDEX_NAME,
    MANIFEST_NAME,
    MAX_DIMENSIONS,
    MAX_SIZE,
    Checkpoint,
    read_header,
    read_json,
    read_manifest,
)
from tilepress.formats.int8 import Int8Scheme, scheme_of
from tilepress.formats.int8_packed import to_words
from tilepress.formats.kv_int4 import KVFormat, fake_quantize, forms_of
from tilepress.formats.kv_pages import page_order
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
    found["int8-exceptions"] = dense | {"quantization_config": _exceptions()}
    found["4-bits"] = dense | {"quantization_config": _of_others()}
    return {name: json.dumps(config).encode() for name, config in found.items()}


_LAYER = "model.layers.0.mlp"


def _exceptions() -> dict:
    """Static inputs, but for one layer."""
    scheme = Int8Scheme("channel", "tensor", frozenset({f"{_LAYER}.down_proj"}))
    return scheme.quantization_config(["lm_head"], [f"{_LAYER}.{name}_proj" for name in ("gate", "up", "down")])


def _of_others() -> dict:
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


def _look_at_config(path: Path) -> None:
    checkpoint = Checkpoint(path.parent)
    quantization = checkpoint.config.get("quantization_config", {})
    assert isinstance(checkpoint.text_config, dict)
    if other_tools.is_of_compressed_tensors(checkpoint.config):
        other_tools.why_not_ours(quantization)
    scheme_of(quantization)


def _rules() -> dict[str, bytes]:
    """A `quantization_config` with the headers beside it, and the number that fills each tensor."""
    own, exceptions = {f"{_LAYER}.norm.weight": ["BF16", [8], 1]}, _exceptions()
    for name in ("gate", "up", "down"):
        own |= {
            f"{_LAYER}.{name}_proj.weight": ["I8", [4, 8], 3],
            f"{_LAYER}.{name}_proj.weight_scale": ["BF16", [4, 1], 1],
        }
        own |= {} if name == "down" else {f"{_LAYER}.{name}_proj.input_scale": ["BF16", [1], 0.5]}
    exceptions |= {"ignore": ["lm_head", "re:.*router$"], "sparsity_config": {"format": "dense"}}
    shape, scale = ["I64", [2], 8], ["F32", [8, 1], 1]
    others = {
        "x.weight_packed": ["I32", [8, 1], 7],
        "x.weight_shape": shape,
        "x.weight_scale": scale,
        "x.weight_zero_point": ["I32", [1, 1], 0],
    }
    alone, name = Int8Scheme("channel", "none").quantization_config(["lm_head"]), f"{_LAYER}.up_proj.weight"
    packed = {f"{name}_packed": ["I32", [8, 2], 7], f"{name}_shape": shape, f"{name}_scale": scale}
    found = {"exceptions": [exceptions, own], "4-bits": [_of_others(), others], "packed": [alone, packed]}
    return {name: json.dumps(parts).encode() for name, parts in found.items()}


def _look_at_rules(path: Path) -> bool:
    """Check a config against headers, which a shard may have. What is no such pair is no input."""
    try:
        config, headers = json.loads(path.read_bytes())
        tensors = {name: (kind, tuple(shape)) for name, (kind, shape, _) in headers.items()}
        elements = [
            math.prod(shape) for kind, shape in tensors.values() if all(type(n) is int and n >= 0 for n in shape)
        ]
        values = {name: float(fill) for name, (_, _, fill) in headers.items()}
        sound = isinstance(config, dict) and all(kind in DTYPES for kind, _ in tensors.values())
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return False
    if not sound or len(elements) < len(tensors) or max(elements, default=0) > 1 << 16:
        return False
    if any(len(shape) > MAX_DIMENSIONS or max(shape, default=0) >= MAX_SIZE for _, shape in tensors.values()):
        return False  # no header that is read has it

    def value(name: str) -> torch.Tensor:
        kind, shape = tensors[name]
        return torch.full(shape, values[name], dtype=torch.float64).to(DTYPES[kind])

    names = {name: name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")}
    findings, _ = int8_rules.vllm_findings(config, tensors, names, value, ONE_PRODUCT)
    _, others, _ = other_tools.check(config, tensors, value)
    return not findings or not others


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
        "format_version": 1, "tilepress": "0", "command": "compress prune", "settings": {"sparsity": 0.6, "method": "magnitude", "ignore": ["lm_head"]},
        "fingerprint": "0" * 64, "versions": {}, "source": {"name": "m", "files": []},
        "left_alone": [{"name": "model.norm.weight", "reason": "not a matrix"}], "tensors": [tensor, packed | {"name": "x"}],
        "files": [{"name": "config.json", "bytes": 3, "sha256": "0" * 64}],
    }  # fmt: skip
    return {"sound": json.dumps(found).encode()}


def _look_at_manifest(path: Path) -> None:
    """Read a manifest, describe what it tells of the weights, and tell it as the history of another artifact."""
    manifest = read_manifest(path.parent)
    with contextlib.suppress(TilepressError):
        inspect(path.parent)
    recipe = {key: manifest[key] for key in ("command", "settings", "source")}
    own = json.loads(_manifest()["sound"])
    model_card(own | {"source": own["source"] | {"recipe": recipe}})


@cache
def _calibrations() -> dict[str, dict[str, bytes]]:
    """The files of a calibration in one form, of one whose layers differ, and of one with feedback of keys' errors."""
    int4, int8, static, plain = (KVFormat(32, *how) for how in ((4, 32), (8,), (4, 0, True), (16,)))
    layer, none = kv_calibration.CachedLayer, kv_calibration.Side(None)

    def side(number: float) -> kv_calibration.Side:
        return kv_calibration.Side(torch.full((3, 1, 32), number))

    with_scales = side(2)._replace(fixed=torch.ones(1, 1, 2).half(), clip=0.9)
    mixed = (
        layer(side(1), with_scales, forms_of(int8, static), rotate=True),
        layer(none, side(3), forms_of(plain, int4)),
    )
    feedback = torch.zeros(1, 8, 32, 4, dtype=torch.int8)
    feedback[:, :4, 16:] = 9  # of the first half to the second
    fed = (layer(side(1), side(2), int4, True, feedback),)
    found = {"sound": (layer(side(1), side(2), int4),), "mixed": mixed, "fed": fed}
    weights = kv_calibration.weights_hash(Checkpoint(folder()))
    files = {
        name: kv_calibration.to_files(kv_calibration.KVCalibration(1, layers, refits=1), weights)
        for name, layers in found.items()
    }
    return {name: {path.rpartition("/")[2]: data for path, data in made.items()} for name, made in files.items()}


def _calibrated(path: Path) -> None:
    """Load a sidecar of which one file is given, with the other file of each calibration; what is loaded must serve."""
    refused = None
    for files in _calibrations().values():
        for name in files.keys() - {path.name}:
            (path.parent / name).write_bytes(files[name])
        try:
            found = kv_calibration.load(Checkpoint(path.parents[1]))
        except TilepressError as error:
            refused = error
            continue
        assert len(found.layers) <= 2 and found.bytes_per_token > 0
        for each in found.layers:
            page_order(each.form)
            for what, form in zip(each.sides, (each.form.key, each.form.value), strict=True):
                rows = torch.linspace(-3, 3, 2 * found.kv_heads * form.head_dim).view(2, found.kv_heads, -1)
                feedback = each.feedback if what is each.key else None
                back = fake_quantize(rows, form, *what, each.rotate, found.refits, feedback)
                assert back.shape == rows.shape
        return
    raise refused


def _jsonl() -> dict[str, bytes]:
    lines = [{"text": "one"}, {"text": "zwei ü", "more": [1, {"x": None}]}]
    return {"sound": "\n".join(json.dumps(line) for line in lines).encode()}


def _recipe() -> dict[str, bytes]:
    steps = [
        {"command": "prune", "sparsity": 0.5, "method": "wanda", "ignore": ["lm_head"], "dataset": "text.jsonl"},
        {"command": "quantize", "activations": "tensor", "observer": "percentile 99.99", "dtype": "bfloat16"},
        {"command": "recover", "steps": 2, "base": "dense", "nsamples": 4},
        {"command": "kv", "bits": 4, "group_size": "head"},
    ]
    whole = Steps("model", tuple(steps)).to_yaml()
    return {"sound": whole.encode(), "json": json.dumps(yaml.safe_load(whole)).encode()}  # JSON is YAML, too


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
            # Layouts without a scale keep every bit, so a zero with a sign counts; a product with a scale has none.
            count = nonzeros(matrix.view(torch.int16) if scale is None else matrix)
            assert count == found["nonzeros"], (count, found)


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
    "recipe": Reader(_as_file("recipe.yaml", lambda path: recipe(path).recipes()), _recipe),
    "header": Reader(_as_file("fuzzed.bin", read_header), _headers),
    "index": Reader(_as_file(INDEX_NAME, _open), _index),
    "config": Reader(_as_file("config.json", _look_at_config), _config),
    "rules": Reader(_as_file("rules.json", _look_at_rules), _rules),
    "manifest": Reader(_as_file(MANIFEST_NAME, _look_at_manifest), _manifest),
    "json": Reader(_as_file("any.json", read_json), _manifest),
    "kv-facts": Reader(
        _as_file("kv_cache/kv_cache.json", _calibrated),
        lambda: {name: files[kv_calibration.FACTS_NAME] for name, files in _calibrations().items()},
    ),
    "kv-tensors": Reader(
        _as_file(f"kv_cache/{kv_calibration.TENSORS_NAME}", _calibrated),
        lambda: {name: files[kv_calibration.TENSORS_NAME] for name, files in _calibrations().items()},
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
        return READERS[name].read(data) is not False
    except TilepressError as error:
        assert error.message
        return False
