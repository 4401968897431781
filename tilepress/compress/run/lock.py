"""The lock on a folder that a run writes: a second run is told who is there instead of racing with it.

It is the kernel's lock (flock) on a small file that says who holds it. So it goes with the process, however that ends, and a
killed run needs no cleaning up. Ranks of one run share it. Where the file system has no locks, runs go unlocked.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
from pathlib import Path

from tilepress.formats import UsageError
from tilepress.formats.artifact import disk_errors
from tilepress.formats.files import regular

LOCK_NAME = "lock"
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class Lock:
    """The lock of a run that writes `output`, as a file in `folder`, which `take` makes; `shared` is for ranks that write together."""

    def __init__(self, output: Path, folder: Path, shared: bool = False):
        self.output, self.folder, self.path, self.shared = output, folder, folder / LOCK_NAME, shared
        self._file: int | None = None

    @property
    def held(self) -> bool:
        return self._file is not None

    def take(self) -> None:
        """Take the lock, if it is not held yet. Raises UsageError naming the process that holds it."""
        if self.folder.is_symlink():
            raise UsageError(f"{self.folder} is a link to another folder", "remove it, or choose another -o DIR")
        while not self.held:
            with disk_errors(self.path):
                self.folder.mkdir(parents=True, exist_ok=True)
                regular(self.path)
                file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.flock(file, (fcntl.LOCK_SH if self.shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = holder_of(file)
                os.close(file)
                raise UsageError(
                    f"another run is writing {self.output}: {holder}",
                    "wait for it or stop it first, or choose another -o DIR",
                ) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    os.close(file)
                    with disk_errors(self.path):
                        raise
            if _is_at(file, self.path):
                self._file = file
                os.ftruncate(file, 0)
                os.pwrite(file, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
            else:  # the run before ended between our two calls, and took the file with it
                os.close(file)

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *_) -> None:
        """Release the lock. The last to hold it removes the file, and the folder where nothing else is in it."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(self._file, self.path):
                self.path.unlink()
                self.folder.rmdir()
        os.close(self._file)
        self._file = None


def _is_at(file: int, path: Path) -> bool:
    """Return whether an open file is the one that a path names now."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
    return False


def holder_of(file: int) -> str:
    """Return who wrote a lock's file."""
    try:
        holder = json.loads(os.pread(file, 1000, 0))
        return f"process {int(holder['pid'])} on {str(holder['host'])[:100]}"
    # It has just begun, or somebody else wrote it: infinity is no process, and brackets nest too deep.
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return "a process that does not say which"
