"""OpenRLHF's rollout actor, unmodified, on shmllm: in the test's process, and as an actor of Ray.

docs/clients.md says how to install OpenRLHF.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import engine_processes
from support.client_helpers import needs, ray_environment
from support.grpo_runs import environment_kept, make_policy
from support.programs import free_port, result_of, run_source
from support.reference_models import greedy_tokens
from support.trained_weights import trained, weights_of
from support.waiting import PATIENCE_S, holds_within

from shmllm import CallError, SamplingParams
from shmllm.compat import vllm as shim

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore"),  # the client's own
    pytest.mark.usefixtures("no_leaks"),
    needs("openrlhf", "ray", "aiohttp", how="docs/clients.md"),
]

HOST = "127.0.0.1"
PROMPT = [5, 9, 30, 17]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
# What OpenRLHF's create_vllm_engines passes, with a dtype in which tokens can be compared.
OPTIONS: dict[str, Any] = {
    "enforce_eager": True,
    "worker_extension_cls": "openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap",
    "tensor_parallel_size": 1,
    "seed": 3,
    "distributed_executor_backend": "uni",
    "max_model_len": 128,
    "enable_prefix_caching": True,
    "dtype": "float32",
    "trust_remote_code": True,
    "full_determinism": False,
    "gpu_memory_utilization": 0.5,
    "bundle_indices": None,
    "num_gpus": 1,
    "enable_sleep_mode": True,
    "agent_func_path": None,
    "remote_rm_url": None,
    "mm_pad_token_ids": set(),
    "logprobs_mode": "processed_logprobs",
    "max_logprobs": 1,
}


# Makes an actor of Ray, as create_vllm_engines does where a GPU is.
IN_RAY = """
import json, sys
import ray
from shmllm.compat import vllm
vllm.install()
from openrlhf.trainer.ray.vllm_engine import RolloutRayActor, batch_vllm_engine_call
from vllm import SamplingParams
job = json.loads(sys.argv[1])
ray.init(
    address="local", num_cpus=1, num_gpus=0, include_dashboard=False,
    object_store_memory=80 * 2**20, _temp_dir=job["temporary"], log_to_driver=False,
    runtime_env={"worker_process_setup_hook": "shmllm.compat.vllm.install"},
)
actor = RolloutRayActor.options(num_cpus=1, num_gpus=0).remote(**job["options"])
for method in ("sleep", "wake_up", "reset_prefix_cache"):
    batch_vllm_engine_call([actor], method)
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
output = ray.get(actor.generate.remote(job["prompt"], params))
print(json.dumps(list(output.outputs[0].token_ids)))
ray.kill(actor)
ray.shutdown()
"""


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_policy(path)
    return path


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[int]:
    """transformers' greedy tokens."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    return greedy_tokens(auto.from_pretrained(directory).eval(), PROMPT, 12)


@pytest.fixture(scope="module")
def actor(directory: Path, runner: asyncio.Runner) -> Iterator[Any]:
    with started(directory, runner) as made:
        yield made


@contextmanager
def started(directory: Path, runner: asyncio.Runner) -> Iterator[Any]:
    """An actor of OpenRLHF, in this process."""
    with environment_kept():
        os.environ["RAY_ADDRESS"] = "not used"
        shim.install()
        from openrlhf.trainer.ray.vllm_engine import RolloutRayActor

        own = RolloutRayActor.__ray_metadata__.modified_class
        made = own.__new__(own)
        runner.run(made.__init__(model=str(directory), **OPTIONS))
        yield made
        made.llm.shutdown()
        shim.uninstall()


async def tokens_of(actor: Any) -> list[int]:
    output = await actor.generate(list(PROMPT), GREEDY)
    return list(output.outputs[0].token_ids)


def test_rollouts_are_those_of_transformers(
    actor: Any, runner: asyncio.Runner, expected: list[int]
) -> None:
    assert runner.run(tokens_of(actor)) == expected
    assert actor.get_num_unfinished_requests() == 0


