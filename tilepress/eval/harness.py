"""Tasks of lm-evaluation-harness (Gao et al. 2021), scored by it on models that are loaded here: the extra `tasks`.

Each item's own value is kept, so that a base's can be paired with it. A metric that is no mean over items (a corpus BLEU, a perplexity) has no such
values and is left out. Windows begin as those of the scorer of our own (tasks.py), and a calibrated attention cache is simulated.
"""

from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import numpy as np

from tilepress.formats import UsageError, foreign_errors, installing
from tilepress.runtime.half import fast_products
from tilepress.runtime.hf.paged_cache import cache_mode

_PREFERRED = ("acc_norm", "acc", "exact_match", "f1")


@dataclass(frozen=True)
class ItemScores:
    """What a model scored at each item of a task: {metric: values [items]}."""

    task: str
    metrics: dict[str, np.ndarray]

    @property
    def main(self) -> str:
        """The metric by which a recovery is told: accuracy by length, else accuracy, else the first."""
        return next((name for name in _PREFERRED if name in self.metrics), next(iter(self.metrics)))


def check(tasks: Sequence[str]) -> None:
    """Raise UsageError where the harness is missing, or has no such task."""
    if find_spec("lm_eval") is None:
        raise UsageError(
            f"--tasks {','.join(tasks)} needs lm-evaluation-harness", f"use hellaswag, or {installing('tasks')}"
        )
    files = [task for task in tasks if _is_file(task)]
    if missing := [task for task in files if not Path(task).is_file()]:
        raise UsageError(f"there is no task file {missing[0]}", "give a YAML of lm-evaluation-harness, or a name")
    if len(files) == len(tasks):
        return
    known = set(_manager(tasks).all_tasks)
    unknown = [task for task in tasks if task not in files and task not in known]
    if unknown:
        raise UsageError(
            f"--tasks {','.join(unknown)} is unknown", "`lm-eval ls tasks` lists them; a YAML file serves too"
        )


@cache
def _index():
    """Return the harness's index of its own tasks, which takes seconds to read."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _manager(tasks: Sequence[str]):
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=False) if all(map(_is_file, tasks)) else _index()


def _is_file(task: str) -> bool:
    return task.endswith((".yaml", ".yml"))


def scores(
    model, tokenizer, tasks: Sequence[str], *, limit: int | None, fewshot: int | None, bos: bool, batch: int
) -> list[ItemScores]:
    """Return what a loaded model scores at each item of each task. Raises TilepressError for what fails in the harness."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch, add_bos_token=bos)
    mode = "sim" if getattr(model, "kv_state", None) is not None else "off"
    with (
        foreign_errors("lm-evaluation-harness fails", "check the task, its data and the network"),
        cache_mode(model, mode),
        fast_products(model.dtype, model.device),
        redirect_stderr(StringIO()),  # its bars and its log: one voice is enough
    ):
        found = simple_evaluate(
            wrapped,
            tasks=[str(Path(task).resolve()) if _is_file(task) else task for task in tasks],
            num_fewshot=fewshot,
            task_manager=_manager(tasks),
            limit=limit,
            bootstrap_iters=0,
            log_samples=True,
        )
        return [_of_items(task, samples) for task, samples in found["samples"].items()]


def _of_items(task: str, samples: list[dict]) -> ItemScores:
    """Return the values of a task's items, in their order, of the first of its filters."""
    first = [sample for sample in samples if sample.get("filter") == samples[0].get("filter")]
    first.sort(key=lambda sample: sample["doc_id"])
    metrics = {}
    for name in first[0]["metrics"]:
        values = [sample[name] for sample in first]
        if all(isinstance(value, (bool, int, float, np.number)) for value in values):
            metrics[name] = np.array(values, float)
    if not metrics:
        raise UsageError(f"{task} has no score of single items", "choose a task with accuracy or exact match")
    return ItemScores(task, metrics)
