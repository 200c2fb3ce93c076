"""Weights that a trainer sends to real engines, under vLLM's names: complete, wrong, and with ends
that are killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.engines import assert_idle, assert_unused, named_engine
from support.programs import environment, start_at_go
from support.trainers import DictSource, can_update, checksums_of, other_checkpoint
from support.waiting import PATIENCE_S, wait_until

from shmllm import LLM, AsyncLLM, RequestError, SamplingParams
from shmllm.errors import CallOrderError, EngineDeadError, EngineStartError
from shmllm.trainer import (
    GlooTrainerInitInfo,
    ShmTrainerInitInfo,
    WeightTransferTrainerFactory,
)

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

OPTIONS: dict[str, Any] = {
    "kv_cache_memory_bytes": 2**26,
    "num_threads": 1,
    "dtype": "float32",
    "weight_transfer_config": {"backend": "gloo"},
}
PROMPT = [5, 7, 11, 13] * 4
BUFFER_BYTES = 2**20
"""Several buckets for the weights of the bundled model."""


def gloo(llm: LLM, packed: bool = True, timeout_s: float = PATIENCE_S) -> GlooTrainerInitInfo:
    world_size = 1 + llm.get_world_size()
    return GlooTrainerInitInfo(
        "127.0.0.1", 0, world_size, packed, BUFFER_BYTES, timeout_s=timeout_s
    )


def connect(llm: LLM, source: DictSource, **options: Any) -> Any:
    info = gloo(llm, **options)
    return WeightTransferTrainerFactory.trainer_init(info, client=llm, source=source)


def send(llm: LLM, source: DictSource, version: int | str | None = None, **options: Any) -> None:
    """One update by a trainer of its own."""
    sender = connect(llm, source, **options)
    sender.send_weights(version)
    sender.shutdown()


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """A checkpoint of other weights: its directory and the weights."""
    directory = tmp_path_factory.mktemp("checkpoint") / "new"
    weights = other_checkpoint(directory)
    return str(directory), weights


@pytest.fixture(scope="module")
def old() -> dict[str, str]:
    """The checksums of the bundled model."""
    return checksums_of("tiny", dtype="float32")


@pytest.fixture(scope="module")
def expected(new: tuple[str, dict[str, Any]]) -> dict[str, str]:
    """The checksums of an engine that starts with the new checkpoint."""
    return checksums_of(new[0], dtype="float32")


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("engine")
    with named_engine(directory, **OPTIONS) as (name, _):
        yield name


@pytest.fixture
def llm(named: str) -> Iterator[LLM]:
    """A front end of a running engine, which the test must leave idle and with whole weights."""
    with LLM.attach(named) as llm:
        yield llm
        llm.start_weight_update()  # none is under way
        llm.abandon_weight_update()
        llm.collective_rpc("reload_weights")
        assert_idle(llm)
    assert_unused(named)


def in_each(llm: LLM) -> list[dict[str, str]]:
    """The checksums of all engines of a pool."""
    return llm.collective_rpc(lambda worker: worker.compute_weight_checksums())


@pytest.mark.parametrize(
    ("options", "packed"),
    [
        pytest.param({}, True, marks=pytest.mark.slow),
        ({"tensor_parallel_size": 2, "num_threads": 2}, True),
        pytest.param({"data_parallel_size": 2, "num_threads": 2}, True, marks=pytest.mark.slow),
        pytest.param({"multiprocess": False}, True, marks=pytest.mark.slow),
        pytest.param(
            {"pipeline_parallel_size": 2, "num_threads": 2}, False, marks=pytest.mark.slow
        ),
        pytest.param({"data_parallel_size": 2, "num_threads": 2}, False, marks=pytest.mark.slow),
    ],
)
def test_a_broadcast_makes_it_the_new_model(
    new: tuple[str, dict[str, Any]],
    old: dict[str, str],
    expected: dict[str, str],
    options: dict[str, Any],
    packed: bool,
) -> None:
    with LLM(**OPTIONS | options) as llm:
        assert llm.compute_weight_checksums() == old
        sender = connect(llm, DictSource(new[1]), packed=packed)
        sender.send_weights(version="one")
        assert llm.get_weight_version() == "one"
        assert llm.compute_weight_checksums() == expected
        if "data_parallel_size" in options:
            assert in_each(llm) == [expected, expected]
        sender.send_weights()  # the connection stays
        sender.shutdown()
        assert llm.compute_weight_checksums() == expected


def test_quantized_weights_are_rounded_as_at_the_start(new: tuple[str, dict[str, Any]]) -> None:
    options = {"dtype": "float32", "quantization": "int8"}
    rounded = checksums_of(new[0], **options)
    with LLM(**OPTIONS | options, multiprocess=False) as llm:
        assert llm.compute_weight_checksums() != rounded
        send(llm, DictSource(new[1]))
        assert llm.compute_weight_checksums() == rounded


@pytest.mark.parametrize("multiprocess", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_trainer_sends_through_shared_memory(
    new: tuple[str, dict[str, Any]], expected: dict[str, str], multiprocess: bool
) -> None:
    options = OPTIONS | {"weight_transfer_config": None, "multiprocess": multiprocess}
    with LLM(**options) as llm:
        sender = WeightTransferTrainerFactory.trainer_init(
            ShmTrainerInitInfo(), client=llm, source=DictSource(new[1])
        )
        sender.send_weights(version=5)
        assert llm.get_weight_version() == 5
        assert llm.compute_weight_checksums() == expected
        llm.start_weight_update()
        with pytest.raises(RequestError, match=r"shm.*pairs"):
            llm.update_weights({"update_info": {"names": []}})


def test_requests_go_on_while_weights_arrive(llm: LLM, new: tuple[str, dict[str, Any]]) -> None:
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)

    def decode(index: int) -> None:
        if index == len(new[1]) - 1:  # the update is under way, and not complete
            begun = llm.get_metrics()["steps"]
            llm.enqueue([PROMPT], params)
            wait_until(lambda: llm.get_metrics()["steps"] > begun, "a step")
            llm.pause_generation(mode="keep")  # so that the request outlasts the update

    send(llm, DictSource(new[1], decode), version="two", packed=False)
    llm.resume_generation()
    (output,) = llm.wait_for_completion(use_tqdm=False)
    assert [each.version for each in output.outputs[0].weight_versions] == [0, "two"]


def test_weights_that_do_not_fit_leave_the_old_ones(
    llm: LLM, new: tuple[str, dict[str, Any]], old: dict[str, str], expected: dict[str, str]
) -> None:
    source = DictSource(new[1])
    sender = connect(llm, source)
    first = next(iter(new[1]))
    for wrong, words in (
        ({"no.such.weight": torch.ones(3)}, "no.such.weight"),
        ({first: new[1][first] * float("nan")}, "finite"),
        ({first: torch.ones(3)}, "shape"),
    ):
        source.weights = new[1] | wrong
        with pytest.raises(RequestError, match=words):
            sender.send_weights()
        assert llm.compute_weight_checksums() == old
        with pytest.raises(RequestError, match="trainer_init"):
            sender.send_weights()
        sender = connect(llm, source)
    source.weights = new[1]
    sender.send_weights()
    sender.shutdown()
    assert llm.compute_weight_checksums() == expected


def test_several_calls_are_one_update_in_any_order(llm: LLM, old: dict[str, str]) -> None:
    sender = connect(llm, DictSource({}), packed=False)
    names = llm.collective_rpc("list_weights")[0]
    weights = {name: torch.ones(shape) for name, (_, shape) in names.items()}
    llm.start_weight_update()
    half = len(weights) // 2
    for part in (dict([*weights.items()][half:]), dict([*weights.items()][:half])):
        sender.source = DictSource(part)
        sender.transmit()
        assert llm.compute_weight_checksums() == old
    llm.finish_weight_update(weight_version=3)
    sender.shutdown()
    assert llm.get_weight_version() == 3
    for name in weights:
        (weight,) = llm.collective_rpc("get_weight", args=(name,))
        assert torch.equal(weight, weights[name])


INFO = {"names": ["model.norm.weight"], "dtype_names": ["float32"], "shapes": [[3]]}


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (INFO | {"shapes": []}, "names has 1 entries, but shapes has 0"),
        (INFO | {"dtype_names": ["float33"]}, "float33"),
        (INFO | {"shapes": [[-3]]}, "sizes"),
        (INFO | {"nams": []}, "no key 'nams'; the nearest is 'names'"),
        ({"names": []}, "lacks dtype_names, shapes"),
        ([INFO, INFO | {"names": ["other"]}], "different tensors"),
        (7, "must be a dict"),
    ],
)
def test_an_invalid_update_info_ends_the_update(
    llm: LLM, old: dict[str, str], info: Any, words: str
) -> None:
    with pytest.raises(CallOrderError, match="start_weight_update"):
        llm.update_weights({"update_info": info})
    llm.start_weight_update()
    with pytest.raises(RequestError, match=words):
        llm.update_weights(SimpleNamespace(update_info=info))
    with pytest.raises(CallOrderError):
        llm.finish_weight_update()
    assert llm.compute_weight_checksums() == old


def test_calls_in_the_wrong_order_and_names_that_do_not_exist(llm: LLM) -> None:
    llm.start_weight_update()
    with pytest.raises(CallOrderError, match="init_weight_transfer_engine"):
        llm.update_weights({"update_info": INFO})
    for init_info, words in (
        ({"master_addres": "::1"}, "nearest is 'master_address'"),
        ({}, "lacks master_address, master_port, world_size"),
        ({"nccl_unique_id_b64": "AA=="}, "not supported"),
        ({"master_address": "::1", "master_port": 1, "world_size": 1}, "world_size must be"),
    ):
        with pytest.raises(RequestError, match=words):
            llm.init_weight_transfer_engine({"init_info": init_info})
    with pytest.raises(RequestError, match="init_info"):
        llm.init_weight_transfer_engine({})
    with pytest.raises(RequestError, match="draft"):
        llm.start_draft_weight_update()
    with pytest.raises(EngineStartError, match="shm, ipc, nccl, gloo"):
        LLM(weight_transfer_config='{"backend": "carrier pigeon"}')


def test_an_end_that_does_not_come_is_one_error_in_time(
    llm: LLM, new: tuple[str, dict[str, Any]], old: dict[str, str]
) -> None:
    source = DictSource(new[1])
    info = gloo(llm, timeout_s=0.4)
    info.world_size = 3
    with pytest.raises(RequestError, match="engines with 1 workers have joined"):
        WeightTransferTrainerFactory.trainer_init(info, client=llm, source=source)
    nobody = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 2, "timeout_s": 0.3}
    with pytest.raises(RequestError, match="no trainer answers"):
        llm.init_weight_transfer_engine({"init_info": nobody})
    with pytest.raises(TimeoutError):
        llm.collective_rpc(
            "init_weight_transfer_engine", 0.05, kwargs={"init_info": nobody | {"timeout_s": 5}}
        )
    sender = connect(llm, source, timeout_s=0.3)
    llm.start_weight_update()
    with pytest.raises(RequestError, match=r"sent nothing for 0\.3 s"):
        llm.update_weights({"update_info": INFO})
    sender.disconnect()
    assert llm.compute_weight_checksums() == old


def test_the_names_of_vllm_in_collective_rpc(llm: LLM, old: dict[str, str]) -> None:
    assert llm.collective_rpc("start_weight_update") == [None]
    with pytest.raises(CallOrderError):
        llm.collective_rpc("shutdown_weight_transfer_engine")
    with pytest.raises(RequestError, match="lacks"):
        llm.collective_rpc("update_weights", kwargs={"update_info": {}})
    assert llm.collective_rpc("update_weight_version", args=("three",)) == [None]
    assert llm.collective_rpc("get_weight_version") == ["three"]
    with pytest.raises(RequestError, match="whole number or a text"):
        llm.update_weight_version(1.5)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="'init_info'"):
        llm.collective_rpc("init_weight_transfer_engine", kwargs={"info": {}})
    assert llm.collective_rpc("compute_weight_checksums") == [old]
    assert llm.collective_rpc("shutdown_weight_transfer_engine") == [None]
    assert (llm.get_world_size(), llm.get_world_size(include_dp=False)) == (1, 1)


def test_coroutines_have_the_same_methods(
    named: str, new: tuple[str, dict[str, Any]], expected: dict[str, str]
) -> None:
    async def main() -> None:
        async_llm = AsyncLLM.attach(named)
        assert await async_llm.get_world_size() == 1
        client = _Blocking(async_llm, asyncio.get_running_loop())
        info = GlooTrainerInitInfo("127.0.0.1", 0, 2)
        make = WeightTransferTrainerFactory.trainer_init
        source = DictSource(new[1])
        sender = await asyncio.to_thread(make, info, client=client, source=source)
        await asyncio.to_thread(sender.send_weights, "four")
        assert await async_llm.compute_weight_checksums() == expected
        assert await async_llm.get_weight_version() == "four"
        await async_llm.update_weight_version("five")
        assert await async_llm.get_weight_version() == "five"
        await async_llm.shutdown_weight_transfer_engine()
        await async_llm.collective_rpc("reload_weights")
        async_llm.shutdown()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def listening_at(pid: int) -> set[str]:
    """The addresses at which a process listens, in the hexadecimal digits of /proc/net."""
    own = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            own.add(os.readlink(link))
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return {
        row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own
    }


def test_with_a_loopback_address_nothing_listens_on_a_network(llm: LLM) -> None:
    assert listening_at(llm.engine_pid) == set()
    before = listening_at(os.getpid())
    sender = connect(llm, DictSource({}))
    assert listening_at(llm.engine_pid) == {"0100007F"}
    assert listening_at(os.getpid()) == {"0100007F"} | before
    sender.shutdown()
    wait_until(lambda: not listening_at(llm.engine_pid), "the engine has closed its socket")


class _Blocking:
    """A client as vLLM's: its methods take the contents of requests."""

    def __init__(self, llm: AsyncLLM, loop: asyncio.AbstractEventLoop) -> None:
        self._llm, self._loop = llm, loop

    def _run(self, call: Any) -> None:
        asyncio.run_coroutine_threadsafe(call, self._loop).result(PATIENCE_S)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._run(self._llm.init_weight_transfer_engine(SimpleNamespace(init_info=init_info)))

    def start_weight_update(self) -> None:
        self._run(self._llm.start_weight_update())

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._run(self._llm.collective_rpc("update_weights", kwargs={"update_info": update_info}))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._run(self._llm.finish_weight_update(weight_version=weight_version))


