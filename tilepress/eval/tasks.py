"""Accuracy on multiple-choice tasks: which of several endings does a model find the most likely behind a context?

The scores are those of lm-evaluation-harness (Gao et al. 2021, "A framework for few-shot language model evaluation") without examples before the context:

    acc        the ending with the highest log-likelihood is the right one
    acc_norm   after division by the ending's characters: long endings are unlikely by themselves
    acc_bytes  after division by its UTF-8 bytes: the same, but for other alphabets

Context and ending are tokenized together and divided at the length of the context's own tokens, which lie before the ending also where a token would
span both. Standard errors are those of a mean over items; against a base they are paired. A window begins with the BOS as those of a perplexity do.

A task of our own is a row of `TASKS`: where its items are, and how one is read. It needs no network where its items are in a file. All other names, and YAML
files, are tasks of lm-evaluation-harness itself (harness.py).
"""

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path

import numpy as np
import torch

from tilepress.device import find_device
from tilepress.eval import harness
from tilepress.eval.scores import score
from tilepress.formats import TilepressError, UsageError, dtype_name
from tilepress.formats.checkpoint import open_model
from tilepress.runtime.half import fast_products
from tilepress.runtime.hf.paged_cache import cache_mode
from tilepress.runtime.loader import load, paths
from tilepress.text import check_vocabulary, load_tokenizer, max_positions, rows, window_start

_TOKENS_AT_ONCE = 2048
_BATCH = 8  # requests that the harness runs together
METRICS = ("acc", "acc_norm", "acc_bytes")

Progress = Callable[[str, int, int], None]  # what, windows done, windows in all


@dataclass(frozen=True)
class Item:
    """A question: the right ending is `choices[gold]`."""

    context: str
    choices: tuple[str, ...]
    gold: int


@dataclass(frozen=True)
class Task:
    """A set of questions: a source as in text.py, and how a row of it is read."""

    dataset: str
    read: Callable[[dict], Item]


def _hellaswag(row: dict) -> Item:
    """Read a row of HellaSwag (Zellers et al. 2019), as published or with `query`, `choices` and `gold` made of it already."""
    if "query" in row:
        return Item(row["query"], tuple(row["choices"]), int(row["gold"]))
    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return Item(_plain(context), tuple(map(_plain, row["endings"])), int(row["label"]))


def _plain(text: str) -> str:
    """Take away what WikiHow's pages left in brackets, as every harness does."""
    without = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return without.replace("  ", " ")


TASKS = {"hellaswag": Task("Rowan/hellaswag::validation", _hellaswag)}


@dataclass(frozen=True)
class Accuracy:
    """Shares of items that were answered rightly; errors are standard errors over items, None for a single one."""

    acc: float
    acc_stderr: float | None
    acc_norm: float
    acc_norm_stderr: float | None
    acc_bytes: float
    acc_bytes_stderr: float | None


@dataclass(frozen=True)
class TaskResult(Accuracy):
    """The accuracy of a model at a task, and beside a base's."""

    task: str
    dataset: str
    items: int
    base: Accuracy | None = None
    acc_norm_change: float | None = None  # over the base's
    acc_norm_change_stderr: float | None = None  # paired
    flips: float | None = (
        None  # share of items of which one of the two answers rightly and the other does not, by acc_norm
    )
    recovery: float | None = None  # acc_norm over the base's
    recovery_stderr: float | None = None

    def to_json(self) -> dict:
        """Return what is known as a dictionary of plain values."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class HarnessResult:
    """The scores of a model at a task of lm-evaluation-harness, {metric: (mean, standard error)}, and beside a base's.

    The recovery is that of the metric `main`; its error is of paired items."""

    task: str
    items: int
    main: str
    scores: dict[str, tuple[float, float | None]]
    base: dict[str, tuple[float, float | None]] = field(default_factory=dict)
    recovery: float | None = None
    recovery_stderr: float | None = None

    def to_json(self) -> dict:
        """Return what is known as a dictionary of plain values, in the words of the scorer of our own."""
        told = {"task": self.task, "items": self.items, "dataset": "lm-evaluation-harness", "main": self.main}
        told |= _named(self.scores)
        if self.base:
            told["base"] = _named(self.base)
        if self.recovery is not None:
            told |= {"recovery": self.recovery, "recovery_stderr": self.recovery_stderr}
        return told


def metrics_of(scores: dict) -> list[str]:
    """Return the names of the scores in a task's part of what `eval tasks --json` prints."""
    others = ("acc_norm_change", "flips", "recovery")
    return [k for k, v in scores.items() if isinstance(v, float) and not k.endswith("_stderr") and k not in others]


