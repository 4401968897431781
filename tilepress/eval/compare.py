"""Two models side by side: what each writes after the same prompts, and how far apart their next tokens are.

The first model answers greedily, and so does the second. Then both see the first one's answer, and the second's next-token distributions are compared with the
first's on it: KL divergence and same top token, as `perplexity` has them for a text. Prompts are few: read the answers, and take errors seriously.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from tilepress.chat import Chat
from tilepress.eval.scores import Distance, DistanceSums, divergence, score
from tilepress.formats import UsageError
from tilepress.runtime.half import fast_products
from tilepress.runtime.hf.paged_cache import cache_mode

PROMPTS = (
    "The capital of France is",
    "Water boils when",
    "Once upon a time there was a king who",
    "The difference between a cat and a dog is",
    "def fibonacci(n):",
)

Progress = Callable[[str, int, int], None]  # what, prompts done, prompts in all


@dataclass(frozen=True)
class Pair:
    """The answers of two models to one prompt."""

    prompt: str
    of_a: str
    of_b: str
    tokens: int  # of a's answer
    alike: int  # tokens before the answers part
    kl_divergence: float  # of a || b on a's answer, nats a token
    same_top: float  # share of its tokens for which both name the same most likely one


@dataclass(frozen=True)
class SideBySide:
    """Two models and their answers; `distance` is b's from a over all of a's answers, errors over prompts."""

    a: str
    b: str
    pairs: tuple[Pair, ...]
    distance: Distance
    templated: bool
    new_tokens: int
    device: str
    seconds: float

    def to_json(self) -> dict:
        """Return what `compare --json` prints, as a dictionary of plain values."""
        return asdict(self)


def compare(
    a: str | Path,
    b: str | Path,
    prompts: Sequence[str] = PROMPTS,
    *,
    new_tokens: int = 64,
    raw: bool = False,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> SideBySide:
    """Let two models answer the same prompts greedily, and measure how far b's next tokens are from a's: `tilepress.compare(MODEL, "int8")`.

    a, b     folders or hub ids, dense or artifacts, of one vocabulary; calibrated attention caches are used to answer, and simulated to compare
    prompts  texts; they go through a's chat template if it has one, unless `raw`

    Raises UsageError for no prompt, and for models that do not share a vocabulary."""
    if not prompts:
        raise UsageError("there is no prompt to compare on", "give at least one")
    started = time.monotonic()
    options = {"raw": raw, "device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
    first, second = Chat(a, **options), Chat(b, **options)
    sizes = [chat.model.config.get_text_config().vocab_size for chat in (first, second)]
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"the models have vocabularies of {sizes[0]} and {sizes[1]}",
            "compare an artifact with what it is made from",
        )
    pairs, distance = [], DistanceSums()
    for done, prompt in enumerate(prompts):
        progress(prompt, done, len(prompts))
        first.clear()
        ours = first.say(prompt, new_tokens=new_tokens, temperature=0)
        theirs = second.continued(ours.prompt_ids, new_tokens=new_tokens, temperature=0)
        seen = [_scored(chat.model, ours.prompt_ids, ours.ids) for chat in (first, second)]
        distance.add(*seen)
        kl, same = divergence(seen[0][1], seen[1][1])
        alike = next((i for i, (x, y) in enumerate(zip(ours.ids, theirs.ids, strict=False)) if x != y), None)
        alike = min(len(ours.ids), len(theirs.ids)) if alike is None else alike
        told = prompt, ours.text, theirs.text, ours.tokens, alike
        pairs.append(Pair(*told, float(kl.mean()), float(same.double().mean())))
    progress("prompts", len(prompts), len(prompts))
    seconds = round(time.monotonic() - started, 2)
    about = distance.result(), first.templated, new_tokens, str(first.model.device), seconds
    return SideBySide(str(a), str(b), tuple(pairs), *about)


@torch.inference_mode()
def _scored(model, prompt: Sequence[int], answer: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the losses [n] and the logits [n, vocabulary] of an answer's tokens, on the CPU."""
    ids = torch.tensor([[*prompt, *answer]], device=model.device)
    with (
        cache_mode(model, "off" if getattr(model, "kv_state", None) is None else "sim"),
        fast_products(model.dtype, ids.device),
    ):
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return score(logits, ids[0, len(prompt) :]).cpu(), logits.cpu()
