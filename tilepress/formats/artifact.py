"""Writing an artifact so that a killed run can resume and a half-written folder never loads.

A shard's tensors are streamed into temporary files, one for each element size, so that each weight is looked at once; these
are joined behind the header. Then fsync, rename, and a done-record with hashes. `config.json` and the manifest come after every
shard, so no loader accepts a folder that is not complete.
"""

import errno
import hashlib
import itertools
import json
import os
import shutil
import struct
import uuid
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from tilepress.formats import TilepressError
from tilepress.formats.checkpoint import DTYPE_NAMES
from tilepress.formats.layout import side_suffixes

WORK_FOLDER = ".tilepress"  # plan and done-records of an unfinished run
_BLOCK_BYTES = 1 << 22  # copied at once


@contextmanager
def disk_errors(path: Path):
    """Turns an OSError of the body into a TilepressError that names the path."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise TilepressError(
                f"the disk is full: cannot write {path}",
                "free some space, then run the same command again; one that makes an artifact with --resume",
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
    """Encode a dictionary as every JSON file of an artifact is written."""
    return encoded(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def encoded(text: str) -> bytes:
    """Encode what an artifact says; of a folder's or file's name that is no text, bytes become question marks."""
    return text.encode(errors="replace")


def sha256_file(path: Path) -> str:
    """The SHA-256 of a whole file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


class ShardWriter:
    """Writes one safetensors file from tensors that come in any order, holding none of them.

    Tensors of one element size go to a temporary file of their own, one after the other. `finish` joins them behind the
    header: wide elements first, so that every tensor is aligned without holes, then what is stored beside packed words
    behind the words, then by name. The order in which tensors came therefore changes no byte.
    """

    def __init__(self, path: Path, folder: Path):
        """The temporary files are in `folder`, on the same disk as `path`."""
        self.path = path
        self._folder = folder
        self._streams: dict[int, BinaryIO] = {}  # by the bytes of an element
        self._stored: list[_Stored] = []

    def add(self, name: str, shape: tuple[int, ...], pieces: Iterable[Tensor]) -> int:
        """Stores a tensor given as one or more consecutive pieces of its elements, and returns its bytes.

        `shape[0]` may be -1 for as many as come.
        """
        stream, begin, dtype = None, 0, None
        with disk_errors(self.path):
            for piece in pieces:
                if stream is None:
                    dtype, stream = piece.dtype, self._stream(piece.dtype.itemsize)
                    begin = stream.tell()
                assert piece.dtype == dtype, (name, piece.dtype)
                stream.write(piece.contiguous().cpu().reshape(-1).view(torch.uint8).numpy())
            nbytes = stream.tell() - begin
        if shape and shape[0] == -1:
            shape = (nbytes // dtype.itemsize, *shape[1:])
        self._stored.append(_Stored(name, dtype, tuple(shape), begin, nbytes))
        return nbytes

    def finish(self) -> tuple[int, str]:
        """Joins the streams, makes the file durable and gives it its name; returns its size and sha256."""
        stored, digest = sorted(self._stored, key=_order), hashlib.sha256()
        with disk_errors(self.path):
            joined = self._streams[0] = self._open()

            def put(data: bytes) -> None:
                digest.update(data)
                joined.write(data)

            put(_header(stored))
            for itemsize, tensors in itertools.groupby(stored, lambda tensor: tensor.dtype.itemsize):
                stream = self._streams.pop(itemsize)
                for tensor in tensors:
                    stream.seek(tensor.begin)
                    for at in range(0, tensor.nbytes, _BLOCK_BYTES):
                        put(stream.read(min(_BLOCK_BYTES, tensor.nbytes - at)))
                _remove(stream)
            joined.flush()
            os.fsync(joined.fileno())
            size = joined.tell()
            joined.close()
            os.replace(joined.name, self.path)
            return size, digest.hexdigest()

    def abandon(self) -> None:
        """Removes the temporary files."""
        for stream in self._streams.values():
            _remove(stream)

    def _stream(self, itemsize: int) -> BinaryIO:
        if itemsize not in self._streams:
            self._streams[itemsize] = self._open()
        return self._streams[itemsize]

    def _open(self) -> BinaryIO:
        return open(temporary_name(self._folder, self.path), "w+b")


@dataclass(frozen=True)
class _Stored:
    """A tensor in the stream of its element size, from byte `begin` on."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    nbytes: int


def _order(tensor: _Stored) -> tuple:
    """The place of a tensor in a file, as a key to sort by."""
    beside = next((i for i, suffix in enumerate(side_suffixes(), 1) if tensor.name.endswith(suffix)), 0)
    return -tensor.dtype.itemsize, beside, tensor.name


def _header(tensors: list[_Stored]) -> bytes:
    """The safetensors header of tensors in their order, with its length before it.

    It is padded with spaces, which the format allows, to what it would take if every number had the most digits: so its
    length, and with it where each tensor begins, does not depend on how many bytes the tensors have.
    """
    exact: dict = {"__metadata__": {"format": "pt"}}
    widest, at = dict(exact), 0
    for tensor in tensors:
        dtype = {"dtype": DTYPE_NAMES[tensor.dtype]}
        exact[tensor.name] = dtype | {"shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        widest[tensor.name] = dtype | {"shape": [2**63] * len(tensor.shape), "data_offsets": [2**63, 2**63]}
        at += tensor.nbytes
    header, longest = (json.dumps(form, separators=(",", ":")).encode() for form in (exact, widest))
    room = -(-(len(longest) + 8) // 128) * 128 - 8
    return struct.pack("<Q", room) + header.ljust(room)


def _remove(stream: BinaryIO) -> None:
    stream.close()
    Path(stream.name).unlink(missing_ok=True)
