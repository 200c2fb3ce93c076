"""The tests of what images change in a model's steps on a device, compared with transformers: their
tokens' positions on three axes, and attention up to an image's end.

The images are tokens of text here. Each folder has a fixture `gpu_device`: the fake GPU, or a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gpu_steps import GpuSteps
from support.item_models import (
    ITEMS,
    LENGTH,
    MADE,
    items_config,
    make_items_model,
    wanted_logits,
)
from support.variants import slow

from shmllm.config.graphs import CudaGraphMode

NONE, FULL = CudaGraphMode.NONE, CudaGraphMode.FULL
TOLERANCE = 2e-5
SHORT = 9
"""The length of the prompt without images."""
STEPS = [{0: 15}, {1: SHORT, 0: 22}, {0: 3, 1: 1}, {0: 1, 1: 1}, {0: 1, 1: 1}, {1: 1}, {0: 1}]
"""By row, how many tokens steps compute; no image is cut."""


@pytest.fixture(autouse=True, scope="module")
def _inference_mode() -> Any:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def items_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """Return random models by their names in MADE, and where they are."""
    made: dict[str, tuple[Any, Path]] = {}

    def get(name: str) -> tuple[Any, Path]:
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            made[name] = make_items_model(name, directory), directory
        return made[name]

    return get


def make_steps(gpu_device: Any, directory: Path, mode: str, sizes: tuple[int, ...]) -> GpuSteps:
    steps = GpuSteps(
        gpu_device, directory, mode, sizes, max_tokens=48, config=items_config(directory)
    )
    steps.program.capture()
    steps.items = {0: ITEMS}
    for row, length in ((0, LENGTH - 4), (1, SHORT)):
        steps.add(row, [(7 * row + 3 * index) % 90 + 5 for index in range(length)])
    return steps


class ItemsConformance:
    @pytest.mark.parametrize(
        "mode", ["FULL_AND_PIECEWISE", *map(slow, ("NONE", "FULL", "PIECEWISE"))]
    )
    @pytest.mark.parametrize("name", [name if name == "gemma3" else slow(name) for name in MADE])
    def test_logits_equal_those_of_transformers(self, gpu_device, items_models, name, mode) -> None:
        """Requests with and without images share steps, and prompts begin beside decodes. Replays
        equal launches bit for bit."""
        model, directory = items_models(name)
        steps = make_steps(gpu_device, directory, mode, (2, 32))
        for work in STEPS:
            step = steps.prepare(work)
            if step.mode is FULL and not step.descriptor.uniform:
                step.max_query_len = step.descriptor.num_tokens  # as in the captured graph
            states = [(each, each.clone()) for each in steps.cache.states.values()]
            steps.poison()
            launched = steps.run(step, NONE)
            for each, content in states:
                each.copy_(content)
            steps.poison()
            replayed = steps.run(step)
            for one, other in zip(launched, replayed, strict=True):
                assert torch.equal(one, other)
            for row, logits in steps.finish(step, replayed[1]).items():
                tokens = steps.tokens[row][:-1]
                if row == 0 and len(tokens) < LENGTH - 4:
                    continue
                want = wanted_logits(name, model, tokens, steps.items.get(row, []))[-1]
                assert float((logits - want).abs().max() / want.abs().max()) < TOLERANCE
