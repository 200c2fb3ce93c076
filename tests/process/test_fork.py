"""Child processes of a front end: they end normally, and the front end still works."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engines import assert_unused, named_engine
from support.programs import (
    is_running,
    kill,
    python,
    read_line,
    result_of,
    run_source,
    start_source,
)
from support.waiting import PATIENCE_S, wait_until

from shmllm.ipc import registry

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

# A file and not a -c text: children that start afresh import it.
PROGRAM = """
import json, multiprocessing, os, subprocess, sys
from shmllm import LLM, SamplingParams, ShmLLMError

GREEDY = SamplingParams(temperature=0, max_tokens=4)

def answer(llm):
    return llm.generate("import os", GREEDY, use_tqdm=False)[0].outputs[0].token_ids

def try_everything(llm):
    # What each use of an inherited LLM raises, in words.
    found = {}
    for name, use in {
        "generate": lambda: answer(llm),
        "chat": lambda: llm.chat([{"role": "user", "content": "x"}], GREEDY, use_tqdm=False),
        "reset_prefix_cache": llm.reset_prefix_cache,
        "get_metrics": llm.get_metrics,
        "health": llm.health,
    }.items():
        try:
            found[name] = ["no error", str(use())]
        except Exception as error:
            names = [base.__name__ for base in type(error).__mro__]
            found[name] = ["ShmLLMError" if "ShmLLMError" in names else names[0], str(error)]
    return found

def in_child(writing, llm=None, closes=False):
    found = None if llm is None else try_everything(llm)
    if closes:
        llm.close()
    if isinstance(writing, int):
        os.write(writing, json.dumps(found).encode())
    else:
        writing.send(found)

def by_fork(llm, closes):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        in_child(writing, llm, closes)
        sys.exit(7)  # with everything that runs at an exit
    os.close(writing)
    text = b"".join(iter(lambda: os.read(reading, 4096), b""))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    return json.loads(text)

def by_multiprocessing(method, llm, closes):
    context = multiprocessing.get_context(method)
    reading, writing = context.Pipe(False)
    inherited = (llm, closes) if method == "fork" else ()
    child = context.Process(target=in_child, args=(writing, *inherited))
    child.start()
    writing.close()  # or a child that failed would leave this end waiting
    try:
        found = reading.recv()
    except EOFError:
        found = None
    child.join(30)
    assert child.exitcode == 0, child.exitcode
    return found

def by_popen(close_fds):
    subprocess.run([sys.executable, "-c", "pass"], close_fds=close_fds, check=True)

def start_child(how, llm, closes):
    if how == "os.fork":
        return by_fork(llm, closes)
    if how.startswith("Popen"):
        return by_popen(close_fds=how == "Popen")
    return by_multiprocessing(how, llm, closes)

if __name__ == "__main__":
    name, closes, *ways = sys.argv[1:]
    with LLM.attach(name) if name else LLM(kv_cache_memory_bytes=2**26, num_threads=1) as llm:
        before = answer(llm)
        report = {}
        for how in ways:
            found = [start_child(how, llm, closes == "closes") for _ in range(2)]
            report[how] = {
                "same": [answer(llm) == before for _ in range(2)],
                "in child": found,
            }
        print(json.dumps(report))
"""
HOLDS_ON = """
import os, sys, time
from shmllm import LLM
llm = LLM.attach(sys.argv[1])
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""
INHERITING = ("os.fork", "fork")
WAYS = (*INHERITING, "forkserver", "spawn", "Popen", "Popen with all descriptors")


@pytest.fixture(scope="module")
def name(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with named_engine(tmp_path_factory.mktemp("engine")) as (name, _):
        yield name


SERIAL = {"TOKENIZERS_PARALLELISM": "false"}
"""No library then has a thread when the front end forks, and Python has nothing to warn of."""
PARALLEL = {"PYTHONWARNINGS": "ignore:This process (pid=:DeprecationWarning"}
"""The tokenizers library starts its thread pool. Python 3.12 and later warn of a fork beside
threads, whichever they are; only that warning may be missed on stderr."""
NAMED, PRIVATE = ("named", SERIAL), ("private", PARALLEL)


def uses(*default: tuple[str, dict[str, str]]) -> pytest.MarkDecorator:
    """Engines and variables: `default` ones, and the others marked `slow`."""
    return pytest.mark.parametrize(
        ("engine", "variables"),
        [
            pytest.param(*each, id=each[0], marks=() if each in default else pytest.mark.slow)
            for each in (NAMED, PRIVATE)
        ],
    )


def run_program(
    tmp_path: Path, name: str, ending: str, ways: tuple[str, ...], variables: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """Start children of one front end in several ways; return what each way reported."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = python(str(script), name, ending, *ways, env=variables)
    found = result_of(done)
    assert done.stderr == b""
    assert {how: each["same"] for how, each in found.items()} == {how: [True] * 2 for how in ways}
    return dict(found)


@uses(PRIVATE)
def test_the_parent_works_after_its_children_ended(
    engine: str, variables: dict[str, str], name: str, tmp_path: Path
) -> None:
    run_program(tmp_path, name if engine == "named" else "", "only exits", WAYS, variables)
    if engine == "named":
        assert registry.control_path(name).exists()
        wait_until(lambda: not registry.client_path(name, 0).exists(), "its segment is removed")
        assert_unused(name)


@uses(NAMED)
def test_an_inherited_llm_says_why_it_cannot_be_used(
    engine: str, variables: dict[str, str], name: str, tmp_path: Path
) -> None:
    where = name if engine == "named" else ""
    found = run_program(tmp_path, where, "closes", INHERITING, variables)
    for tried in (tried for each in found.values() for tried in each["in child"]):
        for use in ("generate", "chat", "reset_prefix_cache"):
            kind, text = tried[use]
            assert kind == "ShmLLMError", (use, kind, text)
            assert "forked process" in text
            assert "after the fork" in text


THREADS = """
import json, os
from shmllm import LLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=4)
with LLM(kv_cache_memory_bytes=2**26, num_threads=1) as llm:
    llm.generate(["import os"] * 40, params, use_tqdm=False)
    llm.chat([{"role": "user", "content": "x"}], params, use_tqdm=False)
    list(llm.stream(["x", "y"], params))
    print(json.dumps(len(os.listdir("/proc/self/task"))))
"""


def test_a_front_end_starts_no_thread() -> None:
    """Two libraries do, unless told not to: numpy's OpenBLAS when it is imported, one thread for
    each further core, which end before a fork; tokenizers when it first encodes a batch."""
    variables = SERIAL | {"OPENBLAS_NUM_THREADS": "1"}
    assert result_of(run_source(THREADS, env=variables)) == 1


def test_a_surviving_child_does_not_keep_the_segment_of_its_parent(name: str) -> None:
    front_end = start_source(HOLDS_ON, name)
    child = 0
    try:
        child = int(read_line(front_end))
        segment = registry.client_path(name, 0)
        assert segment.exists()
        front_end.kill()
        front_end.wait(PATIENCE_S)
        wait_until(lambda: not segment.exists(), "the engine removes the dead front end's segment")
        assert is_running(child), "it should have outlived the front end"
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
        kill(front_end)
