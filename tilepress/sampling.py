"""Text that a model writes itself, for users without data: what `--dataset self` means, and `tilepress.sample`.

Each document begins with what the tokenizer puts before a text and a random token that begins with a letter, and the model continues by sampling from its own
distribution at a temperature, without top-k or top-p, until it ends the text or has as many tokens as a window. The random first token makes
documents differ as much as the vocabulary does: LLM-QAT (Liu et al. 2023, arXiv 2305.17888, section 3.1) calibrates and distils so as well as with real text.

    MODEL -> rounds of a few documents, decoded together -> round-00000.jsonl ... -> text-00004.jsonl: all rounds, as any other --dataset

A round depends on the model's bytes, the settings, its number and the kind of device alone. It is a file of its own, so what was stopped goes
on, and more text is more rounds. Files stay in ~/.cache/tilepress/sampled, or `sampled` in the folder TILEPRESS_CACHE, under a hash of the model
and the settings.

This module stands beside the parts of the package, not in one: text is made by running a model, which compression does not do; it is given the text.
"""

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tilepress.device import find_device
from tilepress.formats import TilepressError, UsageError, foreign_errors
from tilepress.formats.artifact import disk_errors, sha256_file, write_atomic
from tilepress.formats.checkpoint import Checkpoint, open_model
from tilepress.runtime.decode.generation import decode
from tilepress.runtime.loader import load
from tilepress.text import Text, check_source, documents, load_tokenizer, window_start

VERSION = 1  # of what is drawn with a seed
DOCUMENTS = {
    "cuda": (32, 128),
    "cpu": (8, 8),
}  # that are decoded together, at least and at most: what is stopped loses a round
_CACHE_BYTES = 8 << 30  # that their keys and values may take, beyond the least
SHORT = 16  # tokens; a text that ends earlier is no text
_NGRAM = 4
_MOST_BESIDE = 1 << 26  # characters of other text
_DECIDES = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt")

Progress = Callable[[str, int, int], None]  # what, tokens done, tokens in all


@dataclass(frozen=True)
class Sampled:
    """Text that a model wrote: `text` is what a recipe is given."""

    text: Text
    documents: int
    tokens: int
    warnings: tuple[str, ...]  # what is wrong with it
    was_complete: bool  # found in the cache

    def to_json(self) -> dict:
        """Return what was written and where it stands, as a dictionary of plain values."""
        counts = {"documents": self.documents, "tokens": self.tokens, "was_complete": self.was_complete}
        return {"text": self.text.dataset, "file": str(self.text.file), **counts, "warnings": list(self.warnings)}


