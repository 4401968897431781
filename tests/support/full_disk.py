"""A disk that is full from a given write on: every call by which a run writes raises ENOSPC then."""

import builtins
import errno
import os
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from tilepress.compress.layers import walk
from tilepress.formats import artifact


class FullDisk:
    """Counts the writes of a run; those from number `room` on fail. `writes` tells how many there were."""

    def __init__(self, room: float = float("inf")):
        self.room, self.writes = room, 0

    def take(self) -> None:
        self.writes += 1
        if self.writes > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextmanager
    def in_place(self, monkeypatch):
        """Put the disk in place of the real one, for what this package writes."""
        real = {name: getattr(os, name) for name in ("replace", "fsync", "link", "mkdir")}
        save_file = walk.save_file

        def counted(function):
            def call(*args, **kwargs):
                self.take()
                return function(*args, **kwargs)

            return call

        def open_file(path, mode="r", *args, **kwargs):
            file = builtins.open(path, mode, *args, **kwargs)  # noqa: SIM115
            return _File(file, self) if set(mode) & set("wax+") else file

        def save(tensors, path, metadata=None):
            try:
                self.take()
            except OSError as error:
                Path(path).write_bytes(b"half")
                raise SafetensorError(f"I/O error: {error.strerror} (os error {error.errno})") from error
            save_file(tensors, path, metadata)

        with monkeypatch.context() as patch:
            for name, function in real.items():
                patch.setattr(os, name, counted(function))
            patch.setattr(artifact, "open", open_file, raising=False)
            patch.setattr(walk, "save_file", save)
            yield self


class _File:
    """An open file whose writes and flushes the disk counts. What is half written stays."""

    def __init__(self, file, disk: FullDisk):
        self._file, self._disk = file, disk

    def write(self, data):
        self._disk.take()
        return self._file.write(data)

    def flush(self):
        self._disk.take()
        self._file.flush()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def __getattr__(self, name):
        return getattr(self._file, name)
