"""The file or directory that is written: under a temporary name until it is complete.

The temporary name begins with a dot and ends in ".unfinished". A process that is killed leaves it
behind, and the next one that writes the same target removes it; a lock says whether the first one
still lives.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from shmllm.errors import QuantizeError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
"""Of Linux's `renameat2`."""


class Target:
    """What a model is written to.

    Args:
        path: the file or directory.
        is_directory: which of the two it becomes.
        overwrite: whether it may exist.

    Raises:
        QuantizeError: it exists and must not, or cannot be replaced, or cannot be made.
    """

    def __init__(self, path: Path, *, is_directory: bool, overwrite: bool) -> None:
        self.path = path
        self._is_directory = is_directory
        absolute = Path(os.path.abspath(path))
        self._unfinished = absolute.with_name(f".{absolute.name}.unfinished")
        parent = absolute.parent
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise QuantizeError(f"cannot write {path}: {parent} does not exist or is not writable")
        if os.path.lexists(path):
            self._check_replaceable(overwrite)

    def _check_replaceable(self, overwrite: bool) -> None:
        path = self.path
        if not overwrite:
            raise QuantizeError(f"{path} exists; choose another name, or add --overwrite")
        is_one = path.is_dir() if self._is_directory else path.is_file()
        if not is_one or path.is_symlink():
            wanted = "directory" if self._is_directory else "file"
            raise QuantizeError(f"cannot overwrite {path}: it is not a {wanted}")
        if self._is_directory and any(path.iterdir()) and not (path / "config.json").is_file():
            raise QuantizeError(f"cannot overwrite {path}: the directory has no model")

    def check_not(self, source: Path) -> None:
        """Raises QuantizeError if the target is the source, or contains it."""
        place, source = Path(os.path.realpath(self.path)), Path(os.path.realpath(source))
        if place == source or place in source.parents:
            raise QuantizeError(f"cannot write {self.path}: the model is read from there")

    def check_room(self, num_bytes: int) -> None:
        """Raises QuantizeError if the disk is too small."""
        free = shutil.disk_usage(self._unfinished.parent).free
        if num_bytes > free:
            raise QuantizeError(
                f"cannot write {self.path}: it needs {num_bytes / 2**20:,.1f} MiB, and "
                f"{free / 2**20:,.1f} MiB are free on the disk"
            )

    @contextlib.contextmanager
    def writing(self) -> Iterator[Path]:
        """Gives the temporary path, which exists and is empty; it gets the target's name if the
        block ends without an exception, and is removed otherwise.

        Raises:
            QuantizeError: the disk is full, or another process writes the same target.
        """
        path = self._unfinished
        lock = -1
        try:
            lock = self._make()
            yield path
            _sync(path)
            self._rename()
        except OSError as error:
            why = "the disk is full" if is_full(error) else error.strerror or str(error)
            raise QuantizeError(f"cannot write {self.path}: {why}") from error
        finally:
            if lock >= 0:
                _remove(path)
                os.close(lock)

    def _make(self) -> int:
        """Makes the temporary file or directory; returns a descriptor that locks it."""
        path = self._unfinished
        if os.path.lexists(path):
            left = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                self._take(left)
                _remove(path)
            finally:
                os.close(left)
        if self._is_directory:
            path.mkdir()
        else:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        made = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._take(made)
            # Another process may have taken, and removed, what was made here and not yet locked.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(made), os.lstat(path)):
                    return made
            raise self._is_written()
        except BaseException:
            os.close(made)
            raise

    def _take(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._is_written() from None

    def _is_written(self) -> QuantizeError:
        return QuantizeError(f"another process is writing {self.path}")

    def _rename(self) -> None:
        if not (self._is_directory and self.path.is_dir()):
            os.replace(self._unfinished, self.path)
            return
        # A directory with files cannot be replaced at once, but change names with another.
        if _exchange(self._unfinished, self.path):
            return
        old = self._unfinished.with_suffix(".replaced")
        _remove(old)
        os.rename(self.path, old)
        os.rename(self._unfinished, self.path)
        _remove(old)


def is_full(error: OSError) -> bool:
    """Whether a disk or a quota was full. numpy's error of a short write has no number."""
    full = (errno.ENOSPC, errno.EDQUOT)
    return error.errno in full or "requested and" in str(error)


def size_of(path: Path) -> int:
    """The size of a file, or of the files of a directory."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return sum(each.stat().st_size for each in files)


def _sync(path: Path) -> None:
    for each in [path] if path.is_file() else path.iterdir():
        with open(each, "rb") as file:
            os.fsync(file.fileno())


def _exchange(first: Path, second: Path) -> bool:
    """Exchanges the names of two files at once; returns False where that is not possible."""
    call = getattr(ctypes.CDLL(None), "renameat2", None)
    names = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second))
    return call is not None and call(*names, _RENAME_EXCHANGE) == 0


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
