"""Decode speed of models in one run: time to the first token and per token, memory, what of the card's bandwidth is used, and where a step's time goes.

All models go through the pass that `generate(custom_generate=tilepress.decode)` runs (runtime/decode/batch.py): packed and dense ones, on a card as CUDA
graphs, dense ones by cuBLAS and by the faster of two attentions: our kernel over pages of bfloat16, and torch's over contiguous keys and values. One model
is in memory at a time.

A run: a prompt of `context` random tokens is prefilled alone, which gives the time to the first token; its keys and values are copied to the other sequences
of the batch, and `new_tokens` greedy steps are timed, from the host. `runs` runs are timed, after two that are not: in the second one the prefill becomes a
graph. A spread is the largest less the smallest, relative to the median. Of ranks that share a model, memory and bytes are of one card, tokens are of all.
"""

import gc
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch
from torch import nn

from tilepress.bench import kernels as bench
from tilepress.bench.steps import PROFILED_STEPS, Case, OwnPass, pass_of
from tilepress.formats import UsageError, dtype_name, foreign_errors
from tilepress.formats.kv_int4 import PAGE_TOKENS
from tilepress.kernels.arch import Path, references
from tilepress.models.families import heads_of
from tilepress.runtime.decode.batch import Batch, free_bytes
from tilepress.runtime.decode.cache import pages_serve
from tilepress.runtime.parallel.group import TensorParallel

GIB = 1 << 30
FILLED = "one prompt prefilled, its keys and values copied to the other sequences of the batch"
_SPARE_STEPS = 2 * PROFILED_STEPS  # for which sequences have room beside the timed ones
_WORKSPACE = 6 * GIB  # that `fit` leaves for activations, graphs and torch itself
_ROOM = 2 * GIB  # that ranks must have left for a step: in the middle of one they cannot agree that it does not fit
_MOST_FIT = 1024
_MOST = 1 << 24  # of anything that is counted: beyond it a step never ends
_Made = TypeVar("_Made")


@dataclass(frozen=True)
class Protocol:
    """Everything that decides a speed besides model and machine. Raises UsageError for what cannot be timed."""

    batches: tuple[int | str, ...] = (1, 16)  # "fit": the largest that the card holds
    context: int = 2048  # tokens of a sequence before the timed steps
    new_tokens: int = 128  # timed steps
    runs: int = 5
    chunk: int = 2048  # tokens of a piece of prefill
    seed: int = 0

    def __post_init__(self):
        numbers = self.context, self.new_tokens, self.runs, self.chunk
        batches = [batch for batch in self.batches if batch != "fit"]
        if not self.batches or min(*numbers, *batches) < 1 or max(*numbers, *batches) > _MOST:
            raise UsageError(
                f"batches {self.batches}, context {self.context}, {self.new_tokens} new tokens, {self.runs} runs",
                f"all must be 1 to {_MOST:,}",
            )

    @property
    def most(self) -> int:
        """Tokens that a sequence has room for."""
        return self.context + self.new_tokens + _SPARE_STEPS


@dataclass(frozen=True)
class Subject:
    """A model to time: its name, and what loads it."""

    name: str
    load: Callable[[], nn.Module]


class _DoesNotFit(torch.OutOfMemoryError):
    """A model or a cache that does not fit on some rank, as all ranks know."""


def speed(
    model: Subject,
    base: Subject | None,
    protocol: Protocol,
    progress: Callable[[str], None] = lambda at: None,
    group: TensorParallel | None = None,
) -> dict:
    """Return the object that `eval speed --json` prints: `rows`, one a model and batch, the base's first.

    Raises UsageError where a card would run a reference."""
    found = compare([model], base, [protocol], progress, group)
    filled = asdict(protocol) | {"filled": FILLED, "sampling": "greedy"}
    return {"env": found["env"], "read_gbps": found["read_gbps"], "protocol": filled, "rows": found["rows"]}


