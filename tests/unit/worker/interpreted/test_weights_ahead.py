"""Which weights the attention of a step asks the L2 cache for, on the fake GPU."""

from __future__ import annotations

from typing import Any

import pytest
from conformance.gpu_program import _inference_mode, add_prompts, models
from support.gpu_steps import GpuSteps

from shmllm.models.attention import Attention
from shmllm.models.mlp import MLP
from shmllm.worker.gpu import attention, weights_ahead
from shmllm_kernels.gpu.row_configs import AheadConfig

__all__ = ["_inference_mode", "models"]

pytestmark = pytest.mark.usefixtures("launches_only")

KIB = 40
"""More than the projection of attention has, and less than it and the next matrix."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What launches of attention ask for, on a device that could be asked."""
    found, launch = [], attention.decode_attention

    def decode_attention(*args: Any, ahead: Any, **options: Any) -> None:
        found.append(ahead)
        launch(*args, **options)

    monkeypatch.setattr(attention, "decode_attention", decode_attention)
    monkeypatch.setattr(weights_ahead, "has_dependent_launches", lambda device: True)
    monkeypatch.setattr(weights_ahead, "ahead_config", lambda *sizes: AheadConfig(KIB))
    return found


def decode(steps: GpuSteps, num_requests: int) -> None:
    steps.run(steps.prepare(dict.fromkeys(range(num_requests), 1)))


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_attention_asks_for_what_is_read_behind_it(gpu_device, models, asked, name) -> None:
    """Of an MLP without gates the first rows, and nothing behind the projection of a mixture."""
    steps = GpuSteps(gpu_device, models(name)[1])
    add_prompts(steps, dict.fromkeys(range(3), 3))
    steps.step(dict.fromkeys(range(3), 2))
    asked.clear()
    decode(steps, 3)
    layers = steps.model.layers
    assert len(asked) == len(layers)
    for layer, ahead in zip(layers, asked, strict=True):
        assert isinstance(layer.mixer, Attention)
        output = layer.mixer.o_proj.weight
        left, [(first, size), *others] = 1024 * KIB, ahead.parts
        assert (first.data_ptr(), size) == (output.data_ptr(), min(left, output.nbytes))
        left -= size
        if not isinstance(layer.mlp, MLP):
            assert [size for _, size in others] == [0, 0]
            continue
        matrix = layer.mlp.gate_up_proj.weight
        halves = matrix.chunk(2) if layer.mlp.spec.gated else [matrix]
        for half, (part, size) in zip(halves, others, strict=False):
            assert part.data_ptr() == half.data_ptr()
            assert size == min(left // len(halves), half.nbytes) // 16 * 16 > 0


def test_steps_of_many_tokens_ask_for_nothing(gpu_device, models, asked) -> None:
    """They read as fast as memory is anyway."""
    steps = GpuSteps(gpu_device, models("llama")[1], max_requests=9)
    add_prompts(steps, dict.fromkeys(range(9), 3))
    steps.step(dict.fromkeys(range(9), 2))
    asked.clear()
    decode(steps, 9)
    assert asked
    assert not any(asked)


def test_nothing_is_asked_for_where_that_has_not_been_measured(
    gpu_device, models, asked, monkeypatch
) -> None:
    monkeypatch.setattr(weights_ahead, "ahead_config", lambda *sizes: AheadConfig(0))
    steps = GpuSteps(gpu_device, models("llama")[1])
    add_prompts(steps, {0: 3})
    steps.step({0: 2})
    asked.clear()
    decode(steps, 1)
    assert asked == [None] * len(steps.model.layers)
