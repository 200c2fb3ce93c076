"""Shared memory that is too small: one line names needed and free bytes, and nothing is left.

Each program runs in a mount namespace of its own, where a small tmpfs lies over /dev/shm.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.programs import CLI, result_of
from support.small_shm import numbers_of, on_shm_of

from shmllm.ipc import layout
from shmllm.ipc.layout import NUM_CLIENTS
from shmllm.ipc.states import SegmentKind

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

GENERATE = """
import json
from shmllm import LLM, NoSpaceError, SamplingParams
def answer(salt=""):
    params = SamplingParams(temperature=0, max_tokens=4)
    prompt = {"prompt": "import os", "cache_salt": salt}
    try:
        return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
    except NoSpaceError as error:
        return str(error)
try:
    with LLM() as llm:
        print(json.dumps([answer(), answer("x" * 2**20), answer()]))
except NoSpaceError as error:
    print(json.dumps(str(error)))
"""


@pytest.mark.parametrize(
    ("size", "kind", "free"),
    [
        ("4k", SegmentKind.CONTROL, 4096),
        ("256k", SegmentKind.CLIENT, 2**18 - layout.ALLOCATED_BYTES[SegmentKind.CONTROL]),
    ],
)
def test_the_error_names_needed_and_free_bytes(size: str, kind: SegmentKind, free: int) -> None:
    message = result_of(on_shm_of(size, GENERATE))
    assert isinstance(message, str)
    assert numbers_of(message) == (layout.ALLOCATED_BYTES[kind], free)
    assert "/dev/shm" in message


@pytest.mark.parametrize("size", [pytest.param("4k", marks=pytest.mark.slow), "64k"])
def test_the_command_says_it_in_one_line(size: str) -> None:
    done = on_shm_of(size, CLI, "generate", "import os")
    assert done.returncode == 2
    assert done.stdout == b""
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("shmllm: shared memory is full")
    needed, free = numbers_of(line)
    assert needed > free


def test_eight_megabytes_are_enough() -> None:
    before, with_a_long_salt, after = result_of(on_shm_of("8m", GENERATE))
    assert before == with_a_long_salt == after
    assert len(after) == 4


SHARED = """
import json
from shmllm import LLM, SamplingParams
from shmllm.shared_kv.folder import folders, places
with LLM(shared_kv_cache_bytes="40M", kv_cache_memory_bytes=2**26) as llm:
    params = SamplingParams(temperature=0, max_tokens=4)
    tokens = llm.generate("import os", params, use_tqdm=False)[0].outputs[0].token_ids
    errors = [each.text for each in llm.engine_errors()]
