"""The contents of a checkpoint or artifact, from headers and manifest alone: nothing is read that grows with the model."""

from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

from tilepress.formats import dtype_name, foreign_errors
from tilepress.formats.checkpoint import Checkpoint, open_model


@dataclass(frozen=True)
class WeightRow:
    """One weight of a model. What only a manifest can tell is None without one."""

    name: str
    layout: str  # its name
    shape: tuple[int, ...]  # packed: (out_features, in_features)
    dtype: str  # of the values
    bytes: int
    sparsity: float | None = None  # share of zeros
    densest_tile: float | None = None  # non-zeros of the fullest tile, as a share of the tile
    wavefronts_per_32: float | None = (
        None  # shared-memory wavefronts per 32 non-zeros when the kernel scatters a tile; 1.0 is ideal
    )
    value_dtype: str | None = None  # of a bitmap's values
    filled: float | None = None  # share of a bitmap's places that hold a non-zero
    error: float | None = None  # relative Frobenius error against the source
    asked: float | None = None  # the sparsity that an allocation chose
    method: str | None = None  # by which it was pruned
    output_error: float | None = None  # of its outputs on calibration text, relative


@dataclass(frozen=True)
class Inspection:
    """The contents of a model: sizes in bytes, counts in elements."""

    path: str
    architecture: str
    made_by: str | None  # command and settings, from the manifest
    shards: int
    rows: tuple[WeightRow, ...]
    left_alone: dict[str, str]  # name: reason
    kv_cache: dict | None = None  # what the manifest tells of it
    allocation: str | None = None  # how a calibrated pruning laid out its zeros

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.rows)

    @property
    def elements(self) -> int:
        return sum(prod(row.shape) for row in self.rows)

    def to_json(self) -> dict:
        """Return what `inspect --json` prints, as a dictionary of plain values."""
        return asdict(self) | {"bytes": self.bytes, "elements": self.elements}


def inspect(model: str | Path, revision: str | None = None) -> Inspection:
    """Describe every weight of a folder or hub id, dense or compressed. Raises TilepressError for what is no sound checkpoint."""
    checkpoint = open_model(model, revision)
    with foreign_errors(f"{checkpoint.name} does not say what it should", "make the artifact again"):
        return _described(checkpoint)


def _described(checkpoint: Checkpoint) -> Inspection:
    manifest = checkpoint.manifest or {}
    records = {record["name"]: record for record in manifest.get("tensors", [])}
    chosen = {item["name"]: item for item in manifest.get("calibration", {}).get("pruned", [])}
    rows = []
    for weight in checkpoint.weights.values():
        record = records.get(weight.name, {})
        layout = weight.stored_as
        tile = layout.tile and prod(layout.tile)
        if not layout.packed:
            entry = weight.entries[0]
            shape, dtype = entry.shape, dtype_name(entry.dtype)
        else:
            form = checkpoint.form(weight)
            shape, dtype = (form.rows, form.cols), dtype_name(form.dtype)
        nonzeros = record.get("nonzeros")
        rows.append(
            WeightRow(
                weight.name,
                weight.layout,
                shape,
                dtype,
                weight.nbytes,
                None if nonzeros is None or not prod(shape) else 1 - nonzeros / prod(shape),
                record["densest_tile"] / tile if tile and "densest_tile" in record else None,
                32 * record["wavefronts"] / nonzeros if nonzeros and "wavefronts" in record else None,
                "int8" if layout.sparse and weight.is_int8 else record.get("value_dtype"),
                nonzeros / record["slots"] if nonzeros and record.get("slots") else None,
                record.get("error"),
                *(chosen.get(weight.name, {}).get(key) for key in ("sparsity", "method", "output_error")),
            )
        )
    made_by = None
    if manifest:
        made_by = manifest["command"] + "".join(
            f" {key}={value}" for key, value in manifest["settings"].items() if value not in (None, [])
        )
    return Inspection(
        str(checkpoint.path),
        ", ".join(checkpoint.config.get("architectures") or [checkpoint.config.get("model_type", "unknown")]),
        made_by,
        len(checkpoint.shards),
        tuple(rows),
        {item["name"]: item["reason"] for item in manifest.get("left_alone", [])},
        manifest.get("kv_cache"),
        manifest.get("allocation", {}).get("chosen"),
    )
