"""Decode speed of models in one run: time to the first token and per token, memory, what of the card's bandwidth is used, and where a step's time goes.

All models go through the same decode loop (runtime/generation.py): packed and dense ones, on a card as CUDA graphs, dense ones by cuBLAS and by the faster
of two attentions: our kernel over pages of bfloat16, and torch's over contiguous keys and values. One model is in memory at a time.

A run: a prompt of `context` random tokens is prefilled alone, which gives the time to the first token; its keys and values are copied to the other
sequences of the batch, and `new_tokens` decode steps are timed, from the host, with everything that the loop does in them. `runs` runs are timed, behind one
that is not. A spread is the largest less the smallest, relative to the median.

Ranks that share a model (runtime/parallel.py) run all this together. Memory and bytes are of one card, tokens are of all.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch
from torch import nn

from tilepress.bench import kernels as bench
from tilepress.formats import UsageError, dtype_name
from tilepress.formats.kv_int4 import PAGE_TOKENS
from tilepress.kernels.arch import Path, references
from tilepress.runtime.decode.backends import ModelBackend
from tilepress.runtime.decode.generation import Engine, Request
from tilepress.runtime.parallel.group import TensorParallel

GIB = 1 << 30
FILLED = "one prompt prefilled, its keys and values copied to the other sequences of the batch"
_SPARE_STEPS = 6  # beside the timed ones: nothing ends before they are over, or those that are profiled
_PROFILED_STEPS = 3
_WORKSPACE = 6 * GIB  # that `fit` leaves for activations, graphs and torch itself
_ROOM = 2 * GIB  # that ranks must have left for a step: in the middle of one they cannot agree that it does not fit
_MOST_FIT = 1024
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
        if not self.batches or min(*numbers, *batches) < 1:
            raise UsageError(
                f"batches {self.batches}, context {self.context}, {self.new_tokens} new tokens, {self.runs} runs",
                "all must be at least 1",
            )

    @property
    def most(self) -> int:
        """Tokens of a sequence in the end."""
        return self.context + self.new_tokens + _SPARE_STEPS


@dataclass(frozen=True)
class Subject:
    """A model to time: its name, and what loads it."""

    name: str
    load: Callable[[], nn.Module]


class _DoesNotFit(torch.OutOfMemoryError):
    """All ranks know of it."""


def speed(
    model: Subject,
    base: Subject | None,
    protocol: Protocol,
    progress: Callable[[str], None] = lambda at: None,
    group: TensorParallel | None = None,
) -> dict:
    """The object that `eval speed --json` prints: `rows`, one a model and batch, the base's first. Raises UsageError where a card would run a reference."""
    found = compare([model], base, [protocol], progress, group)
    filled = asdict(protocol) | {"filled": FILLED, "sampling": "greedy"}
    return {"env": found["env"], "read_gbps": found["read_gbps"], "protocol": filled, "rows": found["rows"]}


def compare(
    models: list[Subject],
    base: Subject | None,
    protocols: list[Protocol],
    progress: Callable[[str], None],
    group: TensorParallel | None = None,
) -> dict:
    """`env`, `read_gbps` and `rows` of several models and contexts: each model is loaded once, the base first, and timed by every protocol. Subjects load
    what is theirs of models that a `group` shares."""
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
    """What `make` makes if it fits on every rank: one that goes on alone would wait for the others. `make` must not wait for them."""
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
    """The fastest of the caches that may serve the model."""
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
    if getattr(model, "kv_state", None) is not None or device.type != "cuda":
        return ("auto",)
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ("bfloat16", "contiguous") if head_dim in (64, 128) and model.dtype == torch.bfloat16 else ("contiguous",)


