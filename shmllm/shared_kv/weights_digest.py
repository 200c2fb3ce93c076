"""The digest of a checkpoint, by which engines know that they compute with the same weights.

It is SHA-256 over the names and contents of the files that decide a model's numbers:

    config.json, config.VERSION.json    the second kind is what transformers lets config.json name
    *.safetensors                       but adapter_*.safetensors
    model.safetensors.index.json        and the files that it lists, whatever their names are
    pytorch_model*.bin                  unless there is model.safetensors or its index
    pytorch_model.bin.index.json        then, too, and the files that it lists
    *.gguf                              and the pieces of a model to whose first piece a link points
    adapters/*/adapter_*                adapters for tasks, one of which the loader may add

The loader may pass over some of them. A checkpoint with one file more has another digest then, and
shares nothing, which costs time; a file too few would give wrong tokens. Tokenizers, generation
options and other adapters do not belong to them. Links are followed, and paths have no influence.

Computing reads all files: 1.2 GB/s from the page cache on a Xeon with SHA instructions, where
BLAKE2b reaches 0.7 GB/s and BLAKE2s less. So the digest is kept in a note, with the size, the time
of the last change and the inode of each file:

    DIRECTORY/shmllm_digest.json                        if the directory can be written
    $XDG_CACHE_HOME/shmllm/digests/KEY.json             else; KEY depends on the path without links

This module must not know what a model computes, nor who compares digests.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

NOTE = "shmllm_digest.json"

_VERSION = 1
"""Raise this when the same files give another digest, or notes have other fields."""
_BUFFER_BYTES = 2**20
_MOST_NOTE_BYTES = 2**24
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLE_INDEX = "pytorch_model.bin.index.json"
_GGUF_PIECE = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.ASCII | re.DOTALL)
_GGUF_MODEL = "model.gguf"


class _State(NamedTuple):
    """What changes with a file's content.

    Attributes:
        size: in bytes.
        mtime_ns: the time of the last change.
        inode: the file's number in its file system.
    """

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> _State:
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


class _File(NamedTuple):
    path: str
    state: _State


_Files = dict[str, _File]
"""The files of a checkpoint by the names that the digest contains."""


def known_digest(directory: Path) -> str | None:
    """The digest of a checkpoint, if it was computed before and no file has changed since.

    It reads a note and looks at the files, without reading them.

    Args:
        directory: the model's directory, or one GGUF file.

    Returns:
        The digest in hexadecimal digits; None: it is not known. No file raises an error.
    """
    try:
        place = os.path.abspath(directory)
        files = _named_files(place)
        found = (_digest_in(path, owners, place, files) for path, owners in _notes(place))
        return next((digest for digest in found if digest is not None), None)
    except (OSError, ValueError):  # ValueError: a path with a null character
        return None


def compute_digest(directory: Path, should_stop: Callable[[], bool]) -> str | None:
    """Computes the digest of a checkpoint from its files, and keeps it in a note.

    Other threads run meanwhile: hashing a buffer releases the GIL. A note that cannot be written
    is left out.

    Args:
        directory: the model's directory, or one GGUF file.
        should_stop: called before each 1 MiB, about every millisecond.

    Returns:
        The digest in hexadecimal digits; None: `should_stop` returned True, a file changed or
        cannot be read, or there are no weights.
    """
    try:
        place = os.path.abspath(directory)
        files = _all_files(place)
        if not any(map(_has_weights, files)):
            return None
        digest = _digest(files, should_stop)
        if digest is None or _all_files(place) != files:
            return None
    except (OSError, ValueError):
        return None
    _keep(place, digest, files)
    return digest


def has_changed_since(directory: Path, moment_s: float) -> bool:
    """Whether a file of a checkpoint was written or replaced after a moment, or cannot be looked
    at. Weights that were read before are then not those of its digest.

    Args:
        directory: that of the checkpoint, or a GGUF file.
        moment_s: in seconds since 1970.
    """
    try:
        files = _all_files(str(directory)).values()
        return any(os.stat(file.path).st_ctime > moment_s for file in files)
    except OSError:
        return True


def digest_of_random(config_json_text: str, seed: int) -> str:
    """The digest of random weights, which no checkpoint has.

    Args:
        config_json_text: the text of config.json.
        seed: the seed of the weights.
    """
    text = config_json_text.encode("utf-8", "surrogatepass")
    return hashlib.sha256(b"shmllm random weights %d\n%d\n" % (_VERSION, seed) + text).hexdigest()


# the files


def _named_files(place: str) -> _Files:
    """The files that are found by their names alone.

    Raises:
        OSError: the directory or a piece of a GGUF model cannot be looked at.
    """
    if os.path.isfile(place):
        return _gguf_files(_GGUF_MODEL, place)
    files = _adapters(place)
    pickles: _Files = {}
    with os.scandir(place) as entries:
        for entry in entries:
            if _is_pickle(entry.name) and entry.is_file():
                pickles[entry.name] = _File(entry.path, _State.of(entry.stat()))
            if not _is_selected(entry.name) or not entry.is_file():
                continue
            if entry.name.endswith(".gguf") and not _GGUF_PIECE.fullmatch(entry.name):
                files |= _gguf_files(entry.name, entry.path)
            else:
                files[entry.name] = _File(entry.path, _State.of(entry.stat()))
    # The loader reads them even beside GGUF files, or safetensors files of other names.
    return files if _SINGLE in files or _INDEX in files else files | pickles


def _all_files(place: str) -> _Files:
    """The files that are found by their names, and those that the index lists."""
    files = _named_files(place)
    index = files.get(_INDEX) or files.get(_PICKLE_INDEX)
    for name in _listed_in(index.path) if index is not None else ():
        path = os.path.join(place, name)
        if name not in files and os.path.isfile(path):
            files[name] = _File(path, _State.of(os.stat(path)))
    return files


def _adapters(place: str) -> _Files:
    """The files of the adapters for tasks beside a checkpoint."""
    paths = glob.glob(os.path.join(glob.escape(place), "adapters", "*", "adapter_*"))
    return {
        os.path.relpath(path, place): _File(path, _State.of(os.stat(path)))
        for path in paths
        if os.path.isfile(path)
    }


def _is_selected(name: str) -> bool:
    if name.endswith(".safetensors"):
        return not name.startswith("adapter_")
    is_config = name.startswith("config.") and name.endswith(".json")
    return is_config or name == _INDEX or name.endswith(".gguf")


def _is_pickle(name: str) -> bool:
    is_file = name.startswith("pytorch_model") and name.endswith(".bin")
    return is_file or name == _PICKLE_INDEX


def _has_weights(name: str) -> bool:
    return not name.endswith(".json")


def _listed_in(index: str) -> list[str]:
    """The file names in an index; none if it is damaged, which the loader refuses."""
    try:
        names = set(json.loads(Path(index).read_bytes())["weight_map"].values())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return []
    return sorted(name for name in names if isinstance(name, str) and _is_file_name(name))


def _is_file_name(name: str) -> bool:
    return os.path.basename(name) == name and name not in ("", ".", "..") and "\0" not in name


def _gguf_files(name: str, path: str) -> _Files:
    """A GGUF file, or all pieces of the model if it is one of them or a link to one."""
    match = _GGUF_PIECE.fullmatch(os.path.basename(path))
    if match is None:
        path = os.path.realpath(path)
        match = _GGUF_PIECE.fullmatch(os.path.basename(path))
    if match is None or int(match[3]) < 2:
        return {name: _File(path, _State.of(os.stat(path)))}
    pieces = _Files()
    for number in range(1, int(match[3]) + 1):
        piece = os.path.join(os.path.dirname(path), f"{match[1]}-{number:05}-of-{match[3]}.gguf")
        pieces[f"{name}/{number}"] = _File(piece, _State.of(os.stat(piece)))
    return pieces


# the digest


def _digest(files: _Files, should_stop: Callable[[], bool]) -> str | None:
    """SHA-256 over each file's name, with its length, and the SHA-256 of its content.

    Returns:
        None: it was stopped, or a file is not the one that was found before.
    """
    whole = hashlib.sha256(b"shmllm weights %d\n" % _VERSION)
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    for name in sorted(files):
        content = _digest_of(files[name], buffer, should_stop)
        if content is None:
            return None
        encoded = name.encode("utf-8", "surrogateescape")
        whole.update(len(encoded).to_bytes(8, "little") + encoded + content)
    return whole.hexdigest()


def _digest_of(file: _File, buffer: memoryview, should_stop: Callable[[], bool]) -> bytes | None:
    content = hashlib.sha256()
    with open(file.path, "rb", buffering=0) as opened:
        if _State.of(os.fstat(opened.fileno())) != file.state:
            return None
        while not should_stop():
            count = opened.readinto(buffer)
            if not count:
                return content.digest()
            content.update(buffer[:count])
    return None


# the notes


def _notes(place: str) -> Iterator[tuple[str, set[int]]]:
    """The paths at which a note may lie, the preferred one first, and the users whose notes there
    count: anybody may write a file into some directories."""
    owners = {0, os.getuid()}
    is_file = os.path.isfile(place)
    beside = f"{place}.{NOTE}" if is_file else os.path.join(place, NOTE)
    # The owner of the directory could replace the weights as well.
    yield beside, owners | {os.stat(os.path.dirname(beside)).st_uid}
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(cache):
        key = hashlib.sha256(os.fsencode(os.path.realpath(place))).hexdigest()[:32]
        yield os.path.join(cache, "shmllm", "digests", f"{key}.json"), owners


def _digest_in(path: str, owners: set[int], place: str, files: _Files) -> str | None:
    """The digest in a note, if the note is undamaged, has an owner who counts, and is of these
    files."""
    try:
        content = _read(path, owners)
        if content is None or content["version"] != _VERSION or files.keys() - content["files"]:
            return None
        for name, state in content["files"].items():
            file = files.get(name)
            # A name that is not among the files comes from the index, which is compared, too.
            now = _State.of(os.stat(os.path.join(place, name))) if file is None else file.state
            if now != tuple(state):
                return None
        digest: str = content["digest"]
        return digest
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _read(path: str, owners: set[int]) -> dict[str, Any] | None:
    # A pipe under this name would block open(2) without O_NONBLOCK.
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return None
        if status.st_uid not in owners:
            return None
        note = json.loads(file.read(_MOST_NOTE_BYTES))
    content: dict[str, Any] = note["content"]
    return content if note["checksum"] == _checksum(content) else None


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _keep(place: str, digest: str, files: _Files) -> None:
    """Writes a note at the first path where one can be written and read again."""
    states = {name: file.state for name, file in files.items()}
    content = {"version": _VERSION, "digest": digest, "files": states}
    text = json.dumps({"checksum": _checksum(content), "content": content})
    with suppress(OSError):
        for path, owners in _notes(place):
            with suppress(OSError):
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                _write(path, text)
                # Some file systems give every file an owner or a mode that `_read` refuses.
                if _digest_in(path, owners, place, files) == digest:
                    return


def _write(path: str, text: str) -> None:
    """Writes a file atomically, so that several processes may write it at once.

    Raises:
        OSError: it cannot be written. No other file is left.
    """
    descriptor, unfinished = tempfile.mkstemp(prefix=f".{NOTE}-", dir=os.path.dirname(path))
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, 0o644)
            file.write(text)
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished)
        raise
