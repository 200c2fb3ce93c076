"""`LLM` with an engine process on a GPU, compared with an engine on the CPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from shmllm import LLM, SamplingParams, StructuredOutputsParams

PROMPTS = ["def add(a, b):\n", "import os\n", "class Node:\n", "for i in range(", "x = "]
GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=2)
CACHE_BYTES = 2**26
"""The rest of a GPU's memory would be a million blocks, each an object on the host."""


@pytest.fixture(scope="module")
def on_gpu() -> Iterator[LLM]:
    options = {"dtype": "float32", "max_num_seqs": 16, "seed": 3}
    with LLM("tiny", device="cuda", kv_cache_memory_bytes=CACHE_BYTES, **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def on_cpu() -> Iterator[LLM]:
    options = {"dtype": "float32", "max_num_seqs": 16, "seed": 3}
    with LLM("tiny", device="cpu", kv_cache_memory_bytes=CACHE_BYTES, **options) as llm:
        yield llm


def texts(llm: LLM, params: SamplingParams) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_texts_and_logprobs_equal_those_of_the_cpu(on_gpu: LLM, on_cpu: LLM) -> None:
    assert on_gpu.facts.graphs
    assert on_gpu.facts.async_scheduling
    pairs = zip(
        on_gpu.generate(PROMPTS, GREEDY, use_tqdm=False),
        on_cpu.generate(PROMPTS, GREEDY, use_tqdm=False),
        strict=True,
    )
    for ours, other in pairs:
        assert ours.outputs[0].text == other.outputs[0].text
        assert ours.outputs[0].cumulative_logprob == pytest.approx(
            other.outputs[0].cumulative_logprob, abs=1e-3
        )


def test_a_seed_gives_the_same_text_whatever_runs_beside_it(on_gpu: LLM) -> None:
    drawn = SamplingParams(temperature=1, max_tokens=16, seed=5)
    together = texts(on_gpu, drawn)
    alone = [on_gpu.generate(p, drawn, use_tqdm=False)[0].outputs[0].text for p in PROMPTS]
    assert together == alone


def test_a_choice_is_enforced(on_gpu: LLM) -> None:
    choice = StructuredOutputsParams(choice=["yes", "no"])
    params = SamplingParams(temperature=1, max_tokens=8, structured_outputs=choice)
    assert set(texts(on_gpu, params)) <= {"yes", "no"}


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back_and_graphs_still_work(on_gpu: LLM, level: int) -> None:
    before = texts(on_gpu, GREEDY)
    on_gpu.sleep(level=level)
    assert on_gpu.is_sleeping()
    on_gpu.wake_up()
    if level == 2:
        on_gpu.collective_rpc("reload_weights")
    assert texts(on_gpu, GREEDY) == before


def test_bfloat16_with_every_graph_mode_gives_one_text() -> None:
    found = set()
    for mode in ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"):
        options = {"compilation_config": {"cudagraph_mode": mode}, "dtype": "bfloat16"}
        with LLM("tiny", device="cuda", kv_cache_memory_bytes=CACHE_BYTES, **options) as llm:
            found.add(texts(llm, SamplingParams(temperature=0, max_tokens=4))[0])
    assert len(found) == 1


@pytest.mark.parametrize(("dtype", "tie"), [("float32", 1e-3), ("bfloat16", 0.3)])
def test_drafts_change_texts_at_ties_only(
    dtype: str, tie: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """A product of several rows may round otherwise than one of a single row: where an output
    differs first, both tokens are about equally likely. Prints how many outputs differ."""
    repeated = [prompt * 4 for prompt in PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=48, logprobs=5, ignore_eos=True)
    options = {"dtype": dtype, "kv_cache_memory_bytes": CACHE_BYTES}
    config = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
    with LLM("tiny", device="cuda", **options) as llm:
        plain = [each.outputs[0] for each in llm.generate(repeated, params, use_tqdm=False)]
    with LLM("tiny", device="cuda", **options, speculative_config=config) as llm:
        assert not llm.facts.async_scheduling
        ours = [each.outputs[0] for each in llm.generate(repeated, params, use_tqdm=False)]
    num_different = 0
    for one, other in zip(plain, ours, strict=True):
        pairs = enumerate(zip(one.token_ids, other.token_ids, strict=True))
        place = next((place for place, (a, b) in pairs if a != b), None)
        if place is None:
            continue
        num_different += 1
        likely = one.logprobs[place]
        tokens = one.token_ids[place], other.token_ids[place]
        assert abs(likely[tokens[0]].logprob - likely[tokens[1]].logprob) < tie
    with capsys.disabled():
        print(f"{dtype}: {num_different} of {len(plain)} outputs differ at a tie")


def test_the_command_reports_its_device() -> None:
    command = "import sys; from shmllm.cli.main import main; sys.exit(main())"
    options = ["--device", "cuda", "--kv-cache-memory-bytes", str(CACHE_BYTES), "--max-tokens", "4"]
    done = subprocess.run(
        [sys.executable, "-c", command, "generate", *options, "x ="],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "graphs FULL_AND_PIECEWISE" in done.stderr
