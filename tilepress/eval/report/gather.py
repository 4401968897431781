"""What a report is made of: artifacts as their manifests tell them, and the results of commands, by the model that they are of."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from types import SimpleNamespace

from tilepress.compress.recipes import Steps, of_manifest
from tilepress.compress.run.finish import history
from tilepress.eval.inspect import inspect
from tilepress.formats import TilepressError, UsageError, foreign_errors
from tilepress.formats.checkpoint import MANIFEST_NAME, Checkpoint, read_manifest
from tilepress.formats.files import read_json, regular
from tilepress.models.experts import expert_tokens
from tilepress.models.families import heads_of
from tilepress.text import max_positions

_KINDS = {  # a result of ours, by keys that no other has
    "perplexity": ("perplexity", "protocol", "bits_per_byte"),
    "tasks": ("results", "protocol", "base_model"),
    "speed": ("env", "rows", "protocol"),
    "compare": ("pairs", "distance"),
    "sweep": ("source", "settings", "rows"),
}
_LAYER = re.compile(r"(?:^|\.)(\d+)\.(.+?)(?:\.weight)?$")
HEAD_ERRORS, EXPERT_TOKENS = "cache error of each KV head", "expert coverage"  # of `Artifact.maps`
CARDS = {"24 GiB (RTX 4090, L4)": 24, "48 GiB (L40S)": 48, "80 GiB (A100, H100)": 80, "140 GiB (H200)": 140}
_FOR_THE_REST = 2 << 30  # bytes left for activations, graphs and torch itself
_OF_A_CARD = 0.95  # share of a card's memory that a process gets, about


@dataclass(frozen=True)
class Artifact:
    """A folder, from its headers and manifest. What only a manifest tells is None for a dense model."""

    name: str
    path: str
    bytes: int  # of stored weights
    elements: int
    source_bytes: int | None  # of the files of what it was first made from
    zeros: float | None  # share of the linear weights that were compressed
    layouts: dict[str, int]  # number of weights by layout
    kv_bytes: int | None  # of a token in the attention cache
    kv_bytes_dense: int | None  # of a token in bfloat16
    positions: int | None  # that the model has
    steps: Steps | None
    versions: dict[str, str]
    maps: dict[str, list[dict]]  # by what is drawn, such as "sparsity": layer, projection (or head, expert) and value
    cache_errors: list[dict]  # of each layer, from the calibration of an attention cache
    left_alone: dict[str, int]  # number of tensors by reason

    def context(self, gib: float) -> int | None:
        """Return how many tokens of one sequence a card of so many GiB holds beside the weights, about; None where heads are not known."""
        if not self.kv_bytes:
            return None
        free = _OF_A_CARD * gib * (1 << 30) - _FOR_THE_REST - self.bytes
        return max(0, int(free // self.kv_bytes))


@dataclass(frozen=True)
class Gathered:
    """Everything that a report shows."""

    artifacts: tuple[Artifact, ...] = ()
    perplexities: tuple[dict, ...] = ()  # as `eval perplexity --json` prints them; so the others
    tasks: tuple[dict, ...] = ()
    speeds: tuple[dict, ...] = ()
    compared: tuple[dict, ...] = ()
    sweeps: tuple[dict, ...] = ()
    notes: tuple[str, ...] = field(default=())  # what could not be read, and why

    def artifact(self, name: str) -> Artifact | None:
        """Return the artifact that a result calls so: by its path, else by its folder's name."""
        same = [one for one in self.artifacts if os.path.realpath(one.path) == os.path.realpath(name)]
        return next(iter(same or [one for one in self.artifacts if one.name == Path(name).name]), None)

    def to_json(self) -> dict:
        """Return everything as a dictionary of plain values."""
        return asdict(self)


def gather(runs: Sequence[str | Path | dict]) -> Gathered:
    """Read what `report` is given. Raises UsageError for what is neither an artifact nor a result, and for nothing at all."""
    if not runs:
        raise UsageError("there is nothing to report on", "give artifacts, and JSON files of `eval`")
    folders: dict[str, Path] = {}
    found: dict[str, list[dict]] = {kind: [] for kind in _KINDS}
    for run in runs:
        if not isinstance(run, dict) and Path(run).is_dir():
            folders.setdefault(os.path.realpath(run), Path(run))
            continue
        result, where = (run, "a result") if isinstance(run, dict) else (_read(Path(run)), str(run))
        found[_kind(result, where)].append(result)
    named, notes = _named(found), []
    for name in named:
        if Path(name).is_dir():
            folders.setdefault(os.path.realpath(name), Path(name))
    artifacts = []
    for path in folders.values():
        given = any(not isinstance(run, dict) and os.path.realpath(run) == os.path.realpath(path) for run in runs)
        try:
            artifacts.append(_artifact(path))
        except TilepressError as error:
            if given:
                raise
            notes.append(f"{path} was not read: {error.message}")
    parts = (tuple(found[kind]) for kind in ("perplexity", "tasks", "speed", "compare", "sweep"))
    return Gathered(tuple(artifacts), *parts, tuple(notes))


def _read(path: Path) -> dict:
    if not path.exists():
        raise UsageError(f"there is no {path}", "give folders of artifacts, and JSON files of `eval … -o FILE`")
    return read_json(regular(path))