def sample(
    model: str | Path,
    text: Text = Text("self"),  # noqa: B008 (frozen)
    *,
    device: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    progress: Progress | None = None,
) -> Sampled:
    """Let a model write the text that calibrates or trains it: `tilepress.compress(MODEL, …, dataset=tilepress.sample(MODEL).text)`.

    model     folder or hub id of the model that writes: for recovery the dense one
    text      Text("self") or Text("self:TEMPERATURE") with the number and length of windows and the seed; documents are as long as windows at most.
              Behind a + may stand other text, Text("self+FILE"), whose documents go into the same file
    progress  called with "sampling", tokens that are done, and tokens in all

    A model that ends its texts at once has its end token taken away, and one that repeats itself is reported, both in `warnings`.
    Raises UsageError for a text that is not sampled, TilepressError for a model that writes nothing at all."""
    if text.temperature is None:
        raise UsageError(f"{text.dataset} is no text that a model writes", 'give Text("self"), or Text("self:0.8")')
    if text.beside:
        check_source(text.beside)
    progress = progress or (lambda what, done, total: None)
    checkpoint, device = open_model(model, revision), find_device(device)
    tokenizer = load_tokenizer(checkpoint.path, trust_remote_code)
    text = text.fitted(checkpoint.text_config, tokenizer)
    wanted = text.nsamples * (text.seqlen - len(window_start(tokenizer, text.bos)))
    at_once = min(_documents(checkpoint.text_config, text.seqlen, torch.device(device).type), text.nsamples)
    folder = _folder(checkpoint, text, at_once)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    writer, rows, rounds, fresh = None, [], 0, 0
    most = 8 + 4 * -(-wanted // (at_once * text.seqlen))  # rounds, for a model that writes little
    while (done := sum(row["tokens"] for row in rows)) < wanted and rounds < most:
        progress("sampling", done, wanted)
        path = folder / f"round-{rounds:05d}.jsonl"
        if not _read(path):
            writer = writer or _Writer(checkpoint, tokenizer, text, at_once, device, trust_remote_code)
            lines = [json.dumps(row, ensure_ascii=False) for row in writer.round(rounds, ends=not _ends_at_once(rows))]
            write_atomic(path, "".join(f"{line}\n" for line in lines).encode(), folder)
            fresh += 1
        rows += _read(path)
        rounds += 1
    progress("sampling", wanted, wanted)
    if not any(row["text"].strip() for row in rows):
        raise TilepressError(f"{checkpoint.name} writes no text", "give real text: --dataset FILE")
    texts = [row["text"] for row in rows if row["text"].strip()]
    file = folder / f"text-{rounds:05d}.jsonl"
    if text.beside:
        texts += _up_to(documents(text.beside, seed=text.seed), _MOST_BESIDE)
        digest = hashlib.sha256("".join(texts).encode()).hexdigest()[:16]
        file = folder / f"text-{rounds:05d}-{digest}.jsonl"
    lines = [json.dumps({"text": written}, ensure_ascii=False) for written in texts]
    content = "".join(f"{line}\n" for line in lines).encode()
    if not file.exists() or file.read_bytes() != content:
        write_atomic(file, content, folder)
    tokens = sum(row["tokens"] for row in rows)
    return Sampled(replace(text, file=file), len(lines), tokens, tuple(_warnings(rows, tokens, wanted)), not fresh)


def _documents(config: dict, seqlen: int, device: str) -> int:
    """Return how many documents are decoded together: a power of two that the model's attention cache has room for."""
    least, most = DOCUMENTS[device]
    heads = config.get("num_attention_heads") or 1
    size = config.get("head_dim") or (config.get("hidden_size") or 0) // heads
    token = 4 * size * (config.get("num_key_value_heads") or heads) * (config.get("num_hidden_layers") or 1)
    if not token:
        return least
    return max(least, min(most, 1 << max(_CACHE_BYTES // (token * seqlen), 1).bit_length() - 1))


def _up_to(texts: Iterator[str], characters: int) -> Iterator[str]:
    """Pass texts on until they have so many characters."""
    for text in texts:
        if characters <= 0:
            return
        characters -= len(text)
        yield text


def _folder(checkpoint: Checkpoint, text: Text, at_once: int) -> Path:
    """Return where rounds of this model with these settings are."""
    names = {path.name for pattern in _DECIDES for path in checkpoint.path.glob(pattern) if path.is_file()}
    made_from = {
        "version": VERSION,
        "files": {name: sha256_file(checkpoint.path / name) for name in sorted({*names, *checkpoint.shards})},
        "temperature": text.temperature,
        "seqlen": text.seqlen,
        "at_once": at_once,
        "seed": text.seed,
        "bos": text.bos,
    }
    key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:32]
    kept = os.environ.get("TILEPRESS_CACHE")
    return (Path(kept) if kept else Path.home() / ".cache" / "tilepress") / "sampled" / key


def _read(path: Path) -> list[dict]:
    """Return the documents of a round, none where it is not there yet; what is damaged is sampled again."""
    try:
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    except (OSError, ValueError, RecursionError):
        return []
    kinds = {"text": str, "tokens": int, "ended": bool, "repeated": int | float, "might_end": bool}
    sound = all(isinstance(row, dict) and all(isinstance(row.get(key), kinds[key]) for key in kinds) for row in found)
    return found if sound else []


class _Writer:
    """A loaded model that writes rounds of documents."""

    def __init__(
        self, checkpoint: Checkpoint, tokenizer, text: Text, at_once: int, device: str, trust_remote_code: bool
    ):
        from transformers import GenerationConfig

        # CPUs without matrix units for bfloat16 are many times faster in float32.
        dtype = torch.float32 if device == "cpu" else "auto"
        self.model = load(str(checkpoint.path), device, dtype, trust_remote_code, kv=False)
        self.tokenizer, self.text, self.at_once = tokenizer, text, at_once
        self.start = window_start(tokenizer, text.bos)
        ends = self.model.generation_config.eos_token_id
        ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        ends += [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.ends = list(dict.fromkeys(ends))
        self.model.generation_config = GenerationConfig()  # its penalties and its top-k would change the distribution
        self.vocabulary = min(len(tokenizer), self.model.config.get_text_config().vocab_size)

    def round(self, number: int, ends: bool) -> list[dict]:
        """Return the documents of a round, each with its `text`, its `tokens`, whether it `ended`, and whether it might (`ends`)."""
        from transformers import GenerationConfig

        text, seed = self.text, (self.text.seed << 20) + number
        draws = random.Random(seed)
        prompts = torch.tensor([[*self.start, self._first(draws)] for _ in range(self.at_once)])
        config = GenerationConfig(
            do_sample=True,
            temperature=text.temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=text.seqlen - prompts.shape[1],
            eos_token_id=self.ends if ends and self.ends else None,
            pad_token_id=(self.ends or [0])[0],
            suppress_tokens=None if ends or not self.ends else self.ends,
        )
        device = self.model.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            given = {"attention_mask": torch.ones_like(prompts).to(device), "generation_config": config}
            with foreign_errors("the model cannot write text", "give real text: --dataset FILE"):
                rows = self.model.generate(prompts.to(device), custom_generate=decode, **given)
        return [self._document(row) | {"might_end": ends} for row in rows[:, len(self.start) :].tolist()]

    def _first(self, draws: random.Random) -> int:
        """Draw the first token: one that begins with a letter, if a thousand draws find one. Special and unused tokens begin no text."""
        special = {*self.tokenizer.all_special_ids}
        for _ in range(1000):
            token = draws.randrange(self.vocabulary)
            if token not in special and self.tokenizer.decode([token]).strip()[:1].isalpha():
                break
        return token

    def _document(self, ids: list[int]) -> dict:
        end = next((at for at, token in enumerate(ids) if token in self.ends), None)
        ids = ids[:end]
        grams = [tuple(ids[i : i + _NGRAM]) for i in range(len(ids) - _NGRAM + 1)]
        repeated = 1 - len({*grams}) / len(grams) if grams else 0.0
        told = {"tokens": len(ids), "ended": end is not None, "repeated": round(repeated, 4)}
        return {"text": self.tokenizer.decode(ids, skip_special_tokens=True)} | told


def _at_an_end(row: dict) -> bool:
    return row["ended"] and row["tokens"] < SHORT


def _ends_at_once(rows: list[dict]) -> bool:
    """Whether more than half of the documents that might end did so before they had begun."""
    return sum(map(_at_an_end, rows)) > 0.5 * sum(row["might_end"] for row in rows)


def _warnings(rows: list[dict], tokens: int, wanted: int) -> list[str]:
    found, short = [], sum(map(_at_an_end, rows))
    if short > 0.1 * len(rows):
        found.append(
            f"{short} of {len(rows)} sampled texts ended within {SHORT} tokens; where that is most, the end token is taken away"
        )
    # The share of 4-grams that were there before is seq-rep-4 of Welleck et al. 2020 (arXiv 1908.04319); natural text has a few percent.
    if 2 * (again := sum(row["repeated"] > 0.5 for row in rows)) > len(rows):
        found.append(
            f"{again} of {len(rows)} sampled texts repeat themselves: try a higher temperature, --dataset self:1.2"
        )
    if tokens < wanted:
        found.append(f"the model wrote {tokens:,} tokens of the {wanted:,} asked for")
    return found
