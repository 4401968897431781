"""Text for calibration and evaluation: one loader for every command, through `datasets`.

A source is a local `.txt`, `.jsonl`, `.json` or `.parquet` file, or a hub id, optionally with configuration and split:
`Salesforce/wikitext:wikitext-2-raw-v1:test`. Tables need a column `text`; a `.txt` file is one document.
"""

import glob
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tilepress.formats import TilepressError, UsageError

_BUILDERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def documents(source: str, column: str = "text", seed: int | None = None) -> Iterator[str]:
    """The documents of a source, streamed; with `seed` in a random order (of as many as a buffer of 10,000 holds).

    Raises UsageError for a source that cannot be read as text."""
    from datasets import load_dataset

    path = Path(source).expanduser()
    try:
        kind = path.suffix.lower()
        if kind in _BUILDERS:
            if not path.is_file():
                raise UsageError(f"no file {source}", "give --dataset a .txt, .jsonl or .parquet file, or a hub id")
            if not path.stat().st_size:
                return
            options = {"sample_by": "document"} if kind == ".txt" else {}
            rows = load_dataset(
                _BUILDERS[kind], data_files=glob.escape(str(path)), split="train", streaming=True, **options
            )
        else:
            name, config, split = (*source.split(":"), "", "")[:3]
            rows = load_dataset(name, config or None, split=split or "train", streaming=True)
        if seed is not None:
            rows = rows.shuffle(seed=seed, buffer_size=10_000)
        for row in rows:
            if not isinstance(row.get(column), str):
                raise UsageError(
                    f"{source} has no text column {column!r}; its columns are {', '.join(map(str, row))}",
                    "rename the column to `text`",
                )
            yield row[column]
    except TilepressError:
        raise
    except Exception as error:
        why = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"cannot read the text of {source}: {why}",
            "give --dataset a .txt, .jsonl or .parquet file with a column `text`, or a hub id you can reach",
        ) from error


def token_ids(
    tokenizer,
    source: str,
    at_least: int | None = None,
    joiner: str = "\n\n",
    seed: int | None = None,
    special_tokens: bool = True,
) -> list[int]:
    """The documents joined and tokenized at once; with `at_least`, no more of the text than gives so many tokens."""
    parts: list[str] = []
    length, wanted = 0, None if at_least is None else 8 * at_least
    for text in documents(source, seed=seed):
        parts.append(text)
        length += len(text)
        if wanted is not None and length > wanted:
            ids = tokenizer(joiner.join(parts), add_special_tokens=special_tokens)["input_ids"]
            # The last document may be cut differently with what follows it: ask for a few tokens more than needed.
            if len(ids) > at_least + 64:
                return ids
            wanted *= 2
    if not any(part.strip() for part in parts):
        raise UsageError(f"{source} has no text", "give another --dataset")
    return tokenizer(joiner.join(parts), add_special_tokens=special_tokens)["input_ids"]


def max_positions(text_config: dict) -> int | None:
    """The longest window that a model's config allows, or None where it names no limit."""
    longest = text_config.get("max_position_embeddings") or text_config.get("n_positions")
    return longest if isinstance(longest, int) else None


def check_window(seqlen: int, text_config: dict) -> None:
    """Raises UsageError for windows that are longer than the model's positions."""
    longest = max_positions(text_config)
    if longest is not None and seqlen > longest:
        raise UsageError(
            f"windows of {seqlen} tokens are longer than the model's {longest} positions", f"use --seqlen {longest}"
        )


def check_vocabulary(windows: list[list[int]], model) -> None:
    """Raises UsageError for token ids that a transformers model has no embedding for."""
    largest, size = max(map(max, windows)), model.get_input_embeddings().num_embeddings
    if largest >= size:
        raise UsageError(
            f"the tokenizer gives token {largest}, the model has {size}", "the tokenizer does not belong to the model"
        )


def load_tokenizer(folder: Path, trust_remote_code: bool = False):
    """The tokenizer of a checkpoint. Raises TilepressError if there is none that loads."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise TilepressError(
            f"{folder.name} has no tokenizer that loads ({str(error).splitlines()[0][:100]})",
            "copy tokenizer.json and tokenizer_config.json of the model into its folder",
        ) from error


@dataclass(frozen=True)
class Text:
    """Which text a calibration sees: `nsamples` windows of `seqlen` tokens, each with what the tokenizer puts before a text (BOS)."""

    dataset: str
    nsamples: int = 128
    seqlen: int = 2048
    seed: int = 0

    def __post_init__(self):
        for name, value, least in (("nsamples", self.nsamples, 1), ("seqlen", self.seqlen, 16), ("seed", self.seed, 0)):
            if value < least:
                raise UsageError(f"--{name} {value} is too small", f"use at least {least}")

    def windows(self, tokenizer) -> list[list[int]]:
        """Token ids, window by window; fewer or shorter where the text ends. Raises UsageError for a text without tokens."""
        start = tokenizer("")["input_ids"][:1]
        step = self.seqlen - len(start)
        ids = token_ids(tokenizer, self.dataset, self.nsamples * step, seed=self.seed, special_tokens=False)
        windows = [start + ids[i : i + step] for i in range(0, len(ids), step)]
        if len(windows) > self.nsamples and len(windows[-1]) < self.seqlen:
            windows.pop()
        if not ids:
            raise UsageError(f"{self.dataset} has no text", "give another --dataset")
        chosen = random.Random(self.seed).sample(range(len(windows)), min(self.nsamples, len(windows)))
        return [windows[i] for i in sorted(chosen)]