print(json.dumps([tokens, errors, sum(len(places(each)) for each in folders())]))
"""


def test_without_room_for_a_shared_cache_the_engine_works_alone() -> None:
    tokens, (error,), num_regions = result_of(on_shm_of("40m", SHARED))
    assert "the KV cache is not shared: shared memory is full" in error
    needed, free = numbers_of(error)
    assert needed > free
    assert (len(tokens), num_regions) == (4, 0)


CROWD = """
import json, subprocess, sys
from shmllm.ipc.layout import NUM_CLIENTS
PROCESSES = 4
front_ends = '''
import sys
from contextlib import ExitStack
from shmllm import LLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
with ExitStack() as stack:
    llms = [stack.enter_context(LLM.attach("crowded")) for _ in range(int(sys.argv[1]))]
    print(len(llms), flush=True)
    sys.stdin.readline()
    outputs = [llm.generate("import os", params, use_tqdm=False)[0].outputs[0] for llm in llms]
    print({tuple(output.token_ids) for output in outputs}, flush=True)
    sys.stdin.readline()
'''
shmllm = [sys.executable, "-c", "from shmllm.cli.main import main; main()"]
options = ["--kv-cache-memory-bytes", str(2**26), "--num-threads", "1", "--log", sys.argv[1]]
subprocess.run([*shmllm, "engine", "start", "crowded", "--detach", *options], check=True)
crowd = []
try:
    for _ in range(PROCESSES):
        command = [sys.executable, "-c", front_ends, str(NUM_CLIENTS // PROCESSES)]
        crowd.append(subprocess.Popen(command, text=True, stdin=subprocess.PIPE,
                                      stdout=subprocess.PIPE))
    def hear():
        return [each.stdout.readline().strip() for each in crowd]
    def tell():
        for each in crowd:
            each.stdin.write("go on\\n")
            each.stdin.flush()
    entered = hear()
    one_more = subprocess.run([*shmllm, "generate", "--attach", "crowded", "x"],
                              capture_output=True, text=True)
    tell()
    answers = hear()
    tell()
    codes = [each.wait(60) for each in crowd]
finally:
    for each in crowd:
        each.kill()
    subprocess.run([*shmllm, "engine", "stop", "crowded"], check=True)
print(json.dumps({"entered": entered, "answers": answers, "codes": codes,
                  "refused": [one_more.returncode, one_more.stderr]}))
"""


@pytest.mark.slow
def test_64_megabytes_hold_an_engine_and_all_of_its_front_ends(tmp_path: Path) -> None:
    found = result_of(on_shm_of("64m", CROWD, str(tmp_path / "engine.log")))
    assert sum(map(int, found["entered"])) == NUM_CLIENTS
    assert set(found["codes"]) == {0}
    (answers,) = set(found["answers"])
    assert answers.count("(") == 1, "all have the same tokens"
    code, message = found["refused"]
    assert code == 2
    assert "32" in message
    assert message.count("\n") == 1


WITHOUT_SLOTS = (
    GENERATE.partition("try:\n    with LLM()")[0]
    + """
plain = SamplingParams(temperature=0, max_tokens=4)
whole = SamplingParams(temperature=0, max_tokens=4, logprobs=-1, prompt_logprobs=-1)
with LLM(max_logprobs=-1) as llm:
    def run(params):
        outputs = llm.generate(["import os"] * len(params), params, use_tqdm=False)
        return [(o.error, o.outputs[0].finish_reason, o.outputs[0].token_ids) for o in outputs]
    print(json.dumps({
        "requests": [answer(), answer("x" * 2**20), answer()],
        "outputs": [run([plain]), run([plain] + [whole] * 60), run([plain])],
    }))
"""
)


@pytest.fixture(scope="module")
def without_slots() -> dict[str, Any]:
    """What a program gets where shared memory has no room for a slot of either direction."""
    return dict(result_of(on_shm_of("2m", WITHOUT_SLOTS)))


def test_a_request_that_needs_a_tensor_slot_fails_alone(without_slots: dict[str, Any]) -> None:
    before, refused, after = without_slots["requests"]
    needed, free = numbers_of(refused)
    assert needed >= 2**20 > free
    assert before == after
    assert len(after) == 4


def test_logprobs_without_room_end_their_requests_and_no_others(
    without_slots: dict[str, Any],
) -> None:
    """60 rows of 4,096 alternatives are 2 MB, which lie in a slot of the output direction. A few
    rows fit into the ring, and on a busy machine the last request may have a step for itself."""
    before, mixed, after = without_slots["outputs"]
    assert before == after == mixed[:1]
    refused = [(error, reason) for error, reason, tokens in mixed[1:] if tokens != before[0][2]]
    assert len(refused) > 30
    for error, reason in refused:
        assert reason == "error"
        assert "no room for its log-probabilities" in error
        assert numbers_of(error)[0] > numbers_of(error)[1]


HOLE = """
import json, os, struct, subprocess, sys
from shmllm import LLM, EngineDeadError, NoSpaceError, SamplingParams
from shmllm.ipc import layout
from shmllm.ipc.words import Word
from shmllm.wire.messages import RecordKind
from support.waiting import wait_until
SLOT = layout.NUM_SMALL_SLOTS + layout.NUM_MEDIUM_SLOTS
shmllm = [sys.executable, "-c", "from shmllm.cli.main import main; main()"]
options = ["--kv-cache-memory-bytes", str(2**26), "--num-threads", "1", "--log", sys.argv[1]]
subprocess.run([*shmllm, "engine", "start", "hole", "--detach", *options], check=True)
def tokens(llm, prompt="import os"):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
def refused(function, *arguments):
    try:
        function(*arguments)
    except (EngineDeadError, NoSpaceError) as error:
        return [type(error).__name__, str(error)]
def publish_a_hole(llm):
    memory = llm._client._channel._client.buffer
    table = layout.REQUEST_SLOT_TABLE_OFFSET + SLOT * layout.SLOT_ENTRY_BYTES
    for offset, value in ((layout.SLOT_PAYLOAD_OFFSET, 2**30), (layout.SLOT_PUBLISHED_OFFSET, 1)):
        word = Word(memory, table + offset)
        word.store(value)
        word.close()
    reference = struct.pack("<IIII", RecordKind.CALL, SLOT, 0, 4096)
    llm._client._send(RecordKind.IN_SLOT, [reference])
    wait_until(llm._client._check_accepted, "the engine disconnects it")
try:
    with LLM.attach("hole") as other, LLM.attach("hole") as faulty:
        before = tokens(other)
        with open("/dev/shm/filler", "wb", buffering=0) as filler:
            try:
                while filler.write(bytes(4096)):
                    pass
            except OSError:
                pass
        found = {
            "faulty": refused(publish_a_hole, faulty),
            "attach": refused(LLM.attach, "hole"),
            "private": refused(LLM),
            "slot": refused(tokens, other, {"prompt": "import os", "cache_salt": "x" * 2**20}),
            "ls": subprocess.run([*shmllm, "ipc", "ls"], capture_output=True, text=True).stdout,
            "same": [tokens(other) == before],
        }
        os.unlink("/dev/shm/filler")
        with LLM.attach("hole") as late:
            found["same"].append(tokens(late) == before)
finally:
    subprocess.run([*shmllm, "engine", "stop", "hole"], check=True)
print(json.dumps(found))
"""


def test_a_hole_in_full_memory_disconnects_the_front_end_that_published_it(tmp_path: Path) -> None:
    found = result_of(on_shm_of("64m", HOLE, str(tmp_path / "engine.log")))
    assert found["same"] == [True, True]
    kind, reason = found["faulty"]
    assert kind == "EngineDeadError"
    assert "has a hole and its file system is full" in reason
    for where in ("attach", "private", "slot"):
        kind, message = found[where]
        assert kind == "NoSpaceError"
        assert " in /dev/shm" in message
        assert numbers_of(message)[0] > numbers_of(message)[1]
    assert found["ls"].count("alive") == 3