TRAINER = """
import os, signal, sys
import torch
from shmllm import LLM
from shmllm.trainer import *
from support.trainers import DictSource

def die(index):
    if index == len(weights) // 2:
        os.kill(os.getpid(), signal.SIGKILL)

name, backend = sys.argv[1:]
llm = LLM.attach(name)
weights = {n: torch.ones(shape) for n, (_, shape) in llm.collective_rpc("list_weights")[0].items()}
info = ShmTrainerInitInfo()
if backend == "gloo":
    info = GlooTrainerInitInfo("127.0.0.1", 0, 2, packed=False)
source = DictSource(weights, die)
sender = WeightTransferTrainerFactory.trainer_init(info, client=llm, source=source)
print("ready", flush=True)
sys.stdin.readline()
sender.send_weights()
"""


@pytest.mark.parametrize("backend", ["gloo", pytest.param("shm", marks=pytest.mark.slow)])
def test_a_trainer_killed_in_the_middle_leaves_the_old_weights(
    llm: LLM,
    named: str,
    new: tuple[str, dict[str, Any]],
    old: dict[str, str],
    expected: dict[str, str],
    backend: str,
) -> None:
    tests = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *_python_path()])}
    with start_at_go(TRAINER, named, backend, env=environment() | tests) as trainer:
        assert trainer.wait(PATIENCE_S) == -signal.SIGKILL
    wait_until(lambda: can_update(llm), "the update is dropped")
    assert llm.compute_weight_checksums() == old
    assert len(llm.generate(PROMPT, use_tqdm=False)[0].outputs[0].token_ids) > 0
    send(llm, DictSource(new[1]), version="next")
    assert llm.compute_weight_checksums() == expected


def _python_path() -> list[str]:
    return [each for each in environment().get("PYTHONPATH", "").split(os.pathsep) if each]


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"data_parallel_size": 2, "num_threads": 2}, marks=pytest.mark.slow)],
    ids=["alone", "in a pool"],
)
def test_an_engine_killed_in_the_middle_is_one_error(
    new: tuple[str, dict[str, Any]], options: dict[str, Any]
) -> None:
    with LLM(**OPTIONS | options) as llm:

        def kill(index: int) -> None:
            if index == len(new[1]) // 2:
                os.kill(llm.engine_pid, signal.SIGKILL)

        sender = connect(llm, DictSource(new[1], kill), packed=False)
        began = time.monotonic()
        with pytest.raises(RequestError if options else EngineDeadError):
            sender.send_weights()
        assert time.monotonic() - began < PATIENCE_S
        with pytest.raises(RequestError, match="trainer_init"):
            sender.send_weights()
        sender.shutdown()
        if options:
            assert len(llm.generate(PROMPT, use_tqdm=False)[0].outputs[0].token_ids) > 0
