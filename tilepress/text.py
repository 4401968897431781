"""Text for calibration and evaluation: one loader for every command.

A source is a local `.txt`, `.jsonl`, `.json` or `.parquet` file, or a hub id, optionally with configuration and split:
`Salesforce/wikitext:wikitext-2-raw-v1:test`. Tables need a column `text`; a `.txt` file is one document. Only `.json`, `.parquet` and the hub
need the package `datasets`.

A model that was trained with a token before every text (BOS) keeps its attention sink there and is another model without it, so windows that are
cut out of a text get theirs again (`window_start`).
"""

import glob
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from tilepress.formats import TilepressError, UsageError, check_kinds, first_line, foreign_errors, lack_of_memory
from tilepress.formats.hub import hub_lookups

CALIBRATION = "Salesforce/wikitext:wikitext-2-raw-v1:train"  # read where a recipe needs text and none is given
EVALUATION = "Salesforce/wikitext:wikitext-2-raw-v1:test"
_BUILDERS = {".json": "json", ".parquet": "parquet"}  # of `datasets`
_PLAIN = (".txt", ".jsonl")
_BUFFER = 10_000  # documents that are shuffled together
SELF = "self"  # a dataset: the model's own text, with a temperature as self:0.8, and other text beside it as self+FILE
RANDOM = "random"  # a dataset: tokens drawn at random, which show a model's outliers and nothing else
BOS = ("auto", "always", "never")  # whether windows begin with it
_WHOLE = 1 << 21  # characters that are tokenized at once, if what is asked for needs no more
_EXCERPT, _EXCERPTS = 1 << 14, 16  # characters of an excerpt, about, and how many at least
_CHARACTERS = 8  # of a token, generously
_TOKENIZING = foreign_errors("the tokenizer fails on a text", "tokenizer_config.json or tokenizer.json is damaged")


def documents(source: str, column: str = "text", seed: int | None = None) -> Iterator[str]:
    """The documents of a source, streamed; with `seed` in a random order (of as many as a buffer of 10,000 holds).

    Raises UsageError for a source that cannot be read as text."""
    for row in rows(source, seed):
        if not isinstance(row.get(column), str):
            raise UsageError(
                f"{source} has no text column {column!r}; its columns are {', '.join(map(str, row))}",
                "rename the column to `text`",
            )
        yield row[column]


def rows(source: str, seed: int | None = None) -> Iterator[dict]:
    """The rows of a source, streamed, each with its columns; see `documents`."""
    path = Path(source).expanduser()
    try:
        kind = path.suffix.lower()
        check_source(source)
        if kind in (*_PLAIN, *_BUILDERS) and not path.stat().st_size:
            return
        if kind in _PLAIN:
            found = _plain_rows(path)
            found = found if seed is None else _shuffled(found, seed)
        else:
            from datasets import load_dataset

            if kind in _BUILDERS:
                files = glob.escape(str(path))
                found = load_dataset(_BUILDERS[kind], data_files=files, split="train", streaming=True)
            else:
                name, config, split = (*source.split(":"), "", "")[:3]
                with hub_lookups():
                    found = load_dataset(name, config or None, split=split or "train", streaming=True)
            if seed is not None:
                found = found.shuffle(seed=seed, buffer_size=_BUFFER)
        yield from found
    except TilepressError:
        raise
    except Exception as error:
        raise UsageError(
            f"cannot read the text of {source[:200]}: {first_line(error)}",
            "give --dataset a .txt, .jsonl or .parquet file with a column `text`, or a hub id you can reach",
        ) from error


def check_source(source: str) -> None:
    """Raise UsageError for a source that is no file that can be read, and cannot be a hub id: before any long work."""
    path, hint = Path(source).expanduser(), "give --dataset a .txt, .jsonl or .parquet file, or a hub id"
    if not source.strip():
        raise UsageError("--dataset is empty", hint)
    if path.suffix.lower() in (*_PLAIN, *_BUILDERS):
        if not path.is_file():
            raise UsageError(f"{source} is no regular file" if path.exists() else f"no file {source}", hint)
    elif path.exists() and not path.is_dir():
        raise UsageError(f"{source} is no .txt, .jsonl, .json or .parquet file", "rename it, or convert it to one")


def _plain_rows(path: Path) -> Iterator[dict]:
    """The lines of a `.jsonl` file, or a `.txt` file as one row; a byte order mark is no text."""
    with open(path, encoding="utf-8-sig") as file:
        if path.suffix.lower() == ".txt":
            yield {"text": file.read()}
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _row(line, f"line {number} of {path}")