def _kind(result: dict, where: str) -> str:
    kind = next((kind for kind, keys in _KINDS.items() if all(key in result for key in keys)), None)
    if kind is None:
        hint = "give what `eval perplexity`, `eval tasks`, `eval speed` or `compare` writes with -o FILE"
        raise UsageError(f"{where} is no result that a report shows", hint)
    return kind


def _named(found: dict[str, list[dict]]) -> list[str]:
    """Return the models that results name, as far as they may be folders: what is compressed, not what it is compared with."""
    names = [result.get("model") for kind in ("perplexity", "tasks") for result in found[kind]]
    names += [row.get("model") for result in found["speed"] for row in result["rows"] if not row.get("is_base")]
    names += [result.get("b") for result in found["compare"]]
    return list(dict.fromkeys(name for name in names if isinstance(name, str)))


def _artifact(path: Path) -> Artifact:
    checkpoint = Checkpoint(path)
    with foreign_errors(f"the manifest of {path} does not say what it should", "make the artifact again"):
        seen, manifest = inspect(path), read_manifest(path) if (path / MANIFEST_NAME).exists() else None
        config = checkpoint.text_config
        layouts: dict[str, int] = {}
        for row in seen.rows:
            layouts[row.layout] = layouts.get(row.layout, 0) + 1
        dense = _cache_bytes(config)
        cache = (manifest or {}).get("kv_cache") or {}
        first = history(manifest)[-1]["source"]["files"] if manifest else []
        left: dict[str, int] = {}
        for reason in seen.left_alone.values():
            left[reason] = left.get(reason, 0) + 1
        compressed = [row for row in seen.rows if row.sparsity is not None and row.name not in seen.left_alone]
        packed = [
            row for row in compressed if row.asked is not None or row.filled or row.densest_tile or row.sparsity > 0.1
        ]
        zeros = sum(row.sparsity * prod(row.shape) for row in packed)
        return Artifact(
            path.resolve().name,
            str(path),
            seen.bytes,
            seen.elements,
            sum(file["bytes"] for file in first) or None,
            zeros / sum(prod(row.shape) for row in packed) if packed else None,
            layouts,
            cache.get("bytes_per_token", dense),
            cache.get("bytes_per_token_bfloat16", dense),
            max_positions(config),
            of_manifest(manifest) if manifest else None,
            {"tilepress": manifest["tilepress"]} | manifest["versions"] if manifest else {},
            {
                "output error": _output_errors(seen, manifest or {}),
                "sparsity": _sparsities(packed),
                HEAD_ERRORS: _head_errors(cache.get("report", [])),
                EXPERT_TOKENS: _expert_tokens((manifest or {}).get("calibration") or {}),
            },
            list(cache.get("report", [])),
            left,
        )


def _cache_bytes(config: dict) -> int | None:
    """Return the bytes that a token's keys and values take in 16 bits; None for a config that does not tell."""
    try:
        heads = heads_of(SimpleNamespace(**config))
        return 2 * 2 * config["num_hidden_layers"] * heads.kv_count * heads.dim
    except (AttributeError, KeyError, TypeError, ZeroDivisionError):
        return None


def place(name: str) -> tuple[int, str] | None:
    """Return the layer and the projection of a weight, experts of a layer under one name; None for one that is in no layer."""
    found = _LAYER.search(name)
    return None if found is None else (int(found[1]), re.sub(r"\.\d+\.", ".*.", found[2]))


def _cells(values: dict[str, float]) -> list[dict]:
    """Return a cell for each layer and projection, with the mean over what stands under one name."""
    cells: dict[tuple[int, str], list[float]] = {}
    for name, value in values.items():
        if (at := place(name)) is not None:
            cells.setdefault(at, []).append(value)
    return [{"layer": at[0], "projection": at[1], "value": sum(v) / len(v)} for at, v in sorted(cells.items())]


def _output_errors(seen, manifest: dict) -> list[dict]:
    """Return the relative error of outputs on calibration text: what quantization measured, else what pruning did."""
    values = {row.name: row.output_error for row in seen.rows if row.output_error is not None}
    layers = manifest.get("report", {}).get("layers", [])
    values |= {layer["name"]: layer["output_error"] for layer in layers if layer.get("output_error") is not None}
    return _cells(values)


def _head_errors(report: list[dict]) -> list[dict]:
    """Return the part of each KV head in its layer's error of attention, from the calibration of an attention cache."""
    return [
        {"layer": layer["layer"], "projection": f"head {head}", "value": error}
        for layer in report
        for head, error in enumerate(layer.get("head_errors", ()))
    ]


def _expert_tokens(calibration: dict) -> list[dict]:
    """Return how many tokens of the calibration text the router of a mixture gave each expert."""
    cells = []
    for path, tokens in expert_tokens(calibration).items():
        if found := _LAYER.search(f"{path}.weight"):
            cells += [
                {"layer": int(found[1]), "projection": f"expert {i}", "value": seen} for i, seen in enumerate(tokens)
            ]
    return sorted(cells, key=lambda cell: cell["layer"])


def _sparsities(rows) -> list[dict]:
    return _cells({row.name: row.sparsity for row in rows})


def json_for_script(value: object) -> str:
    """Return JSON that may stand in a script of a page, whatever strings are in it."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
