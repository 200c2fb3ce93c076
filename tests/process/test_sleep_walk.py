"""Random sequences of sleeping, waking, updating, pausing and generating, against a model.

The long sequences take minutes:  tools/test -m slow tests/process/test_sleep_walk.py -s
"""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.reference_models import make_model, make_prompts
from support.sleep_walk import GREEDY, Walk

from shmllm import LLM

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

Model = tuple[Path, list[dict[str, torch.Tensor]], list[list[int]], list[list[list[int]]]]


def make(kind: str, directory: Path) -> Model:
    """A model directory, two sets of weights, prompts, and transformers' tokens for each."""
    reference = make_model(kind, directory, num_hidden_layers=2)
    prompts = make_prompts(4096, 60)[5:8]  # some share whole blocks
    sets, expected = [], []
    for seed in range(2):
        if seed:
            torch.manual_seed(seed)
            with torch.no_grad():
                for parameter in reference.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.05)
        sets.append({n: p.detach().clone() for n, p in reference.named_parameters()})
        expected.append([greedy(reference, prompt) for prompt in prompts])
    return directory, sets, prompts, expected


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Model:
    return make("qwen3", tmp_path_factory.mktemp("model"))


def greedy(reference: Any, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(GREEDY.max_tokens or 0):
            ids.append(int(reference(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def walk(model: Model, num_steps: int, seed: int, multiprocess: bool, **options: Any) -> None:
    directory, sets, prompts, expected = model
    logging.getLogger("shmllm.frontend.sleeping").setLevel(logging.ERROR)
    options |= {"kv_cache_memory_bytes": 2**24, "multiprocess": multiprocess}
    with LLM(str(directory), **options) as llm:
        walker = Walk(llm, sets, prompts, expected, random.Random(seed))
        print(f"\nseed {seed}, multiprocess={multiprocess}")
        walker.run(num_steps)
    times = sorted(walker.refusals_s)
    print(
        f"{sum(walker.steps.values()):,} steps, {len(times):,} refusals; largest "
        f"{1e3 * times[-1]:.1f} ms, median {1e3 * times[len(times) // 2]:.1f} ms; "
        f"{dict(walker.steps.most_common())}"
    )


@pytest.mark.parametrize("multiprocess", [False, True], ids=["same process", "process"])
def test_a_short_walk(model: Model, multiprocess: bool) -> None:
    walk(model, 250, seed=5, multiprocess=multiprocess)


def test_a_short_walk_with_a_module_of_transformers(tmp_path: Path) -> None:
    """The module has the weights of all experts in one tensor, files have a tensor for each."""
    walk(make("qwen3_moe", tmp_path), 80, 5, multiprocess=False, model_impl="transformers")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_steps", "multiprocess"), [(10_000, False), (1_000, True)], ids=["same process", "process"]
)
def test_a_long_walk(model: Model, num_steps: int, multiprocess: bool) -> None:
    walk(model, num_steps, random.randrange(10**6), multiprocess)
