"""Layers with recurrent states: the states that the prefix cache keeps change no bit."""

from __future__ import annotations

from typing import Any

import pytest
from support.determinism import make_requests, said
from support.reference_models import RECURRENT, ReferenceModel, make_model, make_prompts
from support.variants import slow

from shmllm import LLM, SamplingParams

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

BASE: dict[str, Any] = {"dtype": "float32", "multiprocess": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "a-state-for-each-block": {"mamba_block_size": 16},
    "a-rounded-interval": {"mamba_block_size": 33, "block_size": 32},
    "not-cached": {"enable_prefix_caching": False},
    "short-chunks": {"max_num_batched_tokens": 19, "mamba_block_size": 32},
    "one-at-a-time": {"max_num_seqs": 1, "mamba_block_size": 48},
    "overlapped": {"async_scheduling": True, "mamba_block_size": 16},
    "three-threads": {"num_threads": 3, "mamba_block_size": 16},
}
RECURRENT_WEIGHTS = ("A_log", "conv1d.weight", "conv.conv.weight", "output_gate.weight")

FAMILIES = ["qwen3_5"]
"""Those in the default suite: it has states and attention."""
KINDS = [*FAMILIES, *(slow(kind) for kind in RECURRENT if kind not in FAMILIES)]


@pytest.fixture(scope="module", params=KINDS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: Any) -> ReferenceModel:
    directory = tmp_path_factory.mktemp("models") / request.param
    model = make_model(request.param, directory, max_position_embeddings=1024)
    return ReferenceModel(model, directory, make_prompts(4096, longest=200))


def greedy(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=24)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def everything(llm: LLM, count: int = 12) -> list[Any]:
    """All that the engine says about requests of many kinds."""
    prompts, params = zip(*make_requests(4096, count, seed=11), strict=True)
    outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
    return [said(output) for output in outputs]


def test_the_same_bits_in_all_settings(reference: ReferenceModel) -> None:
    first = None
    for name, options in SETTINGS.items():
        with LLM(str(reference.directory), **(BASE | options)) as llm:
            for attempt in ("new", "repeated"):
                results = everything(llm)
                first = first or results
                assert results == first, f"{name}, {attempt}"
            hits = llm.get_metrics()["prefix_hit_tokens"]
            assert (hits > 0) == (name != "not-cached"), name
            reference.assert_greedy(greedy(llm, reference.prompts))


def test_the_same_bits_with_preemption(reference: ReferenceModel) -> None:
    with LLM(str(reference.directory), **BASE) as llm:
        expected = everything(llm)
        greedily = greedy(llm, reference.prompts)
        num_blocks = 52 if llm.facts.num_blocks else 10  # of keys and values, or of states
    few = {
        "num_gpu_blocks_override": num_blocks,
        "scheduler_reserve_full_isl": False,
        "mamba_block_size": 32,
        "max_num_seqs": 8,
    }
    few |= {"max_model_len": 800, "max_num_batched_tokens": 64}
    with LLM(str(reference.directory), **(BASE | few)) as llm:
        for _ in range(2):
            assert everything(llm) == expected
            assert greedy(llm, reference.prompts) == greedily
        assert llm.get_metrics()["preemptions"] > 0


def test_hits_end_at_states(reference: ReferenceModel) -> None:
    prompt = [*range(1, 151)]
    params = SamplingParams(temperature=0, max_tokens=4)
    with LLM(str(reference.directory), **(BASE | {"mamba_block_size": 64})) as llm:
        cached = []
        for tokens in (prompt, prompt, prompt[:128], [*prompt[:129], 9], [*prompt[:100], 9]):
            [output] = llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)
            cached.append(output.num_cached_tokens)
        assert cached == [0, 128, 64, 128, 64]
        assert llm.facts.num_states > 0
        assert llm.get_metrics()["kv_blocks_total"] == llm.facts.num_counted_blocks > 0


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_updates(reference: ReferenceModel, level: int) -> None:
    """States of old weights are forgotten, and all names that trainers send are known."""
    weights = [*reference.model.state_dict().items()]
    with LLM(str(reference.directory), **(BASE | {"mamba_block_size": 16})) as llm:
        expected = greedy(llm, reference.prompts)
        llm.sleep(level=level)
        llm.wake_up()
        if level == 2:
            llm.update_weights([(name, tensor.clone()) for name, tensor in weights])
        assert greedy(llm, reference.prompts) == expected
        changed = [
            (name, tensor * 1.5 if name.endswith(RECURRENT_WEIGHTS) else tensor.clone())
            for name, tensor in weights
        ]
        llm.update_weights(changed)
        assert greedy(llm, reference.prompts) != expected
        llm.update_weights([(name, tensor.clone()) for name, tensor in weights])
        assert greedy(llm, reference.prompts) == expected