def test_samples_have_rewards_and_log_probabilities(
    actor: Any, runner: asyncio.Runner, directory: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    params = SamplingParams(temperature=1, max_tokens=8, ignore_eos=True, logprobs=1)
    samples = runner.run(actor.generate_responses("one is", "", params, 64, tokenizer, 2))
    assert len(samples) == 2
    for sample in samples:
        ((begin, end),) = sample["action_ranges"]
        assert end - begin == 8
        assert all(value < 0 for value in sample["rollout_log_probs"][begin:end])


def test_a_pause_keeps_requests(actor: Any, runner: asyncio.Runner, expected: list[int]) -> None:
    async def run() -> list[int]:
        await actor.pause_generation()
        waiting = asyncio.ensure_future(tokens_of(actor))
        while not actor.get_num_unfinished_requests():
            await asyncio.sleep(0.01)
        await actor.reset_prefix_cache()
        assert not waiting.done()
        await actor.resume_generation()
        return await asyncio.wait_for(waiting, PATIENCE_S)

    assert runner.run(run()) == expected


def test_it_sleeps_and_wakes_up(actor: Any, runner: asyncio.Runner, expected: list[int]) -> None:
    async def run() -> list[int]:
        for tags in (None, ["weights"]):
            await actor.sleep()
            assert await actor.llm.is_sleeping()
            await actor.wake_up(tags)
        await actor.wake_up(["kv_cache"])
        assert not await actor.llm.is_sleeping()
        return await tokens_of(actor)

    assert runner.run(run()) == expected


def compute_without_a_gpu(worker: Any) -> None:
    """Make tensors that are meant for a GPU in the memory of the host."""
    import torch

    empty: Any = torch.empty
    cuda: Any = torch.cuda
    torch.empty = lambda *shape, device=None, **options: empty(*shape, **options)  # type: ignore
    cuda.current_stream = lambda: None


def test_new_weights_are_broadcast_to_its_workers(directory: Path, runner: asyncio.Runner) -> None:
    policy, port = trained(directory), free_port()

    async def run(actor: Any) -> None:
        await actor.llm.collective_rpc(compute_without_a_gpu)
        with ThreadPoolExecutor(1) as trainer:
            group = trainer.submit(stateless_init_process_group, HOST, port, 0, 2, "cpu")
            await actor.init_process_group(HOST, port, 1, 2, "group", "nccl", False)
            for name, tensor in weights_of(policy).items():
                sent = trainer.submit(group.result().broadcast, tensor.clone(), src=0)
                await actor.update_weight(name, tensor.dtype, tensor.shape)
                sent.result()
        assert await tokens_of(actor) == greedy_tokens(policy, PROMPT, 12)

    with started(directory, runner) as actor:
        from openrlhf.utils.distributed_util import stateless_init_process_group

        runner.run(run(actor))


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what a computer without a GPU does")
def test_its_workers_refuse_new_weights_without_a_gpu(
    actor: Any, runner: asyncio.Runner, expected: list[int]
) -> None:
    shape = [64]
    with pytest.raises(CallError, match=r"mismatch dtype: src torch\.float16, dst torch\.float32"):
        runner.run(actor.update_weight("model.norm.weight", torch.float16, shape))
    for call in (
        actor.update_weight("model.norm.weight", torch.float32, shape),
        actor.update_weight_cuda_ipc("model.norm.weight", torch.float32, shape, {}),
    ):
        with pytest.raises(CallError, match=r"torch/cuda/__init__\.py"):
            runner.run(call)
    assert runner.run(tokens_of(actor)) == expected


def test_it_is_an_actor_of_ray(tmp_path: Path, directory: Path, expected: list[int]) -> None:
    temporary = tempfile.mkdtemp(prefix="ray-")  # sockets in it: the path must be short
    options = {"model": str(directory), **OPTIONS, "mm_pad_token_ids": None}
    job = {"temporary": temporary, "options": options, "prompt": PROMPT}
    others = engine_processes()
    try:
        done = run_source(IN_RAY, json.dumps(job), env=ray_environment(tmp_path))
        assert result_of(done) == expected
        assert holds_within(lambda: engine_processes() <= others, PATIENCE_S)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
