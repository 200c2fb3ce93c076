"""Measures the time from starting a process to its first token, stage by stage.

This module owns the programs that it starts, and it turns their timestamps into stages. All
timestamps are CLOCK_MONOTONIC, which every process of the machine shares.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from shmllm.errors import EngineStartError

# Each program prints its timestamps. Its first statement runs when the interpreter is ready.
_START = """
import time; times_ns = [time.monotonic_ns()]
import json, sys
from shmllm import LLM, SamplingParams
import shmllm.bench.startup_marks
times_ns.append(time.monotonic_ns())
with LLM(**json.loads(sys.argv[1])) as llm:
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    llm.generate([[5, 6, 7]], params, use_tqdm=False)
    token = time.monotonic_ns()
    times_ns += shmllm.bench.startup_marks.marks_ns()
    print(json.dumps([*times_ns, token]))
"""
_ATTACH = """
import time; times_ns = [time.monotonic_ns()]
import json, sys
from shmllm import LLM, SamplingParams
times_ns.append(time.monotonic_ns())
with LLM.attach(sys.argv[1]) as llm:
    times_ns.append(time.monotonic_ns())
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    llm.generate([[5, 6, 7]], params, use_tqdm=False)
    print(json.dumps([*times_ns, time.monotonic_ns()]))
"""
START_STAGES = (
    "interpreter",
    "import shmllm",
    "engine's interpreter",
    "import torch",
    "load",
    "first token",
)
ATTACH_STAGES = ("interpreter", "import shmllm", "attach", "first token")
COLD_SUFFIXES = (".so", ".py", ".pyc", ".safetensors", ".json")
TIMEOUT_S = 900

Stages = dict[str, float]


def start(options: Mapping[str, Any]) -> Stages:
    """Starts a process with a private engine, and returns the seconds of each stage.

    Args:
        options: keyword arguments of `LLM`.

    Raises:
        EngineStartError: the process ended before its first token.
    """
    return _stages(START_STAGES, _START, json.dumps(dict(options)))


def attach(name: str) -> Stages:
    """Starts a process that attaches to engine `name`, and returns the seconds of each stage."""
    return _stages(ATTACH_STAGES, _ATTACH, name)


def _stages(names: tuple[str, ...], source: str, argument: str) -> Stages:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    began_ns = time.monotonic_ns()
    process = subprocess.Popen(
        [sys.executable, "-c", source, argument],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    if process.returncode:
        lines = err.decode(errors="replace").strip().splitlines()
        cause = lines[-1] if lines else f"exit code {process.returncode}"
        raise EngineStartError(
            cause.removeprefix(f"{EngineStartError.__module__}.EngineStartError: ")
        )
    times_ns = [began_ns, *json.loads(out)]
    seconds = [(later - earlier) / 1e9 for earlier, later in pairwise(times_ns)]
    return dict(zip(names, seconds, strict=True))


def drop_from_page_cache(model_directory: str) -> int:
    """Asks the kernel to drop the files that a start reads from the page cache.

    The files are the interpreter's library, the packages and the model. The kernel keeps pages that
    other processes have mapped.

    Returns:
        The total size of these files in bytes.
    """
    num_bytes = 0
    for path in _files_of_a_start(model_directory):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                num_bytes += os.fstat(fd).st_size
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
    return num_bytes


def _files_of_a_start(model_directory: str) -> Iterator[str]:
    roots = {
        sysconfig.get_paths()["stdlib"],
        *(path for path in sys.path if Path(path).is_dir()),
        model_directory,
    }
    for root in sorted(roots):
        for directory, names, files in os.walk(root):
            names[:] = [name for name in names if name not in ("tests", "test", ".git")]
            for file in files:
                if file.endswith(COLD_SUFFIXES) or ".so." in file:
                    yield os.path.join(directory, file)