def _named(scores: dict[str, tuple[float, float | None]]) -> dict[str, float | None]:
    return {
        key: value for name, pair in scores.items() for key, value in zip((name, f"{name}_stderr"), pair, strict=True)
    }


@dataclass(frozen=True)
class TasksResult:
    """What a model answers, with all that decided it."""

    model: str
    base_model: str | None
    results: tuple[TaskResult | HarnessResult, ...]
    protocol: dict
    paths: dict[str, int]  # which implementation served how many layers
    seconds: float

    def to_json(self) -> dict:
        """Return what `eval tasks --json` prints, as a dictionary of plain values."""
        found = {name: getattr(self, name) for name in self.__dataclass_fields__}
        found["results"] = {result.task: result.to_json() for result in self.results}
        if self.recovery is not None:
            found |= dict(zip(("recovery", "recovery_stderr"), self.recovery, strict=True))
        return found

    @property
    def recovery(self) -> tuple[float, float | None] | None:
        """The mean of the tasks' recoveries and its standard error, tasks as they are; None without a base."""
        told = [(result.recovery, result.recovery_stderr) for result in self.results]
        if not told or any(value is None for value, _ in told):
            return None
        errors = [error for _, error in told]
        error = None if None in errors else math.sqrt(sum(error**2 for error in errors)) / len(told)
        return sum(value for value, _ in told) / len(told), error


def tasks(
    model: str | Path,
    tasks: Sequence[str] = ("hellaswag",),
    dataset: str | Path | None = None,
    *,
    base: str | Path | None = None,
    limit: int | None = None,
    fewshot: int | None = None,
    bos: str = "auto",
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    progress: Progress | None = None,
) -> TasksResult:
    """Measure how often a model finds the right ending, and with `base` how that changed.

    model, base  folders or hub ids, dense or artifacts; a calibrated attention cache of the model is simulated
    tasks        names of TASKS; or names and YAML files of lm-evaluation-harness, which the extra `tasks` brings
    dataset      a .jsonl, .json or .parquet file, or HUB_ID[:CONFIG[:SPLIT]], with the rows of the one task; unless given the hub's
    limit        items of each task at most
    fewshot      examples before each item, of lm-evaluation-harness; unless given the task's own number
    bos          whether windows begin with the BOS: text.window_start

    Raises UsageError for an unknown task, and for rows that are none of it; TilepressError for logits that are not finite."""
    progress = progress or (lambda what, done, total: None)
    ours = all(name in TASKS for name in tasks) and fewshot is None
    chosen = _chosen(tasks, dataset, limit, fewshot, ours)
    checkpoint = open_model(model, revision)
    tokenizer = load_tokenizer(checkpoint.path, trust_remote_code)
    start = window_start(tokenizer, bos)
    items = {name: _items(name, source, limit) for name, source in chosen.items() if ours}
    options = {"device": find_device(device), "dtype": dtype, "trust_remote_code": trust_remote_code}
    started = time.monotonic()
    subject = load(str(checkpoint.path), **options)
    other = None if base is None else load(str(base), kv=False, **options)
    results = []
    if not ours:
        how = {"limit": limit, "fewshot": fewshot, "bos": bool(start), "batch": _BATCH}
        progress("tasks", 0, 1)
        own = harness.scores(subject, tokenizer, tasks, **how)
        theirs = [None] * len(own) if other is None else harness.scores(other, tokenizer, tasks, **how)
        results = [_of_harness(*pair) for pair in zip(own, theirs, strict=True)]
        progress("tasks", 1, 1)
    for name, questions in items.items():
        right = answers(subject, tokenizer, questions, start, progress)
        theirs = None if other is None else answers(other, tokenizer, questions, start, progress)
        results.append(_result(name, chosen[name], right, theirs))
    return TasksResult(
        str(model),
        None if base is None else str(base),
        tuple(results),
        {
            "limit": limit,
            "scored_by": "tilepress" if ours else "lm-evaluation-harness",
            "fewshot": fewshot,
            "bos": bos,
            "window_start": tokenizer.convert_ids_to_tokens(start),
            "dtype": dtype_name(subject.dtype),
            "device": str(next(subject.parameters()).device),
        },
        paths(subject),
        round(time.monotonic() - started, 2),
    )