def _row(line: str, where: str) -> dict:
    """A line of a `.jsonl` file. Raises UsageError for what is no JSON object, and for text that holds half of a character."""
    hint = 'write {"text": …} on each line'
    try:
        row = json.loads(line)
        "".join(value for value in row.values() if isinstance(value, str)).encode()
    except AttributeError as error:
        raise UsageError(f"{where} is no JSON object", hint) from error
    except UnicodeEncodeError as error:
        raise UsageError(f"{where} holds half of a surrogate pair, which is no character", "take it out") from error
    except (ValueError, RecursionError) as error:
        why = getattr(error, "msg", "too deep") + (f" at column {error.colno}" if hasattr(error, "colno") else "")
        raise UsageError(f"{where} is not valid JSON: {why}", hint) from error
    return row


def _shuffled(rows: Iterator[dict], seed: int) -> Iterator[dict]:
    """Shuffle rows in the order of `datasets` (5.2), whose shuffle buffer gives half of itself away when it is full."""
    random_order, buffer = np.random.default_rng(seed), []
    for row in rows:
        buffer.append(row)
        if len(buffer) == _BUFFER:
            order = random_order.permutation(_BUFFER)
            yield from (buffer[i] for i in order[: _BUFFER - _BUFFER // 2])
            buffer = [buffer[i] for i in order[_BUFFER - _BUFFER // 2 :]]
    yield from (buffer[i] for i in random_order.permutation(len(buffer)))


@_TOKENIZING
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
    length, wanted = 0, None if at_least is None else _CHARACTERS * at_least
    found = documents(source, seed=seed)
    if at_least is not None and seed is not None:
        found = _excerpts(found, 2 * wanted, seed)
    for text in found:
        parts.append(text)
        length += len(text)
        while wanted is not None and length > wanted:
            whole, most = joiner.join(parts), max(_WHOLE, 2 * wanted)
            ids = tokenizer(whole[:most], add_special_tokens=special_tokens)["input_ids"]
            # The end may be cut differently with what follows it: ask for a few tokens more than needed.
            if len(ids) > at_least + 64:
                return ids
            wanted *= 2
            if len(whole) <= most:
                break
    if not any(part.strip() for part in parts):
        raise UsageError(f"{source} has no text", "give another --dataset")
    return tokenizer(joiner.join(parts), add_special_tokens=special_tokens)["input_ids"]


@_TOKENIZING
def window_start(tokenizer, bos: str = "auto") -> list[int]:
    """Return the token ids that every window begins with.

    auto     what the tokenizer puts before a text when it adds special tokens: mostly the BOS, for many models nothing
    always   that, or the BOS where the tokenizer does not add it by itself
    never    nothing

    Raises UsageError for another word, and for `always` with a tokenizer that has no BOS."""
    _check_bos(bos)
    if bos == "never":
        return []
    probe = "a"
    whole, plain = (tokenizer(probe, add_special_tokens=special)["input_ids"] for special in (True, False))
    # What stands behind the text, an EOS, is left out: an encoder's habit, and never what a window begins with.
    places = [at for at in range(len(whole) - len(plain) + 1) if whole[at : at + len(plain)] == plain]
    start = list(whole[: places[0]]) if places else []
    if start or bos == "auto":
        return start
    if tokenizer.bos_token_id is None:
        raise UsageError("--bos always, but the tokenizer has no BOS token", "use --bos auto, or never")
    return [tokenizer.bos_token_id]


def _check_bos(bos: str) -> None:
    if bos not in BOS:
        raise UsageError(f"--bos {bos} is unknown", f"choose one of {', '.join(BOS)}")


def _excerpts(texts: Iterator[str], most: int, seed: int) -> Iterator[str]:
    """Pass documents on; of one with more than `most` characters, and too many to tokenize, excerpts of so many from all over it.

    Tokenizing takes 200 bytes and 3 us for each character."""
    random_place, count = random.Random(seed), max(most // _EXCERPT, _EXCERPTS)
    for text in texts:
        if len(text) <= max(most, _WHOLE):
            yield text
            continue
        span, parts = len(text) // count, []
        for number in range(count):
            begin = number * span + random_place.randrange(max(1, span - _EXCERPT))
            begin = max(begin, text.find(" ", begin, begin + 100))  # a word begins there, if there are words
            parts.append(text[begin : begin + _EXCERPT])
        yield "\n\n".join(parts)


def max_positions(text_config: dict) -> int | None:
    """The longest window that a model's config allows, or None where it names no limit."""
    longest = text_config.get("max_position_embeddings") or text_config.get("n_positions")
    return longest if type(longest) is int and longest > 0 else None


def default_seqlen(text_config: dict) -> int:
    """Return 2048, or fewer tokens where the model's positions allow no more."""
    return min(2048, max_positions(text_config) or 2048)


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
        if lack_of_memory(error) is not None:
            raise
        raise TilepressError(
            f"{folder.name} has no tokenizer that loads ({first_line(error)})",
            "copy tokenizer.json and tokenizer_config.json of the model into its folder",
        ) from error


@dataclass(frozen=True)
class Text:
    """The text that a recipe reads: `nsamples` windows of `seqlen` tokens, of which the first is the BOS if `bos` says so (`window_start`).

    `dataset` is a `.txt`, `.jsonl`, `.json` or `.parquet` file, or a hub id: `HUB_ID[:CONFIG[:SPLIT]]`; or `self[:TEMPERATURE]`, text that the
    model writes, which `tilepress.sample` makes before a recipe reads it, with other text beside it as `self+FILE`; or `random`, tokens of the
    vocabulary, each as likely as the others. `nsamples` is 128 unless given, or 8 of random tokens, which have little to show; `seqlen` 2048,
    or what the model's positions allow.
    Raises UsageError for a number that is too small or an unknown `bos`."""

    dataset: str = CALIBRATION
    nsamples: int | None = None
    seqlen: int | None = None
    seed: int = 0
    bos: str = "auto"  # auto | always | never
    file: Path | None = field(default=None, repr=False, compare=False)  # where sampled text is

    def __post_init__(self):
        check_kinds(self)
        _check_bos(self.bos)
        if self.nsamples is None:
            object.__setattr__(self, "nsamples", 8 if self.dataset == RANDOM else 128)
        if (temperature := self.temperature) is not None and not 0 < temperature < 100:
            raise UsageError(f"--dataset {self.dataset} has no temperature", "write self, or self:0.8")
        if self.beside in ("", RANDOM):
            raise UsageError(f"--dataset {self.dataset} names no text behind the +", "write self, or self+FILE")
        for name, value, least in (("nsamples", self.nsamples, 1), ("seqlen", self.seqlen, 16), ("seed", self.seed, 0)):
            if value is not None and value < least:
                raise UsageError(f"--{name} {value} is too small", f"use at least {least}")

    def fitted(self, text_config: dict, tokenizer) -> "Text":
        """Return the same text with the window's length and `bos` settled: `auto` is left only where the tokenizer adds none and none is asked for.

        Raises UsageError for windows longer than the model's positions, and for a BOS that the tokenizer does not have."""
        seqlen = default_seqlen(text_config) if self.seqlen is None else self.seqlen
        check_window(seqlen, text_config)
        start = window_start(tokenizer, self.bos)
        refused = self.bos == "never" and bool(window_start(tokenizer))
        return replace(self, seqlen=seqlen, bos="always" if start else "never" if refused else "auto")

    @property
    def temperature(self) -> float | None:
        """That of text which the model writes, NaN for one that is no number; None for other text."""
        own = self.dataset.partition("+")[0]
        if own != SELF and not own.startswith(f"{SELF}:"):
            return None
        try:
            return float(own.removeprefix(SELF).removeprefix(":") or 1.0)
        except ValueError:
            return float("nan")

    @property
    def beside(self) -> str | None:
        """The file or hub id whose text goes with what the model writes, or None."""
        _, plus, other = self.dataset.partition("+")
        return other if plus and self.temperature is not None else None

    @property
    def source(self) -> str:
        """What `documents` reads. Raises UsageError for text that the model has not written yet."""
        if self.temperature is not None and self.file is None:
            raise UsageError(
                "the model has not written its text: compression does not run it",
                "give dataset=tilepress.sample(MODEL).text",
            )
        return str(self.file or self.dataset)

    def described(self) -> dict:
        """Return what a manifest says of the text; `bos` where the tokenizer adds one or one was asked for."""
        told = asdict(self)
        del told["file"]
        return {name: value for name, value in told.items() if (name, value) != ("bos", "auto")}

    @_TOKENIZING
    def windows(self, tokenizer) -> list[list[int]]:
        """Token ids, window by window; fewer or shorter where the text ends. Raises UsageError for a text without tokens."""
        start = window_start(tokenizer, self.bos)
        step = self.seqlen - len(start)
        if self.dataset == RANDOM:
            ordinary = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
            draw = random.Random(self.seed)
            return [start + draw.choices(ordinary, k=step) for _ in range(self.nsamples)]
        ids = token_ids(tokenizer, self.source, self.nsamples * step, seed=self.seed, special_tokens=False)
        windows = [start + ids[i : i + step] for i in range(0, len(ids), step)]
        if len(windows) > self.nsamples and len(windows[-1]) < self.seqlen:
            windows.pop()
        if not ids:
            raise UsageError(f"{self.dataset} has no text", "give another --dataset")
        chosen = random.Random(self.seed).sample(range(len(windows)), min(self.nsamples, len(windows)))
        return [windows[i] for i in sorted(chosen)]
