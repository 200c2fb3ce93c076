"""Tensors between two processes, which may be killed. This file is also the programs of both.

To find memory that is left behind, a test measures how full a tmpfs of its own is, because
segments without a name are not listed anywhere.
"""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
import struct
import subprocess
import sys
import time
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.programs import environment_of_test_files, kill, read_line
from support.waiting import PATIENCE_S

from shmllm.errors import IpcTimeoutError, NoSpaceError
from shmllm.ipc import layout
from shmllm.ipc.client_channel import ClientChannel
from shmllm.ipc.core_channel import CoreChannel
from shmllm.ipc.core_waiter import CoreWaiter
from shmllm.ipc.segment import Segment
from shmllm.ipc.states import SegmentKind
from shmllm.ipc.tensor_ref import DTYPES, REF_BYTES
from shmllm.ipc.tensors import TensorReader, TensorRef, TensorView, TensorWriter
from shmllm.ipc.wait import WaitPolicy

pytestmark = pytest.mark.process

POLICY = WaitPolicy.for_machine("balanced", len(os.sched_getaffinity(0)), 1)
MIB = 1024 * 1024
NUM_TENSORS = 200
MAY_NOT_MOUNT = 77
TENSOR = 1
CRC = struct.Struct("<I")
NUMPY_DTYPES = [name for name, dtype in DTYPES.items() if not dtype.is_pattern]
Pair = tuple[Segment, Segment]


