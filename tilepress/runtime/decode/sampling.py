"""The next token from logits: greedy, or sampled at a temperature among the most probable.

A request draws its uniform numbers from a generator of its own, one for each position, and picks a token by the inverse of the cumulative distribution:
what it gets depends on its seed and its logits, not on who shares its batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tilepress.formats import UsageError
from tilepress.kernels import argmax  # noqa: F401 (the op)


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy. `top_k` 0 and `top_p` 1 leave all tokens. Raises UsageError for what is none of these."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not (self.temperature >= 0 and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise UsageError(
                f"temperature {self.temperature}, top_k {self.top_k}, top_p {self.top_p}: nothing to sample from",
                "use temperature >= 0, top_k >= 0 (0: all) and top_p in (0, 1]",
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def uniforms(self, count: int) -> Tensor:
        """float32 [count] in [0, 1)."""
        return torch.rand(count, generator=torch.Generator().manual_seed(self.seed))


GREEDY = Sampling()


def greedy(logits: Tensor) -> Tensor:
    """logits [rows, vocabulary] -> int64 [rows]."""
    return torch.ops.tilepress.argmax(logits)


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniforms: Tensor) -> Tensor:
    """logits [rows, vocabulary], the rest [rows] -> int64 [rows]; rows of temperature 0 are greedy. Of the probabilities at the temperature the `top_k`
    largest are left, of those the fewest that add up to `top_p` of them. Tensor operations alone, none waits for a card."""
    kept, order = filtered(logits, temperature, top_k, top_p)
    ends = kept.cumsum(-1)
    # Beyond the last kept token nothing is added: a number rounded up to the whole sum must not land there.
    chosen = (ends <= (uniforms.double() * ends[:, -1])[:, None]).sum(-1).clamp(max=(kept > 0).sum(-1) - 1)
    drawn = order.gather(1, chosen[:, None])[:, 0]
    return torch.where(temperature > 0, drawn, greedy(logits))


def filtered(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities in falling order, float64 [rows, vocabulary], 0 where nothing may be drawn (their sum is not 1), and the tokens that they are of."""
    heat = torch.where(temperature > 0, temperature, torch.ones_like(temperature))[:, None]
    falling, order = (logits.float() / heat).sort(stable=True, dim=-1, descending=True)
    place = torch.arange(logits.shape[-1], device=logits.device)
    within = (place < top_k[:, None]) | (top_k[:, None] == 0)
    probabilities = falling.double().masked_fill(~within, -torch.inf).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    return probabilities * ((before < top_p[:, None]) | (place == 0)), order
