"""`LLM` with the bundled model on the fake GPU, in the caller's process."""

from __future__ import annotations

from typing import Any

import pytest

from shmllm import LLM, SamplingParams, StructuredOutputsParams
from shmllm.config.engine import EngineConfig
from shmllm.worker import make_runner

PROMPTS = ["def add(a, b):", "import os"]


def generate(**options: Any) -> tuple[list[str], LLM]:
    params = [
        SamplingParams(temperature=0, max_tokens=4),
        SamplingParams(
            temperature=0,
            max_tokens=4,
            structured_outputs=StructuredOutputsParams(choice=["yes", "no"]),
        ),
    ]
    llm = LLM(
        "tiny", dtype="float32", multiprocess=False, max_num_seqs=2, max_model_len=64,
        max_num_batched_tokens=16, kv_cache_memory_bytes=2**22, **options,
    )  # fmt: skip
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [output.outputs[0].text for output in outputs], llm


@pytest.mark.slow
@pytest.mark.usefixtures("on_fake_gpu")
def test_the_texts_equal_those_of_the_cpu() -> None:
    captured: list[tuple[int, int]] = []
    texts, llm = generate(
        compilation_config={"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [2]},
        on_capture_progress=lambda done, total: captured.append((done, total)),
    )
    facts = llm.facts
    assert facts.device == "fake GPU"
    assert facts.async_scheduling
    graphs = "FULL_DECODE_ONLY: 2 graphs, "  # of the model, and of the sampling behind it
    assert facts.graphs.startswith(graphs)
    assert captured == [(0, 1), (1, 1)]
    assert texts[1] in ("yes", "no")
    with pytest.MonkeyPatch.context() as patch:
        patch.undo()
        patch.setattr(make_runner, "make_runner", _make_cpu_runner)
        assert generate()[0] == texts


@pytest.mark.slow
@pytest.mark.usefixtures("on_fake_gpu")
def test_a_draft_model_changes_no_text() -> None:
    """With two completions of a prompt, a stop string among accepted tokens, and greedily."""
    params = [
        SamplingParams(n=2, temperature=0.9, seed=5, max_tokens=8),
        SamplingParams(temperature=0, max_tokens=8, stop=["in(p"]),
    ]
    options: dict[str, Any] = {
        "dtype": "float32", "multiprocess": False, "max_num_seqs": 4, "max_model_len": 64,
        "max_num_batched_tokens": 16, "kv_cache_memory_bytes": 2**23, "enforce_eager": True,
    }  # fmt: skip
    config = {"model": "tiny", "num_speculative_tokens": 3, "adaptive": False}
    found = []
    for drafter in (None, config):
        with LLM("tiny", **options, speculative_config=drafter) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            said = [(each.text, each.finish_reason) for one in outputs for each in one.outputs]
            found.append((said, llm.get_metrics()))
    (plain, _), (ours, metrics) = found
    assert ours == plain
    assert plain[0] != plain[1]
    assert plain[2] == (".path.jo", "stop")
    assert metrics["accepted_tokens"] == metrics["draft_tokens"] > 8


def _make_cpu_runner(config: EngineConfig, *progress: Any) -> Any:
    from shmllm.worker.cpu.runner import CpuRunner

    return CpuRunner(config)