def random_array(source: random.Random) -> NDArray[np.generic]:
    """An array of a random dtype, layout and size, sometimes larger than a medium slot."""
    name = source.choice(NUMPY_DTYPES)
    most = source.choice((0, 1, 100, 10_000, 100_000, MIB)) if source.random() < 0.97 else 6 * MIB
    shape = [source.randint(0, 7) for _ in range(source.randint(0, 4))]
    shape.append(source.randint(most // 2, most))
    while (count := int(np.prod(shape))) * DTYPES[name].numpy.itemsize > 24 * MIB:
        shape[source.randrange(len(shape))] //= 2
    nbytes = count * DTYPES[name].numpy.itemsize
    raw = np.frombuffer(source.randbytes(nbytes), np.uint8)
    array = (raw & 1 if name == "bool" else raw).view(DTYPES[name].numpy).reshape(shape)
    match source.randrange(4):
        case 0:
            return array.T
        case 1:
            return array[..., ::-2]
    return array


class Echo:
    """The second process: sends every tensor back as its own, with the checksum it saw."""

    def __init__(self, control: Segment, client: Segment) -> None:
        self.channel = CoreChannel(control, client)
        self.waiter = CoreWaiter(control, POLICY)
        self.reader = TensorReader(self.channel.slots)
        self.writer = TensorWriter(self.channel.output_slots)
        self.views: deque[TensorView] = deque()

    def run(self) -> None:
        orphaned_at = time.monotonic() + 2 * PATIENCE_S
        while not self.channel.is_client_closing:
            self.waiter.wait(self.is_ready, busy=True)
            self.channel.drain(self.handle)
            while self.views and self.answer(self.views[0]):
                self.views.popleft().release()
            assert time.monotonic() < orphaned_at, "nobody told this process to end"

    def is_ready(self) -> bool:
        return self.channel.has_requests() or self.channel.is_client_closing

    def handle(self, kind: int, record: memoryview) -> None:
        self.views.append(self.reader.view(TensorRef.decode(record)))

    def answer(self, view: TensorView) -> bool:
        if self.channel.outputs.free_bytes < 4096:
            return False
        array = view.numpy()
        ref = self.writer.try_put(array)
        if ref is None:
            return False
        checksum = zlib.crc32(np.ascontiguousarray(array).tobytes())
        assert self.channel.try_send(TENSOR, ref.encode(), CRC.pack(checksum))
        return True


def hold(control: Segment, client: Segment) -> None:
    """View each tensor that arrives and keep it until this process is killed."""
    channel = CoreChannel(control, client)
    waiter, reader = CoreWaiter(control, POLICY), TensorReader(channel.slots)
    views: list[TensorView] = []

    def keep(kind: int, record: memoryview) -> None:
        views.append(reader.view(TensorRef.decode(record)))
        views[-1].numpy().sum()
        print("holding", len(views), flush=True)

    deadline = time.monotonic() + 2 * PATIENCE_S
    while time.monotonic() < deadline:
        waiter.wait(channel.has_requests, busy=True)
        channel.drain(keep)


def used_bytes(directory: str) -> int:
    status = os.statvfs(directory)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def start(mode: str, pair: Pair) -> subprocess.Popen[str]:
    fds = [segment.fd for segment in pair]
    return subprocess.Popen(
        [sys.executable, os.path.abspath(__file__), mode, *map(str, fds)],
        pass_fds=fds,
        stdout=subprocess.PIPE,
        text=True,
        env=environment_of_test_files(),
    )


def kill_the_reader(directory: str) -> None:
    """Lend large tensors to a process, kill it, and report how full the file system is."""
    control = Segment.create(SegmentKind.CONTROL, directory=directory)
    client = Segment.create(SegmentKind.CLIENT, directory=directory)
    channel = ClientChannel(control, client, POLICY)
    process = start("hold", (control, client))
    writer = TensorWriter(channel.slots)
    for nbytes in (10 * MIB, 40 * MIB):
        ref = writer.put(np.ones(nbytes, np.uint8), deadline=None, on_full=lambda: None)
        channel.try_send(TENSOR, ref.encode())
        read_line(process)
    print("held:", used_bytes(directory) // MIB)
    process.kill()
    process.wait(PATIENCE_S)
    channel.close()
    client.close()
    control.close()
    print("left:", used_bytes(directory))


def kill_the_writer(directory: str) -> None:
    """The same with the roles exchanged: this process reads, and survives."""
    with Segment.create(SegmentKind.CONTROL, directory=directory) as control:
        with Segment.create(SegmentKind.CLIENT, directory=directory) as client:
            channel = ClientChannel(control, client, POLICY)
            process = start("flood", (control, client))
            reader = TensorReader(channel.output_slots)
            views: list[TensorView] = []

            def keep(kind: int, record: memoryview) -> None:
                views.append(reader.view(TensorRef.decode(record)))

            deadline = time.monotonic() + PATIENCE_S
            while len(views) < 2:
                channel.wait(deadline)
                channel.drain(keep)
                assert time.monotonic() < deadline
            process.kill()
            process.wait(PATIENCE_S)
            arrays = [view.numpy() for view in views]
            print("readable after the kill:", [int(array[-1]) for array in arrays])
            print("held:", used_bytes(directory) // MIB)
            channel.close()
        print("still readable:", [int(array[0]) for array in arrays])
        del arrays
        views.clear()
    print("left:", used_bytes(directory))


def flood(control: Segment, client: Segment) -> None:
    """Lend two large tensors and keep writing a third one."""
    channel = CoreChannel(control, client)
    writer = TensorWriter(channel.output_slots)
    for nbytes in (10 * MIB, 40 * MIB):
        ref = writer.put(np.ones(nbytes, np.uint8), deadline=None, on_full=lambda: None)
        assert channel.try_send(TENSOR, ref.encode())
    writer.put(np.ones(5 * MIB, np.uint8), deadline=time.monotonic() + 50, on_full=lambda: None)


def fill(directory: str) -> None:
    """Send tensors where shared memory has room for few of them."""
    control = Segment.create(SegmentKind.CONTROL, directory=directory)
    client = Segment.create(SegmentKind.CLIENT, directory=directory)
    channel, core = ClientChannel(control, client, POLICY), CoreChannel(control, client)
    writer, reader = TensorWriter(channel.slots), TensorReader(core.slots)
    free = os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize
    for mib in (5, 40, 6):
        try:
            ref = writer.try_put(np.full(mib * MIB, mib, np.uint8))
        except NoSpaceError as error:
            print("refused:", error, "| free slots", channel.slots.num_free, "| free", free)
        else:
            assert ref is not None
            with reader.view(ref) as view:
                print("sum:", int(view.numpy().sum()))
    control.buffer[layout.CONTROL_LAST_WORDS_OFFSET] = 1


def file_limit(limit: str) -> None:
    """A limit on file sizes that allows the segment but not the pages of a tensor."""
    with Segment.create(SegmentKind.CLIENT) as client:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
        try:
            client.allocate(layout.CLIENT_END_OFFSET, MIB)
        except NoSpaceError as error:
            print(error)


def main(mode: str, *arguments: str) -> None:
    if mode in ("echo", "hold", "flood"):
        control = Segment.attach(int(arguments[0]), SegmentKind.CONTROL)
        client = Segment.attach(int(arguments[1]), SegmentKind.CLIENT)
        {"echo": lambda *pair: Echo(*pair).run(), "hold": hold, "flood": flood}[mode](
            control, client
        )
    else:
        programs = {
            "kill_the_reader": kill_the_reader,
            "kill_the_writer": kill_the_writer,
            "fill": fill,
            "file_limit": file_limit,
        }
        programs[mode](*arguments)


def on_tmpfs_of(size: str, tmp_path: Path, mode: str) -> str:
    """Output of `main` in a mount namespace of its own, where a tmpfs of `size` is mounted."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("needs unshare")
    script = 'mount -t tmpfs -o size="$1" none "$2" || exit 77; exec "$3" "$4" "$5" "$2"'
    namespaces = "-m" if os.geteuid() == 0 else "-rm"
    here = os.path.abspath(__file__)
    arguments = [size, os.fspath(tmp_path), sys.executable, here, mode]
    done = subprocess.run(
        [unshare, namespaces, "sh", "-c", script, "sh", *arguments],
        env=environment_of_test_files(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    if done.returncode == MAY_NOT_MOUNT or done.stderr.startswith("unshare"):
        pytest.skip(f"may not mount here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def pair() -> Iterator[Pair]:
    with (
        Segment.create(SegmentKind.CONTROL) as control,
        Segment.create(SegmentKind.CLIENT) as client,
    ):
        yield control, client


@pytest.fixture
def front(pair: Pair) -> Iterator[ClientChannel]:
    channel = ClientChannel(*pair, POLICY)
    yield channel
    channel.close()


def test_many_tensors_there_and_back_bit_for_bit(front: ClientChannel, pair: Pair) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    source = random.Random(seed)
    process = start("echo", pair)
    writer, reader = TensorWriter(front.slots), TensorReader(front.output_slots)
    sent: deque[tuple[tuple[int, ...], str, int]] = deque()
    num_back = 0

    def check(kind: int, record: memoryview) -> None:
        nonlocal num_back
        shape, dtype, checksum = sent.popleft()
        assert CRC.unpack(record[REF_BYTES:]) == (checksum,)
        with reader.view(TensorRef.decode(record[:REF_BYTES])) as view:
            array = view.numpy()
            assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
            assert zlib.crc32(array.tobytes()) == checksum
            del array
        num_back += 1

    def look() -> None:
        assert process.poll() is None
        front.drain(check)

    deadline = time.monotonic() + PATIENCE_S
    for _ in range(NUM_TENSORS):
        array = random_array(source)
        checksum = zlib.crc32(array.tobytes())
        ref = writer.put(array, deadline=deadline, on_full=look)
        sent.append((array.shape, array.dtype.name, checksum))
        front.send(TENSOR, ref.encode(), on_full=look, deadline=deadline)
    while sent and time.monotonic() < deadline:
        front.wait(deadline)
        look()
    assert num_back == NUM_TENSORS
    assert front.slots.num_free == layout.NUM_SLOTS
    assert reader.num_held == 0
    front.slots.check_integrity()
    front.output_slots.check_integrity()
    front.slots.reclaim()
    assert front.slots.allocated_bytes <= 100 * MIB
    front.set_closing()
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0


def test_a_reader_that_keeps_everything_is_named_at_the_deadline(
    front: ClientChannel, pair: Pair
) -> None:
    process = start("hold", pair)
    writer = TensorWriter(front.slots)
    try:
        for number in range(1, 25):
            ref = writer.put(np.ones(10), deadline=time.monotonic() + 50, on_full=lambda: None)
            assert front.try_send(TENSOR, ref.encode())
            assert read_line(process) == f"holding {number}\n"
        with pytest.raises(IpcTimeoutError, match="80 bytes in time: the reader holds all 24"):
            writer.put(np.ones(10), deadline=time.monotonic() + 0.05, on_full=lambda: None)
        assert front.slots.num_free == layout.NUM_LARGE_SLOTS
    finally:
        kill(process)
    assert front.slots.num_free == layout.NUM_LARGE_SLOTS


@pytest.mark.parametrize("mode", ["kill_the_reader", "kill_the_writer"])
def test_a_killed_end_leaves_nothing(mode: str, tmp_path: Path) -> None:
    output = on_tmpfs_of("256m", tmp_path, mode)
    held = re.search(r"held: (\d+)", output)
    assert held is not None, output
    assert 50 <= int(held.group(1)) <= 80
    assert "left: 0\n" in output
    if mode == "kill_the_writer":
        assert "readable after the kill: [1, 1]" in output
        assert "still readable: [1, 1]" in output


def test_full_shared_memory_refuses_one_tensor_and_serves_the_next(tmp_path: Path) -> None:
    first, refused, last = on_tmpfs_of("8m", tmp_path, "fill").splitlines()
    assert first == f"sum: {5 * 5 * MIB}"
    assert last == f"sum: {6 * 6 * MIB}"
    found = re.search(r"(\d+) bytes needed, (\d+) bytes free.*slots (\d+) \| free (\d+)", refused)
    assert found is not None, refused
    needed, free, num_free, free_before = map(int, found.groups())
    kept = 5 * MIB  # The slot's pages from the tensor before, which it uses again.
    assert needed == 40 * MIB - kept
    assert free == free_before - kept
    assert num_free == layout.NUM_SLOTS


def test_a_file_size_limit_is_explained(tmp_path: Path) -> None:
    limit = layout.CLIENT_END_OFFSET
    done = subprocess.run(
        [sys.executable, os.path.abspath(__file__), "file_limit", str(limit)],
        env=environment_of_test_files(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert f"{MIB} bytes needed" in done.stdout
    assert "ulimit -f" in done.stdout


if __name__ == "__main__":
    main(*sys.argv[1:])
