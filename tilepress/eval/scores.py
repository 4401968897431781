"""Scores of a model on windows of text, and the distance of two models on the same windows.

Log-softmax is computed in float32 and sums in float64. Errors are standard errors over windows (windows are what is nearly
independent, tokens are not); between two models they are paired, which removes the text's own variance.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_TOKENS_AT_ONCE = 256  # rows of logits in float32 at a time


@dataclass(frozen=True)
class Scores:
    """Scores of one model: errors are standard errors over windows, None for a single window."""

    perplexity: float
    perplexity_stderr: float | None
    nll: float  # mean negative log-likelihood of a token, nats
    nll_stderr: float | None
    bits_per_byte: float  # of text: comparable across tokenizers

    @classmethod
    def of(cls, nll: "WindowSums", bits: float) -> "Scores":
        """Return the scores of summed losses; `bits` are those of one nat a token, for each byte of text."""
        value = math.exp(nll.mean)
        error = None if nll.stderr is None else value * nll.stderr
        return cls(value, error, nll.mean, nll.stderr, nll.mean * bits)


@dataclass(frozen=True)
class Distance:
    """The distance of a model from a reference, on the same windows; errors are paired."""

    delta_nll: float  # nats a token
    delta_nll_stderr: float | None
    kl_divergence: dict[str, float | None]  # of reference || model, nats: mean, stderr, p99, max
    top1_agreement: float  # share of tokens for which both name the same most likely one
    top1_agreement_stderr: float | None


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


class DistanceSums:
    """Sums of what `Distance` holds, window by window."""

    def __init__(self):
        self.delta, self.kl, self.same = WindowSums(), WindowSums(), WindowSums()
        self._kl_of_tokens: list[Tensor] = []

    def add(self, reference: tuple[Tensor, Tensor], model: tuple[Tensor, Tensor]) -> None:
        """Add a window: of each model the losses [n] and the logits [n, vocabulary] of its scored tokens."""
        (reference_losses, reference_logits), (losses, logits) = reference, model
        count = len(losses)
        self.delta.add(float((losses.double() - reference_losses.double()).sum()), count)
        divergences, agrees = divergence(reference_logits, logits)
        self.kl.add(float(divergences.double().sum()), count)
        self.same.add(float(agrees.sum()), count)
        self._kl_of_tokens.append(divergences.cpu())

    def result(self) -> Distance:
        every = torch.cat(self._kl_of_tokens).double().numpy()
        extremes = {"p99": float(np.quantile(every, 0.99)), "max": float(every.max())}
        return Distance(
            self.delta.mean,
            self.delta.stderr,
            {"mean": self.kl.mean, "stderr": self.kl.stderr} | extremes,
            self.same.mean,
            self.same.stderr,
        )
