"""A front end that writes garbage into any word that it can map ends nobody but itself.

Each word gets a faulty front end of its own, in a process of its own: it attaches, damages the
word, and goes on as if nothing had happened. The engine has to live, to take the next front end,
and to answer the good one with the right tokens. What happens to the faulty one is its own affair.
"""

from __future__ import annotations

import faulthandler
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from support.engines import assert_unused, named_engine
from support.programs import ELSEWHERE, environment, is_running, kill, read_line

from shmllm import LLM, SamplingParams
from shmllm.ipc import layout

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

Engine = tuple[str, int, Path]  # its name, its pid, and the file with all that it writes
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SEED = 17
EXTREMES = (1, 2**31, 2**62 + 8, 2**63, 2**64 - 1)

# It reads "segment offset value" from stdin, and writes how the front end with that fault ended:
# attached, and then "exit 0", the signal that ended it, or "hung".
FAULTY = """
import os, signal, sys, time
from contextlib import suppress
from shmllm import SamplingParams
from shmllm.client.attached import AttachedEngineClient
from shmllm.params.request import EngineCoreRequest
from shmllm.wire import codec
from shmllm.wire.messages import Call, Method, RecordKind

name = sys.argv[1]
params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
add = codec.encode_add(EngineCoreRequest(1, [1, 2, 3], params))
call = codec.encode_call(Call(1, Method.RESET_PREFIX_CACHE))
large = b"".join(codec.encode_call(Call(2, Method.RESET_PREFIX_CACHE, " " * 300_000 + "0")))

def use(client):
    channel = client._channel
    channel.try_send(RecordKind.ADD, *add)
    channel.try_send(RecordKind.CALL, *call)
    slot = channel.slots.claim(len(large))
    slot.buffer[:] = large
    channel.try_send(
        RecordKind.IN_SLOT, *codec.encode_in_slot(RecordKind.CALL, slot.publish())
    )
    end = time.monotonic() + 0.03
    while time.monotonic() < end:
        client.poll(0.01).clear()

def go_wrong(where, offset, value):
    client = AttachedEngineClient(name)
    client.wait_ready()
    segment = client._channel._client if where == "client" else client._engine._control
    with segment.part(offset, 8).cast("Q") as word:
        word[0] = value
    os.write(1, b"attached, ")
    with suppress(Exception):
        use(client)
    with suppress(Exception):
        client.close()

for line in sys.stdin:
    where, offset, value = line.split()
    pid = os.fork()
    if pid == 0:
        try:
            go_wrong(where, int(offset), int(value))
        finally:
            os._exit(0)
    end = time.monotonic() + 5
    while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.002)
    if not ended[0]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    print("hung" if not ended[0] else f"exit {os.waitstatus_to_exitcode(ended[1])}", flush=True)
"""

Fault = tuple[str, int, int]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory = tmp_path_factory.mktemp("words")
    with named_engine(directory) as (name, pid):
        yield name, pid, directory / "engine.log"


def words(begin: int, end: int) -> range:
    return range(begin, end, layout.WORD_BYTES)


def slot_words(table: int) -> Iterator[int]:
    for index in range(layout.NUM_SLOTS):
        entry = table + index * layout.SLOT_ENTRY_BYTES
        yield from (entry + layout.SLOT_PUBLISHED_OFFSET, entry + layout.SLOT_PAYLOAD_OFFSET)
        yield from words(entry + layout.SLOT_CLAIMED_AT_OFFSET, entry + 0x20)
        yield entry + layout.SLOT_RELEASED_OFFSET


ALL_WORDS: dict[str, list[int]] = {
    "client": [
        *words(0, 0x600),
        *slot_words(layout.REQUEST_SLOT_TABLE_OFFSET),
        *slot_words(layout.OUTPUT_SLOT_TABLE_OFFSET),
        *words(layout.REQUEST_RING_OFFSET, layout.REQUEST_RING_OFFSET + 0x100),
        *words(layout.OUTPUT_RING_OFFSET, layout.OUTPUT_RING_OFFSET + 0x100),
    ],
    "control": [*words(0x7000, 0x8000)],
}
LIVE_WORDS: dict[str, list[int]] = {
    "client": [
        layout.NONCE_OFFSET,
        layout.CREATOR_PID_OFFSET,
        layout.CLIENT_STATE_OFFSET,
        layout.CLIENT_PARKED_OFFSET,
        *words(layout.CLIENT_DOORBELL_OFFSET, layout.CLIENT_DOORBELL_OFFSET + 0x20),
        layout.REQUEST_PUBLISHED_OFFSET,
        layout.REQUEST_CONSUMED_OFFSET,
        layout.OUTPUT_PUBLISHED_OFFSET,
        layout.OUTPUT_URGENT_OFFSET,
        layout.OUTPUT_CONSUMED_OFFSET,
        layout.REQUEST_SLOT_TABLE_OFFSET + 16 * layout.SLOT_ENTRY_BYTES,
        layout.REQUEST_SLOT_TABLE_OFFSET + 16 * layout.SLOT_ENTRY_BYTES + 0x80,
        layout.OUTPUT_SLOT_TABLE_OFFSET + layout.SLOT_RELEASED_OFFSET,
    ],
    "control": [
        *words(layout.CONTROL_HELLO_OFFSET, layout.CONTROL_HELLO_OFFSET + 0x18),
        layout.CONTROL_DOORBELL_OFFSET,
        layout.CONTROL_DOORBELL_OFFSET + layout.DOORBELL_POSTED_OFFSET,
    ],
}


def damage(engine: Engine, faults: Iterable[Fault]) -> None:
    name, pid, log = engine
    ends: dict[str, int] = {}
    faulty = subprocess.Popen(
        [sys.executable, "-c", FAULTY, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(),
        cwd=ELSEWHERE,
    )
    assert faulty.stdin is not None
    try:
        with LLM.attach(name) as other:
            expected = other.generate("import os\n", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
            for where, offset, value in faults:
                fault = f"{where} word {offset:#x} = {value:#x}"
                faulty.stdin.write(f"{where} {offset} {value}\n".encode())
                faulty.stdin.flush()
                attached, _, end = read_line(faulty).decode().strip().partition(", ")
                assert attached == "attached", f"{fault}, or the one before: {attached}"
                ends[end] = ends.get(end, 0) + 1
                assert is_running(pid), f"{fault}: {log.read_text()}"
                output = other.generate("import os\n", GREEDY, use_tqdm=False)[0].outputs[0]
                assert output.token_ids == expected, fault
        assert_unused(name)
    finally:
        kill(faulty)
    print(f"{sum(ends.values())} words damaged; the faulty front ends ended: {ends}")


def faults(offsets: dict[str, list[int]], values: int, source: random.Random) -> Iterator[Fault]:
    """Some values for each of these words, extreme or random."""
    for where, each in offsets.items():
        for offset in each:
            for value in source.sample((*EXTREMES, source.randrange(2**64)), values):
                yield where, offset, value


def test_damage_to_live_words_ends_only_its_writer(engine: Engine) -> None:
    damage(engine, faults(LIVE_WORDS, 1, random.Random(SEED)))


def test_damage_to_random_words_ends_only_its_writer(engine: Engine) -> None:
    source = random.Random(SEED)
    sample = {where: source.sample(each, 6) for where, each in ALL_WORDS.items()}
    damage(engine, faults(sample, 1, source))


@pytest.mark.stress
def test_damage_to_every_word_ends_only_its_writer(engine: Engine) -> None:
    faulthandler.cancel_dump_traceback_later()  # some thousand faults take minutes
    damage(engine, faults(ALL_WORDS, 3, random.Random(SEED)))
