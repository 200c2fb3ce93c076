"""A front end that calls exec is gone for its engine, although its process lives."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.engines import assert_unused, named_engine
from support.programs import is_running, kill, read_line, start_source
from support.waiting import wait_until

from shmllm import LLM, SamplingParams

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

BECOME_ANOTHER = """
import os, sys
from shmllm import LLM, SamplingParams
params = SamplingParams(max_tokens=900, ignore_eos=True)
llm = LLM.attach(sys.argv[1]) if len(sys.argv) > 1 else LLM(kv_cache_memory_bytes=2**26)
for number, _ in enumerate(llm.stream(["x"] * 8, params)):
    print(llm._client.pid, flush=True)
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"])
"""


def has_become_another(process: subprocess.Popen[bytes]) -> bool:
    return b"time.sleep(600)" in Path(f"/proc/{process.pid}/cmdline").read_bytes()


@pytest.mark.slow
def test_a_private_engine_ends_when_its_front_end_calls_exec() -> None:
    front_end = start_source(BECOME_ANOTHER)
    try:
        engine = int(read_line(front_end))
        wait_until(lambda: has_become_another(front_end), "it calls exec")
        wait_until(lambda: not is_running(engine), "its engine ends")
        assert front_end.poll() is None
    finally:
        kill(front_end)


@pytest.mark.slow
def test_a_named_engine_forgets_a_front_end_that_calls_exec(tmp_path: Path) -> None:
    with named_engine(tmp_path) as (name, _):
        front_end = start_source(BECOME_ANOTHER, name)
        try:
            assert read_line(front_end)
            wait_until(lambda: has_become_another(front_end), "it calls exec")
            assert_unused(name)
            assert front_end.poll() is None
            with LLM.attach(name) as other:
                assert other.generate("x", SamplingParams(max_tokens=2), use_tqdm=False)
        finally:
            kill(front_end)
