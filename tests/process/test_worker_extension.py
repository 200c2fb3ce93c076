"""Classes of trainers in the workers of real engines: their weights arrive, in every rank."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Listener
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import command
from support.engines import attached, named_engine
from support.lora_adapters import draw, linear_modules, merged
from support.programs import free_port, sockets_of
from support.reference_models import greedy_tokens, make_model
from support.trained_weights import (
    PROMPT,
    assert_has_weights_of,
    tokens_of,
    trained,
    weights_of,
)
from support.trainer_extensions import HOST, Adapts, Forbids, FromFiles, OneByOne
from support.variants import slow

from shmllm import LLM, CallError, EngineStartError, LoRARequest, RequestError, SamplingParams
from shmllm.compat.vllm_groups import PyNcclCommunicator, StatelessProcessGroup

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 2**26, "num_threads": 2}
MODULE = "support.trainer_extensions"


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("old")
    make_model("qwen3", path)
    return path


@pytest.fixture(scope="module")
def policy(old: Path) -> Any:
    """A model of the same shape with other weights, which the trainer has."""
    return trained(old)


@pytest.fixture
def start(old: Path) -> Iterator[Any]:
    """Starts an engine with an extension, which the test need not close."""
    engines: list[LLM] = []

    def run(extension: Any, **options: Any) -> LLM:
        engines.append(LLM(str(old), worker_extension_cls=extension, **OPTIONS | options))
        return engines[-1]

    yield run
    for engine in engines:
        engine.close()


def trainers_end(port: int, size: int) -> PyNcclCommunicator:
    return PyNcclCommunicator(StatelessProcessGroup.create(HOST, port, 0, size), "cpu")


@pytest.mark.parametrize("ranks", [slow(1), 2])
def test_a_call_for_each_weight(ranks: int, start: Any, policy: Any) -> None:
    llm = start(OneByOne, tensor_parallel_size=ranks)
    size, port = ranks + 1, free_port()
    with ThreadPoolExecutor(1) as trainer:
        group = trainer.submit(trainers_end, port, size)
        joined = llm.collective_rpc(
            "init_process_group", args=(port, 1), kwargs={"world_size": size}
        )
        assert joined == list(range(1, size))
        for name, tensor in weights_of(policy).items():
            sent = trainer.submit(group.result().broadcast, tensor.clone(), 0)
            kwargs = {"name": name, "dtype": tensor.dtype, "shape": list(tensor.shape)}
            assert llm.collective_rpc("update_weight", kwargs=kwargs) == [None] * ranks
            sent.result()
    assert_has_weights_of(llm, policy)
    assert llm.get_weight_version() == len(weights_of(policy))


@pytest.mark.parametrize("ranks", [1, slow(2)])
def test_buckets_in_shared_memory(ranks: int, start: Any, policy: Any, tmp_path: Path) -> None:
    llm = start(f"{MODULE}.InBuckets", tensor_parallel_size=ranks)
    address = str(tmp_path / "bucket")
    with ThreadPoolExecutor(ranks) as trainers:
        listeners = [Listener(f"{address}-{rank}", "AF_UNIX") for rank in range(ranks)]
        sent = [trainers.submit(send_buckets, each, weights_of(policy)) for each in listeners]
        counts = llm.collective_rpc("update_weights_from_ipc", args=(address,))
        assert counts == [each.result() for each in sent] == [len(weights_of(policy))] * ranks
    assert_has_weights_of(llm, policy)
    assert llm.get_weight_version() == 1
    assert llm.collective_rpc(lambda worker: worker.was_made_with) == [ranks] * ranks


def send_buckets(listener: Listener, weights: dict[str, torch.Tensor]) -> int:
    """Send weights in buckets that only the largest of them fills."""
    size = max(each.nbytes for each in weights.values())
    memory = SharedMemory(create=True, size=size)
    try:
        with listener, listener.accept() as engine:
            engine.send(memory.name)
            bucket: dict[str, Any] = {}
            at = 0
            for name, tensor in [*weights.items(), ("", torch.empty(size))]:
                if at + tensor.nbytes > size:
                    engine.send(bucket)
                    assert engine.recv() == "done"
                    memory.buf[:at] = bytes(at)  # the engine must not read it any more
                    bucket, at = {}, 0
                if name:
                    memory.buf[at : at + tensor.nbytes] = tensor.contiguous().numpy().tobytes()
                    bucket[name] = tensor.dtype, tensor.shape, at
                    at += tensor.nbytes
            engine.send(None)
    finally:
        memory.close()
        memory.unlink()
    return len(weights)


@pytest.mark.parametrize(
    "options",
    [{}, slow({"tensor_parallel_size": 2}), slow({"data_parallel_size": 2})],
    ids=str,
)
def test_a_checkpoint_in_files(options: Any, start: Any, policy: Any, tmp_path: Path) -> None:
    policy.save_pretrained(tmp_path, max_shard_size="200KB")
    llm = start(FromFiles, **options)
    llm.collective_rpc("init_broadcaster")
    assert llm.collective_rpc("liveness_probe") == [None, *[None] * len(options)]
    llm.collective_rpc("update_weights_from_path", args=(str(tmp_path),))
    assert_has_weights_of(llm, policy)


@pytest.mark.parametrize("ranks", [1, slow(2)])
def test_tokens_that_a_class_forbids_are_not_sampled(ranks: int, start: Any) -> None:
    llm = start(Forbids, tensor_parallel_size=ranks, max_logprobs=-1)
    tokens = tokens_of(llm)
    llm.collective_rpc("forbid", args=(tokens[2:4],))
    others = tokens_of(llm)
    assert others[:2] == tokens[:2]
    assert not set(others) & set(tokens[2:4])
    scored = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
    output = llm.generate([[*PROMPT, *tokens[:2]]], scored, use_tqdm=False)[0].outputs[0]
    assert output.logprobs[0][tokens[2]].logprob == -torch.inf


def test_adapters_that_a_class_receives(start: Any, old: Path, policy: Any) -> None:
    llm = start(Adapts, enable_lora=True, max_lora_rank=8)
    shapes = dict(list(linear_modules(policy).items())[:4])
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16}
    request = LoRARequest("sent", 7, "another-directory")
    before = tokens_of(llm)
    for seed in (1, 2):
        adapter = draw(shapes, seed)
        assert llm.collective_rpc("adapt", args=(7, config, adapter)) == [True]
        assert llm.collective_rpc("adapt", args=(7, config, {})) == [False]
        assert tokens_of(llm, lora_request=request) == greedy_tokens(
            merged(original(old), adapter, 2.0), PROMPT, 12
        )
        with pytest.raises(RequestError, match="adapter 7 is 'sent' from tensors"):
            tokens_of(llm, lora_request=LoRARequest("other", 7, "another-directory"))
        assert llm.collective_rpc("forget", args=(7,)) == [True]
    assert llm.collective_rpc("forget", args=(7,)) == [False]
    assert tokens_of(llm) == before


@pytest.mark.slow
def test_a_class_cannot_change_the_adapters_of_several_processes(start: Any) -> None:
    llm = start(Adapts, enable_lora=True, tensor_parallel_size=2)
    for call in (("adapt", (7, {}, {})), ("forget", (7,))):
        with pytest.raises(RequestError, match="cannot change the adapters of 2 processes"):
            llm.collective_rpc(call[0], args=call[1])


def original(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(directory).eval()


def test_an_engine_in_this_process(start: Any, policy: Any, tmp_path: Path) -> None:
    policy.save_pretrained(tmp_path)
    llm = start(FromFiles, multiprocess=False)
    llm.collective_rpc("update_weights_from_path", args=(str(tmp_path),))
    assert_has_weights_of(llm, policy)
    assert not torch.distributed.is_initialized()


def test_a_tensor_that_does_not_fit_changes_nothing(start: Any, policy: Any) -> None:
    llm = start(FromFiles)
    before = tokens_of(llm)
    with pytest.raises(CallError, match="FileNotFoundError"):
        llm.collective_rpc(lambda worker: worker.model_runner.model.load_weights(missing()))
    with pytest.raises(RequestError, match=r"model\.norm\.weight"):
        llm.collective_rpc(
            lambda worker: worker.model.load_weights([("model.norm.weight", torch.ones(3))])
        )
    assert tokens_of(llm) == before


def missing() -> Iterator[tuple[str, torch.Tensor]]:
    yield "model.norm.weight", torch.load("/no/such/file")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{MODULE}.Absent", "Absent cannot be imported: AttributeError"),
        ("no.such.module.Class", "cannot be imported: ModuleNotFoundError"),
        (f"{MODULE}.Taken", "has get_model, which the worker has itself"),
        (f"{MODULE}.Fails", "cannot be made: RuntimeError: no GPU"),
        (f"{MODULE}.HOST", "is no class"),
        ("Class", "must be 'module.Class', got 'Class'"),
        (7, "must be 'module.Class', got 7"),
    ],
)
@pytest.mark.parametrize("multiprocess", [False, slow(True)])
def test_what_is_no_extension_is_one_error(
    name: Any, message: str, multiprocess: bool, start: Any
) -> None:
    with pytest.raises(EngineStartError, match=message) as error:
        start(name, multiprocess=multiprocess)
    assert "\n" not in str(error.value)


def test_a_class_of_the_program_itself_is_sent(start: Any) -> None:
    class Local:
        def twice(self, number: int) -> int:
            return 2 * number

    assert start(Local).collective_rpc("twice", args=(4,)) == [8]


def test_unknown_methods_are_named_with_those_of_the_extension(start: Any) -> None:
    llm = start(FromFiles)
    with pytest.raises(RequestError, match="the nearest is 'liveness_probe'"):
        llm.collective_rpc("livenes_probe")


def test_gloo_listens_on_loopback_and_other_engines_have_no_socket(start: Any) -> None:
    assert all("127.0.0.1" in each for each in listening(start(FromFiles).engine_pid))
    with LLM(**OPTIONS) as plain:
        assert sockets_of(plain.engine_pid) == []


def listening(pid: int) -> list[str]:
    """The addresses on which a process listens."""
    inodes = {each.partition("[")[2].rstrip("]") for each in sockets_of(pid)}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    mine = [row[1].partition(":")[0] for row in rows if row[9] in inodes and row[3] == "0A"]
    return [socket.inet_ntoa(bytes.fromhex(each)[::-1]) for each in mine]


@pytest.mark.slow
def test_a_named_engine_runs_methods_of_those_who_may_run_code(tmp_path: Path) -> None:
    options: dict[str, Any] = {"worker_extension_cls": f"{MODULE}.FromFiles"}
    refusal = pytest.raises(RequestError, match="--allow-callables")
    with named_engine(tmp_path, **options) as (name, _), attached(name) as llm, refusal:
        llm.collective_rpc("liveness_probe")
    options["allow_callables"] = True
    with named_engine(tmp_path, **options) as (name, _), attached(name) as llm:
        assert llm.collective_rpc("liveness_probe") == [None]


def test_the_option_is_in_the_help() -> None:
    assert b"--worker-extension-cls" in command("engine", "start", "--help").stdout
