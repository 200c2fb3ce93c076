"""A request gets bitwise the same outputs whatever runs beside it, by default."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cache_shapes import cache_shape
from support.determinism import ask, ask_one_by_one, ask_shuffled, make_requests
from support.drafters import DRAFTING, KINDS, Kind, KnowingDrafter, use_drafter
from support.reference_models import LATENTS, MAMBAS, QUICK, VARIANTS, make_model
from support.variants import slow

from shmllm import LLM, EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.worker.cpu.cache import layout_of
from shmllm_kernels.cpu.arithmetic import HAS_INT8
from shmllm_kernels.cpu.products import DTYPES

NUM_REQUESTS = 32
SHAPE: dict[str, Any] = {"intermediate_size": 1376, "max_position_embeddings": 1024}
"""Wide enough for torch to share the activation of a chunk between threads; long enough for
contexts of several key tiles."""


OPTIONS: dict[str, dict[str, Any]] = {
    **{dtype: {"dtype": dtype} for dtype in DTYPES},
    "int8": {"quantization": "int8"},
    "int8-int8": {"quantization": "int8", "activation_dtype": "int8"},
    "int4": {"quantization": "int4"},
    "kv-int8": {"kv_cache_dtype": "int8"},
}
TRANSPOSED = ("gpt2",)
"""Those whose matrices are stored transposed: they are not quantized."""
QUICK_CASES = list(zip(("float32", "bfloat16", "float16"), QUICK, strict=False))
CASES = [
    case if case in QUICK_CASES else slow(case)
    for case in itertools.product(OPTIONS, VARIANTS)
    if (case[0] in (*DTYPES, "kv-int8") or case[1] not in TRANSPOSED)
    and (case[0] != "kv-int8" or case[1] not in LATENTS)
]
NAMES = ("model.layers.0.mlp.down_proj.weight", "model.layers.3.self_attn.q_proj.weight")


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def start(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Any:
    dtype, kind = request.param
    if dtype == "int8-int8" and not HAS_INT8:
        pytest.skip("the CPU lacks AVX512_VNNI and AVX2")
    directory: Path = tmp_path_factory.mktemp(kind)
    make_model(kind, directory, **SHAPE)

    def start_engine(**options: Any) -> LLM:
        settings = {"num_threads": 2, "kv_cache_memory_bytes": 2**26, "multiprocess": False}
        settings |= OPTIONS[dtype]
        return LLM(str(directory), **(settings | options))

    return start_engine


@pytest.fixture(scope="module")
def alone(start: Any) -> list[Any]:
    """The output of each request when it runs alone, without a prefix cache."""
    with start(enable_prefix_caching=False) as llm:
        return ask_one_by_one(llm, make_requests(4096, NUM_REQUESTS, seed=1))


@pytest.fixture
def requests() -> list[Any]:
    return make_requests(4096, NUM_REQUESTS, seed=1)


def test_batches_and_the_prefix_cache(start: Any, alone: list[Any], requests: list[Any]) -> None:
    with start() as llm:
        assert ask(llm, requests) == alone
        assert ask_shuffled(llm, requests, seed=2) == alone
        assert llm.get_metrics()["prefix_hit_tokens"] > 0
        assert ask_one_by_one(llm, requests) == alone


def test_chunks(start: Any, alone: list[Any], requests: list[Any]) -> None:
    with start(max_num_batched_tokens=29, max_num_seqs=5, block_size=32) as llm:
        assert ask(llm, requests) == alone
        assert ask_shuffled(llm, requests, seed=3) == alone


def test_preemption(
    start: Any, alone: list[Any], requests: list[Any], request: pytest.FixtureRequest
) -> None:
    with start() as probe:
        config = ModelConfig.from_directory(Path(probe.facts.model_directory))
    shape = cache_shape(config, 16, lambda heads: layout_of(heads, 16, "float32").block_bytes)
    shape = replace(shape, max_step_tokens=100)
    room = {
        "num_gpu_blocks_override": shape.blocks_for(720) + 12,
        "scheduler_reserve_full_isl": False,
        "max_model_len": 720,
    }
    with start(**room, max_num_batched_tokens=100) as llm:
        assert ask_shuffled(llm, requests, seed=4) == alone
        preemptions = llm.get_metrics()["preemptions"]
    # These states may leave room for one request only; test_greedy preempts those.
    if request.node.callspec.params["start"][1] not in (*MAMBAS, "kimi_linear"):
        assert preemptions > 0


@pytest.mark.parametrize("kind", [k if k == "mixed" else slow(k) for k in KINDS])
def test_drafts(start: Any, alone: list[Any], requests: list[Any], kind: Kind) -> None:
    known = {
        (tuple(prompt["prompt_token_ids"]), params.seed): said[0]
        for (prompt, params), said in zip(requests, alone, strict=True)
    }
    with start(**DRAFTING, max_num_batched_tokens=100) as llm:
        use_drafter(llm, KnowingDrafter(kind, 4096, known))
        assert ask(llm, requests) == alone
        assert ask_shuffled(llm, requests, seed=7) == alone
        stats = llm._client._core.scheduler.stats
    share = stats.accepted_tokens / stats.draft_tokens
    low, high = {"right": (1, 1), "wrong": (0, 0), "mixed": (0.1, 0.9), "random": (0, 0.1)}[kind]
    assert low <= share <= high


@pytest.mark.parametrize("pooling_type", ["LAST", "MEAN"])
def test_embeddings(pooling_type: str, requests: list[Any]) -> None:
    prompts = [prompt for prompt, _ in requests]
    options: dict[str, Any] = {"pooler_config": {"pooling_type": pooling_type}}
    options |= {"multiprocess": False, "num_threads": 2}
    with LLM(**options) as llm:
        one_by_one = [llm.embed(prompt, use_tqdm=False)[0] for prompt in prompts]
    with LLM(max_num_batched_tokens=29, **options) as llm:
        together = llm.embed(prompts, use_tqdm=False)
    for a, b in zip(one_by_one, together, strict=True):
        assert a.outputs.embedding == b.outputs.embedding


@pytest.mark.process
@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("num_threads", [2, slow(3)])
def test_across_processes_and_numbers_of_threads(num_threads: int) -> None:
    """The bundled model with the default settings of an LLM."""
    requests = make_requests(4096, 16, seed=5)
    with LLM(deterministic=True, num_threads=1, multiprocess=False) as llm:
        assert llm.facts.deterministic
        alone = ask_one_by_one(llm, requests)
    with LLM(num_threads=num_threads) as llm:
        assert ask(llm, requests) == alone


def test_after_sleep_and_an_update() -> None:
    requests = make_requests(4096, 16, seed=6)
    with LLM(multiprocess=False, num_threads=2) as llm:
        alone = ask_one_by_one(llm, requests)
        weights = [(name, llm.collective_rpc("get_weight", args=(name,))[0]) for name in NAMES]
        llm.sleep(level=2)
        llm.wake_up(["weights"])
        llm.collective_rpc("reload_weights")
        assert llm.wake_up()
        assert ask(llm, requests) == alone
        llm.update_weights([(name, weight + 0.01) for name, weight in weights])
        changed = ask_one_by_one(llm, requests)
        assert changed != alone
        llm.reset_prefix_cache()
        assert ask(llm, requests) == changed


def test_other_values_of_the_option_are_refused() -> None:
    with pytest.raises(EngineStartError, match="deterministic must be True or False, got 1"):
        LLM(deterministic=1, multiprocess=False)  # type: ignore[arg-type]
