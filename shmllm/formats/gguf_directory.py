"""What lies in the model directory that is made from a GGUF file, for its maker and its readers.

The weights stay in the GGUF file: the directory has a link to it and the file's identity, or links
to all pieces of a model and to the file with its tower of images, and their identities. A reader
compares the identity, because weights of another model under the same path would go unnoticed if
their shapes are equal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shmllm.errors import EngineStartError

LINK = "model.gguf"
LINK_STEM = "model"
PROJECTOR_LINK = "mmproj.gguf"
IDENTITY = "gguf_source.json"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """The identity of a GGUF file.

    Attributes:
        path: the path without links.
        size: in bytes.
        mtime_ns: the time of the last change.
    """

    path: str
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> SourceFile:
        """Looks at a file.

        Raises:
            EngineStartError: the file does not exist or cannot be looked at.
        """
        real = os.path.realpath(path)
        try:
            status = os.stat(real)
        except OSError as error:
            raise EngineStartError(
                f"cannot read the weights in {real}: {error.strerror or error}; give the model "
                "again with the file's present path"
            ) from None
        return cls(real, status.st_size, status.st_mtime_ns)


def identity(sources: Sequence[SourceFile]) -> str:
    """The content of the file IDENTITY: an object, or a list of the pieces'."""
    files = [asdict(each) for each in sources]
    return json.dumps(files if len(files) > 1 else files[0], indent=2)


def check_source(directory: Path) -> None:
    """Checks that the GGUF file is the one that a directory was made from. A directory that was
    not made from a GGUF file passes.

    Raises:
        EngineStartError: the file is gone or has changed.
    """
    try:
        stored = json.loads((directory / IDENTITY).read_text(encoding="utf-8"))
        made_from = [SourceFile(**each) for each in (stored if type(stored) is list else [stored])]
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise EngineStartError(f"cannot read {directory / IDENTITY}: {error}") from None
    for source in made_from:
        if SourceFile.of(Path(source.path)) != source:
            raise EngineStartError(
                f"{source.path} has changed since this engine's model directory was made from it; "
                "start again with this file as the model"
            )
