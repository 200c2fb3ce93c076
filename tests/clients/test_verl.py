"""verl's class for vLLM's workers, its sender of weights and its server, unmodified, on shmllm.

docs/clients.md says how to install verl. Its server runs without its HTTP side, and without Ray.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.client_helpers import needs
from support.grpo_runs import environment_kept
from support.lora_adapters import draw, linear_modules, merged
from support.reference_models import greedy_tokens, make_model
from support.trained_weights import (
    PROMPT,
    assert_has_weights_of,
    tokens_of,
    trained,
    weights_of,
)
from support.waiting import PATIENCE_S

from shmllm.compat import vllm as shim

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore"),  # the client's own
    pytest.mark.usefixtures("no_leaks"),
    needs("verl", "ray", "msgspec", "peft", how="docs/clients.md"),
]

EXTENSION = "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_memory_bytes": 2**26,
    "num_threads": 2,
    "worker_extension_cls": EXTENSION,
}
ADAPTER = {"r": 8, "lora_alpha": 16, "target_modules": {"q_proj", "v_proj"}, "bias": "none"}
PREPARED = {"peft_type": "LORA", "task_type": "CAUSAL_LM", **ADAPTER}

Tensors = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def verl_finds_shmllm() -> Iterator[None]:
    with environment_kept():
        os.environ["VERL_RAY_JOB_ID"] = str(os.getpid())
        os.environ["VERL_USE_EXTERNAL_MODULES"] = "support.verl_on_cpu"
        os.environ["VERL_PLATFORM"] = "cpu"
        shim.install()
        yield
        shim.uninstall()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model("qwen3", path)
    return path


@pytest.fixture(scope="module")
def policy(directory: Path) -> Any:
    """The model in training."""
    return trained(directory)


@pytest.fixture
def start(directory: Path) -> Iterator[Callable[..., Any]]:
    """Starts an engine with verl's extension, which the test need not close."""
    engines: list[Any] = []

    def run(**options: Any) -> Any:
        from vllm import LLM

        engines.append(LLM(str(directory), **OPTIONS | options))
        return engines[-1]

    yield run
    for engine in engines:
        engine.close()


def send(llm: Any, tensors: Tensors, **options: Any) -> None:
    """Send tensors to each rank by verl's sender, as its trainers do."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    handles = llm.collective_rpc("_get_zmq_handle")

    def run(handle: str) -> None:
        sender = BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True)
        asyncio.run(sender.async_send_weights(iter(tensors.items())))

    with ThreadPoolExecutor(len(handles)) as trainers:
        sent = [trainers.submit(run, handle) for handle in handles]
        answers = llm.collective_rpc("update_weights_from_ipc", kwargs=options | {"use_shm": True})
        for each in sent:
            each.result(PATIENCE_S)
    assert answers == [None] * len(handles)


def test_weights_arrive_after_a_sleep(start: Any, policy: Any) -> None:
    llm = start()
    llm.collective_rpc("sleep", kwargs={"level": 2})
    assert llm.is_sleeping()
    assert llm.collective_rpc("wake_up", kwargs={"tags": ["weights"]}) == [False]
    send(llm, weights_of(policy))
    assert llm.collective_rpc("wake_up", kwargs={"tags": ["kv_cache"]}) == [True]
    assert_has_weights_of(llm, policy)


def test_weights_arrive_in_each_rank(start: Any, policy: Any) -> None:
    llm = start(tensor_parallel_size=2)
    send(llm, weights_of(policy))
    assert_has_weights_of(llm, policy)


def test_adapters_arrive_as_tensors(start: Any, policy: Any) -> None:
    from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID, VLLM_LORA_NAME
    from vllm.lora.request import LoRARequest

    llm = start(enable_lora=True, max_lora_rank=8)
    names = {name: name.replace("q_proj.w", "q_proj.base_layer.w") for name in weights_of(policy)}
    base = {names[name]: tensor for name, tensor in weights_of(policy).items()}
    send(llm, base, peft_config=PREPARED, base_sync_done=False)
    assert_has_weights_of(llm, policy)
    modules = linear_modules(policy).items()
    shapes = {name: shape for name, shape in modules if name.endswith(("q_proj", "v_proj"))}
    # The directory of a request of verl's does not exist.
    request = LoRARequest(VLLM_LORA_NAME, VLLM_LORA_INT_ID, "some_path")
    for seed in (1, 2):
        adapter = draw(shapes, seed)
        send(llm, adapter, peft_config=PREPARED, base_sync_done=True)
        assert llm.list_loras() == {VLLM_LORA_INT_ID}
        expected = greedy_tokens(merged(policy, adapter, 2.0), PROMPT, 12)
        assert tokens_of(llm, lora_request=request) == expected
    assert tokens_of(llm) == greedy_tokens(policy, PROMPT, 12)


def test_forbidden_tokens_are_never_sampled(start: Any) -> None:
    from vllm import SamplingParams

    llm = start()
    banned = tokens_of(llm)[:2]
    llm.collective_rpc("monkey_patch_model", kwargs={"vocab_size": 100, "banned_token_ids": [7]})
    params = SamplingParams(temperature=1, max_tokens=400, ignore_eos=True, logprobs=0, seed=1)
    tokens = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)[0].outputs[0]
    assert set(tokens.token_ids) <= set(range(100)) - {7}
    assert len(set(tokens.token_ids)) > 50
    assert not set(tokens_of(llm)) & {7, *(token for token in banned if token >= 100)}


@pytest.fixture
def server(policy_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """verl's server of a replica, whose engine this test starts."""
    import ray
    from verl.workers.config import HFModelConfig, RolloutConfig
    from verl.workers.rollout.replica import RolloutMode
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    job = SimpleNamespace(get_job_id=lambda: str(os.getpid()))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: job)
    config = RolloutConfig(
        name="vllm",
        prompt_length=32,
        response_length=16,
        max_model_len=128,
        tensor_model_parallel_size=1,
    )
    made = vLLMHttpServer(
        config=config,
        model_config=HFModelConfig(path=str(policy_directory)),
        rollout_mode=RolloutMode.HYBRID,
        workers=[],
        replica_rank=0,
        node_rank=0,
        gpus_per_node=1,
        nnodes=1,
        cuda_visible_devices="",
    )
    yield made
    for port in (made._master_sock, made._dp_rpc_sock, made._dp_master_sock):
        port.close()


