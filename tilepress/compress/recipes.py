"""Recipes as files: the steps that made an artifact, written as YAML and read back.

    model: meta-llama/Llama-3.1-8B        # for people; a run names its own
    steps:
    - command: prune                      # prune | recover | quantize | kv | convert
      sparsity: 0.5                       # settings as the manifest has them; what is left out has its default
      method: sparsegpt
      dataset: text.jsonl                 # and the text that the step reads
      nsamples: 128

A manifest holds these settings already, so any artifact gives its recipe: its folder serves where such a file does. Settings are the settled
ones: a recipe that says `rounding: gptq` was perhaps made by a command that left the choice to us.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from tilepress.compress.convert import Convert
from tilepress.compress.kv.recipe import KVCache
from tilepress.compress.prune.recipe import Prune
from tilepress.compress.quantize.observers import Observer
from tilepress.compress.quantize.recipe import Quantize
from tilepress.compress.recover.recipe import Recover
from tilepress.compress.recover.settings import Settings as Training
from tilepress.compress.run.finish import history
from tilepress.compress.run.plan import Recipe
from tilepress.formats import TilepressError, UsageError, first_line, foreign_errors
from tilepress.formats.checkpoint import MANIFEST_NAME, read_manifest
from tilepress.formats.files import read_yaml, regular
from tilepress.text import Text

_KINDS = {kind.command.split()[-1]: kind for kind in (Prune, Recover, Quantize, KVCache, Convert)}
_TEXT = ("dataset", "nsamples", "seqlen", "seed", "bos")
_TRAINED = "recover_"  # before the settings of training in a step that prunes and recovers
_TRAINING = {field.name for field in fields(Training)}
_MOST_BYTES = 1 << 20
_SHAPE = "it has `steps`, a list, each with a `command` and its settings; `tilepress inspect DIR --recipe` prints one"


@dataclass(frozen=True)
class Steps:
    """The steps of a recipe, as settings: `model` is the name of what they started from, if it is known."""

    model: str | None
    steps: tuple[dict, ...]

    def to_json(self) -> dict:
        """Return the file's content as a dictionary of plain values."""
        return {"model": self.model, "steps": list(self.steps)}

    def to_yaml(self) -> str:
        """Return the file's text."""
        import yaml

        return yaml.safe_dump(self.to_json(), sort_keys=False, allow_unicode=True, width=120)

    def recipes(self) -> list[tuple[Recipe, Text | None]]:
        """Return each step's recipe and the text that it reads. Raises UsageError for a step that is none."""
        if not self.steps:
            raise UsageError("the recipe has no steps", _SHAPE)
        return [_recipe(number, step) for number, step in enumerate(self.steps, 1)]


def recipe(source: str | Path) -> Steps:
    """Read a recipe from a YAML file, or from the manifest of an artifact. Raises UsageError for what is neither."""
    path = Path(source)
    if path.is_dir() or path.name == MANIFEST_NAME:
        folder = path if path.is_dir() else path.parent
        if not (folder / MANIFEST_NAME).exists():
            raise UsageError(f"{folder} has no {MANIFEST_NAME}, so no recipe", "give an artifact, or a YAML file")
        with foreign_errors(f"the manifest of {folder} does not say what it should", "make the artifact again"):
            return of_manifest(read_manifest(folder))
    if not path.exists():
        raise UsageError(f"no recipe at {path}", "give a YAML file, or the folder of an artifact")
    regular(path)
    if path.stat().st_size > _MOST_BYTES:
        raise UsageError(f"{path} is too large for a recipe", _SHAPE)
    return _read(path)


def of_manifest(manifest: Mapping) -> Steps:
    """Return the steps that a manifest tells, the first first."""
    newest_first = history(manifest)
    model = newest_first[-1]["source"]["name"]
    steps = []
    for step in reversed(newest_first):
        settings = {key: value for key, value in step["settings"].items() if value is not None}
        if settings.get("base") == model:  # a run in which it is the first model names it by itself
            del settings["base"]
        steps.append({"command": step["command"].split()[-1]} | settings)
    return Steps(model, tuple(steps))


def _read(path: Path) -> Steps:
    try:
        found = read_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:  # bytes that are no UTF-8, too
        raise UsageError(f"{path} is no YAML ({error})", _SHAPE) from error
    steps = found.get("steps") if isinstance(found, dict) else None
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise UsageError(f"{path} is no recipe", _SHAPE)
    unknown = sorted(str(key) for key in found if key not in ("model", "steps"))
    if unknown:
        raise UsageError(f"{path} has {', '.join(unknown)} beside model and steps", _SHAPE)
    return Steps(None if found.get("model") is None else str(found["model"]), tuple(steps))


def _recipe(number: int, step: dict) -> tuple[Recipe, Text | None]:
    settings = dict(step)
    kind = _KINDS.get(str(settings.pop("command", None)))
    if kind is None:
        told = f"step {number} of the recipe has the command {step.get('command')!r}"
        raise UsageError(told, f"choose one of {', '.join(_KINDS)}")
    try:
        trained = {key: settings.pop(key) for key in list(settings) if str(key).startswith(_TRAINED)}
        trained = {key.removeprefix(_TRAINED): value for key, value in trained.items()}
        # A step that prunes and recovers has its text among the settings of recovery.
        text = {key: (trained if trained else settings).pop(key) for key in _TEXT if key in (trained or settings)}
        if trained:
            settings = {key: value for key, value in settings.items() if key not in _TEXT}
            found = Recover(**_known(Recover, trained), prune=kind(**_values(kind, settings)))
        else:
            found = kind(**_values(kind, settings))
        return found, Text(**text) if text else None
    except TilepressError as error:
        raise UsageError(f"step {number}: {error.message}", error.hint) from error
    except TypeError as error:
        raise UsageError(f"step {number}, {step['command']}: {first_line(error)}", _SHAPE) from error


def _known(kind: type, settings: dict) -> dict:
    """Return settings that a recipe has. Raises UsageError for others."""
    allowed = {field.name for field in fields(kind)} if kind is not Recover else _TRAINING | {"base"}
    if unknown := sorted(str(key) for key in settings if key not in allowed):
        raise UsageError(f"{', '.join(unknown)} is no setting of it", f"it has {', '.join(sorted(allowed))}")
    return settings


def _values(kind: type, settings: dict) -> dict:
    """Return settings of a file or manifest as the recipe's own values."""
    values = dict(_known(kind, settings))
    if "ignore" in values and isinstance(values["ignore"], list):
        values["ignore"] = tuple(values["ignore"])
    if "dtype" in values:
        dtype = getattr(torch, str(values["dtype"]), None)
        if not isinstance(dtype, torch.dtype):
            raise UsageError(f"the dtype {values['dtype']!r} is unknown", "use bfloat16, float16 or float32")
        values["dtype"] = dtype
    if values.get("group_size") == "head":
        values["group_size"] = None
    if isinstance(values.get("observer"), str):
        name, _, percentile = values["observer"].partition(" ")
        with foreign_errors(f"the observer {values['observer']!r} is none", "write mse, minmax or percentile 99.99"):
            values["observer"] = Observer(name, *([float(percentile)] if percentile else []))
    return values