def _fitting(model: nn.Module, cache: str, protocol: Protocol) -> int:
    """The most sequences whose keys and values the card holds beside the model."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        raise UsageError("--batch fit asks for what a card holds", "give numbers")
    group = _group(model)
    small = _agreed(group, lambda: Engine(model, 1, protocol.most, cache, chunk=protocol.chunk))
    per_sequence = small.backend.cache.bytes_per_token * -(-protocol.most // PAGE_TOKENS) * PAGE_TOKENS
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

    def make() -> Engine:
        engine = Engine(model, batch, protocol.most, cache, chunk=protocol.chunk)
        if group is not None and device.type == "cuda" and _free(device) < _ROOM:
            raise torch.OutOfMemoryError
        return engine

    engine = _agreed(group, make)
    paths = engine.paths()
    _refuse_references(device, paths, isinstance(engine.backend, ModelBackend))
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(protocol.seed)
    prompt = torch.randint(vocabulary, (protocol.context,), generator=generator).tolist()
    request = Request(tuple(prompt), protocol.new_tokens + _SPARE_STEPS)
    _run(engine, request, batch, 1)
    ttft, tpot = zip(*(_run(engine, request, batch, protocol.new_tokens) for _ in range(protocol.runs)), strict=True)
    shares = _shares_of_a_step(engine, request, batch)
    step_s = statistics.median(tpot)
    per_second = [batch / seconds for seconds in tpot]
    weights, kv_bytes = stored_bytes(model), engine.backend.cache and engine.backend.cache.bytes_per_token
    read = _bytes_of_a_step(engine, batch, protocol)
    return {
        "batch": batch,
        "dtype": dtype_name(model.dtype),
        "cache": "the model's own" if engine.backend.cache is None else engine.backend.cache.name,
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


def _start(engine: Engine, request: Request, batch: int) -> float:
    """Brings so many sequences to run; seconds to the first token."""
    _together(engine)
    started = time.perf_counter()
    first = engine.submit(request)
    while not first.tokens:
        engine.step()
    seconds = time.perf_counter() - started
    if getattr(engine.backend.cache, "copy", None) is None:
        for _ in range(batch - 1):
            engine.submit(request)
        while len(engine.running) < batch:
            engine.fill()
    else:
        for _ in range(batch - 1):
            engine.fork(first, request)
    return seconds


def _run(engine: Engine, request: Request, batch: int, steps: int) -> tuple[float, float]:
    """Seconds to the first token, and of a step of the whole batch."""
    ttft = _start(engine, request, batch)
    _together(engine)
    started = time.perf_counter()
    for _ in range(steps):
        engine.step()
    _wait(engine.device)
    seconds = (time.perf_counter() - started) / steps
    engine.clear()
    return ttft, seconds


def _group(model: nn.Module) -> TensorParallel | None:
    return getattr(model, "tensor_parallel", None)


def _free(device: torch.device) -> int:
    """Bytes that torch has or can have for new tensors."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def _gpus(group: TensorParallel | None) -> int:
    return 1 if group is None else group.size


def _together(engine: Engine) -> None:
    """Waits for the card, and for all ranks."""
    _wait(engine.device)
    if (group := _group(engine.model)) is not None:
        group.least(0)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _spread(name: str, values: list[float]) -> dict[str, float]:
    median = statistics.median(values)
    return {name: median, f"{name}_spread": (max(values) - min(values)) / median}


def _speedup(row: dict, base: dict) -> dict[str, float]:
    """Of tokens per GPU-second; the spread is that of the fastest and slowest quotient of runs."""
    rates = [[r["batch"] / r["gpus"] / ms for ms in r["runs"]["tpot_ms"]] for r in (row, base)]
    ours, theirs = rates
    found = row["tokens_per_gpu_s"] / base["tokens_per_gpu_s"]
    return {"speedup": found, "speedup_spread": (max(ours) / min(theirs) - min(ours) / max(theirs)) / found}


def stored_bytes(model: nn.Module) -> int:
    """Of all parameters and buffers, memory that several share counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(model)}
    return sum(storages.values())


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _bytes_of_a_step(engine: Engine, batch: int, protocol: Protocol) -> int | None:
    """What a decode step must read: every product's weight, and keys and values at their mean length of the run."""
    decoder = getattr(engine.backend, "decoder", None)
    if decoder is None:
        return None
    linears = [x for layer in decoder.layers for x in (layer.qkv, layer.out, layer.inner, layer.outer)]
    weights = sum(tensor.nbytes for linear in (*linears, decoder.lm_head) for tensor in _tensors(linear))
    tokens = batch * (protocol.context + protocol.new_tokens // 2)
    return weights + tokens * engine.backend.cache.bytes_per_token


def _shares_of_a_step(engine: Engine, request: Request, batch: int) -> list[dict]:
    """Kernels of a decode step (operators on a CPU) with microseconds and share of them all, the longest first.

    A kernel that starts while others still run, and waits for them, has what it takes beyond their end.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    _start(engine, request, batch)
    engine.step()
    _wait(engine.device)
    on_card = engine.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_card else ProfilerActivity.CPU]) as found:
        for _ in range(_PROFILED_STEPS):
            engine.step()
        _wait(engine.device)
    engine.clear()
    if on_card:
        kernels = [event for event in found.events() if event.device_type == DeviceType.CUDA]
        times = times_without_overlap([(e.name, e.time_range.start, e.time_range.end) for e in kernels])
    else:
        times = {event.key: event.self_cpu_time_total for event in found.key_averages()}
    total = sum(times.values())
    rows = sorted(((name, us) for name, us in times.items() if us > 0), key=lambda item: -item[1])
    return [{"kernel": name, "us": us / _PROFILED_STEPS, "share": us / total} for name, us in rows]


def times_without_overlap(spans: list[tuple[str, float, float]]) -> dict[str, float]:
    """Sums by name of spans (name, begin, end), each counted from the latest end of those that end before it."""
    times: dict[str, float] = {}
    until = -math.inf
    for name, begin, end in sorted(spans, key=lambda span: span[2]):
        times[name] = times.get(name, 0.0) + end - max(begin, until)
        until = max(until, end)
    return times
