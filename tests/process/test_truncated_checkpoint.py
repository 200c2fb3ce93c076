"""A checkpoint that is truncated while engines read it: one error that names the file."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shmllm import LLM, CallError, EnginePausedError, EngineStartError, SamplingParams
from shmllm.frontend.model_files import resolve_model
from shmllm.plugins import entry_points
from shmllm.sigbus.bus_handler import HANDLERS

pytestmark = [
    pytest.mark.process,
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.skipif(
        platform.machine() not in HANDLERS, reason=f"no SIGBUS handler for {platform.machine()}"
    ),
]

SMALL = {"kv_cache_memory_bytes": 2**27, "max_num_seqs": 4}
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
CHANGED = r"model\.safetensors has changed while it was read: load it again"

PLUGIN = """
import os
import time
from pathlib import Path

def register():
    if os.getpid() == int(os.environ["TEST_FRONT_END"]):
        return
    from shmllm.models import weights
    copy, flag = weights._copy, Path(os.environ["TEST_TRUNCATES"])

    def truncate_and_copy(file, *arguments):
        if flag.exists():
            wait_for_all_ranks()
            os.truncate(file.path, 4096)
        copy(file, *arguments)

    def wait_for_all_ranks():
        flag.with_suffix(f".{os.getpid()}").touch()
        deadline = time.monotonic() + 60
        while len(list(flag.parent.glob(f"{flag.name}.*"))) < int(os.environ["TEST_RANKS"]):
            assert time.monotonic() < deadline, "a rank has not opened the file"
            time.sleep(0.01)

    weights._copy = truncate_and_copy
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the bundled model."""
    return Path(shutil.copytree(resolve_model("tiny"), tmp_path / "model"))


@pytest.fixture
def truncates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """While this file exists, engines truncate the files that they read, before each tensor: when
    all ranks have opened them, as the library that opens a file reads it before its memory can be
    protected."""
    packages, flag = tmp_path / "packages", tmp_path / "truncates"
    facts = packages / "truncating-1.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: truncating\nVersion: 1\n")
    entry = "[shmllm.general_plugins]\ntruncating = test_truncating:register\n"
    (facts / "entry_points.txt").write_text(entry)
    (packages / "test_truncating.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setenv("TEST_FRONT_END", str(os.getpid()))
    monkeypatch.setenv("TEST_TRUNCATES", str(flag))
    monkeypatch.delenv("SHMLLM_PLUGINS", raising=False)
    entry_points.load_general_plugins.cache_clear()
    yield flag
    entry_points.load_general_plugins.cache_clear()


@pytest.fixture
def repair(model: Path) -> Callable[[], None]:
    """Brings the file back."""
    path = model / "model.safetensors"
    content = path.read_bytes()

    def write() -> None:
        path.write_bytes(content)

    return write


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_start_fails_with_the_name_of_the_file(
    num_ranks: int, model: Path, truncates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_RANKS", str(num_ranks))
    truncates.touch()
    with pytest.raises(EngineStartError, match=CHANGED):
        LLM(str(model), num_threads=num_ranks, tensor_parallel_size=num_ranks, **SMALL)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_engine_goes_on_when_a_reload_fails(
    num_ranks: int,
    model: Path,
    truncates: Path,
    repair: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEST_RANKS", str(num_ranks))
    options = {"num_threads": num_ranks, "tensor_parallel_size": num_ranks, **SMALL}
    with LLM(str(model), **options) as llm:
        expected = llm.generate("import os", PARAMS, use_tqdm=False)[0].outputs[0].token_ids
        truncates.touch()
        with pytest.raises(CallError, match=CHANGED):
            llm.collective_rpc("reload_weights")
        truncates.unlink()
        with pytest.raises(EnginePausedError, match="46 weights are missing"):
            llm.generate("import os", PARAMS, use_tqdm=False)
        repair()
        llm.collective_rpc("reload_weights")
        found = llm.generate("import os", PARAMS, use_tqdm=False)[0].outputs[0].token_ids
        assert found == expected