@foreign_errors("the model cannot be timed", "`tilepress verify DIR` checks an artifact")
def compare(
    models: list[Subject],
    base: Subject | None,
    protocols: list[Protocol],
    progress: Callable[[str], None],
    group: TensorParallel | None = None,
) -> dict:
    """Return `env`, `read_gbps` and `rows` of several models and contexts: each model is loaded once, the base first, and timed by every protocol.

    Subjects load what is theirs of models that a `group` shares."""
    rows, facts, bandwidth = [], None, None
    for subject in [base, *models] if base is not None else models:
        progress(f"loading {subject.name}")
        try:
            loaded = _agreed(group, subject.load)
        except torch.OutOfMemoryError:
            loaded = None
        if loaded is None:  # told here: while an error is handled, it holds what there was of the model
            cases = [(batch, protocol) for protocol in protocols for batch in protocol.batches]
            rows += [_too_large(subject, base, *case, group) for case in cases]
            progress("  does not fit")
            _let_go()
            continue
        device = next(loaded.parameters()).device
        if facts is None:
            facts = _environment(device)
            bandwidth = bench.read_gbps() if device.type == "cuda" else None
            torch.cuda.empty_cache()
        for protocol in protocols:
            for batch in protocol.batches:
                rows.append(_row(subject, base, loaded, batch, protocol, bandwidth, progress))
                progress(f"  {rows[-1]['tpot_ms']:.2f} ms a token" if rows[-1]["fits"] else "  does not fit")
        del loaded
        _let_go()
    for row in rows:
        case = [r for r in rows if (r["asked"], r["context"]) == (row["asked"], row["context"])]
        other = next((r for r in case if r["is_base"] and r["fits"]), None)
        if other is not None and row["fits"] and not row["is_base"]:
            row |= _speedup(row, other)
    if facts is None:  # nothing fits
        here = torch.device("cuda" if torch.cuda.is_available() else "cpu") if group is None else group.device
        facts = _environment(here)
    return {"env": facts, "read_gbps": bandwidth, "rows": rows}


def _too_large(
    subject: Subject, base: Subject | None, batch: int | str, protocol: Protocol, group: TensorParallel | None
) -> dict:
    facts = {"model": subject.name, "is_base": subject is base, "asked": batch, "context": protocol.context}
    return facts | {"batch": None if batch == "fit" else batch, "fits": False, "gpus": _gpus(group)}


def _let_go() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _environment(device: torch.device) -> dict:
    if device.type == "cuda":
        return bench.environment()
    return {"card": None, "torch": torch.__version__, "threads": torch.get_num_threads()}


def _agreed(group: TensorParallel | None, make: Callable[[], _Made]) -> _Made:
    """Return what `make` makes if it fits on every rank: one that goes on alone would wait for the others. `make` must not wait for them."""
    try:
        made = make()
    except torch.OutOfMemoryError:
        if group is None:
            raise
        made = None
    if made is None:
        _let_go()  # collectives need memory too
    if group is not None and not group.least(made is not None):
        raise _DoesNotFit
    return made


def _row(subject, base, model, asked, protocol: Protocol, bandwidth: float | None, progress) -> dict:
    """Return the row of the fastest of the caches that may serve the model."""
    device = next(model.parameters()).device
    found, tried = [], {}
    for cache in _caches(model, device):
        try:
            batch = _fitting(model, cache, protocol) if asked == "fit" else asked
            progress(f"{subject.name}, batch {batch}, context {protocol.context}, cache {cache}")
            found.append(_measured(model, cache, batch, protocol, bandwidth))
            tried[found[-1]["cache"]] = found[-1]["tpot_ms"]
        except torch.OutOfMemoryError as error:
            if _group(model) is not None and not isinstance(error, _DoesNotFit):
                raise  # in the middle of what ranks do together
            tried[cache] = None
        _let_go()
    if not found:
        return _too_large(subject, base, asked, protocol, _group(model))
    facts = {"model": subject.name, "is_base": subject is base, "asked": asked, "context": protocol.context}
    return facts | {"fits": True} | min(found, key=lambda row: row["tpot_ms"] / row["batch"]) | {"caches_tried": tried}


def _caches(model: nn.Module, device: torch.device) -> tuple[str, ...]:
    """Return the caches to try: on a card only those whose attention runs no reference, unless the model has its own."""
    if getattr(model, "kv_state", None) is not None or device.type != "cuda":
        return ("auto",)
    paged = pages_serve(heads_of(model.config.get_text_config()).dim, model.dtype, device)
    return ("bfloat16", "contiguous") if paged else ("contiguous",)


