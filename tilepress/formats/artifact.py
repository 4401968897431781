"""Writing an artifact so that a killed run can resume and a half-written folder never loads.

A shard is streamed into a temporary file: the header's room is reserved from the planned sizes, tensors follow one by one, the
header is written last and padded with spaces (the safetensors format allows that). Then fsync, rename, and a done-record with
hashes. `config.json` and the manifest come after every shard, so no loader accepts a folder that is not complete.
"""

import errno
import hashlib
import json
import os
import shutil
import struct
import uuid
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tilepress.formats import TilepressError
from tilepress.formats.checkpoint import DTYPE_NAMES

WORK_FOLDER = ".tilepress"  # plan and done-records of an unfinished run


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of a shard to be written: `max_elements` bounds a size that is known only once the tensor is packed."""

    name: str
    dtype: torch.dtype
    max_elements: int
    dims: int = 1

    @property
    def max_nbytes(self) -> int:
        return self.max_elements * self.dtype.itemsize


@contextmanager
def disk_errors(path: Path):
    """Turns an OSError of the body into a TilepressError that names the path."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise TilepressError(
                f"the disk is full: cannot write {path}", "free some space, then run the same command with --resume"
            ) from error
        raise TilepressError(
            f"cannot write {path}: {error.strerror or error}", "check the folder and its permissions"
        ) from error


def temporary_name(folder: Path, path: Path) -> Path:
    """A name in `folder` that no other process, on this machine or another, picks for the same file."""
    return folder / f"{path.name}.{uuid.uuid4().hex}.tmp"


def write_atomic(path: Path, data: bytes | Path, folder: Path) -> None:
    """Writes a small file, or copies the file `data`, through a temporary one in `folder`: it is there whole or not at all.

    `folder` must be on the same disk; neither folder is made.
    """
    temporary = temporary_name(folder, path)
    with disk_errors(path):
        with open(temporary, "wb") as file:
            if isinstance(data, Path):
                with open(data, "rb") as source:
                    shutil.copyfileobj(source, file, 1 << 22)
            else:
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


def to_json(value: dict) -> bytes:
    """As every JSON file of an artifact is written."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def sha256_file(path: Path) -> str:
    """Of a whole file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


class ShardWriter:
    """Writes one safetensors file tensor by tensor, holding none of them.

    Tensors must be added in the order of `planned`; each may take at most its planned elements.
    """

    def __init__(self, path: Path, planned: list[PlannedTensor], folder: Path):
        """The file grows as a temporary one in `folder`, on the same disk as `path`."""
        self.path = path
        self._temporary = temporary_name(folder, path)
        self._planned = planned
        self._header: dict = {"__metadata__": {"format": "pt"}}
        # No number of a header has more digits than this one.
        widest = dict(self._header) | {
            t.name: {"dtype": DTYPE_NAMES[t.dtype], "shape": [2**63] * t.dims, "data_offsets": [2**63, 2**63]}
            for t in planned
        }
        self._room = -(-(len(json.dumps(widest, separators=(",", ":")).encode()) + 8) // 128) * 128 - 8
        with disk_errors(path):
            self._file = open(self._temporary, "wb")  # noqa: SIM115 - finish or abandon closes it
            self._file.seek(8 + self._room)
        self._offset = 0

    def add(self, name: str, shape: tuple[int, ...], pieces: Iterable[Tensor]) -> int:
        """Appends a tensor given as consecutive pieces of its elements; returns its bytes. `shape[0]` may be -1: what comes."""
        planned = self._planned[len(self._header) - 1]
        assert planned.name == name, (planned.name, name)
        begin = self._offset
        with disk_errors(self.path):
            for piece in pieces:
                assert piece.dtype == planned.dtype, (name, piece.dtype)
                data = piece.contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
                self._file.write(data)
                self._offset += data.nbytes
        nbytes = self._offset - begin
        if shape and shape[0] == -1:
            shape = (nbytes // planned.dtype.itemsize, *shape[1:])
        self._header[name] = {
            "dtype": DTYPE_NAMES[planned.dtype],
            "shape": list(shape),
            "data_offsets": [begin, self._offset],
        }
        return nbytes

    def finish(self) -> tuple[int, str]:
        """Writes the header, makes the file durable and gives it its name; returns its size and sha256."""
        header = json.dumps(self._header, separators=(",", ":")).encode()
        assert len(self._header) - 1 == len(self._planned) and len(header) <= self._room
        with disk_errors(self.path):
            self._file.seek(0)
            self._file.write(struct.pack("<Q", self._room) + header.ljust(self._room))
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            digest = sha256_file(self._temporary)
            os.replace(self._temporary, self.path)
            return self.path.stat().st_size, digest

    def abandon(self) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)
