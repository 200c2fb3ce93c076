"""Models in several GGUF files, as llama.cpp cuts and names them: NAME-00001-of-00003.gguf.

The first piece has the metadata of the model, and each has some of its tensors. This module finds
the pieces by their names, and checks that they belong together.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from shmllm.errors import EngineStartError
from shmllm.formats.gguf import GgufHeader, TensorEntry, read_header, shown
from shmllm.formats.gguf_projectors import is_projector

_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.ASCII | re.DOTALL)
_MOST_NAMED = 3


def piece_name(stem: str, number: int, count: int) -> str:
    """The name of a piece; the first has the number 1."""
    return f"{stem}-{number:05}-of-{count:05}.gguf"


def models_in(directory: Path) -> list[Path]:
    """The GGUF models of a directory, sorted: each file, and of each model in pieces the first that
    is there. Files with towers of images belong to another file."""
    found: dict[tuple[str, ...], Path] = {}
    for path in sorted(directory.glob("*.gguf")):
        if is_projector(path):
            continue
        match = _NAME.fullmatch(path.name)
        found.setdefault((path.name,) if match is None else (match[1], match[3]), path)
    return [*found.values()]


def pieces_of(path: Path) -> list[Path]:
    """The files of a model, of which one is given; that one alone if its name is not a piece's.

    Raises:
        EngineStartError: a piece is missing.
    """
    match = _NAME.fullmatch(path.name)
    if match is None:  # a link may have another name than the piece
        path = Path(os.path.realpath(path))
        match = _NAME.fullmatch(path.name)
    count = 1 if match is None else int(match[3])
    if match is None or count < 2:
        return [path]
    pieces = [path.with_name(piece_name(match[1], 1 + index, count)) for index in range(count)]
    missing = [piece.name for piece in pieces if not piece.is_file()]
    if missing:
        more = len(missing) - _MOST_NAMED
        names = ", ".join(missing[:_MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")
        raise EngineStartError(
            f"{path} is one of {count:,} pieces of a model, and {path.parent} lacks {names}; copy "
            "or download all of them"
        )
    return pieces


def label(path: Path) -> str:
    """A model of `models_in` as errors list it."""
    match = _NAME.fullmatch(path.name)
    return path.name if match is None else f"{path.name} and {int(match[3]) - 1:,} more pieces"


def read_pieces(paths: list[Path]) -> GgufHeader:
    """Reads the headers of the files of a model, which `pieces_of` returns, as one.

    Raises:
        EngineStartError: as `read_header`; or a file is not the piece that its place says, or they
            are pieces of different models.
    """
    headers = [read_header(path) for path in paths]
    for index, header in enumerate(headers):
        _check_piece(header, index, headers[0], len(headers))
    first = headers[0]
    if len(headers) == 1:
        return first
    tensors: dict[str, TensorEntry] = {}
    for header in headers:
        twice = next((name for name in header.tensors if name in tensors), None)
        if twice is not None:
            other = next(each.path.name for each in headers if twice in each.tensors)
            raise header.error(f"{twice} is in {other}, too: they are pieces of different models")
        tensors |= header.tensors
    if first.metadata["split.tensors.count"] != len(tensors):
        raise first.error(
            f"split.tensors.count is {shown(first.metadata['split.tensors.count'])}, and the "
            f"{len(headers):,} pieces have {len(tensors):,} tensors: they are of different models"
        )
    return GgufHeader(first.path, first.metadata, tensors, tuple(headers))


def _check_piece(header: GgufHeader, index: int, first: GgufHeader, count: int) -> None:
    known = header.metadata
    found = known.get("split.count", 0)
    if count == 1 and found in (0, 1):
        return
    number = known.get("split.no")
    if count == 1:
        raise header.error(
            f"one of {shown(found)} pieces of a model, which its name does not say; give all of "
            "them their names again: NAME-00001-of-00002.gguf and so on"
        )
    if (found, number) != (count, index):
        raise header.error(
            f"expected piece {index + 1:,} of {count:,}; its metadata have split.no "
            f"{shown(number)} (from 0) and split.count {shown(found)}"
        )
    for key in ("split.tensors.count", "general.architecture"):
        expected, value = first.metadata.get(key), known.get(key)
        if value != expected and (value is not None or key.startswith("split")):
            raise header.error(
                f"{key} is {shown(value)}, and {shown(expected)} in {first.path.name}: they are "
                "pieces of different models"
            )
    if type(known.get("split.tensors.count")) is not int:
        raise header.error("no number split.tensors.count, which each piece has")
