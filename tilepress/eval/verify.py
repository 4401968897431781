"""The check that an artifact holds what it declares. Every check runs as far as it can, and every finding is listed."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from tilepress.compress.run.targets import linear_layers
from tilepress.eval import other_tools
from tilepress.formats import TilepressError, UsageError, int8, int8_rules, kv_calibration
from tilepress.formats.artifact import sha256_file
from tilepress.formats.checkpoint import (
    DTYPE_NAMES,
    INDEX_NAME,
    MANIFEST_NAME,
    Checkpoint,
    Weight,
    read_header,
    read_json,
    read_manifest,
)
from tilepress.formats.hub import locate
from tilepress.models.families import ONE_PRODUCT

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Check:
    """A check: what was looked at, how often, and what was wrong with it; `notes` are worth knowing, and not wrong."""

    name: str
    looked_at: int
    findings: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.findings


@dataclass(frozen=True)
class Verification:
    """Everything that was checked of an artifact."""

    path: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def to_json(self) -> dict:
        """Return what `verify --json` prints, as a dictionary of plain values."""
        checks = [
            {
                "name": check.name,
                "looked_at": check.looked_at,
                "passed": check.passed,
                "findings": list(check.findings),
                "notes": list(check.notes),
            }
            for check in self.checks
        ]
        return {"path": self.path, "passed": self.passed, "checks": checks}


def verify(
    path: str | Path,
    base: str | Path | None = None,
    *,
    reload: bool = True,
    progress: Progress = lambda what, done, total: None,
) -> Verification:
    """Check a finished artifact: files and hashes, headers and index, packed words, declared counts, and loading (`reload`).

    An artifact of compressed-tensors that another tool wrote is checked by that package's rules, in schemes that tilepress does not run too.
    With `base`, a folder or hub id, every kept value is compared with that model's. A folder that `save_pretrained` wrote has no manifest: it
    is checked as far as its tensors tell. `progress` is called with what is at hand, how many are done, and how many there are.
    Returns every check with its findings; raises TilepressError only where `path` is no artifact at all, or `base` no checkpoint.
    """
    found = _checks(Path(str(path)), None if base is None else Checkpoint(locate(str(base))), reload, progress)
    return Verification(str(path), tuple(found))


def _checks(path: Path, source: Checkpoint | None, reload: bool, progress: Progress) -> list[Check]:
    declared = (path / MANIFEST_NAME).exists()
    foreign = None if declared else _scheme_of_others(path)
    if not declared and not foreign and not _has_packed(path) and not (path / kv_calibration.FOLDER).exists():
        raise TilepressError(
            f"{path} has no {MANIFEST_NAME} and no packed weight",
            "give a folder that a tilepress command finished; continue an unfinished one with --resume",
        )
    checks, manifest = [], {"files": [], "tensors": []}
    if declared:
        try:
            manifest = read_manifest(path)
        except TilepressError as error:
            return [Check("manifest", 1, (error.message,))]
        checks.append(_files(path, manifest, progress))
    checks.append(_headers(path))
    try:
        checkpoint = Checkpoint(path)
        weights = checkpoint.weights
    except TilepressError as error:
        return [*checks, Check("index", 1, (error.message,))]
    checks.append(Check("index", len(checkpoint.tensors), ()))
    checks.append(_weights(checkpoint, weights, manifest if declared else None, progress))
    if foreign:
        tensors = {e.name: (DTYPE_NAMES[e.dtype], e.shape) for e in checkpoint.tensors.values()}
        count, findings, notes = other_tools.check(checkpoint.config["quantization_config"], tensors, checkpoint.read)
        checks.append(Check("compressed-tensors' rules", count, tuple(findings), tuple(notes)))
    elif any(weight.stored_as.matrix_of_codes for weight in weights.values()):
        checks.append(_vllm(checkpoint))
    if (path / kv_calibration.FOLDER).exists():
        checks.append(_cache(checkpoint))
    if source:
        pruned = {record["name"] for record in manifest["tensors"] if "zeros" in record}
        pruned |= set() if declared else {weight.name for weight in weights.values() if weight.is_packed}
        changed = {
            record["name"]: what
            for record in manifest["tensors"]
            for what in ("smoothed", "refitted", "trained")
            if record.get(what)
        }
        checks.append(_against(checkpoint, weights, source, pruned, changed, progress))
    if reload and foreign:
        checks.append(Check("loads", 0, (), (f"not tried, tilepress does not run it: {foreign}",)))
    elif reload:
        sound = all(check.passed for check in checks)
        checks.append(_reload(path, len(weights)) if sound else Check("loads", 0, ("not tried: other checks failed",)))
    return checks


def _scheme_of_others(path: Path) -> str | None:
    """Return why tilepress does not run what compressed-tensors wrote here, or None where it does, or did not write it."""
    config = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    if not other_tools.is_of_compressed_tensors(config):
        return None
    return other_tools.why_not_ours(config["quantization_config"])


def _has_packed(path: Path) -> bool:
    checkpoint = Checkpoint(path)
    try:
        return any(weight.is_packed for weight in checkpoint.weights.values())
    except TilepressError:  # parts are missing: a finding
        return True


def _files(path: Path, manifest: dict, progress: Progress) -> Check:
    findings, files = [], manifest.get("files", [])
    for done, file in enumerate(files):
        progress(f"hash of {file['name']}", done, len(files))
        found = path / file["name"]
        if not found.is_file():
            findings.append(f"{file['name']} is missing")
        elif found.stat().st_size != file["bytes"]:
            findings.append(f"{file['name']} has {found.stat().st_size} bytes, declared {file['bytes']}")
        else:
            try:
                digest = sha256_file(found)
            except OSError as error:
                findings.append(f"{file['name']} cannot be read: {error.strerror}")
                continue
            if digest != file["sha256"]:
                findings.append(f"{file['name']} has sha256 {digest[:12]}…, declared {file['sha256'][:12]}…")
    declared = {file["name"] for file in files}
    findings += [
        f"{name} is not declared" for name in sorted(p.name for p in path.glob("*.safetensors")) if name not in declared
    ]
    return Check("files and hashes", len(files), tuple(findings))


def _headers(path: Path) -> Check:
    findings, shards = [], sorted(path.glob("*.safetensors"))
    if not (path / INDEX_NAME).exists() and (path / MANIFEST_NAME).exists():
        findings.append(f"{INDEX_NAME} is missing")
    for shard in shards:
        try:
            read_header(shard)
        except TilepressError as error:
            findings.append(error.message)
    return Check("headers", len(shards), tuple(findings))


def _weights(checkpoint: Checkpoint, weights: dict[str, Weight], manifest: dict | None, progress: Progress) -> Check:
    """Check each weight by itself, and against its record where there is a manifest."""
    findings = []
    records = {record["name"]: record for record in manifest["tensors"]} if manifest else {}
    findings += [f"{name} is declared but not stored" for name in sorted(set(records) - set(weights))]
    for done, weight in enumerate(weights.values()):
        progress(weight.name, done, len(weights))
        record = records.get(weight.name)
        if record is None and manifest:
            findings.append(f"{weight.name} is stored but not declared")
            continue
        try:
            found, problems = _describe(checkpoint, weight)
        except TilepressError as error:
            findings.append(error.message)
            continue
        findings += [f"{weight.name}: {problem}" for problem in problems]
        if not problems and record:
            if "zeros" in record:
                found["zeros"] = prod(found["shape"]) - found["nonzeros"]
            found.setdefault("transposed", None)
            findings += [
                f"{weight.name}: {key} is {value}, declared {record.get(key)}"
                for key, value in found.items()
                if record.get(key) != value
            ]
    return Check("weights as declared", len(weights), tuple(findings))


def _describe(checkpoint: Checkpoint, weight: Weight) -> tuple[dict, list[str]]:
    """Describe a weight in the manifest's words, and list what is wrong with it."""
    examined, problems = checkpoint.examine(weight)
    return {"layout": weight.layout, "bytes": weight.nbytes} | examined, problems