def _fitting(model: nn.Module, cache: str, protocol: Protocol) -> int:
    """Return the most sequences whose keys and values the card holds beside the model."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        raise UsageError("--batch fit asks for what a card holds", "give numbers")
    group = _group(model)
    small = _agreed(group, lambda: pass_of(model, 1, protocol.most, cache, protocol.chunk))
    _refuse_references(device, small.paths(), isinstance(small, OwnPass))
    per_sequence = small.cache.bytes_per_token * -(-protocol.most // PAGE_TOKENS) * PAGE_TOKENS
    del small
    _let_go()
    free, _ = torch.cuda.mem_get_info(device)
    free = free if group is None else group.least(free)
    most = (free - _WORKSPACE) // per_sequence
    if most < 1:
        raise _DoesNotFit
    return int(min(most if most < 8 else most // 8 * 8, _MOST_FIT))


def _measured(model: nn.Module, cache: str, batch: int, protocol: Protocol, bandwidth: float | None) -> dict:
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    group = _group(model)
    gpus = _gpus(group)

    def make() -> Batch | OwnPass:
        made = pass_of(model, batch, protocol.most, cache, protocol.chunk)
        if group is not None and device.type == "cuda" and free_bytes(device) < _ROOM:
            raise torch.OutOfMemoryError
        return made

    timed = _agreed(group, make)
    paths = timed.paths()
    _refuse_references(device, paths, isinstance(timed, OwnPass))
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(protocol.seed)
    prompt = torch.randint(vocabulary, (protocol.context,), generator=generator)
    case = Case(timed, prompt, batch, protocol.most)
    for _ in range(2):
        case.run(1)
    ttft, tpot = zip(*(case.run(protocol.new_tokens) for _ in range(protocol.runs)), strict=True)
    shares = case.shares_of_a_step()
    step_s = statistics.median(tpot)
    per_second = [batch / seconds for seconds in tpot]
    weights, kv_bytes = stored_bytes(model), timed.cache and timed.cache.bytes_per_token
    read = _bytes_of_a_step(timed, batch, protocol)
    return {
        "batch": batch,
        "dtype": dtype_name(model.dtype),
        "cache": "the model's own" if timed.cache is None else timed.cache.name,
        "weights_gib": weights / GIB,
        "kv_gib": kv_bytes and batch * protocol.context * kv_bytes / GIB,
        "peak_gib": torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None,
        **_spread("ttft_ms", [1000 * seconds for seconds in ttft]),
        **_spread("tpot_ms", [1000 * seconds for seconds in tpot]),
        **_spread("tokens_per_s", per_second),
        **_spread("tokens_per_gpu_s", [rate / gpus for rate in per_second]),
        "gpus": gpus,
        "bytes_per_step": read,
        "share_of_read": read and bandwidth and read / step_s / 1e9 / bandwidth,
        "runs": {"ttft_ms": [1000 * seconds for seconds in ttft], "tpot_ms": [1000 * seconds for seconds in tpot]},
        "paths": {str(path): count for path, count in paths.items()},
        "step": shares,
    }


def _refuse_references(device: torch.device, paths: Iterable[Path | str], is_own: bool) -> None:
    """Raise UsageError where a card would run references, or all of the model's own forward pass (`is_own`)."""
    slow = list(paths) if is_own else references(paths)
    if device.type == "cuda" and slow:
        raise UsageError(f"this card would run {'; '.join(map(str, slow))}", "only kernels are timed")


def _group(model: nn.Module) -> TensorParallel | None:
    return getattr(model, "tensor_parallel", None)


def _gpus(group: TensorParallel | None) -> int:
    return 1 if group is None else group.size


def _spread(name: str, values: list[float]) -> dict[str, float]:
    median = statistics.median(values)
    return {name: median, f"{name}_spread": (max(values) - min(values)) / median}


def _speedup(row: dict, base: dict) -> dict[str, float]:
    """Return the quotient of tokens per GPU-second; its spread is that of the fastest and slowest quotient of runs."""
    rates = [[r["batch"] / r["gpus"] / ms for ms in r["runs"]["tpot_ms"]] for r in (row, base)]
    ours, theirs = rates
    found = row["tokens_per_gpu_s"] / base["tokens_per_gpu_s"]
    return {"speedup": found, "speedup_spread": (max(ours) / min(theirs) - min(ours) / max(theirs)) / found}


def stored_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers, memory that several share counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(model)}
    return sum(storages.values())


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _bytes_of_a_step(timed: Batch | OwnPass, batch: int, protocol: Protocol) -> int | None:
    """Return the bytes that a decode step must read: every product's weight, and keys and values at their mean length of the run."""
    if isinstance(timed, OwnPass):
        return None
    decoder = timed.decoder
    linears = [x for layer in decoder.layers for x in (layer.qkv, layer.out, layer.inner, layer.outer)]
    weights = sum(tensor.nbytes for linear in (*linears, decoder.lm_head) for tensor in _tensors(linear))
    tokens = batch * (protocol.context + protocol.new_tokens // 2)
    return weights + tokens * timed.cache.bytes_per_token
