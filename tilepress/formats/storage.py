"""Folders that are reached by an address, through fsspec: `s3://BUCKET/MODEL`, `gs://…`, `hf://OWNER/MODEL`.

A model there is planned from a *mirror*, a local folder of its small files and of shards that end after their header, with the true sizes
in `.remote.json`. Readers of headers find everything; whoever reads a tensor before the shard was fetched is told that the file is cut off.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath

from tilepress.formats import TilepressError, UsageError, first_line, installing
from tilepress.formats.files import REPAIR_HINT, read_json

SIZES_NAME = ".remote.json"  # of a mirror: the sizes of its shards
_AT_ONCE = 16  # requests
_FIRST_BYTES = 1 << 16  # of a shard: most headers are shorter
_MAX_HEADER_BYTES = 1 << 25
_BLOCK_BYTES = 1 << 22
_IDENTITIES = ("ETag", "etag", "blob_id", "md5Hash", "content_md5", "mtime", "LastModified", "last_modified", "created")
_AGAIN = "the file changed, or the connection broke: go on with --resume"
_EXTRAS = {"s3": "s3", "s3a": "s3"}


@dataclass(frozen=True)
class Stored:
    """A file as the store lists it: `key` is another when its bytes are, `sha256` what the store says of them, if it does."""

    size: int
    key: str
    sha256: str | None = None


class Store:
    """A folder in a store. Its methods raise TilepressError for what the store refuses, and where it cannot be reached."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        with self._told():
            from fsspec.core import url_to_fs

            self._fs, self._root = url_to_fs(self.url, **_options(url))
            self._root = self._root.rstrip("/")

    @property
    def name(self) -> str:
        """What a model there is called: the hub id, else its folder's name."""
        path = self.url.partition("://")[2]
        return path.partition("@")[0] if self.url.startswith("hf://") else path.rpartition("/")[2]

    def files(self) -> dict[str, Stored]:
        """Return every file below the folder by its name there; none where there is no such folder."""
        with self._told():
            self._fs.invalidate_cache()
            try:
                listed = self._fs.find(self._root, detail=True)
            except FileNotFoundError:
                return {}
        found = {}
        for path, info in listed.items():
            name = path.removeprefix(self._root).lstrip("/")
            parts = PurePosixPath(name).parts
            if name and info.get("type") == "file":
                if "/".join(parts) != name or ".." in parts or not name.isprintable():
                    raise TilepressError(
                        f"{self.url} has a file whose name is no path: {name!r}", "rename or remove it"
                    )
                found[name] = _stored(info)
        return found

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        with self._told(name):
            return self._fs.cat_file(f"{self._root}/{name}", start=begin, end=end)

    def fetch(self, name: str, path: Path, stored: Stored) -> None:
        """Copy a file to a new local one. Raises TilepressError where it is not the one that was listed."""
        with self._told(name):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fs.get_file(f"{self._root}/{name}", str(path))
        if path.stat().st_size != stored.size:
            told = f"{path.stat().st_size} bytes came, {stored.size} were listed"
            raise TilepressError(f"{self.url}/{name}: {told}", _AGAIN)
        if stored.sha256:
            with open(path, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != stored.sha256:
                raise TilepressError(f"{self.url}/{name} does not have the hash that the store declares", _AGAIN)

    def send(self, path: Path, name: str) -> Stored:
        """Copy a local file to the store and return how it is listed there."""
        with self._told(name):
            self._fs.put_file(str(path), f"{self._root}/{name}")
            self._fs.invalidate_cache()
            stored = _stored(self._fs.info(f"{self._root}/{name}"))
        if stored.size != path.stat().st_size:
            raise TilepressError(f"{self.url}/{name} has {stored.size} bytes of {path.stat().st_size}", _AGAIN)
        return stored

    def remove(self, name: str) -> None:
        with self._told(name):
            self._fs.rm_file(f"{self._root}/{name}")

    def sha256(self, name: str) -> str:
        """Return the hash of a file, read from the store."""
        digest = hashlib.sha256()
        with self._told(name), self._fs.open(f"{self._root}/{name}", "rb", block_size=_BLOCK_BYTES) as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
        return digest.hexdigest()

    @contextmanager
    def _told(self, name: str | None = None) -> Iterator[None]:
        """Turn what fsspec and its packages raise in the body into two lines."""
        where = self.url if name is None else f"{self.url}/{name}"
        scheme = self.url.partition("://")[0]
        try:
            yield
        except (TilepressError, MemoryError):
            raise
        except ImportError as error:
            hint = installing(_EXTRAS[scheme]) if scheme in _EXTRAS else "pip install the package that it names"
            raise UsageError(f"{scheme}:// needs a package ({first_line(error)})", hint) from error
        except FileNotFoundError as error:
            raise TilepressError(f"{where} is not there ({first_line(error)})", "check the address") from error
        except Exception as error:
            said = first_line(error)
            if isinstance(error, ValueError) and "rotocol" in said:
                raise UsageError(
                    f"{where} is no address that fsspec knows ({said})", "check what is before ://"
                ) from error
            if isinstance(error, PermissionError) or "redential" in said or "Forbidden" in said or "401" in said:
                hint = "check the credentials of this machine and what they may do there"
                raise TilepressError(f"{where} is not open to you ({said})", hint) from error
            hint = "check the address, the network and the endpoint (AWS_ENDPOINT_URL for S3), then use --resume"
            raise TilepressError(f"{where} cannot be used ({said})", hint) from error


def _options(url: str) -> dict:
    """Return fsspec's options: a store that does not answer is told in seconds, unless the user has configured it otherwise; folders are made."""
    from fsspec.config import conf

    if url.startswith("file://"):
        return {"auto_mkdir": True}
    own = url.startswith(("s3://", "s3a://")) and "config_kwargs" not in conf.get("s3", {})
    return {"config_kwargs": {"connect_timeout": 5, "retries": {"max_attempts": 2}}} if own else {}


def _stored(info: dict) -> Stored:
    said = next((info[name] for name in _IDENTITIES if info.get(name) is not None), "")
    if isinstance(said, datetime):  # of one file some stores tell a time, of many a number
        said = said.timestamp()
    key = f"{said:.3f}" if isinstance(said, float) else str(said)
    return Stored(int(info["size"]), key, getattr(info.get("lfs"), "sha256", None))


class Mirror:
    """A local folder that stands for a model in a store: see the top."""

    def __init__(self, store: Store, folder: Path, files: dict[str, Stored]):
        self.store, self.folder, self.files = store, folder, files

    @classmethod
    def make(cls, store: Store, folder: Path, wanted) -> "Mirror":
        """Bring the small files of a model that `wanted` takes by name, and the headers of its shards. Raises UsageError for an empty folder."""
        listed = store.files()
        files = {name: stored for name, stored in listed.items() if wanted(name)}
        if not files:
            raise UsageError(f"{store.url} holds no files of a model", "check the address")
        folder.mkdir(parents=True, exist_ok=True)
        mirror = cls(store, folder, files)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(mirror._bring, files))
        sizes = {name: stored.size for name, stored in files.items() if is_shard(name)}
        (folder / SIZES_NAME).write_text(json.dumps(sizes))
        return mirror

    def _bring(self, name: str) -> None:
        if is_shard(name):
            self._put(name, self._header(name))
        else:
            self.store.fetch(name, self.folder / name, self.files[name])

    def _header(self, name: str) -> bytes:
        """Return a shard's first bytes, as far as its header goes; what is no shard is told by whoever reads it."""
        first = self.store.read(name, 0, min(_FIRST_BYTES, self.files[name].size))
        length = 8 + struct.unpack("<Q", first[:8])[0] if len(first) >= 8 else 0
        if length > min(_MAX_HEADER_BYTES, self.files[name].size):
            return first
        return first[:length] if length <= len(first) else first + self.store.read(name, len(first), length)

    def _put(self, name: str, header: bytes) -> None:
        """Let a shard end after its header, with the time that says which bytes the store has."""
        temporary = self.folder / f".{name}.header"
        temporary.write_bytes(header)
        self._date(name, temporary)
        os.replace(temporary, self.folder / name)

    def _date(self, name: str, path: Path) -> None:
        """Give a file a time that follows from what the store lists: the same on every machine until the file is another."""
        stored = self.files[name]
        digest = hashlib.sha256(f"{stored.size} {stored.key}".encode()).digest()
        seconds = int.from_bytes(digest[:4], "big")  # whole ones: not every disk keeps parts of them
        os.utime(path, (0, seconds))

    @contextmanager
    def fetched(self, name: str) -> Iterator[None]:
        """Have the whole shard in the folder during the body."""
        path, whole = self.folder / name, self.folder / f".{name}.whole"
        header = path.read_bytes()
        try:
            self.store.fetch(name, whole, self.files[name])
            self._date(name, whole)
            os.replace(whole, path)
            yield
        finally:
            whole.unlink(missing_ok=True)
            self._put(name, header)


def is_shard(name: str) -> bool:
    return "/" not in name and name.endswith(".safetensors")


def sizes_of(folder: Path) -> dict[str, int]:
    """Return the sizes of a mirror's shards; nothing for any other folder."""
    if not (folder / SIZES_NAME).exists():
        return {}
    sizes = read_json(folder / SIZES_NAME)
    if not all(type(size) is int for size in sizes.values()):
        raise TilepressError(f"{folder / SIZES_NAME} does not hold sizes", REPAIR_HINT)
    return sizes