def _cache(checkpoint: Checkpoint) -> Check:
    """The sidecar of the attention cache: whole, and of these weights."""
    try:
        found = kv_calibration.load(checkpoint)
    except TilepressError as error:
        return Check("kv_cache", 1, (error.message,))
    if found is None:
        return Check("kv_cache", 1, (f"{kv_calibration.FACTS_NAME} is missing",))
    return Check("kv_cache", len(found.layers), ())


def _vllm(checkpoint: Checkpoint) -> Check:
    """The rules by which vLLM accepts an INT8 artifact."""
    config = checkpoint.config.get("quantization_config", {})
    if config.get("quant_method") != int8.METHOD:
        return Check("vLLM's rules", 0, (), (f"quant_method is {config.get('quant_method')}: only tilepress loads it",))
    tensors = {e.name: (DTYPE_NAMES[e.dtype], e.shape) for e in checkpoint.tensors.values()}
    try:
        linears, unknown = linear_layers(checkpoint), ()
    except UsageError as error:
        linears, unknown = {}, (f"float layers were not compared with `ignore`: {error.message}",)
    findings, notes = int8_rules.vllm_findings(config, tensors, linears, checkpoint.read, ONE_PRODUCT)
    notes = (*notes, *unknown)
    return Check("vLLM's rules", len(tensors), tuple(findings), tuple(notes))


