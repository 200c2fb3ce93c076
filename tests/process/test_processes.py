"""Processes that compute end without freeing objects, and forked ones are as executed ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ENGINE_MODULE, engine_processes
from support.forked_engines import ForkedProcess
from support.programs import Completed, children, run_source
from support.waiting import PATIENCE_S

from shmllm import LLM, SamplingParams
from shmllm.config import processes
from shmllm.errors import EngineDeadError

pytestmark = pytest.mark.process


def run_to_end(source: str) -> Completed:
    """Run a source text that defines a function `main`."""
    return run_source(f"{source}\nfrom shmllm.config.processes import run_to_end\nrun_to_end(main)")


class TestTheEnd:
    def test_it_frees_nothing_but_runs_what_is_registered_and_writes_the_streams(self) -> None:
        done = run_to_end(
            "import atexit, sys\n"
            "class Object:\n"
            "    def __del__(self): print('freed')\n"
            "lives = Object()\n"
            "def main():\n"
            "    atexit.register(print, 'first')\n"
            "    atexit.register(print, 'last', file=sys.stderr)\n"
            "    return 7"
        )
        assert (done.returncode, done.stdout, done.stderr) == (7, b"first\n", b"last\n")

    def test_it_waits_for_threads_but_for_daemons(self) -> None:
        done = run_to_end(
            "import threading, time\n"
            "is_over, never = threading.Event(), threading.Event()\n"
            "def work():\n"
            "    is_over.wait()\n"
            "    print('worked')\n"
            "def main():\n"
            "    threading.Thread(target=never.wait, daemon=True).start()\n"
            "    threading.Thread(target=work).start()\n"
            "    threading.Timer(0.1, is_over.set).start()\n"
            "    return 3"
        )
        assert (done.returncode, done.stdout, done.stderr) == (3, b"worked\n", b"")

    @pytest.mark.parametrize("redirection", ["2>&-", ">&- 2>&-", ">/dev/full"])
    def test_a_stream_that_takes_nothing_changes_no_exit_code(self, redirection: str) -> None:
        source = (
            "from shmllm.config.processes import run_to_end\n"
            "def main():\n"
            "    print('lost')\n"
            "    return 5\n"
            "run_to_end(main)"
        )
        done = run_source(
            "import subprocess, sys\n"
            f"command = [sys.executable, '-c', {source!r}]\n"
            f"done = subprocess.run(['sh', '-c', '\"$@\" {redirection}', 'sh', *command])\n"
            "sys.exit(done.returncode)",
            env={"PYTHONUNBUFFERED": ""},
        )
        assert done.returncode == 5, done.stderr

    def test_an_error_ends_it_as_any_program(self) -> None:
        done = run_to_end("def main(): raise ValueError('its reason')")
        assert done.returncode == 1
        assert b"its reason" in done.stderr


def described() -> dict[str, Any]:
    """What the system and a front end see of an engine."""
    with LLM(kv_cache_memory_bytes=2**26, num_threads=1) as llm:
        pid = llm._client.pid
        assert pid in children(os.getpid())
        assert pid in engine_processes()
        process = Path(f"/proc/{pid}")
        command = (process / "cmdline").read_text().rstrip("\0").split("\0")
        files = {int(each.name): os.readlink(each) for each in (process / "fd").iterdir()}
        return {
            "command": [word for word in command if not word.isdigit()],
            "session": os.getsid(pid) == pid,
            "directory": os.readlink(process / "cwd"),
            "streams": [files[number] for number in range(3)],
            "files": sorted(name.split("#")[0] for name in files.values()),
            "variable": llm.collective_rpc(_variable),
            "tokens": llm.generate("def f", SamplingParams(temperature=0), use_tqdm=False)[0]
            .outputs[0]
            .token_ids,
        }


def _variable(worker: Any) -> str | None:
    """Runs in the engine."""
    return os.environ.get("SHMLLM_OF_THIS_TEST")


@pytest.mark.usefixtures("no_leaks")
class TestForkedEngines:
    """`support.forked_engines`: other tests rely on that their engines are as those of users."""

    def test_they_are_as_executed_ones(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SHMLLM_OF_THIS_TEST", "set after the server's start")
        forked = described()
        monkeypatch.setattr(processes, "Popen", subprocess.Popen)
        assert forked == described()
        assert ENGINE_MODULE in forked["command"]

    def test_their_end_is_reported(self) -> None:
        with LLM(kv_cache_memory_bytes=2**26, num_threads=1) as llm:
            os.kill(llm._client.pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                llm.generate("def f", use_tqdm=False)

    def test_what_imports_read_from_the_environment_needs_exec(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        command = [sys.executable, "-m", "this"]
        with_same = processes.start(command, processes.DEVNULL)
        assert isinstance(with_same, ForkedProcess)
        monkeypatch.setenv("PYTHONOPTIMIZE", "1")
        with_other = processes.start(command, processes.DEVNULL)
        assert isinstance(with_other, subprocess.Popen)
        assert with_same.wait(PATIENCE_S) == 1  # `this` does not end its process
        assert with_other.wait(PATIENCE_S) == 0
