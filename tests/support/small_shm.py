"""Programs that run where /dev/shm is small."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest
from support.programs import Completed, environment_of_test_files
from support.waiting import PATIENCE_S

MAY_NOT_MOUNT = 77
SCRIPT = f'mount -t tmpfs -o size="$1" none /dev/shm || exit {MAY_NOT_MOUNT}; shift; exec "$@"'


def on_shm_of(size: str, source: str, *arguments: str) -> Completed:
    """Run a source text where /dev/shm has `size`, or skip."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("needs unshare")
    namespaces = "-m" if os.geteuid() == 0 else "-rm"
    done = subprocess.run(
        [
            unshare,
            namespaces,
            "sh",
            "-c",
            SCRIPT,
            "sh",
            size,
            sys.executable,
            "-c",
            source,
            *arguments,
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment_of_test_files(),
        timeout=PATIENCE_S,
        check=False,
    )
    if done.returncode == MAY_NOT_MOUNT or done.stderr.startswith(b"unshare"):
        pytest.skip(f"may not mount here: {done.stderr.decode().strip()}")
    return done


def numbers_of(message: str) -> tuple[int, int]:
    """(needed, free) of an error message."""
    found = re.search(r"([\d,]+) bytes needed, ([\d,]+) bytes free", message)
    assert found, message
    needed, free = (int(number.replace(",", "")) for number in found.groups())
    return needed, free
