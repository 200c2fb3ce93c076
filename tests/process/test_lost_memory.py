"""A front end truncates the file of its segment, or publishes a hole in it while /dev/shm is full.

The engine lives, disconnects that front end with the reason, and serves the others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from support.engines import assert_unused, named_engine, run_a_little, slow_steps
from support.programs import is_running, result_of, run_source
from support.waiting import PATIENCE_S, holds_within, wait_until

from shmllm import LLM, EngineDeadError, SamplingParams
from shmllm.ipc import layout, registry
from shmllm.ipc.segment import LOST
from shmllm.ipc.states import SegmentKind
from shmllm.ipc.words import Word
from shmllm.wire import codec
from shmllm.wire.messages import Abort, RecordKind

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
WHOLE = layout.TOTAL_BYTES[SegmentKind.CLIENT]

# In the engine: truncates the segment of the front end that the file names by its nonce, within a
# function that is about to read or write that segment.
TRUNCATE_WITHIN = """
import os
import sys
from pathlib import Path
from shmllm.engine.weight_updates import WeightUpdates
from shmllm.ipc import segment
order = Path({order!r})
def cut(name):
    if order.exists() and order.read_text().split()[0] == name:
        nonce = int(order.read_text().split()[1])
        order.unlink()
        for each in list(segment._live):
            if each.is_usable and each.nonce == nonce:
                os.ftruncate(each.fd, 4096)
def wrap(owner, name, is_after):
    function = getattr(owner, name)
    def wrapped(*args):
        is_after or cut(name)
        result = function(*args)
        is_after and cut(name)
        return result
    setattr(owner, name, wrapped)
wrap(segment.Segment, "allocate", True)
wrap(WeightUpdates, "stage", False)
"""


class Engine(NamedTuple):
    name: str
    pid: int
    log: Path
    order: Path
    other: LLM

    def tokens(self) -> list[int]:
        """What the front end without faults gets."""
        return self.other.generate("import os\n", GREEDY, use_tqdm=False)[0].outputs[0].token_ids

    def num_lost(self) -> int:
        """How often the engine's error log names the loss of a segment."""
        return sum(error.count for error in self.other.engine_errors() if LOST in error.text)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The engine of all tests of this module, with a front end that stays."""
    directory = tmp_path_factory.mktemp("lost")
    order = directory / "order"
    preface = TRUNCATE_WITHIN.format(order=str(order))
    with named_engine(directory, preface, allow_callables=True) as (name, pid):
        with LLM.attach(name) as other:
            yield Engine(name, pid, directory / "engine.log", order, other)
        assert_unused(name)


@pytest.fixture
def expected(engine: Engine) -> Iterator[list[int]]:
    """The other front end's tokens, which have to be the same afterwards."""
    before, num_lost = engine.tokens(), engine.num_lost()
    yield before
    assert holds_within(lambda: engine.num_lost() == num_lost + 1, PATIENCE_S), (
        engine.log.read_text()
    )
    assert engine.tokens() == before
    assert is_running(engine.pid)


@contextmanager
def faulty(engine: Engine) -> Iterator[LLM]:
    """A front end that truncates its own file. It must not use its segment until the end of the
    block, because this process has no handler."""
    llm = LLM.attach(engine.name)
    try:
        yield llm
        check_refused(llm)
    finally:
        os.ftruncate(fd_of(llm), WHOLE)
        llm.close()


def fd_of(llm: LLM) -> int:
    fd: int = llm._client._channel._client.fd
    return fd


def check_refused(llm: LLM) -> None:
    """Check that the engine tells this front end why it is disconnected."""

    with pytest.raises(EngineDeadError, match="was truncated"):
        wait_until(lambda: llm._client._check_accepted(), "the engine disconnects it")


@pytest.mark.usefixtures("expected")
def test_an_idle_front_end_truncates_its_file_to_nothing(engine: Engine) -> None:
    with faulty(engine) as llm:
        os.ftruncate(fd_of(llm), 0)


@pytest.mark.usefixtures("expected")
@pytest.mark.parametrize(
    "size",
    [layout.PAGE_BYTES, layout.REQUEST_RING_OFFSET + 2 * layout.PAGE_BYTES],
    ids=["page", "ring"],
)
def test_records_behind_the_new_end_of_the_file(engine: Engine, size: int) -> None:
    """The engine parks at the cursor, and is woken by a cursor that moves on."""
    with faulty(engine) as llm:
        (record,) = codec.encode_abort(Abort(list(range(10**6, 10**6 + 3000))))
        llm._client._send(RecordKind.ABORT, [record])
        llm.reset_prefix_cache()  # the engine has read all records
        published = Word(llm._client._channel._client.buffer, layout.REQUEST_PUBLISHED_OFFSET)
        position = published.load()
        assert position > 2 * layout.PAGE_BYTES
        os.ftruncate(fd_of(llm), size)
        published.store(position + 64)
        llm._client._channel._peer_doorbell.post()
        check_refused(llm)
        published.close()


@pytest.mark.usefixtures("expected")
def test_a_front_end_whose_requests_run(engine: Engine) -> None:
    with slow_steps(engine.other), faulty(engine) as llm:
        llm.enqueue(["import os\n"] * 3, LONG)
        run_a_little(llm)
        os.ftruncate(fd_of(llm), 0)


