"""The tests of steps whose products are launches for many rows: the logits equal transformers'.

Each folder has a fixture `gpu_device`: the fake GPU, or a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance.gpu_program import (
    FULL,
    NONE,
    TOLERANCES,
    add_prompts,
    assert_replay_equals_launch,
)
from support.gpu_steps import GpuSteps
from support.model_helpers import reference_logits
from support.variants import slow

from shmllm.models.mlp import MLP
from shmllm.worker.gpu import many_products, program
from shmllm_kernels.gpu.row_configs import ManyRowsConfig

TILE = ManyRowsConfig(64, 32, 32, 4, 2, 1, is_default=1)
LEAST = 9
REQUESTS = 10
SIZE = 12
"""The tokens of the graph that decodes replay."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The launches, as rows, matrix and activation, of a table that has them from 9 rows on."""
    found, launch = [], many_products.multiply_rows

    def multiply_rows(out: Any, x: Any, weight: Any, *args: Any, **options: Any) -> None:
        found.append((len(x), weight, args[-1]))
        launch(out, x, weight, *args, **options)

    monkeypatch.setattr(many_products, "multiply_rows", multiply_rows)
    monkeypatch.setattr(many_products, "default_tiles", lambda device: [TILE])
    monkeypatch.setattr(many_products, "many_rows_config", lambda *sizes: TILE)
    monkeypatch.setattr(many_products, "LEAST_COLUMNS", 1)
    for module in (many_products, program):
        monkeypatch.setattr(module, "LEAST_ROWS", LEAST)
    return found


class ManyRowsStepsConformance:
    @pytest.mark.parametrize("name", ["llama", *map(slow, ("gpt2", "gemma2", "mixtral"))])
    @pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", slow("FULL_AND_PIECEWISE")])
    def test_the_logits_equal_those_of_transformers(
        self, gpu_device, models, launched, name, mode, dtype
    ) -> None:
        reference, directory = models(name)
        sizes = {"max_requests": SIZE, "max_tokens": 32}
        steps = GpuSteps(gpu_device, directory, mode, (SIZE,), dtype=dtype, **sizes)
        steps.program.capture()
        add_prompts(steps, dict.fromkeys(range(REQUESTS), 3), seed=5)
        launched.clear()
        prompts = steps.prepare(dict.fromkeys(range(REQUESTS), 3))
        if mode == "FULL_DECODE_ONLY":
            assert prompts.mode is NONE
        self._compare(steps, reference, steps.finish(prompts, steps.run(prompts)[1]), dtype)
        if dtype is torch.float32:
            assert not launched
            return
        decodes = steps.prepare(dict.fromkeys(range(REQUESTS), 1))
        assert decodes.mode is FULL
        launched.clear()
        self._compare(steps, reference, assert_replay_equals_launch(steps, decodes), dtype)
        self._check(steps, launched)

    def _compare(self, steps, reference, found, dtype) -> None:
        assert len(found) == REQUESTS
        for row, logits in found.items():
            want = reference_logits(reference, steps.tokens[row][:-1])[-1]
            difference = float((logits - want).abs().max() / want.abs().max())
            assert difference < TOLERANCES[dtype]

    def _check(self, steps, launched) -> None:
        """One step was launched and one replayed: each matrix has had one launch, with the
        activation of an MLP."""
        places = [weight.data_ptr() for _, weight, _ in launched]
        assert len(set(places)) == len(places)
        assert {rows for rows, _, _ in launched} == {SIZE}
        head = steps.model.embedding.head.weight.data_ptr()
        assert head in places
        activations = {weight.data_ptr(): kind for _, weight, kind in launched}
        for layer in steps.model.layers:
            assert layer.mixer.o_proj.weight.data_ptr() in places
            if isinstance(layer.mlp, MLP):
                kind = activations[layer.mlp.gate_up_proj.weight.data_ptr()]
                assert kind.name == layer.mlp.spec.activation
                assert kind.is_gated == layer.mlp.spec.gated

    def test_deterministic_steps_have_none(self, gpu_device, models, launched) -> None:
        """Parts of tiles depend on the number of rows."""
        sizes = {"max_requests": SIZE, "max_tokens": 32, "dtype": torch.float16}
        steps = GpuSteps(gpu_device, models("llama")[1], deterministic=True, **sizes)
        add_prompts(steps, dict.fromkeys(range(REQUESTS), 2))
        steps.step(dict.fromkeys(range(REQUESTS), 2))
        assert not launched

    def test_fewer_and_more_rows_have_none(self, gpu_device, models, launched, monkeypatch) -> None:
        monkeypatch.setattr(many_products, "MOST_ROWS", 16)
        sizes = {"max_requests": SIZE, "max_tokens": 32, "dtype": torch.float16}
        steps = GpuSteps(gpu_device, models("llama")[1], **sizes)
        add_prompts(steps, dict.fromkeys(range(REQUESTS), 3))
        for work, are_many in (({0: 3, 1: 3}, 0), ({2: 3, 3: 3, 4: 3}, 1), (MORE, 0)):
            launched.clear()
            steps.step(work)
            of_layers = [weight for rows, weight, _ in launched if rows > SIZE - 4]
            assert bool(of_layers) == are_many


MORE = {5: 3, 6: 3, 7: 3, 8: 3, 9: 3, 0: 1, 1: 1}
"""17 tokens."""
