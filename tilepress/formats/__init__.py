"""Bytes on disk <-> tensors. This package needs torch and safetensors only and imports nothing else of tilepress.

The two errors live here because every other part, down to the formats, raises them; so does the check of settings that users make.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import get_args, get_origin, get_type_hints


def dtype_name(dtype) -> str:
    """A torch dtype as a model's config spells it: bfloat16, float16, int32."""
    return str(dtype).removeprefix("torch.")


def is_address(place: object) -> bool:
    """Tell an address in a store, `s3://BUCKET/MODEL`, from a path and a hub id."""
    return "://" in str(place)


class TilepressError(Exception):
    """Something the user can mend: `message` says what is wrong with its values, `hint` the command or flag that helps.

    The command line prints both as two lines and ends with `exit_code`.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = ""):
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(TilepressError):
    """The request itself is wrong: a value out of range, an output folder that exists, an unknown architecture."""

    exit_code = 2


def installing(extra: str = "") -> str:
    """Return the command that installs tilepress, with an extra if one is named. No index has it: pip takes a folder or a wheel."""
    what = f"'./tilepress[{extra}]'" if extra else "./tilepress"
    return f"pip install {what}  # ./tilepress: the folder of its clone, or a path to its wheel"


def first_line(error: Exception) -> str:
    """What another package says of an error, for a message of one line; its kind where it says nothing."""
    said = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__} {said[0][:160]}".rstrip()


_NO_MEMORY = (
    "can't allocate memory",
    "failed to map segment",
    "Cannot allocate memory",
    "out of memory",
    "error return without exception set",  # of Python itself, where an import found no room for it
)


def lack_of_memory(error: Exception) -> str | None:
    """Return what an error says of memory that ran out, a card's too; None for an error of another kind.

    Words count where the system speaks, not where a message may quote a file."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, (ImportError, OSError, RuntimeError, SystemError)):
        found = next((line for line in lines if any(words in line for words in _NO_MEMORY)), None)
        if found is not None:
            return found
    kinds = {kind.__name__ for kind in type(error).__mro__}  # OutOfMemoryError is torch's, not imported here
    return lines[0] if kinds & {"MemoryError", "OutOfMemoryError"} else None


@contextmanager
def foreign_errors(message: str, hint: str) -> Iterator[None]:
    """Turn what other packages raise in the body into a TilepressError, with the first line of theirs behind `message`.

    Memory that runs out, a card's too, is told as it is."""
    try:
        yield
    except TilepressError:
        raise
    except Exception as error:
        if lack_of_memory(error) is not None:
            raise
        raise TilepressError(f"{message}: {first_line(error)}", hint) from error


def check_kinds(settings) -> None:
    """Raise UsageError for a value of a dataclass that is not of the kind its field declares.

    What means the same becomes what is declared: numpy's numbers Python's, a list a tuple, a path its text."""
    hints = get_type_hints(type(settings))
    for name in (field.name for field in fields(settings)):
        value, hint = getattr(settings, name), hints[name]
        declared = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        kinds = tuple(get_origin(kind) or kind for kind in declared)
        if isinstance(value, Integral) and not isinstance(value, bool) and {int, float} & {*kinds}:
            value = int(value)
        elif isinstance(value, Real) and not isinstance(value, bool) and float in kinds:
            value = float(value)
        elif isinstance(value, list) and tuple in kinds:
            value = tuple(value)
        elif isinstance(value, Path) and Path not in kinds and str in kinds:
            value = str(value)
        sound = isinstance(value, (*kinds, int) if float in kinds else kinds)
        sound &= not isinstance(value, bool) or bool in kinds
        sound &= not isinstance(value, tuple) or all(isinstance(each, str) for each in value)
        if not sound or getattr(value, "is_floating_point", True) is False:  # a dtype of integers
            takes = " or ".join(getattr(kind, "__name__", "") if kind in kinds else str(kind) for kind in declared)
            raise UsageError(
                f"{type(settings).__name__}({name}={value!r}): a {type(value).__name__} that it does not take",
                f"it takes {takes.replace('NoneType', 'None').replace('dtype', 'a floating torch.dtype')}",
            )
        object.__setattr__(settings, name, value)