VICTIM = """
import sys
from pathlib import Path
from shmllm import LLM
name, order, where = sys.argv[1:]
with LLM.attach(name) as llm:
    def truncate_within(function):
        Path(order).write_text(f"{function} {llm._client._channel._client.nonce}")
    weight, (dtype, shape) = next(iter(llm.collective_rpc("list_weights")[0].items()))
    if where == "output slot":
        truncate_within("allocate")
        llm.collective_rpc("get_weight", args=(weight,))
    else:
        import numpy
        truncate_within("stage")
        llm.update_weights([(weight, numpy.ones(shape, dtype))])
"""


@pytest.mark.usefixtures("expected")
@pytest.mark.parametrize("where", ["output slot", "bucket"])
def test_a_slot_in_use_loses_its_memory(engine: Engine, where: str) -> None:
    """The slot's memory vanishes after the engine has claimed it to write a weight there, or before
    the engine reads new weights from it. The front end may die of its own doing."""
    run_source(VICTIM, engine.name, str(engine.order), where)
    assert not engine.order.exists()
    for entry in registry.names():  # it may have died after it was disconnected
        if entry.engine == engine.name:
            registry.sweep(entry.path)


PRIVATE = """
import os, sys
from shmllm import LLM, SamplingParams
from support.programs import is_running
from support.waiting import PATIENCE_S, holds_within
llm = LLM(kv_cache_memory_bytes=2**26, num_threads=1)
pid = llm.engine_pid
segment = llm._client._channel._client
os.ftruncate(segment.fd, 0)
assert holds_within(lambda: not is_running(pid), PATIENCE_S)
print(llm._client._channel.last_words(), flush=True)
os._exit(0)
"""


def test_a_private_engine_ends_with_the_reason() -> None:
    done = run_source(PRIVATE, env={"PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr.decode()
    last_line = done.stdout.decode().strip().splitlines()[-1]
    assert last_line.startswith("shmllm.errors.SegmentError: ")
    assert LOST in last_line


def test_an_engine_ends_with_the_reason_if_its_own_segment_is_truncated(tmp_path: Path) -> None:
    with named_engine(tmp_path) as (name, pid):
        os.truncate(registry.control_path(name), 0)
        assert holds_within(lambda: not is_running(pid), PATIENCE_S)
        log = (tmp_path / "engine.log").read_text()
        assert f"SegmentError: the segment of this engine {LOST}" in log


TOOLS = """
import json, os
from pathlib import Path
from shmllm.cli.ipc import contents, describe, open_segment
from shmllm.errors import IpcError
from shmllm.ipc import registry
from shmllm.ipc.states import SegmentKind
from shmllm.ipc.segment import Segment
from shmllm.monitor.find import FoundEngine, find_engines, identity_of
from shmllm.monitor.sample import Watch
from shmllm.sigbus import bus_guard
bus_guard.install()
found = []
for kind, path in (
    (SegmentKind.CONTROL, registry.control_path("lost")),
    (SegmentKind.CLIENT, registry.client_path("lost", 3)),
):
    with Segment.create(kind) as segment:
        segment.take_ownership()
        assert registry.publish(segment, path)
        try:
            entry = next(each for each in registry.names() if each.path == path)
            watch = Watch(FoundEngine("lost", 0, path, identity_of(path))) if not found else None
            with open_segment(entry) as opened:
                os.truncate(path, 0)
                contents(opened, 8, 0)
                try:
                    opened.check_intact(str(path))
                except IpcError as error:
                    found.append(str(error))
            found.append(describe(entry)["owner"])
            if watch:
                watch.sample()
                found.append([watch.is_over, watch.last_words()])
                watch.close()
            assert all(engine.name != "lost" for engine in find_engines())
        finally:
            registry.withdraw(segment, path)
print(json.dumps(found))
"""


def test_the_tools_name_a_segment_that_is_truncated_before_or_while_they_read() -> None:
    control, before, watched, client, before_client = result_of(run_source(TOOLS))
    for message, path in (
        (control, registry.control_path("lost")),
        (client, registry.client_path("lost", 3)),
    ):
        assert message == f"{path} {LOST}"
    for message in (before, before_client):
        assert message.startswith("unreadable (a C")
        assert "was truncated" in message
        assert str(registry.control_path("lost")) in message
    assert watched == [True, f"its segment {LOST}"]


ERRORS = """
import os, sys
from shmllm.cli.engine import engine
from shmllm.ipc import registry
from shmllm.ipc.control import ControlView
from shmllm.ipc.states import SegmentKind
from shmllm.ipc.segment import Segment
path = registry.control_path("lost")
read = ControlView.errors
def truncate_and_read(view):
    os.truncate(path, 0)
    return read(view)
ControlView.errors = truncate_and_read
with Segment.create(SegmentKind.CONTROL) as segment:
    segment.take_ownership()
    assert registry.publish(segment, path)
    try:
        engine(["errors", "lost"], standalone_mode=False)
    finally:
        registry.withdraw(segment, path)
print("null")
"""


def test_engine_errors_survives_a_truncation_while_it_reads() -> None:
    assert result_of(run_source(ERRORS)) is None
