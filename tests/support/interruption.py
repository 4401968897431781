"""A run killed before any of its renames, and going on: what its folder holds then is what SIGKILL leaves, for files are on the disk
before they are renamed. The run itself goes on, so that one run gives every state."""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from support.artifacts import run_recipe

from tilepress.compress.run.plan import Recipe
from tilepress.text import Text


def digest(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def killed_before_each_rename(run: Callable[[Path], object], output: Path, monkeypatch) -> list[Path]:
    """Runs into `output`; returns a copy of it from before every rename, in order."""
    real, states = os.replace, []

    def replace(source, target):
        states.append(output.with_name(f"{output.name}-killed-{len(states)}"))
        shutil.copytree(output, states[-1])
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        run(output)
    return states


def stop_anywhere_and_resume(
    recipe: Recipe, source: Path, folder: Path, monkeypatch, look: Callable[[Path], None], text: Text | None = None
) -> int:
    """Every killed run, resumed, must give the bytes of the one that went on; `look` sees what was left. Returns how many."""
    whole = folder / "whole"
    states = killed_before_each_rename(lambda output: run_recipe(recipe, source, output, text=text), whole, monkeypatch)
    for step, state in enumerate(states):
        look(state)
        run_recipe(recipe, source, state, resume=True, text=text)
        assert digest(state) == digest(whole), f"killed before rename {step}"
        shutil.rmtree(state)
    return len(states)
