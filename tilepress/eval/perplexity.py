"""Perplexity, and how far a compressed model is from its base, window by window.

Recipe `gptq` (what pruning and quantization papers report): documents joined by a blank line, tokenized once, cut into windows
without overlap, the tail dropped; every token but a window's first is scored. Recipe `strided` (transformers' documentation):
windows overlap, only the tokens new to a window are scored, so each has at least `seqlen - stride` of context. The two are never
comparable with each other, nor across tokenizers: that is what bits per byte is for.

Log-softmax is computed in float32 and sums in float64. Errors are standard errors over windows (windows are what is nearly
independent, tokens are not); against a base they are paired, which removes the text's own variance.

Ranks that share a model (runtime/parallel) run the same windows together, and each has all logits and all figures.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby, islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tilepress.device import find_device
from tilepress.formats import TilepressError, UsageError, check_kinds, dtype_name
from tilepress.formats.checkpoint import open_model
from tilepress.formats.kv_int4 import PAGE_TOKENS
from tilepress.runtime.hf.paged_cache import PagedCache, cache_mode
from tilepress.runtime.loader import load, paths
from tilepress.runtime.parallel.group import TensorParallel
from tilepress.text import EVALUATION, check_vocabulary, check_window, default_seqlen, load_tokenizer, token_ids

_TOKENS_AT_ONCE = 256  # rows of logits in float32 at a time
_MOST_DECODED = 16  # windows at a time
_LOGITS_BYTES = 1 << 30
RECIPES = ("gptq", "strided")
_MEASURED = {
    "sim": "keys and values quantized and dequantized inside an ordinary forward pass",
    "decode": "windows through the packed cache: half at once, then token by token",
}

Span = tuple[int, int, int]  # first token of a window, its end, the first scored one
Progress = Callable[[str, int, int], None]  # what, windows done, windows in all


@dataclass(frozen=True)
class Protocol:
    """Everything that decides a perplexity besides the model."""

    dataset: str
    recipe: str = "gptq"  # gptq | strided
    seqlen: int = 2048  # tokens of a window
    stride: int | None = None  # tokens between windows; gptq: seqlen, strided: seqlen / 4 unless given
    limit: int | None = None  # windows at most

    def __post_init__(self):
        check_kinds(self)
        if self.recipe not in RECIPES:
            raise UsageError(f"--recipe {self.recipe} is unknown", f"choose one of {', '.join(RECIPES)}")
        if self.seqlen < 2 or (self.limit is not None and self.limit < 1):
            raise UsageError(
                f"seqlen {self.seqlen} and limit {self.limit} give nothing to score",
                "use --seqlen 2 or more and --limit 1 or more",
            )
        default = self.seqlen if self.recipe == "gptq" else max(self.seqlen // 4, 1)
        step = default if self.stride is None else self.stride
        if self.recipe == "gptq" and step != self.seqlen:
            raise UsageError("recipe gptq has windows without overlap", "leave --stride out, or use --recipe strided")
        if not 1 <= step <= self.seqlen:
            raise UsageError(
                f"stride {step} is not in 1..{self.seqlen}",
                "each window must reach the next: --stride at most --seqlen",
            )
        object.__setattr__(self, "stride", step)

    def windows(self, num_tokens: int) -> list[Span]:
        """The spans of the windows of a text of so many tokens."""
        if self.recipe == "gptq":
            spans = [(a, a + self.seqlen, a + 1) for a in range(0, num_tokens - self.seqlen + 1, self.seqlen)]
        else:
            spans, scored = [], 1
            for a in range(0, num_tokens, self.stride):
                end = min(a + self.seqlen, num_tokens)
                if end > max(scored, a + 1):
                    spans.append((a, end, max(scored, a + 1)))  # a window's first token has nothing before it
                scored = end
                if end == num_tokens:
                    break
        return spans[: self.limit]


@dataclass(frozen=True)
class Scores:
    """Scores of one model: errors are standard errors over windows, None for a single window."""

    perplexity: float
    perplexity_stderr: float | None
    nll: float  # mean negative log-likelihood of a token, nats
    nll_stderr: float | None
    bits_per_byte: float  # of text: comparable across tokenizers


@dataclass(frozen=True)
class Comparison:
    """The distance of a model from its base, on the same windows; errors are paired."""

    base: Scores
    delta_nll: float  # nats a token
    delta_nll_stderr: float | None
    kl_divergence: dict[str, float | None]  # of base || model, nats: mean, stderr, p99, max
    top1_agreement: float  # share of tokens for which both name the same most likely one
    top1_agreement_stderr: float | None


@dataclass(frozen=True)
class PerplexityResult(Scores):
    """The scores of a model with all that decided them, and how it compares with a base."""

    tokens: int  # that were scored
    windows: int
    window_nll: list[float]
    protocol: dict  # settings of the measurement, and where and how it ran
    kv_cache: dict | None = None  # of a model with a calibrated cache: how it was measured
    comparison: Comparison | None = None
    model: str | None = None
    base_model: str | None = None
    paths: dict[str, int] | None = None  # which implementation served how many layers
    base_paths: dict[str, int] | None = None
    seconds: float | None = None

    def to_json(self) -> dict:
        """Return what `eval perplexity --json` prints, as a dictionary of plain values."""
        own = [*Scores.__dataclass_fields__, "tokens", "windows", "window_nll", "protocol"]
        found = {name: getattr(self, name) for name in own}
        if self.kv_cache is not None:
            found["kv_cache"] = self.kv_cache
        if self.comparison is not None:
            found |= asdict(self.comparison)
        if self.model is not None:
            found = {"model": self.model, **found, "paths": self.paths, "seconds": self.seconds}
        if self.base_model is not None:
            found["base"] = {"model": self.base_model, **found["base"], "paths": self.base_paths}
        return found


class WindowSums:
    """Sums of a per-token quantity by window: their mean over tokens and its standard error over windows."""

    def __init__(self):
        self.sums: list[float] = []
        self.counts: list[int] = []

    def add(self, total: float, count: int) -> None:
        self.sums.append(total)
        self.counts.append(count)

    @property
    def mean(self) -> float:
        return sum(self.sums) / sum(self.counts)

    @property
    def stderr(self) -> float | None:
        """The standard error, None for a single window. It is the ratio estimator: windows may differ in length."""
        n = len(self.sums)
        if n < 2:
            return None
        residuals = np.array(self.sums) - np.array(self.counts) * self.mean
        return float(math.sqrt(n / (n - 1) * float(residuals @ residuals)) / sum(self.counts))


def score(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood of each target, nats: logits [n, vocabulary], targets [n] -> float32 [n]."""
    rows = [
        torch.nn.functional.cross_entropy(part.float(), want, reduction="none")
        for part, want in zip(logits.split(_TOKENS_AT_ONCE), targets.split(_TOKENS_AT_ONCE), strict=True)
    ]
    return torch.cat(rows)


