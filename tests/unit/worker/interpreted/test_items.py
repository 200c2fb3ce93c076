"""What images change in a model's steps, on the fake GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conformance.gpu_items import ItemsConformance, _inference_mode, items_models, make_steps
from support.fake_gpu import FakeGpu
from support.kernel_variants import seen_variants

__all__ = ["_inference_mode", "items_models"]


class TestItems(ItemsConformance):
    pass


@pytest.fixture
def launches_of_attention(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each launch of attention over more than decodes has ends."""
    from shmllm.worker.gpu import attention

    found: list[bool] = []
    launch = attention.paged_attention

    def paged_attention(*arguments: Any, ends: Any = None, **options: Any) -> None:
        found.append(ends is not None)
        launch(*arguments, ends=ends, **options)

    monkeypatch.setattr(attention, "paged_attention", paged_attention)
    return found


@pytest.mark.slow
def test_only_steps_with_images_have_ends(
    gpu_device: FakeGpu, items_models: Any, launches_of_attention: list[bool]
) -> None:
    steps = make_steps(gpu_device, items_models("gemma3")[1], "NONE", ())
    shown = []
    for work in ({0: 15}, {1: 9}, {0: 25, 1: 1}, {0: 1, 1: 1}):
        launches_of_attention.clear()
        steps.step(work)
        shown.append(list(launches_of_attention))
    assert shown == [[True] * 2, [False] * 2, [True] * 2, []]


@pytest.mark.slow
def test_nothing_is_compiled_in_steps(gpu_device: FakeGpu, items_models: Any) -> None:
    directory: Path = items_models("gemma3")[1]
    with seen_variants(lambda: gpu_device.is_capturing) as seen:
        steps = make_steps(gpu_device, directory, "FULL_DECODE_ONLY", (2,))
        before = set(seen)
        for work in ({0: 15}, {1: 9}, {0: 22, 1: 1}, {0: 3}, {0: 1, 1: 1}):
            steps.step(work)
        assert not set(seen) - before
