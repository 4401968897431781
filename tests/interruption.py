"""Stopping a run before each of its renames, and going on: no `finally` of ours runs after a stop, as with SIGKILL."""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from conftest import run_recipe

from tilepress.compress import shards
from tilepress.compress.plan import Recipe


def digest(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def stopped_before(step: int, run: Callable[[], object], monkeypatch) -> bool:
    """Runs until the rename of that number; returns whether there was one."""

    class Killed(BaseException):
        pass

    real, left = os.replace, step

    def replace(source, target):
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        patch.setattr(shards.ShardWriter, "abandon", lambda self: self._file.close())
        try:
            run()
        except Killed:
            return True
    return False


def stop_anywhere_and_resume(
    recipe: Recipe, source: Path, folder: Path, monkeypatch, look: Callable[[Path], None]
) -> int:
    """Every stopped run, resumed, must give the bytes of one that was not stopped; `look` sees what a stop left. Returns how many."""
    run_recipe(recipe, source, folder / "whole")
    expected, step = digest(folder / "whole"), 0
    while True:
        output = folder / f"stopped-{step}"
        if not stopped_before(step, lambda output=output: run_recipe(recipe, source, output), monkeypatch):
            return step
        look(output)
        run_recipe(recipe, source, output, resume=True)
        assert digest(output) == expected, f"stopped before rename {step}"
        shutil.rmtree(output)
        step += 1
