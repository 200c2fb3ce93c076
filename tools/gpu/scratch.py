"""The directory of a command's temporary files: installed packages, and what the parts write.

It lies in the directory of the results, so that the next command finds and removes what a killed
one has left.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "gpu-check.tmp-"


@contextmanager
def scratch(out: Path) -> Iterator[Path]:
    """Makes an empty directory in `out`, and removes it at the end of the block. Those of earlier
    commands are removed first. The path is absolute."""
    for old in out.glob(f"{PREFIX}*"):
        shutil.rmtree(old)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=out.resolve()) as directory:
        yield Path(directory)