def _chosen(
    names: Sequence[str], dataset: str | Path | None, limit: int | None, fewshot: int | None, ours: bool
) -> dict[str, str]:
    if not names:
        raise UsageError("--tasks of no name is unknown", f"choose {', '.join(TASKS)}, or tasks of the harness")
    if dataset is not None and len(names) > 1:
        raise UsageError(
            f"--dataset holds the items of one task, --tasks names {len(names)}", "run one after the other"
        )
    if limit is not None and limit < 1:
        raise UsageError(f"--limit {limit} leaves nothing to answer", "use at least 1")
    if fewshot is not None and fewshot < 0:
        raise UsageError(f"--fewshot {fewshot} cannot be", "use 0 or more examples")
    if not ours:
        if dataset is not None:
            raise UsageError(
                f"--dataset is for our own {', '.join(TASKS)}", "a task of the harness has its data in its YAML file"
            )
        harness.check(names)
        return {}
    return {name: TASKS[name].dataset if dataset is None else str(dataset) for name in names}


def _items(name: str, source: str, limit: int | None) -> list[Item]:
    found = []
    for row in rows(source):
        try:
            item = TASKS[name].read(row)
            texts = (item.context, *item.choices)
            sound = len(texts) > 2 and 0 <= item.gold < len(texts) - 1 and all(x and isinstance(x, str) for x in texts)
        except (KeyError, TypeError, ValueError, AttributeError):
            sound = False
        if not sound:
            raise UsageError(
                f"row {len(found) + 1} of {source} is no item of {name}; its columns are {', '.join(map(str, row))}",
                "give rows with query, choices and gold, or the published ones",
            )
        found.append(item)
        if len(found) == limit:
            break
    if not found:
        raise UsageError(f"{source} has no rows", "give another --dataset")
    return found


def answers(
    model, tokenizer, items: Sequence[Item], start: list[int], progress: Progress = lambda what, done, total: None
) -> np.ndarray:
    """Return whether each item is answered rightly by each of METRICS, bool [items, 3]."""
    windows = [_window(tokenizer, item.context, choice, start, model) for item in items for choice in item.choices]
    check_vocabulary([ids for ids, _ in windows], model)
    likely = np.array(_log_likelihoods(model, windows, progress))
    found, at = np.zeros((len(items), len(METRICS)), bool), 0
    for row, item in zip(found, items, strict=True):
        mine = likely[at : at + len(item.choices)]
        at += len(item.choices)
        lengths = [1.0] * len(item.choices), map(len, item.choices), (len(choice.encode()) for choice in item.choices)
        row[:] = [int(np.argmax(mine / np.array([*length]))) == item.gold for length in lengths]
    return found


