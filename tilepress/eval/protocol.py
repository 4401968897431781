"""The protocol of a perplexity: which windows of a text are run, and which of their tokens are scored.

Recipe `gptq` (what pruning and quantization papers report): documents joined by a blank line, tokenized once, cut into windows
without overlap, the tail dropped; every token but a window's first is scored. Recipe `strided` (transformers' documentation):
windows overlap, only the tokens new to a window are scored, so each has at least `seqlen - stride` of context. The two are never
comparable with each other, nor across tokenizers: that is what bits per byte is for.

Both cut windows out of one long text, so of a model that was trained with a BOS they show all windows but the first without it, which such a model has
never seen (a 270M Gemma 3 is four times as perplexed). Windows begin with it here, it counts as one of their tokens, and it is not scored. `bos="first"` leaves
it to the text's beginning, as the code of GPTQ and transformers' documentation do: figures of theirs, and of most papers, are made so.
"""

from dataclasses import dataclass

from tilepress.formats import UsageError, check_kinds
from tilepress.text import BOS, window_start

RECIPES = ("gptq", "strided")
TEXT_ALONE = "first"  # of `bos`, beside those of text.py

Span = tuple[int, int, int]  # first token of a window, its end, the first scored one


@dataclass(frozen=True)
class Protocol:
    """Everything that decides a perplexity besides the model."""

    dataset: str
    recipe: str = "gptq"  # gptq | strided
    seqlen: int = 2048  # tokens of a window
    stride: int | None = None  # tokens between windows; gptq: seqlen, strided: seqlen / 4 unless given
    limit: int | None = None  # windows at most
    bos: str = "auto"  # auto | always | never: at the beginning of every window (text.py); first: of the text alone

    def __post_init__(self):
        check_kinds(self)
        if self.recipe not in RECIPES:
            raise UsageError(f"--recipe {self.recipe} is unknown", f"choose one of {', '.join(RECIPES)}")
        if self.bos not in (*BOS, TEXT_ALONE):
            raise UsageError(f"--bos {self.bos} is unknown", f"choose one of {', '.join((*BOS, TEXT_ALONE))}")
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

    def start(self, tokenizer) -> list[int]:
        """The token ids that every window begins with. Raises UsageError for a BOS that the tokenizer does not have, or no room behind it."""
        start = [] if self.bos == TEXT_ALONE else window_start(tokenizer, self.bos)
        if self.seqlen <= len(start):
            raise UsageError(f"windows of {self.seqlen} tokens have no room beside the BOS", "use a larger --seqlen")
        return start

    def windows(self, num_tokens: int, start: int = 0) -> list[Span]:
        """The spans of the windows of a text of so many tokens, for windows that begin with `start` more: seqlen counts those, too.

        A token is scored if something stands before it: a window's first one is where the window has a start."""
        width, unseen = self.seqlen - start, 0 if start else 1
        if self.recipe == "gptq":
            return [(a, a + width, a + unseen) for a in range(0, num_tokens - width + 1, width)][: self.limit]
        spans, scored = [], unseen
        for a in range(0, num_tokens, min(self.stride, width)):
            end = min(a + width, num_tokens)
            if end > max(scored, a + unseen):
                spans.append((a, end, max(scored, a + unseen)))
            scored = end
            if end == num_tokens:
                break
        return spans[: self.limit]
