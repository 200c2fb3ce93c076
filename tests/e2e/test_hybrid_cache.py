"""Layers with windows or chunks beside full ones: blocks that nothing reads any more are freed, and
no bit changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from support.determinism import make_requests, said
from support.reference_models import ReferenceModel, make_model, make_prompts
from support.scoring import choices
from support.variants import slow

from shmllm import LLM, EngineStartError, RequestError, SamplingParams

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

WINDOW = 40
FULL, SLIDING = "full_attention", "sliding_attention"
LAYERS = {
    "one-group-each": [SLIDING, FULL, SLIDING, FULL],
    "more-windows": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, SLIDING],
    "only-windows": [SLIDING, SLIDING, SLIDING],
}
"""Models whose layers make two groups, six groups, and one."""
CHUNKS = "chunks"
"""The name of a model with chunks."""
ENTRIES = "entries"
"""The name of a model whose layers read windows and entries of several tokens."""
FEW_BLOCKS = {
    **{"one-group-each": 110, "more-windows": 110, "only-windows": 20, CHUNKS: 110},
    ENTRIES: 130,
}
"""The size of a pool that has room for about two of the longest requests."""
BASE: dict[str, Any] = {"dtype": "float32", "multiprocess": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "hybrid": {},
    "not-hybrid": {"disable_hybrid_kv_cache_manager": True},
    "not-cached": {"enable_prefix_caching": False},
    "short-chunks": {"max_num_batched_tokens": 16, "long_prefill_token_threshold": 5},
    "one-at-a-time": {"max_num_seqs": 1},
    "large-blocks": {"block_size": 64},
}


def make(kind: str, directory: Path) -> ReferenceModel:
    if kind == CHUNKS:
        model = make_model("llama4", directory, max_position_embeddings=1024)
    elif kind == ENTRIES:
        model = make_model("deepseek_v4", directory, max_position_embeddings=1024)
    else:
        layers = LAYERS[kind]
        model = make_model(
            "qwen2",
            directory,
            num_hidden_layers=len(layers),
            layer_types=layers,
            use_sliding_window=True,
            sliding_window=WINDOW,
            max_position_embeddings=1024,
        )
    return ReferenceModel(model, directory, make_prompts(4096, longest=5 * WINDOW))


KINDS = ["more-windows", slow("one-group-each"), slow("only-windows"), slow(CHUNKS), slow(ENTRIES)]


@pytest.fixture(scope="module", params=KINDS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: Any) -> ReferenceModel:
    return make(request.param, tmp_path_factory.mktemp("models") / request.param)


def greedy(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=24)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def everything(llm: LLM, count: int = 12) -> list[Any]:
    """All that the engine says about requests of many kinds, some longer than ten windows."""
    prompts, params = zip(*make_requests(4096, count, seed=11), strict=True)
    outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
    return [said(output) for output in outputs]


def test_the_same_bits_in_all_settings(reference: ReferenceModel) -> None:
    expected: list[Any] | None = None
    for name, options in SETTINGS.items():
        with LLM(str(reference.directory), **BASE, **options) as llm:
            reference.assert_greedy(greedy(llm, reference.prompts))
            found = everything(llm)
            assert expected is None or found == expected, name
            assert everything(llm) == found, f"{name}, from the prefix cache"
            expected = found


def test_the_same_bits_with_preemption(reference: ReferenceModel) -> None:
    with LLM(str(reference.directory), **BASE) as llm:
        expected = everything(llm)
        greedily = greedy(llm, reference.prompts)
    options = BASE | {"max_model_len": 800, "max_num_batched_tokens": 64}
    options["num_gpu_blocks_override"] = FEW_BLOCKS[reference.directory.name]
    options["scheduler_reserve_full_isl"] = False
    with LLM(str(reference.directory), **options) as llm:
        assert llm.facts.max_model_len == 800
        assert greedy(llm, reference.prompts) == greedily
        assert everything(llm) == expected
        assert llm.get_metrics()["preemptions"] > 0


def test_a_request_of_many_windows_needs_few_blocks(tmp_path: Path) -> None:
    """It fits into a pool that would not hold all keys and values of half of it."""
    reference = make("only-windows", tmp_path)
    options = BASE | {"max_num_batched_tokens": 32, "num_gpu_blocks_override": 8}
    [prompt] = [prompt for prompt in reference.prompts if len(prompt) == 5 * WINDOW][:1]
    with LLM(str(tmp_path), **options) as llm:
        assert llm.facts.max_model_len == 1024
        assert greedy(llm, [prompt] * 3) == greedy(llm, [prompt] * 3)
        reference.prompts = [prompt]
        reference.assert_greedy(greedy(llm, [prompt]))
    with LLM(str(tmp_path), **options, disable_hybrid_kv_cache_manager=True) as llm:
        assert llm.facts.max_model_len == 7 * 16


def without_windows(directory: Path) -> Any:
    """transformers' model of the same weights, of which each layer sees all tokens."""
    config = transformers.AutoConfig.from_pretrained(directory)
    config.sliding_window, config.layer_types = None, [FULL] * config.num_hidden_layers
    return transformers.AutoModelForCausalLM.from_pretrained(directory, config=config).eval()


def test_without_windows_a_request_is_no_longer_than_the_smallest(
    reference: ReferenceModel,
) -> None:
    options = BASE | {"disable_sliding_window": True}
    directory = str(reference.directory)
    if CHUNKS in directory:
        with LLM(directory, **options) as llm:
            assert llm.facts.max_model_len == 1024
        return
    prompt, full = reference.prompts[-1][: WINDOW - 8], without_windows(reference.directory)
    with LLM(directory, **options) as llm:
        assert llm.facts.max_model_len == WINDOW
        (tokens,) = greedy(llm, [prompt])
        assert len(tokens) == 8
        assert choices(full, prompt, list(tokens)) == list(tokens)
        with pytest.raises(RequestError, match=f"max_model_len is {WINDOW}"):
            greedy(llm, [reference.prompts[-1][:WINDOW]])
    with pytest.raises(EngineStartError, match=f"smallest sliding window, {WINDOW}: pass at most"):
        LLM(directory, **options, max_model_len=WINDOW + 1)
    with LLM(directory, **options, max_model_len=WINDOW - 1) as llm:
        assert llm.facts.max_model_len == WINDOW - 1
