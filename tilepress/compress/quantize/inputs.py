"""One input of a decoder layer on its way through calibration: what it looked like, and what is decided from that.

Linear layers that read one tensor share its statistics, factors, range and second moments (layers/groups.py). ranges.py shows an input all
windows of text and asks for the decisions in order: factors, fold, range, codes of the weights, errors.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tilepress.compress.layers.groups import Group
from tilepress.compress.layers.layerwise import LayerByLayer
from tilepress.compress.layers.moments import Moments
from tilepress.compress.layers.walk import FEW_TOKENS
from tilepress.compress.quantize.gptq import Rounding
from tilepress.compress.quantize.observers import InputStats, Observer, clipped_share
from tilepress.compress.quantize.smoothing import (
    ALPHAS,
    exact_factors,
    learned_factors,
    output_error,
    quantized_weight,
    smooth_factors,
)
from tilepress.formats import TilepressError, int8
from tilepress.formats.checkpoint import linear_shape
from tilepress.models.families import norm_offset
from tilepress.ranks import Ranks

SAMPLED_ROWS = 1024  # of each input, for output errors and the search of alpha
ROUNDINGS = ("nearest", "gptq")
# Learned factors see so many rows of an input: a channel that is rarely large needs many. On a card they cost no more launches.
LEARNING_ROWS = {"cpu": 4096, "cuda": 16384}
COMPARED_ROWS = (
    4096  # of these, that products in float32 compare outputs on: more would take longer than all of the search
)
_GPTQ_SHARE = 0.3  # of the noise that rounding weights to the nearest would add, what GPTQ leaves, about


@dataclass(frozen=True)
class Settings:
    """The settings of a recipe that concern calibration."""

    scheme: int8.Int8Scheme
    observer: Observer
    smooth: str  # off | learn | auto | channel (every channel to the same reach) | a number
    rounding: str  # nearest | gptq
    dynamic: float  # of a static scheme the share of linear layers, at most, whose inputs are quantized per token
    dtype: torch.dtype | None  # the recipe's
    keep: float = 0.0  # of the linear weights the share, at most, that stays in 16 bits
    device: str = "cpu"  # cpu | cuda
    all_experts: bool = False  # whether experts of a mixture see every token of the text
    head: bool = False  # whether the output head is quantized too

    @property
    def sampled_rows(self) -> int:
        return LEARNING_ROWS.get(self.device, LEARNING_ROWS["cpu"]) if self.smooth == "learn" else SAMPLED_ROWS

    @property
    def weighs_tokens(self) -> bool:
        """Whether weights are computed from those of the checkpoint, by what single tokens say."""
        return self.smooth == "learn" or self.rounding == "gptq" or bool(self.dynamic or self.keep)

    @property
    def observes_twice(self) -> bool:
        """Whether a layer runs once more after its fold."""
        return self.smooth not in ("off", "learn") or (self.smooth == "learn" and self.scheme.static)


class Input:
    """One input of a layer on its way through calibration: its group, its statistics, and what was decided."""

    def __init__(self, group: Group, settings: Settings, dtype: torch.dtype, number: int):
        self.group, self.settings, self.dtype, self.number = group, settings, dtype, number
        self.scheme = settings.scheme
        self.stats: InputStats = InputStats(SAMPLED_ROWS, seed=number)
        self.factors: Tensor | None = None  # of the producer's output channels
        self.alpha: float | None = None
        self.left_alone = group.reason
        self.range: tuple[float, float] | None = None
        self.scale: Tensor | None = None
        self.zero_point: Tensor | None = None
        self.errors: list[float] | None = None
        self.borrowed = False
        self.typical: Tensor | None = None  # squared norm of a token of it
        self.reach: float | None = None  # the largest magnitude, before factors divided it
        self.massive: float | None = None  # how many times that is the root mean square of a typical token's values
        self.moments: Moments | None = None
        self.folded: list[Tensor] | None = None  # the weights, where they are not read off the module
        self.row_divisors: list[Tensor | None] = []  # factors that are folded into the rows of each weight
        self.codes: list[tuple[Tensor, Tensor]] | None = None  # of each weight, with their scale
        self.noise: float | None = (
            None  # that quantizing these linear layers alone adds to the residual stream, squared and relative
        )
        self.noise_per_token: float | None = None  # the same with a scale per token in place of the static range
        self.errors_per_token: list[float] | None = None
        self.routed: int | None = None  # tokens that the router gives this expert, where it saw all of them
        self._seen: list[Tensor] = []  # rows of the window that runs
        # Rows of windows that were not looked at yet, their tokens' energy, and their place in the text where ranks share it.
        self._waiting: list[tuple[Tensor, Tensor | None, int | None]] = []
        self._scale: Tensor | None = None  # a usual token's energy

    def start(self) -> None:
        """Begin with new statistics."""
        self.stats = InputStats(self.settings.sampled_rows, seed=self.number)
        self.typical = self.moments = None

    def see(self, x: Tensor) -> None:
        """Take x [..., channels] of a window that runs."""
        self._seen.append(x.detach().reshape(-1, x.shape[-1]).clone())  # the layer may go on in place

    def end_window(self, energy: Tensor, counting: bool, together: float = 1, place: int | None = None) -> None:
        """Take the window's `energy` [tokens], each token's squared norm in the residual stream; look at the windows that wait once they
        have `together` elements. `counting` fills the histogram. `place` is that of the window's first token in a text that ranks share."""
        seen, self._seen = [rows for rows in self._seen if len(rows)], []
        whole = len(seen) == 1 and len(seen[0]) == len(energy) and ".experts." not in self.group.linears[0]
        whole = whole and not self.group.normed
        places = [None if place is None else place + i for i in range(len(seen))]
        self._waiting += [(rows, energy if whole else None, at) for rows, at in zip(seen, places, strict=True)]
        if sum(rows.numel() for rows, *_ in self._waiting) >= together:
            self.look(counting)

    def look(self, counting: bool) -> None:
        """Look at the windows that wait."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        parts, name = [rows for rows, *_ in waiting], self.group.linears[0]
        rows, weights = parts[0] if len(parts) == 1 else torch.cat(parts), None
        if self.settings.weighs_tokens:
            self._settle_typical(parts[0])
            weights = torch.cat([self._weights(rows, energy) for rows, energy, _ in waiting])
        places = [place for *_, place in waiting]
        self.stats.add(rows, name, counting, [len(part) for part in parts], weights, None if None in places else places)
        if self.settings.rounding == "gptq" and (counting or not self.settings.observes_twice):
            self.moments = Moments(rows.shape[1]) if self.moments is None else self.moments
            # Moments know no other scale than their mean, so the largest weights may be about 1.
            root = (weights * self._scale).sqrt()[:, None]
            self.moments.add((rows * root).to(rows.dtype), name)

    def _settle_typical(self, rows: Tensor) -> None:
        if self.typical is None:
            self.typical = rows.float().square().sum(-1).median().clamp(min=1e-30)

    def usual(self) -> list[float]:
        """Return a usual token's squared norm and energy by the first window that was seen; not a number where there was none."""
        if self._waiting:
            rows, energy, _ = self._waiting[0]
            self._settle_typical(rows)
            self._weights(rows, energy)
        return [math.nan if found is None else float(found) for found in (self.typical, self._scale)]

    def settle_usual(self, typical: float, scale: float, device: torch.device) -> None:
        """Take what is usual from another rank; not a number leaves it open."""
        if not math.isnan(typical):
            self.typical = torch.tensor(typical, device=device)
        if not math.isnan(scale):
            self._scale = torch.tensor(scale, device=device)

    def reduce(self, ranks: Ranks, owner: int, width: int, counting: bool) -> None:
        """Make the statistics and moments those of all ranks' windows, on the rank `owner`; `width` is of the input."""
        if ranks.size == 1:
            return
        usual = ranks.gather(torch.tensor([self.usual()], dtype=torch.float64, device=ranks.device))[:, 0]
        typical, scale = (next((v for v in of.tolist() if not math.isnan(v)), math.nan) for of in usual.t())
        if self.settings.rounding == "gptq" and (counting or not self.settings.observes_twice):
            self.moments = self.moments or Moments(width)
            if self.moments.tokens:
                self.moments.scale(scale / float(self._scale))
            self.moments.reduce(ranks, owner)
        self.settle_usual(typical, scale, ranks.device)
        self.stats.reduce(ranks, owner)

    def _weights(self, rows: Tensor, energy: Tensor | None) -> Tensor:
        """Return how much each token counts [n]: the reciprocal of its squared norm in the residual stream, which its error is added to.

        An attention sink's input can be a million times a usual one: without weights it would be all that counts. What a norm makes is of
        one size and goes into gates and attention, not straight to the stream, so its own norm serves. It has to for experts, too, which see
        some of the tokens in an order of their own."""
        if energy is None:
            energy = rows.float().square().sum(-1).clamp(min=self.typical)
        weights = energy.clamp(min=1e-30).reciprocal()
        if self._scale is None:
            self._scale = weights.median().reciprocal()
        return weights

    def weights(self, modules: dict) -> list[Tensor]:
        """Return each linear layer's weight, [out, in] float32."""
        found = []
        for path in self.group.linears:
            weight = modules[path].weight.detach().float()
            found.append(weight.t().contiguous() if linear_shape(modules[path])[2] else weight)
        return found

    def choose_factors(self, modules: dict) -> None:
        """Decide on smoothing from the statistics of the unfolded layer; leaves `factors` None where it does not help."""
        if self.group.producer is None:
            return
        if self.stats.tokens < FEW_TOKENS:
            self.left_alone = f"saw fewer than {FEW_TOKENS} tokens"
            return
        weights, smooth = self.weights(modules), self.settings.smooth
        if smooth == "learn":
            self._learn_factors(weights, modules)
            return
        reach = torch.maximum(self.stats.high, -self.stats.low)
        reach = self.group.shared(reach)
        columns = self.group.shared(torch.stack([w.abs().amax(0) for w in weights]).amax(0))
        alphas = {"auto": ALPHAS, "channel": (1.0,)}.get(smooth) or (float(smooth),)
        candidates = {alpha: self._exact(smooth_factors(reach, columns, alpha), modules) for alpha in alphas}
        best = alphas[0]
        if smooth == "auto":
            exact = [self._compared @ weight.t() for weight in weights]
            errors = {alpha: self._error(factors, weights, exact) for alpha, factors in candidates.items()}
            best = min(errors, key=errors.get)
            if errors[best] >= self._error(torch.ones_like(reach), weights, exact):
                self.left_alone = "no alpha lowers the output error"
                return
        self.alpha, self.factors = best, candidates[best]

    def _learn_factors(self, weights: list[Tensor], modules: dict) -> None:
        """Take learned factors if they lower the error of the outputs, token by token."""
        rows, share = self.stats.rows, _GPTQ_SHARE if self.settings.rounding == "gptq" else 1.0
        learned = learned_factors(rows, torch.cat(weights), self.group, self.stats.beside, self.scheme, share)
        learned, exact = self._exact(learned, modules), [self._compared @ weight.t() for weight in weights]
        if self._error(learned, weights, exact) < self._error(torch.ones_like(learned), weights, exact):
            self.factors = learned
        else:
            self.left_alone = "no factors lower the output error"

    def fold(self, modules: dict, divisors: dict[str, Tensor]) -> None:
        """Compute the weights as they will be stored, and what was seen as it will be seen: divided by the factors.

        `divisors` are the factors that are folded into the outputs of linear layers."""
        if not self.settings.weighs_tokens:
            return
        if self.stats.tokens:
            self.reach = float(torch.maximum(self.stats.high, -self.stats.low).max())
            self.massive = self.reach / float(self.typical / len(self.stats.high)) ** 0.5
        columns = 1.0 if self.factors is None else self.group.spread(self.factors)
        self.folded = [weight * columns for weight in self.weights(modules)]
        self.row_divisors = [divisors.get(path) for path in self.group.linears]
        for weight, divisor in zip(self.folded, self.row_divisors, strict=True):
            if divisor is not None:
                weight.div_(divisor[:, None])
        if self.factors is not None:
            self.stats.divide(columns)
            if self.moments is not None:
                self.moments.divide(columns)

    def round_weights(self) -> None:
        """Round the weights by GPTQ, where that is asked for and the input was seen."""
        if self.moments is None or self.stats.tokens < FEW_TOKENS:
            return
        rounding = Rounding(self.moments.hessian(0.0), self.group.linears[0], self.moments.tokens)
        scales = [int8.weight_scale(weight, self.scheme.weights, self.dtype) for weight in self.folded]
        # One matrix for all: the launches are as many as it has columns.
        rows, steps = (
            [len(w) for w in self.folded],
            [s.reshape(-1, 1).expand(len(w), 1) for w, s in zip(self.folded, scales, strict=True)],
        )
        codes = rounding.codes(torch.cat(self.folded), torch.cat(steps))
        self.codes = list(zip(codes.split(rows), scales, strict=True))
        self.moments = None

    def _exact(self, factors: Tensor, modules: dict) -> Tensor:
        producer = modules[self.group.producer]
        if producer.weight.dim() != 1:
            return factors
        return exact_factors(factors, producer.weight, self.dtype, norm_offset(producer))

    @property
    def _compared(self) -> Tensor:
        """The sampled rows that outputs are compared on, [at most COMPARED_ROWS, channels]."""
        return self._thinned(self.stats.rows)

    @staticmethod
    def _thinned(rows: Tensor) -> Tensor:
        return rows[:: -(-len(rows) // COMPARED_ROWS)]

    def _error(self, factors: Tensor, weights: list[Tensor], exact: list[Tensor]) -> float:
        """Return the squared error of the group's outputs on the sampled rows, all quantized as the artifact will be."""
        columns = self.group.spread(factors)
        rows = self._compared / columns
        scale = zero_point = None
        if self.scheme.static:
            low, high = float((self.stats.low / columns).min()), float((self.stats.high / columns).max())
            sampled = InputStats(1, 0)
            sampled.add(rows, self.group.linears[0])
            chosen = self.settings.observer.range(sampled.histogram, low, high, self.scheme.asymmetric)
            scale, zero_point = self._static(chosen)
        rows = int8.fake_quantize_input(rows, self.scheme, scale, zero_point)
        token = self._thinned(self.stats.beside)[:, None] if self.settings.weighs_tokens else 1.0
        totals = []
        for weight, expected in zip(weights, exact, strict=True):
            back = quantized_weight(weight * columns, self.scheme, self.dtype)
            totals.append(((rows @ back.t() - expected).square() * token).sum())
        return sum(torch.stack(totals).tolist())

    def _static(self, chosen: tuple[float, float]) -> tuple[Tensor, Tensor | None]:
        """Return scale and zero point of a range, on the device of the sampled rows."""
        scale, zero_point = int8.static_scale(*chosen, self.scheme.asymmetric, self.dtype)
        device = self.stats.low.device if self.stats.tokens else scale.device
        return scale.to(device), None if zero_point is None else zero_point.to(device)

    def choose_range(self, inputs: list["Input"]) -> None:
        """Choose the static range, unless that is done; an expert that saw no token gets the range of the layer's other experts."""
        if not self.scheme.static or self.range is not None:
            return
        if self.stats.tokens:
            low, high = float(self.stats.low.min()), float(self.stats.high.max())
            self.range = self.settings.observer.range(self.stats.histogram, low, high, self.scheme.asymmetric)
            self.scale, self.zero_point = self._static(self.range)
            return
        seen = [item for item in inputs if item.stats.tokens and ".experts." in item.group.linears[0]]
        kind = {path.rpartition(".")[2] for path in self.group.linears}
        others = [item for item in seen if kind & {path.rpartition(".")[2] for path in item.group.linears}]
        if ".experts." not in self.group.linears[0] or not others:
            raise TilepressError(
                f"{self.group.linears[0]} saw no token of the calibration text",
                f"give more text (--nsamples, --dataset), or --ignore {self.group.linears[0]}",
            )
        for item in others:
            item.choose_range(inputs)
        self.borrowed = True
        self.range = min(item.range[0] for item in others), max(item.range[1] for item in others)
        self.scale, self.zero_point = self._static(self.range)

    def measure(self, modules: dict) -> None:
        """Measure the relative output error of each linear layer on the sampled rows."""
        if not self.stats.tokens:
            return
        weights = self.weights(modules) if self.folded is None else self.folded
        compared, quantized = self._compared, self._quantized(weights)
        rows = int8.fake_quantize_input(compared, self.scheme, self.scale, self.zero_point)
        self.errors = output_error(compared, weights, rows, quantized)
        if self.settings.dynamic and self.scheme.static:
            per_token = int8.fake_quantize_input(compared, int8.Int8Scheme(), None, None)
            self.errors_per_token = output_error(compared, weights, per_token, quantized)

    def _quantized(self, weights: list[Tensor]) -> list[Tensor]:
        """Return the weights as they come back from INT8 [out, in] float32."""
        if self.codes is None:
            return [quantized_weight(weight, self.scheme, self.dtype) for weight in weights]
        return [int8.dequantize(codes, scale.float()) for codes, scale in self.codes]

    @contextlib.contextmanager
    def quantized(self, modules: dict, scheme: int8.Int8Scheme) -> Iterator[None]:
        """Quantize these linear layers and their input for as long as the context lasts; a layer whose factors were not applied takes what
        it always took and gives what it always gave."""
        applied = self.settings.observes_twice
        columns = 1.0 if applied or self.factors is None else self.group.spread(self.factors)

        def quantize(_, args: tuple) -> tuple:
            x = args[0].float() / columns
            return int8.fake_quantize_input(x, scheme, self.scale, self.zero_point).to(args[0].dtype), *args[1:]

        before, handles = [modules[path].weight.data for path in self.group.linears], []
        try:
            parts = zip(self.group.linears, self._quantized(self.folded), self.row_divisors, strict=True)
            for path, weight, divisor in parts:
                module = modules[path]
                weight = weight if applied or divisor is None else weight * divisor[:, None]
                weight = weight.t().contiguous() if linear_shape(module)[2] else weight
                module.weight.data = weight.to(module.weight.dtype)
                handles.append(module.register_forward_pre_hook(quantize))
            yield
        finally:
            for path, weight in zip(self.group.linears, before, strict=True):
                modules[path].weight.data = weight
            for handle in handles:
                handle.remove()

    def record(self, names: dict[str, str]) -> dict:
        """Return what the manifest keeps."""
        found: dict = {"weights": [names[path] for path in self.group.linears], "tokens": self.stats.tokens}
        if self.routed is not None:
            found["routed"] = self.routed
        if self.stats.tokens:
            found |= {"low": float(self.stats.low.min()), "high": float(self.stats.high.max())}
        if self.range is not None:
            scale, zero = float(self.scale), 0 if self.zero_point is None else int(self.zero_point)
            reach = ((int8.QMIN - 0.5 - zero) * scale, (int8.QMAX + 0.5 - zero) * scale)
            found |= {"range": list(self.range), "scale": scale, "zero_point": zero}
            if self.stats.tokens:
                found["clip_share"] = clipped_share(self.stats.histogram, *reach)
        if self.settings.smooth != "off":
            found |= {"alpha": self.alpha, "folded_into": self.group.producer if self.factors is not None else None}
            if self.factors is None:
                found["left_alone"] = self.left_alone
        if self.massive is not None:
            found |= {"reach": self.reach, "massive": round(self.massive, 1)}
        if self.noise_per_token is not None:
            found["noise_per_token"] = self.noise_per_token
            found["per_token_error"] = dict(zip(found["weights"], self.errors_per_token, strict=True))
        if self.noise is not None:
            found |= {"noise": self.noise, "elements": sum(weight.numel() for weight in self.folded)}
        if self.errors is not None:
            found["output_error"] = dict(zip(found["weights"], self.errors, strict=True))
        return found

    def warnings(self, names: dict[str, str]) -> list[str]:
        first, tokens = names[self.group.linears[0]], self.stats.tokens
        if self.borrowed:
            return [f"{first} saw no token: it has the range of its layer's other experts"]
        return [f"{first} saw only {tokens} tokens"] if tokens < FEW_TOKENS else []

    def tensors(self, model: LayerByLayer, names: dict[str, str]) -> dict[str, Tensor]:
        """Return tensors for the work folder, by the names that `Calibration` looks up."""
        found = {}
        for i, name in enumerate(names[path] for path in self.group.linears):
            if self.codes is not None:
                found[f"codes:{name}"], found[f"weight_scale:{name}"] = (part.cpu() for part in self.codes[i])
            if self.scale is not None:
                found[f"scale:{name}"] = self.scale.cpu().clone()
            if self.zero_point is not None:
                found[f"zero:{name}"] = self.zero_point.cpu().clone()
            if self.factors is not None:
                found[f"columns:{name}"] = self.group.spread(self.factors).cpu().clone()
        if self.factors is not None:
            for part in ("weight", "bias"):
                stored = model.stored.get(f"{self.group.producer}.{part}")
                if stored:
                    found[f"divisors:{stored}"] = self.factors.cpu().clone()
            if offset := norm_offset(model.model.get_submodule(self.group.producer)):
                found[f"offset:{model.stored[f'{self.group.producer}.weight']}"] = torch.tensor(offset)
        return found