def _against(
    checkpoint: Checkpoint,
    weights: dict[str, Weight],
    source: Checkpoint,
    pruned: set[str],
    changed: dict[str, str],
    progress: Progress,
) -> Check:
    """Every value, or every non-zero one of a pruned weight, must be the source's converted to the artifact's dtype; int8 codes must be
    the nearest. Smoothed tensors hold other numbers of the same function, refitted ones make up for what was pruned: they are not compared. Of trained
    ones the zeros are, where the source is the pruned model: each must still be one."""
    findings = []
    findings += [f"{name} of the base is missing" for name in sorted(set(source.weights) - set(weights))]
    for done, weight in enumerate(weights.values()):
        progress(f"{weight.name} against the base", done, len(weights))
        if weight.name not in source.weights:
            findings.append(f"{weight.name} is not in the base")
            continue
        if changed.get(weight.name) in ("smoothed", "refitted"):
            continue
        try:
            theirs = source.dense(source.weights[weight.name])
            if weight.is_int8 and not source.weights[weight.name].is_int8:
                ours, scale = weight.stored_as.codes(checkpoint.packed(weight))
                theirs = theirs.t() if checkpoint.form(weight).transposed else theirs
                theirs = int8.quantize(theirs.to(scale.dtype), scale) if ours.shape == theirs.shape else theirs
            else:
                ours = checkpoint.dense(weight)
        except (TilepressError, RuntimeError) as error:
            findings.append(f"{weight.name}: {error}")
            continue
        if ours.shape != theirs.shape:
            findings.append(f"{weight.name} is {list(ours.shape)}, in the base {list(theirs.shape)}")
            continue
        if changed.get(weight.name) == "trained":
            still = int(torch.count_nonzero(ours[theirs == 0])) if _zeros(theirs) >= 0.5 * _zeros(ours) else 0
            findings += [f"{weight.name}: {still} zeros of the base are none"] if still else []
            continue
        wrong = 0
        for mine, base in zip(ours.reshape(-1).split(1 << 22), theirs.reshape(-1).split(1 << 22), strict=True):
            differs = mine != base.to(mine.dtype)
            wrong += int((differs & (mine != 0) if weight.name in pruned else differs).sum())
        if wrong:
            findings.append(f"{weight.name}: {wrong} values differ from the base")
    skipped = [changed[name] for name in weights if name in changed]
    notes = tuple(
        f"{skipped.count(what)} {what} tensors were not compared" for what in sorted({*skipped} - {"trained"})
    )
    if learned := skipped.count("trained"):
        notes += (f"of {learned} trained tensors only zeros were compared",)
    return Check("values equal the base", len(weights) - len(skipped) + learned, tuple(findings), notes)


def _zeros(tensor: torch.Tensor) -> int:
    return tensor.numel() - int(torch.count_nonzero(tensor))


def _reload(path: Path, count: int) -> Check:
    """Loads the artifact and runs a few tokens through it."""
    from tilepress.runtime.loader import load

    try:
        model = load(str(path))
        with torch.inference_mode():
            logits = model(torch.arange(8)[None] % model.config.get_text_config().vocab_size, use_cache=False).logits
    except Exception as error:
        return Check("loads", count, (str(error).splitlines()[0] if str(error) else type(error).__name__,))
    finite = bool(torch.isfinite(logits).all())
    return Check("loads", count, () if finite else ("the model gives non-finite logits",))
