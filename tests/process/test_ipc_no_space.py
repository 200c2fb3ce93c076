"""Errors of the transport when shared memory is full. This file is also the program that runs."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys

import pytest

import shmllm
from shmllm.errors import NoSpaceError
from shmllm.ipc import layout
from shmllm.ipc.segment import Segment
from shmllm.ipc.slots import SlotWriter
from shmllm.ipc.states import SegmentKind

pytestmark = pytest.mark.process

LIMIT_S = 50


def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    root = os.path.dirname(os.path.dirname(os.path.abspath(shmllm.__file__)))
    return subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        **options,  # type: ignore[call-overload]
    )


def main(directory: str, file_limit: str) -> None:
    if int(file_limit):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(file_limit), int(file_limit)))
    control = Segment.create(SegmentKind.CONTROL, directory=directory)
    try:
        client = Segment.create(SegmentKind.CLIENT, directory=directory)
    except NoSpaceError as error:
        print("client:", error)
    else:
        slots = SlotWriter(
            client.buffer, layout.REQUEST_SLOT_LAYOUT, client.allocate, client.discard
        )
        try:
            slots.claim(layout.LARGE_SLOT_BYTES // 2)
        except NoSpaceError as error:
            print("slot:", error, "free slots", slots.num_free)
        small = slots.claim(layout.SMALL_SLOT_BYTES)
        assert small is not None
        small.buffer[:] = bytes(layout.SMALL_SLOT_BYTES)
        print("still usable:", small.publish())
    control.buffer[layout.CONTROL_LAST_WORDS_OFFSET] = 1


def on_small_tmpfs(size: str, tmp_path: os.PathLike[str]) -> str:
    """Output of `main` in a mount namespace of its own, where a tmpfs of `size` is mounted."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("needs unshare")
    script = 'mount -t tmpfs -o size="$1" none "$2" || exit 77; exec "$3" "$4" "$2" 0'
    arguments = [size, os.fspath(tmp_path), sys.executable, os.path.abspath(__file__)]
    done = run([unshare, "-rm", "sh", "-c", script, "sh", *arguments])
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"may not mount here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_file_size_limit_is_explained() -> None:
    limit = str(512 * 1024)
    done = run([sys.executable, os.path.abspath(__file__), "/dev/shm", limit])
    assert done.returncode == 0, done.stderr
    assert f"{layout.ALLOCATED_BYTES[SegmentKind.CLIENT]} bytes needed" in done.stdout
    assert "ulimit -f" in done.stdout


def test_a_full_file_system_is_explained_at_creation(tmp_path: os.PathLike[str]) -> None:
    output = on_small_tmpfs("256k", tmp_path)
    assert output.startswith("client: shared memory is full")
    free = 256 * 1024 - layout.ALLOCATED_BYTES[SegmentKind.CONTROL]
    assert f"{layout.ALLOCATED_BYTES[SegmentKind.CLIENT]} bytes needed, {free} bytes" in output


def test_a_full_file_system_is_explained_at_the_first_use_of_a_slot(
    tmp_path: os.PathLike[str],
) -> None:
    output = on_small_tmpfs("2m", tmp_path)
    assert output.startswith("slot: shared memory is full")
    allocated = sum(layout.ALLOCATED_BYTES.values())
    needed, free = layout.LARGE_SLOT_BYTES // 2, 2 * 1024 * 1024 - allocated
    assert f"{needed} bytes needed, {free} bytes free" in output
    assert f"still usable: SlotRef(slot=0, offset=0, nbytes={layout.SMALL_SLOT_BYTES})" in output
    assert f"free slots {layout.NUM_SLOTS}" in output


if __name__ == "__main__":
    main(*sys.argv[1:])