def _window(tokenizer, context: str, choice: str, start: list[int], model) -> tuple[list[int], int]:
    """Return the token ids of a context and an ending, and how many are the ending's. What a model has no positions for is cut off before it."""
    before, after = context.rstrip(), f"{context[len(context.rstrip()) :]} {choice}"
    whole, own = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (before + after, before))
    ending = max(len(whole) - len(own), 1)
    room = (max_positions(model.config.get_text_config().to_dict()) or len(whole) + len(start)) - len(start)
    return [*start, *whole[-room:]], min(ending, room - (not start))


@torch.inference_mode()
def _log_likelihoods(model, windows: list[tuple[list[int], int]], progress: Progress) -> list[float]:
    """Return the log-likelihood of each window's ending, nats. Windows of one length run together: padding would change how sums are rounded."""
    device, found, done = next(model.parameters()).device, [0.0] * len(windows), 0
    order = sorted(range(len(windows)), key=lambda i: len(windows[i][0]))
    mode = "sim" if getattr(model, "kv_state", None) is not None else "off"
    for length, alike in groupby(order, key=lambda i: len(windows[i][0])):
        group, most = list(alike), max(1, _TOKENS_AT_ONCE // length)
        for numbers in (group[i : i + most] for i in range(0, len(group), most)):
            progress("window", done, len(windows))
            ids = torch.tensor([windows[i][0] for i in numbers], device=device)
            with cache_mode(model, mode), fast_products(model.dtype, ids.device):
                logits = model(ids, use_cache=False).logits
            for i, of_window, own in zip(numbers, logits, ids, strict=True):
                ending = windows[i][1]
                losses = score(of_window[-ending - 1 : -1], own[-ending:]).double()
                found[i] = -float(losses.sum())
                if not math.isfinite(found[i]):
                    raise TilepressError("the model gives non-finite logits", "check it: `tilepress verify DIR`")
            done += len(numbers)
    progress("window", len(windows), len(windows))
    return found


def _mean(values: np.ndarray) -> tuple[float, float | None]:
    """Return a mean over items and its standard error."""
    error = None if len(values) < 2 else float(values.std(ddof=1) / math.sqrt(len(values)))
    return float(values.mean()), error


def _accuracy(right: np.ndarray) -> dict[str, float | None]:
    found = {}
    for name, column in zip(METRICS, right.T, strict=True):
        found[name], found[f"{name}_stderr"] = _mean(column.astype(float))
    return found


def _result(name: str, dataset: str, right: np.ndarray, theirs: np.ndarray | None) -> TaskResult:
    told = _accuracy(right) | {"task": name, "dataset": dataset, "items": len(right)}
    if theirs is None:
        return TaskResult(**told)
    normed = METRICS.index("acc_norm")
    change, error = _mean(right[:, normed].astype(float) - theirs[:, normed])
    recovery, recovery_error = _recovery(right[:, normed].astype(float), theirs[:, normed].astype(float))
    return TaskResult(
        **told,
        base=Accuracy(**_accuracy(theirs)),
        acc_norm_change=change,
        acc_norm_change_stderr=error,
        flips=float((right[:, normed] != theirs[:, normed]).mean()),
        recovery=recovery,
        recovery_stderr=recovery_error,
    )


def _of_harness(own: harness.ItemScores, theirs: harness.ItemScores | None) -> HarnessResult:
    means = {name: _mean(values) for name, values in own.metrics.items()}
    about = own.task, len(next(iter(own.metrics.values()))), own.main, means
    if theirs is None:
        return HarnessResult(*about)
    base = {name: _mean(values) for name, values in theirs.metrics.items()}
    return HarnessResult(*about, base, *_recovery(own.metrics[own.main], theirs.metrics[own.main]))


def _recovery(own: np.ndarray, base: np.ndarray) -> tuple[float | None, float | None]:
    """Return the quotient of two means over the same items and its standard error, that of the residuals own - quotient * base.

    None where the base scores nothing."""
    if not base.mean():
        return None, None
    value = float(own.mean() / base.mean())
    _, error = _mean(own - value * base)
    return value, None if error is None else error / float(base.mean())