def test_the_server_drives_an_engine(server: Any, policy_directory: Path) -> None:
    asyncio.run(drive(server, policy_directory))


async def drive(server: Any, directory: Path) -> None:
    """Generate, abort and sleep, as verl's trainer lets its servers do."""
    from vllm import AsyncEngineArgs, AsyncLLMEngine

    with pytest.raises(NotImplementedError, match="there is no server"):
        await server.launch_server()
    args = AsyncEngineArgs(model=str(directory), logprobs_mode="processed_logprobs", **OPTIONS)
    server.engine = engine = AsyncLLMEngine.from_engine_args(args)
    greedy = {"temperature": 0, "logprobs": True, "max_tokens": 6, "ignore_eos": True}
    try:
        vocab_size = len(server.model_config.tokenizer)
        await server.collective_rpc("monkey_patch_model", kwargs={"vocab_size": vocab_size})
        first = await server.generate([5, 9, 30], dict(greedy), "first")
        assert first.stop_reason == "completed"
        assert len(first.token_ids) == len(first.log_probs) == 6
        long = {"temperature": 1.0, "max_tokens": 100, "ignore_eos": True}
        running = asyncio.ensure_future(server.generate([5, 9, 30], dict(long), "running"))
        while not engine.output_processor.has_request("running"):
            await asyncio.sleep(0.01)
        refused = await server.abort_request("running")
        assert not refused["aborted"]
        assert "AsyncLLM.abort" in refused["error"]
        assert (await server.abort_all_requests())["request_ids"] == ["running"]
        assert (await running).stop_reason == "aborted"
        parked = asyncio.ensure_future(server.generate([5, 9, 30], dict(greedy), "parked"))
        await server.resume_generation()
        assert (await parked).token_ids == first.token_ids
        await server.clear_kv_cache()
        for before, after in (
            (server.sleep, server.wake_up),
            (server.release_kv_cache, server.resume_kv_cache),
        ):
            await server.wait_for_requests_to_drain()
            await before()
            assert await engine.is_sleeping()
            await engine.wake_up(["weights"])
            await engine.collective_rpc("reload_weights")
            await after()
            again = await server.generate([5, 9, 30], dict(greedy), "again")
            assert again == first
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def policy_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer of its own vocabulary."""
    from support.grpo_runs import make_policy

    path = tmp_path_factory.mktemp("policy")
    make_policy(path)
    assert json.loads((path / "config.json").read_text())["vocab_size"] > 100
    return path
