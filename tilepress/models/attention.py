"""Attention as transformers' models ask for it: what becomes of scores beyond a scale and a causal mask.

An attention function of transformers gets what few models have by name: `sliding_window`, `softcap` (Gemma 2) and `s_aux`, sinks (gpt-oss). `Scores.asked`
reads these, `Scores.of` the attention modules of known families. Calibration and the packed cache both compute what is said here.

torch's fused attention knows neither soft caps nor sinks: `attend` writes scores out, some queries at a time.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tilepress.models.families import Family

_AT_ONCE = 1 << 22  # scores that are written out at once
_BIASES = ("position_bias", "alibi")  # arguments that add to scores what no window, cap or sink does


class Scores(NamedTuple):
    """What becomes of a layer's scores between their scale and the softmax."""

    window: int = 0  # a query sees so many tokens, itself among them; 0: all up to itself
    softcap: float = 0.0  # scores are softcap * tanh(score / softcap); 0: as they are
    sinks: Tensor | None = None  # [query heads]: one score more in the softmax's sum, of a token without a value

    @classmethod
    def asked(cls, given: Mapping) -> "Scores":
        """Return what an attention function was given by name."""
        return cls(given.get("sliding_window") or 0, given.get("softcap") or 0.0, given.get("s_aux"))

    @classmethod
    def of(cls, attention: nn.Module, family: Family | None) -> "Scores":
        """Return what an attention module of a family asks for; of a family that is not known, its window alone."""
        cap = family.names.softcap if family is not None and family.names is not None else None
        return cls(window_of(attention), (getattr(attention, cap) or 0.0) if cap else 0.0)

    @property
    def absolute(self) -> bool:
        """Whether a number that is added to all scores of a query changes its weights: else what all tokens share may be left out of scores."""
        return self.softcap > 0 or self.sinks is not None

    @property
    def extras(self) -> tuple[str, ...]:
        """What is asked for, in the words of kernels/attention_ref.py."""
        asked = {"a window": self.window > 0, "a soft cap": self.softcap > 0, "sinks": self.sinks is not None}
        return tuple(name for name, is_asked in asked.items() if is_asked)

    def capped(self, scores: Tensor) -> Tensor:
        """Return scores beneath the soft cap."""
        return torch.tanh(scores / self.softcap) * self.softcap if self.softcap else scores

    def weights(self, scores: Tensor, seen: Tensor) -> Tensor:
        """Return what queries give each token: float32 scores [..., KV heads, queries per KV head, rows, tokens] of which bool `seen` count -> the same shape.

        The window is `seen`'s business. A row that sees nothing has weights that are finite."""
        scores = self.capped(scores).masked_fill(~seen, torch.finfo(torch.float32).min)
        if self.sinks is None:
            return scores.softmax(-1)
        sinks = self.sinks.float().view(scores.shape[-4], -1, 1, 1).expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


PLAIN = Scores()


def window_of(attention: nn.Module) -> int:
    """Return how many tokens a query of an attention module sees, 0 for all: the layer's own number, or the config's, as transformers' classes have it."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window or 0
    config = attention.config
    # Classes without a number of their own that know windows (Mistral, Phi-3, Mixtral) have it in their config's class.
    return (getattr(config, "sliding_window", None) or 0) if hasattr(type(config), "sliding_window") else 0


def unserved(mask: Tensor | None, given: Mapping) -> str | None:
    """Name what an attention function was given that nothing here computes, or return None."""
    if mask is not None and mask.is_floating_point():
        return "a mask of its own"
    return next((name for name in _BIASES if given.get(name) is not None), None)


def attend(
    query: Tensor,  # [batch, heads, rows, D]
    key: Tensor,  # [batch, KV heads, tokens, D]
    value: Tensor,
    mask: Tensor | None,  # bool [batch or 1, 1, rows, tokens]; None: causal from the first token on, or all for one row
    scale: float,
    scores: Scores,
    dropout: float = 0.0,
) -> Tensor:
    """Return attention [batch, heads, rows, D] with products in the dtype of query and the softmax in float32, as transformers' eager attention has them."""
    (batch, heads, rows, dim), (kv_heads, tokens) = query.shape, key.shape[1:3]
    if mask is None:
        mask = torch.ones(rows, tokens, dtype=torch.bool, device=query.device)
        mask = (mask if rows == 1 else mask.tril())[None, None]
    step, found = max(1, _AT_ONCE // max(1, batch * heads * tokens)), []
    for part, seen in zip(query.split(step, 2), mask.split(step, 2), strict=True):
        grouped = part.reshape(
            batch, kv_heads, -1, dim
        )  # heads that share a KV head are rows of it: nothing is repeated
        raw = (grouped @ key.mT).float().view(batch, kv_heads, heads // kv_heads, -1, tokens) * scale
        given = torch.dropout(scores.weights(raw, seen[:, :, None]).to(value.dtype), dropout, dropout > 0)
        found.append((given.flatten(2, 3) @ value).view(batch, heads, -1, value.shape[-1]))
    return torch.cat(found, 2)
