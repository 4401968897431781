"""Files that others wrote, read with bounds: a pipe is not waited for, and JSON takes no more memory than a model's may, YAML no more than it shows."""

import json
import re
from pathlib import Path

from tilepress.formats import TilepressError, UsageError, first_line

REPAIR_HINT = "download or write the checkpoint again; `tilepress verify DIR` lists every finding"
_MAX_JSON_BYTES = 1 << 26
_MAX_YAML_CHARACTERS = 1 << 20
_YAML_WRITTEN_OUT = 16  # times the characters: a few lines of aliases can stand for more than any memory holds
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")  # of a character beyond U+FFFF, as JSON may write it


def regular(path: Path) -> Path:
    """The path, if no reading from it can wait for ever or never end. Raises TilepressError for a pipe or a device."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise TilepressError(f"{path} is no regular file", "take the pipe or device away, or put a file in its place")
    return path


def in_utf8(path: Path) -> Path:
    """The path, if safetensors and tokenizers can open it. Raises UsageError for a name that is not UTF-8."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the name of {path} is not UTF-8", "rename the folder, or give another") from error
    return path


def read_json(path: Path) -> dict:
    """A JSON object from a file. Raises TilepressError naming the file."""
    try:
        if regular(path).stat().st_size > _MAX_JSON_BYTES:
            raise TilepressError(f"{path} has more than {_MAX_JSON_BYTES >> 20} MiB of JSON", REPAIR_HINT)
        text = path.read_text(encoding="utf-8")
        value = json.loads(text)
        if _HALF_PAIR.search(text):  # which may be half of a pair with nothing for the other half
            json.dumps(value, ensure_ascii=False).encode()
    except OSError as error:
        raise TilepressError(f"cannot read {path}: {error.strerror}", "check the file and its permissions") from error
    except (ValueError, RecursionError) as error:
        raise TilepressError(f"{path} is not valid JSON: {error}", REPAIR_HINT) from error
    if not isinstance(value, dict):
        raise TilepressError(f"{path} does not hold a JSON object", REPAIR_HINT)
    return value


def read_yaml(text: str) -> object:
    """What YAML says, as plain values. Raises ValueError for what is none, and for more than a recipe or a card can need."""
    import yaml

    if len(text) > _MAX_YAML_CHARACTERS:
        raise ValueError(f"more than {_MAX_YAML_CHARACTERS >> 20} MiB of YAML")
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(first_line(error)) from error
    left, written_out, most = [found], 0, _YAML_WRITTEN_OUT * len(text) + 4096
    while left:
        value = left.pop()
        if isinstance(value, int) and abs(value) >= 1 << 64:  # which Python may refuse to print
            raise ValueError(f"a number of {value.bit_length()} bits")
        written_out += 1 + (len(value) if isinstance(value, (str, bytes)) else 0)
        if isinstance(value, dict):
            left += (*value, *value.values())
        elif isinstance(value, (list, set)):
            left += value
        if written_out + len(left) > most:
            raise ValueError("aliases that stand for much more than is written")
    return found
