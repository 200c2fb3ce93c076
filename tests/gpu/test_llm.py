"""`LLM` with an engine process on a GPU, compared with an engine on the CPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.further_layers import make, save_both

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
@pytest.mark.parametrize(
    "drafter", [{"method": "ngram"}, {"model": "tiny"}], ids=["ngram", "model"]
)
def test_drafts_change_texts_at_ties_only(
    drafter: dict[str, str], dtype: str, tie: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prints how many outputs differ, and how many drafts of the model for itself are wrong."""
    prompts = [prompt * 4 for prompt in PROMPTS]
    options = {"dtype": dtype, "kv_cache_memory_bytes": CACHE_BYTES}
    config = {**drafter, "num_speculative_tokens": 4, "adaptive": False}
    found, metrics = differing_at_ties("tiny", prompts, options, config, tie)
    drafts, accepted = metrics["draft_tokens"], metrics["accepted_tokens"]
    assert drafts > 20
    if "model" in drafter:
        assert accepted > 0.8 * drafts
    with capsys.disabled():
        print(f"{drafter}, {dtype}: {found}, {accepted} of {drafts} drafted tokens are right")


def test_drafts_of_a_further_layer_change_tokens_at_ties_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prints how many outputs differ."""
    directory = save_both(*make("deepseek_v3", scale=4.0), tmp_path)
    prompts = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (1, 5, 18, 40)]
    options = {"dtype": "float32", "kv_cache_memory_bytes": CACHE_BYTES}
    options |= {"skip_tokenizer_init": True}
    config = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}
    found, metrics = differing_at_ties(str(directory), prompts, options, config, 1e-3)
    assert metrics["draft_tokens"] > 20
    with capsys.disabled():
        print(f"mtp: {found}")


def differing_at_ties(
    model: str, prompts: list[Any], options: dict[str, Any], config: dict[str, Any], tie: float
) -> tuple[str, dict[str, Any]]:
    """Compare the greedy outputs of engines without and with drafts. A product of several rows may
    round otherwise than one of a single row: where an output differs first, both tokens are about
    equally likely.

    Returns:
        How many differ, in words, and the metrics of the engine with drafts.
    """
    params = SamplingParams(temperature=0, max_tokens=48, logprobs=5, ignore_eos=True)
    with LLM(model, device="cuda", **options) as llm:
        plain = [each.outputs[0] for each in llm.generate(prompts, params, use_tqdm=False)]
    with LLM(model, device="cuda", **options, speculative_config=config) as llm:
        assert not llm.facts.async_scheduling
        ours = [each.outputs[0] for each in llm.generate(prompts, params, use_tqdm=False)]
        metrics = dict(llm.get_metrics())
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
    return f"{num_different} of {len(plain)} outputs differ at a tie", metrics


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
