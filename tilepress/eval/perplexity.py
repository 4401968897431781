"""Perplexity, and how far a compressed model is from its base, window by window.

`protocol.py` says which windows are run and which tokens are scored, `scores.py` what is computed from the logits.

The noise floor tells a divergence that means something from one that does not. It is that of the dense model from itself with activations in the next
wider float: the same weights, rounded differently along the way. Yuan et al. 2025 (arXiv 2506.09501) find that the rounding of bfloat16 alone, moved by batch
size or kernel, changes what models answer, and weights in bfloat16 with arithmetic in float32 to be what removes it. A compressed model whose KL divergence is
near the floor cannot be told from its base run on another machine; compare also "flips", 1 - same top token (Dutta et al. 2024, arXiv 2407.09141).

Ranks that share a model (runtime/parallel) run the same windows together, and each has all logits and all figures.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby, islice
from pathlib import Path

import torch
from torch import Tensor

from tilepress.device import find_device
from tilepress.eval.protocol import Protocol, Span
from tilepress.eval.scores import Distance, DistanceSums, Scores, WindowSums, score
from tilepress.formats import TilepressError, UsageError, dtype_name, foreign_errors, kv_calibration
from tilepress.formats.checkpoint import Checkpoint, open_model
from tilepress.formats.kv_int4 import PAGE_TOKENS
from tilepress.runtime.half import fast_products
from tilepress.runtime.hf.paged_cache import PagedCache, cache_mode
from tilepress.runtime.loader import load, paths
from tilepress.runtime.parallel.group import TensorParallel
from tilepress.text import (
    EVALUATION,
    check_source,
    check_vocabulary,
    check_window,
    default_seqlen,
    load_tokenizer,
    token_ids,
)

_MOST_DECODED = 16  # windows at a time
_LOGITS_BYTES = 1 << 30
_MEASURED = {
    "sim": "keys and values quantized and dequantized inside an ordinary forward pass",
    "decode": "windows through the packed cache: half at once, then token by token",
}

WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
Progress = Callable[[str, int, int], None]  # what, windows done, windows in all


@dataclass(frozen=True)
class Comparison(Distance):
    """The distance of a model from its base."""

    base: Scores


@dataclass(frozen=True)
class NoiseFloor(Distance):
    """The distance of the dense model from itself with activations in a wider float."""

    of: str  # base | model: the one that was given
    dtype: str  # the wider one
    perplexity: float


@dataclass(frozen=True)
class PerplexityResult(Scores):
    """The scores of a model with all that decided them, and how it compares with a base."""

    tokens: int  # that were scored
    windows: int
    window_nll: list[float]
    protocol: dict  # settings of the measurement, and where and how it ran
    kv_cache: dict | None = None  # of a model with a calibrated cache: how it was measured
    comparison: Comparison | None = None
    noise_floor: NoiseFloor | None = None
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
        if self.noise_floor is not None:
            found["noise_floor"] = asdict(self.noise_floor)
        if self.model is not None:
            found = {"model": self.model, **found, "paths": self.paths, "seconds": self.seconds}
        if self.base_model is not None:
            found["base"] = {"model": self.base_model, **found["base"], "paths": self.base_paths}
        return found


def perplexity(
    model: str | Path,
    dataset: str | Path = EVALUATION,
    *,
    base: str | Path | None = None,
    recipe: str = "gptq",
    seqlen: int | None = None,
    stride: int | None = None,
    limit: int | None = None,
    bos: str = "auto",
    noise_floor: bool = False,
    kv: str = "auto",
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    group: TensorParallel | None = None,
    progress: Progress | None = None,
) -> PerplexityResult:
    """Measure a model's perplexity on a text, and with `base` how far it is from that model, window by window.

    model, base  folders or hub ids, dense or artifacts
    dataset      a .txt, .jsonl or .parquet file, or HUB_ID[:CONFIG[:SPLIT]]
    recipe       "gptq": windows without overlap, as papers report; "strided": overlapping by all but `stride` tokens (a quarter of seqlen)
    seqlen       tokens of a window; unless given 2048, or what the model's positions allow
    limit        windows at most
    bos          "auto": every window begins with what the tokenizer puts before a text; "always": also if it does not do so by itself;
                 "never"; "first": only the text does, and so the first window, as in the code of GPTQ and most papers. It is one of the
                 seqlen tokens and not scored
    noise_floor  also measure the dense model, `base` or else `model`, with activations in the next wider float: what rounding alone costs
    kv           what a calibrated attention cache does: see `measure`
    dtype        of activations and dense weights; "auto": the checkpoint's
    group        the ranks that share both models, each of which calls this with the same arguments and gets the same
    progress     called with "window", windows done, and windows in all

    Raises UsageError for a text too short for one window, models that do not share a vocabulary, a BOS that the tokenizer does not have, or the noise
    floor of an artifact; TilepressError for logits that are not finite.
    """
    check_source(str(dataset))
    progress = progress or (lambda what, done, total: None)
    checkpoint = open_model(model, revision)
    length = default_seqlen(checkpoint.text_config) if seqlen is None else seqlen
    protocol = Protocol(str(dataset), recipe, length, stride, limit, bos)
    dense = model if base is None else base
    if noise_floor:
        _check_dense(open_model(dense, revision if base is None else None), with_cache=base is None)
    options = {"device": find_device(device), "dtype": dtype, "trust_remote_code": trust_remote_code, "group": group}
    started = time.monotonic()
    subject = load(str(checkpoint.path), **options)
    other = None if base is None else load(str(base), kv=False, **options)
    wider = None
    if noise_floor:
        dtype_of_dense = (subject if other is None else other).dtype
        path = str(checkpoint.path) if base is None else str(base)
        wider = load(path, kv=False, **options | {"dtype": WIDER.get(dtype_of_dense, torch.float64)})
    found = measure(subject, load_tokenizer(checkpoint.path, trust_remote_code), protocol, other, progress, kv, wider)
    mode = "cache" if found.protocol["kv"] == "decode" else found.protocol["kv"]
    return replace(
        found,
        model=str(model),
        base_model=None if base is None else str(base),
        paths=paths(subject, mode),
        base_paths=None if base is None else paths(other),
        seconds=round(time.monotonic() - started, 2),
    )


@foreign_errors("the model cannot be measured", "`tilepress verify DIR` checks an artifact")
def measure(
    model,
    tokenizer,
    protocol: Protocol,
    base=None,
    progress: Progress = lambda what, done, total: None,
    kv: str = "auto",
    wider=None,
) -> PerplexityResult:
    """Score a loaded transformers causal language model, and with `base` compare the two on the same windows.

    `kv` is what a model with a calibrated attention cache does: `sim` quantizes and dequantizes all keys and values of an ordinary forward
    pass, `decode` sends every window through the packed cache (half of it at once, then token by token) and tells how far `sim` is from
    that, `off` leaves them alone; `auto` is `sim` where there is a calibration. The base is always run without. `wider` is the base, or without one the model,
    loaded in a wider float: its distance is the noise floor.

    Of models that ranks share, every rank calls it with the same arguments, and gets the same. Raises what `perplexity` raises.
    """
    _check_fit(model, base, protocol)
    kv = _cache_mode(model, kv)
    start = protocol.start(tokenizer)
    needed = None if protocol.limit is None else protocol.limit * protocol.stride + protocol.seqlen
    # A text that begins with the BOS in place of its windows has it from the tokenizer, with whatever else that adds.
    ids = token_ids(tokenizer, protocol.dataset, needed, special_tokens=not start and protocol.bos != "never")
    spans = protocol.windows(len(ids), len(start))
    if ids:
        check_vocabulary([start + ids], model)
    if not spans or (protocol.recipe == "strided" and len(ids) < 2):
        raise UsageError(
            f"{protocol.dataset} has {len(ids)} tokens, less than one window of {protocol.seqlen}",
            "give more text or a smaller --seqlen",
        )
    nll, base_nll, wider_nll, simulated = WindowSums(), WindowSums(), WindowSums(), WindowSums()
    distance, noise = DistanceSums(), DistanceSums()
    scored_bytes = 0
    for done, ((first, end, scored), logits) in enumerate(_runs(model, ids, spans, start, kv, progress)):
        window = torch.tensor([start + ids[first:end]], device=logits.device)
        rows = slice(len(start) + scored - 1 - first, len(start) + end - 1 - first)
        targets = window[0, len(start) + scored - first :]
        count = end - scored
        scored_bytes += len(tokenizer.decode(ids[scored:end]).encode())

        def run(other, whose: str, hint: str, window=window, rows=rows, targets=targets, done=done):
            """Return losses and logits of the scored tokens by another model, on its own device and brought here."""
            found = _logits(other, window.to(next(other.parameters()).device))[rows].to(window.device)
            return _finite(score(found, targets), whose, done, hint), found

        of_model = _finite(
            score(logits[rows], targets), "the model", done, "check the artifact: `tilepress verify DIR`"
        )
        reference = of_model, logits[rows]
        nll.add(float(of_model.double().sum()), count)
        if kv == "decode":
            simulated.add(float(score(_logits(model, window, "sim")[rows], targets).double().sum()), count)
        if base is not None:
            reference = run(base, "the base model", "check --base")
            base_nll.add(float(reference[0].double().sum()), count)
            distance.add(reference, (of_model, logits[rows]))
        if wider is not None:
            again = run(wider, "the dense model in a wider float", "check the checkpoint")
            wider_nll.add(float(again[0].double().sum()), count)
            noise.add(reference, again)
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
    comparison = floor = None
    if base is not None:
        comparison = Comparison(**vars(distance.result()), base=Scores.of(base_nll, bits))
    if wider is not None:
        of, value = "model" if base is None else "base", math.exp(wider_nll.mean)
        floor = NoiseFloor(**vars(noise.result()), of=of, dtype=dtype_name(wider.dtype), perplexity=value)
    return PerplexityResult(
        **vars(Scores.of(nll, bits)),
        tokens=tokens,
        windows=len(spans),
        window_nll=[total / count for total, count in zip(nll.sums, nll.counts, strict=True)],
        protocol=asdict(protocol)
        | {
            "joiner": "\n\n",
            "window_start": tokenizer.convert_ids_to_tokens(start),
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
        noise_floor=floor,
    )


def _finite(losses: Tensor, whose: str, window: int, hint: str) -> Tensor:
    """Return the losses. Raises TilepressError if one of them is not finite."""
    if not bool(torch.isfinite(losses).all()):
        raise TilepressError(f"{whose} gives non-finite logits in window {window}", hint)
    return losses


def _check_dense(checkpoint: Checkpoint, with_cache: bool) -> None:
    """Raise UsageError for a model that is no dense one, also if it has nothing but a cache with which it would run."""
    packed = any(weight.is_packed or weight.is_int8 for weight in checkpoint.weights.values())
    if packed or (with_cache and kv_calibration.CONFIG_KEY in checkpoint.config):
        raise UsageError(
            f"the noise floor is that of a dense model, {checkpoint.name} is compressed", "give its source as --base"
        )


def _cache_mode(model, kv: str) -> str:
    if kv not in ("auto", "sim", "decode", "off"):
        raise UsageError(f"--kv {kv} is unknown", "choose one of sim, decode, off")
    calibrated = getattr(model, "kv_state", None) is not None
    if kv in ("sim", "decode") and not calibrated:
        raise UsageError(f"--kv {kv}, but the model has no calibrated cache", "make one: `tilepress compress kv`")
    return ("sim" if calibrated else "off") if kv == "auto" else kv


def _runs(
    model, ids: list[int], spans: list[Span], start: list[int], kv: str, progress: Progress
) -> Iterator[tuple[Span, Tensor]]:
    """Yield each window's span and the logits of all its positions, `start` before those of the span.

    Windows of one length are decoded together, as many as have logits of _LOGITS_BYTES.
    """
    device, longest = next(model.parameters()).device, len(start) + max(end - first for first, end, _ in spans)
    row = model.config.get_text_config().vocab_size * model.dtype.itemsize
    most = min(_MOST_DECODED, max(1, _LOGITS_BYTES // (longest * row))) if kv == "decode" else 1
    done = 0
    for _, alike in groupby(spans, lambda span: span[1] - span[0]):
        while group := list(islice(alike, most)):
            progress("window", done, len(spans))
            windows = torch.tensor([start + ids[first:end] for first, end, _ in group], device=device)
            found = _decoded(model, windows) if kv == "decode" else _logits(model, windows, kv)[None]
            yield from zip(group, found, strict=True)
            done += len(group)


def _logits(model, window: Tensor, kv: str = "off") -> Tensor:
    """Return the logits of every position of a window, by one forward pass."""
    with cache_mode(model, kv), torch.inference_mode(), fast_products(model.dtype, window.device):
        return model(window, use_cache=False).logits[0]


def _decoded(model, windows: Tensor) -> Tensor:
    """Return the logits [n, tokens, vocabulary] of every position of windows [n, tokens], through the packed cache.

    Their first halves go through at once, the rest token by token.
    """
    n, tokens = windows.shape
    cache = PagedCache(model.kv_state.calibration, windows.device, num_pages=n * -(-tokens // PAGE_TOKENS))
    pieces = windows.split([tokens // 2, *[1] * (tokens - tokens // 2)], 1)
    with torch.inference_mode(), fast_products(model.dtype, model.device):
        return torch.cat([model(p, past_key_values=cache, use_cache=True).logits for p in pieces if p.numel()], 1)


def _check_fit(model, base, protocol: Protocol) -> None:
    config = model.config.get_text_config()
    check_window(protocol.seqlen, config.to_dict())
    if base is not None and base.config.get_text_config().vocab_size != config.vocab_size:
        raise UsageError(
            f"the models have vocabularies of {config.vocab_size} and {base.config.get_text_config().vocab_size}",
            "give as --base the model that the artifact was made from",
        )