def divergence(base: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """KL(base || other) of each row in nats, and whether both name the same top token: logits [n, vocabulary] -> [n], [n]."""
    kl, same = [], []
    for p, q in zip(base.split(_TOKENS_AT_ONCE), other.split(_TOKENS_AT_ONCE), strict=True):
        p, q = torch.log_softmax(p.float(), -1), torch.log_softmax(q.float(), -1)
        kl.append((p.exp() * (p - q)).sum(-1).clamp(min=0))
        same.append(p.argmax(-1) == q.argmax(-1))
    return torch.cat(kl), torch.cat(same)


def perplexity(
    model: str | Path,
    dataset: str | Path = EVALUATION,
    *,
    base: str | Path | None = None,
    recipe: str = "gptq",
    seqlen: int | None = None,
    stride: int | None = None,
    limit: int | None = None,
    kv: str = "auto",
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    group: TensorParallel | None = None,
    progress: Progress = lambda what, done, total: None,
) -> PerplexityResult:
    """Measure a model's perplexity on a text, and with `base` how far it is from that model, window by window.

    model, base  folders or hub ids, dense or artifacts
    dataset      a .txt, .jsonl or .parquet file, or HUB_ID[:CONFIG[:SPLIT]]
    recipe       "gptq": windows without overlap, as papers report; "strided": overlapping by all but `stride` tokens (a quarter of seqlen)
    seqlen       tokens of a window; unless given 2048, or what the model's positions allow
    limit        windows at most
    kv           what a calibrated attention cache does: see `measure`
    dtype        of activations and dense weights; "auto": the checkpoint's
    group        the ranks that share both models, each of which calls this with the same arguments and gets the same
    progress     called with "window", windows done, and windows in all

    Raises UsageError for a text too short for one window or models that do not share a vocabulary, TilepressError for logits that are not finite.
    """
    checkpoint = open_model(model, revision)
    length = default_seqlen(checkpoint.text_config) if seqlen is None else seqlen
    protocol = Protocol(str(dataset), recipe, length, stride, limit)
    options = {"device": find_device(device), "dtype": dtype, "trust_remote_code": trust_remote_code, "group": group}
    started = time.monotonic()
    subject = load(str(checkpoint.path), **options)
    other = None if base is None else load(str(base), kv=False, **options)
    found = measure(subject, load_tokenizer(checkpoint.path, trust_remote_code), protocol, other, progress, kv)
    mode = "cache" if found.protocol["kv"] == "decode" else found.protocol["kv"]
    return replace(
        found,
        model=str(model),
        base_model=None if base is None else str(base),
        paths=paths(subject, mode),
        base_paths=None if base is None else paths(other),
        seconds=round(time.monotonic() - started, 2),
    )


def measure(
    model,
    tokenizer,
    protocol: Protocol,
    base=None,
    progress: Progress = lambda what, done, total: None,
    kv: str = "auto",
) -> PerplexityResult:
    """Score a loaded transformers causal language model, and with `base` compare the two on the same windows.

    `kv` is what a model with a calibrated attention cache does: `sim` quantizes and dequantizes all keys and values of an ordinary forward
    pass, `decode` sends every window through the packed cache (half of it at once, then token by token) and tells how far `sim` is from
    that, `off` leaves them alone; `auto` is `sim` where there is a calibration. The base is always run without.

    Of models that ranks share, every rank calls it with the same arguments, and gets the same. Raises what `perplexity` raises.
    """
    _check_fit(model, base, protocol)
    kv = _cache_mode(model, kv)
    needed = None if protocol.limit is None else protocol.limit * protocol.stride + protocol.seqlen
    ids = token_ids(tokenizer, protocol.dataset, needed)
    spans = protocol.windows(len(ids))
    if ids:
        check_vocabulary([ids], model)
    if not spans or (protocol.recipe == "strided" and len(ids) < 2):
        raise UsageError(
            f"{protocol.dataset} has {len(ids)} tokens, less than one window of {protocol.seqlen}",
            "give more text or a smaller --seqlen",
        )
    nll, base_nll, delta, kl, same = WindowSums(), WindowSums(), WindowSums(), WindowSums(), WindowSums()
    kl_of_tokens: list[Tensor] = []
    simulated = WindowSums()
    scored_bytes = 0
    for done, ((first, end, scored), logits) in enumerate(_runs(model, ids, spans, kv, progress)):
        window = torch.tensor([ids[first:end]], device=logits.device)
        rows = slice(scored - 1 - first, end - 1 - first)
        count = end - scored
        scored_bytes += len(tokenizer.decode(ids[scored:end]).encode())
        logits = logits[rows]
        losses = score(logits, window[0, scored - first :])
        if not bool(torch.isfinite(losses).all()):
            raise TilepressError(
                f"the model gives non-finite logits in window {done}", "check the artifact: `tilepress verify DIR`"
            )
        nll.add(float(losses.double().sum()), count)
        if kv == "decode":
            others = score(_logits(model, window, "sim")[rows], window[0, scored - first :])
            simulated.add(float(others.double().sum()), count)
        if base is not None:
            base_logits = _logits(base, window.to(next(base.parameters()).device))[rows].to(logits.device)
            base_losses = score(base_logits, window[0, scored - first :])
            if not bool(torch.isfinite(base_losses).all()):
                raise TilepressError(f"the base model gives non-finite logits in window {done}", "check --base")
            base_nll.add(float(base_losses.double().sum()), count)
            delta.add(float((losses.double() - base_losses.double()).sum()), count)
            divergences, agrees = divergence(base_logits, logits)
            kl.add(float(divergences.double().sum()), count)
            same.add(float(agrees.sum()), count)
            kl_of_tokens.append(divergences.cpu())
    progress("window", len(spans), len(spans))
    tokens = sum(nll.counts)
    bits = tokens / max(scored_bytes, 1) / math.log(2)  # of one nat a token, for each byte of text
    cache = None
    if kv != "off":
        calibration = model.kv_state.calibration
        cache = {"measured": _MEASURED[kv], "format": calibration.name}
        cache["bits_per_element"] = calibration.bits_per_element
    if kv == "decode":
        others = math.exp(simulated.mean)
        cache |= {"sim_perplexity": others, "decode_over_sim": math.exp(nll.mean) / others - 1}
    comparison = None
    if base is not None:
        every = torch.cat(kl_of_tokens).double().numpy()
        extremes = {"p99": float(np.quantile(every, 0.99)), "max": float(every.max())}
        comparison = Comparison(
            _scores(base_nll, bits),
            delta.mean,
            delta.stderr,
            {"mean": kl.mean, "stderr": kl.stderr} | extremes,
            same.mean,
            same.stderr,
        )
    return PerplexityResult(
        **vars(_scores(nll, bits)),
        tokens=tokens,
        windows=len(spans),
        window_nll=[total / count for total, count in zip(nll.sums, nll.counts, strict=True)],
        protocol=asdict(protocol)
        | {
            "joiner": "\n\n",
            "bos": bool(ids) and ids[0] == tokenizer.bos_token_id,
            "dtype": dtype_name(model.dtype),
            "device": str(next(model.parameters()).device),
            "ranks": 1 if (group := getattr(model, "tensor_parallel", None)) is None else group.size,
            "attention": model.config._attn_implementation,
            "log_softmax": "float32",
            "tokenizer": type(tokenizer).__name__,
            "vocabulary": model.config.get_text_config().vocab_size,
            "kv": kv,
        },
        kv_cache=cache,
        comparison=comparison,
    )


def _scores(nll: WindowSums, bits: float) -> Scores:
    """Return the scores of summed losses; `bits` are those of one nat a token, for each byte of text."""
    value = math.exp(nll.mean)
    error = None if nll.stderr is None else value * nll.stderr
    return Scores(value, error, nll.mean, nll.stderr, nll.mean * bits)


def _cache_mode(model, kv: str) -> str:
    if kv not in ("auto", "sim", "decode", "off"):
        raise UsageError(f"--kv {kv} is unknown", "choose one of sim, decode, off")
    calibrated = getattr(model, "kv_state", None) is not None
    if kv in ("sim", "decode") and not calibrated:
        raise UsageError(f"--kv {kv}, but the model has no calibrated cache", "make one: `tilepress compress kv`")
    return ("sim" if calibrated else "off") if kv == "auto" else kv


def _runs(model, ids: list[int], spans: list[Span], kv: str, progress: Progress) -> Iterator[tuple[Span, Tensor]]:
    """Yield each window's span and the logits of all its positions.

    Windows of one length are decoded together, as many as have logits of _LOGITS_BYTES.
    """
    device, longest = next(model.parameters()).device, max(end - first for first, end, _ in spans)
    row = model.config.get_text_config().vocab_size * model.dtype.itemsize
    most = min(_MOST_DECODED, max(1, _LOGITS_BYTES // (longest * row))) if kv == "decode" else 1
    done = 0
    for _, alike in groupby(spans, lambda span: span[1] - span[0]):
        while group := list(islice(alike, most)):
            progress("window", done, len(spans))
            windows = torch.tensor([ids[first:end] for first, end, _ in group], device=device)
            found = _decoded(model, windows) if kv == "decode" else _logits(model, windows, kv)[None]
            yield from zip(group, found, strict=True)
            done += len(group)


def _logits(model, window: Tensor, kv: str = "off") -> Tensor:
    """Return the logits of every position of a window, by one forward pass."""
    with cache_mode(model, kv), torch.inference_mode():
        return model(window, use_cache=False).logits[0]


def _decoded(model, windows: Tensor) -> Tensor:
    """Return the logits [n, tokens, vocabulary] of every position of windows [n, tokens], through the packed cache.

    Their first halves go through at once, the rest token by token.
    """
    n, tokens = windows.shape
    cache = PagedCache(model.kv_state.calibration, windows.device, num_pages=n * -(-tokens // PAGE_TOKENS))
    pieces = windows.split([tokens // 2, *[1] * (tokens - tokens // 2)], 1)
    with torch.inference_mode():
        return torch.cat([model(p, past_key_values=cache, use_cache=True).logits for p in pieces if p.numel()], 1)


def _check_fit(model, base, protocol: Protocol) -> None:
    config = model.config.get_text_config()
    check_window(protocol.seqlen, config.to_dict())
    if base is not None and base.config.get_text_config().vocab_size != config.vocab_size:
        raise UsageError(
            f"the models have vocabularies of {config.vocab_size} and {base.config.get_text_config().vocab_size}",
            "give as --base the model that the artifact was made from",
        )
