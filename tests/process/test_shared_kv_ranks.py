"""Engines of two ranks that share a prefix cache: kills at any time, sleep, and new weights."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.programs import children, is_running
from support.reference_models import make_model
from support.waiting import PATIENCE_S, holds_within, join_all, wait_until

from shmllm import LLM, EngineDeadError, SamplingParams
from shmllm.errors import RankDeadError
from shmllm.shared_kv.folder import folders, places, region_path
from shmllm.shared_kv.region import Region

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.usefixtures("no_leaks", "own_regions"),
]

SHARED: dict[str, Any] = {
    "dtype": "float32",
    "tensor_parallel_size": 2,
    "kv_cache_memory_bytes": 2**26,
    "shared_kv_cache_bytes": "24M",
}
PROMPT = [*range(1, 600)]
LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_model("llama", path, max_position_embeddings=1024)
    return path


def ask(llm: LLM, params: SamplingParams) -> tuple[list[int], int]:
    """The tokens behind the prompt, and how many of the prompt's were cached."""
    [output] = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    assert output.num_cached_tokens is not None
    return list(output.outputs[0].token_ids), output.num_cached_tokens


def num_cached(llm: LLM) -> int:
    return ask(llm, SamplingParams(temperature=0, max_tokens=2))[1]


def rank_of(llm: LLM) -> int:
    """The pid of the other rank of an engine."""
    (found,) = children(llm._client.pid)
    return found


def region_at(place: int) -> Region:
    [folder] = folders()
    return Region.open(region_path(folder, place), place)


def has_region(pid: int) -> bool:
    """Whether a process has mapped or opened a file of a region."""
    files = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    return any("/kv+" in line for line in (*files, Path(f"/proc/{pid}/maps").read_text()))


@pytest.mark.parametrize("reads", ["in_place", "copy"])
@pytest.mark.parametrize("victim", ["rank 0", "rank 1"])
def test_the_owner_is_killed_while_another_engine_reads(
    directory: Path, reads: str, victim: str
) -> None:
    with ExitStack() as stack:
        owner = stack.enter_context(LLM(str(directory), **SHARED))
        reader = stack.enter_context(LLM(str(directory), **SHARED, shared_kv_cache_reads=reads))
        expected, _ = ask(owner, LONG)
        pid = rank_of(owner) if victim == "rank 1" else owner._client.pid

        def kill_it() -> None:
            wait_until(lambda: reader.get_metrics()["generated_tokens"] > 5, "some tokens")
            os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill_it)
        killer.start()
        assert ask(reader, LONG) == (expected, 592)
        join_all([killer])
        with pytest.raises(EngineDeadError):
            ask(owner, LONG)
        region = region_at(0)
        assert holds_within(lambda: not region.is_owned, PATIENCE_S)
        region.close()
        with LLM(str(directory), **SHARED) as heir:
            assert ask(heir, LONG) == (expected, 592)
            [folder] = folders()
            assert sorted(places(folder)) == [0, 1], "it has taken the region over"
        assert ask(reader, LONG)[0] == expected


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_rank_of_an_engine_in_this_process_is_killed(directory: Path, overlaps: bool) -> None:
    options = SHARED | {"multiprocess": False, "async_scheduling": overlaps}
    with LLM(str(directory), **options) as llm:
        num_cached(llm)
        (rank,) = children(os.getpid())
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(RankDeadError, match="was ended by SIGKILL"):
            ask(llm, LONG)
    assert children(os.getpid()) == []
    with LLM(str(directory), **options) as llm:
        assert num_cached(llm) == 592
        [folder] = folders()
        assert sorted(places(folder)) == [0], "it has taken the region over"


def test_a_region_stays_that_of_a_rank_that_has_not_ended_yet(directory: Path) -> None:
    """A stopped rank may be about to write a block when the engine is killed."""
    with LLM(str(directory), **SHARED) as owner:
        num_cached(owner)
        rank = rank_of(owner)
        os.kill(rank, signal.SIGSTOP)
        try:
            os.kill(owner._client.pid, signal.SIGKILL)
            assert holds_within(lambda: not is_running(owner._client.pid), PATIENCE_S)
            region = region_at(0)
            assert region.is_owned
            with LLM(str(directory), **SHARED) as other:
                assert num_cached(other) == 592, "it reads the region"
                [folder] = folders()
                assert sorted(places(folder)) == [0, 1]
                assert region.is_owned
        finally:
            os.kill(rank, signal.SIGCONT)
        assert holds_within(lambda: not region.is_owned, PATIENCE_S)
        region.close()


def change(worker: Any) -> None:
    """Runs in each rank, with whole tensors."""
    import torch

    name = "model.norm.weight"
    tensor = worker.model.named_weights()[name][0]
    worker.model.load_weights([(name, torch.full(tensor.shape, 0.5))])


@pytest.mark.parametrize("reads", ["in_place", "copy"])
def test_sleep_and_new_weights(directory: Path, reads: str) -> None:
    with LLM(str(directory), **SHARED, shared_kv_cache_reads=reads) as llm:
        assert num_cached(llm) == 0
        assert num_cached(llm) == 592
        pids = llm._client.pid, rank_of(llm)
        assert all(map(has_region, pids))
        region = region_at(0)
        assert 512 * os.fstat(region.fd).st_blocks > 24 * 10**6
        llm.sleep(level=1)
        assert not any(map(has_region, pids))
        assert 512 * os.fstat(region.fd).st_blocks < 2 * 10**6, "tables are left"
        region.close()
        llm.wake_up()
        assert num_cached(llm) == 0
        assert num_cached(llm) == 592
        llm.collective_rpc(change)
        assert num_cached(llm) == 0
        llm.collective_rpc("reload_weights")
        assert num_cached(llm) == 592, "of the weights in the directory"
        llm.sleep(level=2)
        llm.wake_up()
        llm.collective_rpc("reload_weights")
        num_cached(llm)
        assert num_cached(llm) == 592
        llm.reset_prefix_cache(reset_connector=True)
        assert num_cached(llm) == 0
