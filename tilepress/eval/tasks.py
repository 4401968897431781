"""Accuracy on multiple-choice tasks: which of several endings does a model find the most likely behind a context?

The scores are those of lm-evaluation-harness (Gao et al. 2021, "A framework for few-shot language model evaluation") without examples before the context:

    acc        the ending with the highest log-likelihood is the right one
    acc_norm   after division by the ending's characters: long endings are unlikely by themselves
    acc_bytes  after division by its UTF-8 bytes: the same, but for other alphabets

Context and ending are tokenized together and divided at the length of the context's own tokens, which lie before the ending also where a token would
span both. Standard errors are those of a mean over items; against a base they are paired. A window begins with the BOS as those of a perplexity do.

A task is a row of `TASKS`: where its items are, and how one is read.
"""

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch

from tilepress.device import find_device
from tilepress.eval.scores import score
from tilepress.formats import TilepressError, UsageError, dtype_name
from tilepress.formats.checkpoint import open_model
from tilepress.runtime.hf.paged_cache import cache_mode
from tilepress.runtime.loader import load, paths
from tilepress.text import check_vocabulary, load_tokenizer, max_positions, rows, window_start

_TOKENS_AT_ONCE = 2048
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


@dataclass(frozen=True)
class TasksResult:
    """What a model answers, with all that decided it."""

    model: str
    base_model: str | None
    results: tuple[TaskResult, ...]
    protocol: dict
    paths: dict[str, int]  # which implementation served how many layers
    seconds: float

    def to_json(self) -> dict:
        """Return what `eval tasks --json` prints, as a dictionary of plain values."""
        found = asdict(self)
        found["results"] = {
            result["task"]: {name: value for name, value in result.items() if value is not None}
            for result in found["results"]
        }
        return found


def tasks(
    model: str | Path,
    tasks: Sequence[str] = ("hellaswag",),
    dataset: str | Path | None = None,
    *,
    base: str | Path | None = None,
    limit: int | None = None,
    bos: str = "auto",
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    progress: Progress | None = None,
) -> TasksResult:
    """Measure how often a model finds the right ending, and with `base` how that changed.

    model, base  folders or hub ids, dense or artifacts; a calibrated attention cache of the model is simulated
    tasks        names of TASKS
    dataset      a .jsonl, .json or .parquet file, or HUB_ID[:CONFIG[:SPLIT]], with the rows of the one task; unless given the hub's
    limit        items of each task at most
    bos          whether windows begin with the BOS: text.window_start

    Raises UsageError for an unknown task, and for rows that are none of it; TilepressError for logits that are not finite."""
    progress = progress or (lambda what, done, total: None)
    chosen = _chosen(tasks, dataset, limit)
    checkpoint = open_model(model, revision)
    tokenizer = load_tokenizer(checkpoint.path, trust_remote_code)
    start = window_start(tokenizer, bos)
    items = {name: _items(name, source, limit) for name, source in chosen.items()}
    options = {"device": find_device(device), "dtype": dtype, "trust_remote_code": trust_remote_code}
    started = time.monotonic()
    subject = load(str(checkpoint.path), **options)
    other = None if base is None else load(str(base), kv=False, **options)
    results = []
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
            "bos": bos,
            "window_start": tokenizer.convert_ids_to_tokens(start),
            "dtype": dtype_name(subject.dtype),
            "device": str(next(subject.parameters()).device),
        },
        paths(subject),
        round(time.monotonic() - started, 2),
    )


def _chosen(names: Sequence[str], dataset: str | Path | None, limit: int | None) -> dict[str, str]:
    unknown = [name for name in names if name not in TASKS]
    if unknown or not names:
        raise UsageError(f"--tasks {','.join(unknown) or 'of no name'} is unknown", f"choose of {', '.join(TASKS)}")
    if dataset is not None and len(names) > 1:
        raise UsageError(
            f"--dataset holds the items of one task, --tasks names {len(names)}", "run one after the other"
        )
    if limit is not None and limit < 1:
        raise UsageError(f"--limit {limit} leaves nothing to answer", "use at least 1")
    return {name: TASKS[name].dataset if dataset is None else str(dataset) for name in names}


def _items(name: str, source: str, limit: int | None) -> list[Item]:
    found = []
    for row in rows(source):
        try:
            item = TASKS[name].read(row)
            sound = len(item.choices) > 1 and 0 <= item.gold < len(item.choices) and all(item.choices) and item.context
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
            with cache_mode(model, mode):
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
    return TaskResult(
        **told,
        base=Accuracy(**_accuracy(theirs)),
        acc_norm_change=change,
        acc_norm_change_stderr=error,
        flips=float((right[:, normed] != theirs[:, normed]).mean()),
    )
