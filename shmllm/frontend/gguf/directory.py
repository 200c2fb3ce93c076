"""Finds or makes the model directory of a GGUF file, in the cache of the user.

Making one takes about a second. A directory is complete from the moment that it has its name, which
depends on the file's identity and on VERSION, so none is ever changed: another file, or another
version of these modules, has another directory. Directories of files that changed stay until the
user removes them, because an engine may still use them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shmllm.errors import EngineStartError
from shmllm.formats.gguf_directory import (
    IDENTITY,
    LINK,
    LINK_STEM,
    PROJECTOR_LINK,
    SourceFile,
    identity,
)
from shmllm.formats.gguf_pieces import piece_name, pieces_of, read_pieces
from shmllm.formats.gguf_projectors import projectors_beside
from shmllm.frontend.gguf.config import generation_config, model_config
from shmllm.frontend.gguf.projector import find_projector
from shmllm.frontend.gguf.sentence_files import sentence_files
from shmllm.frontend.gguf.tokenizer import has_vocabulary, make_tokenizer

VERSION = 5
"""Raise this when the same GGUF file gives other contents than before."""

_UNFINISHED = ".making-"
_LONGEST_STEM = 100


def model_directory(file: Path) -> Path:
    """The model directory of a GGUF file: config.json, tokenizer.json, tokenizer_config.json,
    perhaps generation_config.json and the files of sentence-transformers, and links to the file
    with the weights and to that with the tower. Any piece of a model in several files stands for
    all of them.

    The directory lies in $XDG_CACHE_HOME/shmllm/models, or in the folder for temporary files if
    that cannot be written.

    Raises:
        EngineStartError: the file cannot be read, has a model or tokenizer that is not supported,
            or no directory can be made. The message is one line.
    """
    pieces, projectors = pieces_of(file), projectors_beside(file)
    sources = {path: SourceFile.of(path) for path in (*pieces, *projectors)}
    name = _name([*sources.values()])
    places = _places()
    for place in places:
        if _is_ours(place / name):
            return place / name
    contents, links = _convert(pieces, projectors, sources)
    problems = []
    for place in places:
        try:
            return _make(place, name, contents, links)
        except OSError as error:
            problems.append(f"{place}: {error.strerror or error}")
    raise EngineStartError(
        f"cannot write the files made from {file} ({'; '.join(problems)}); set XDG_CACHE_HOME to "
        "a directory that you can write"
    )


def _name(sources: Sequence[SourceFile]) -> str:
    files = " ".join(map(str, sources))
    digest = hashlib.sha256(f"{files} {VERSION}".encode("utf-8", "surrogateescape"))
    stem = re.sub(r"[^\w.-]", "_", Path(sources[0].path).stem, flags=re.ASCII)[:_LONGEST_STEM]
    return f"{stem}-{digest.hexdigest()[:16]}"


def _places() -> list[Path]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return [
        cache / "shmllm" / "models",
        Path(tempfile.gettempdir()) / f"shmllm-{os.getuid()}-models",
    ]


def _is_ours(directory: Path) -> bool:
    """Whether this is a directory that no other user can have made or can change: anybody may
    create one under a known name in the folder for temporary files."""
    try:
        status = os.lstat(directory)
    except OSError:
        return False
    is_safe = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and status.st_uid in (0, os.getuid()) and is_safe


def _convert(
    pieces: list[Path], projectors: Sequence[Path], sources: Mapping[Path, SourceFile]
) -> tuple[dict[str, str], dict[str, SourceFile]]:
    """The texts of the files by name, and what links point to."""
    header = read_pieces(pieces)
    config = model_config(header)
    tokenizers: dict[str, Any] = {}
    if has_vocabulary(header):
        tokenizer, settings = make_tokenizer(header)
        tokenizers = {"tokenizer.json": tokenizer, "tokenizer_config.json": settings}
    contents = {"config.json": config} | tokenizers | sentence_files(header)
    generation = generation_config(header)
    if generation:
        contents["generation_config.json"] = generation
    count = len(pieces)
    names = [piece_name(LINK_STEM, index + 1, count) for index in range(count)]
    read = dict(zip(names if count > 1 else [LINK], pieces, strict=True))
    projector, files = find_projector(projectors, header, config)
    if projector is not None:
        contents, read[PROJECTOR_LINK] = contents | files, projector
    for path in read.values():
        if SourceFile.of(path) != sources[path]:
            raise EngineStartError(
                f"{path} changed while it was read; try again when it is complete"
            )
    texts = {name: json.dumps(each, ensure_ascii=False) for name, each in contents.items()}
    links = {name: sources[path] for name, path in read.items()}
    return texts | {IDENTITY: identity([*links.values()])}, links


def _make(
    place: Path, name: str, contents: Mapping[str, str], links: Mapping[str, SourceFile]
) -> Path:
    """Write a directory under a temporary name and rename it. If another process was faster, its
    directory remains.

    Raises:
        OSError: a directory cannot be written there, or belongs to another user.
    """
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(place):
        raise PermissionError("another user can write there")
    _remove_unfinished(place)
    with _unfinished(place) as directory:
        for file, text in contents.items():
            (directory / file).parent.mkdir(exist_ok=True)
            (directory / file).write_text(text, encoding="utf-8")
        for link, source in links.items():
            (directory / link).symlink_to(source.path)
        try:
            directory.rename(place / name)
        except OSError:
            if not _is_ours(place / name):
                raise
    return place / name


@contextlib.contextmanager
def _unfinished(place: Path) -> Iterator[Path]:
    """A new directory with a lock, which is removed at the end if it still has its name."""
    directory = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=place))
    lock = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _remove_unfinished(place: Path) -> None:
    """Remove what killed processes have left: directories with files, and without a lock."""
    for directory in place.glob(f"{_UNFINISHED}*"):
        with contextlib.suppress(OSError):
            lock = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A process that has made its directory takes the lock before it writes a file.
                if any(directory.iterdir()):
                    shutil.rmtree(directory)
            finally:
                os.close(lock)
