"""The tests of the kernels of adapters of experts: they equal experts with merged weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conformance.attention_kernels import product_of_single_rows
from conformance.expert_kernels import SMALL, WIDE, placed
from conformance.lora_kernels import PLACES, tolerances, units_of
from support.kernel_helpers import assert_close, poisoned
from torch import Tensor

from shmllm_kernels.gpu.configs import ProductConfig
from shmllm_kernels.gpu.expert_lora import ExpertPlaces, PairAdapters, shrink_pairs
from shmllm_kernels.gpu.expert_sums import WeightedSum, combine
from shmllm_kernels.gpu.experts import down, gate_and_up
from shmllm_kernels.gpu.lora import StepUnits
from shmllm_kernels.gpu.pairs import sort_pairs
from shmllm_kernels.reference import moe as plain

UNUSED = (1, 2)
"""A place and an expert that its adapter does not change."""


def step_of(rows: list[int], device: torch.device) -> StepUnits:
    """The adapters of a step's tokens; see `units_of`."""
    step = units_of(rows, device, len(rows) + 3)
    step.places[: len(rows)] = torch.tensor(rows, dtype=torch.int32)
    return step


class Layer:
    """Random experts, and adapters of them at places."""

    def __init__(
        self, draw, dtype, activation: str, experts: int, hidden: int, inner: int, ranks: int
    ) -> None:
        self.activation, self.dtype, self.device = activation, dtype, draw.device
        width = inner if activation == "relu_squared" else 2 * inner
        self.weights = [
            draw.normal(experts, *shape, dtype=dtype, scale=shape[1] ** -0.5)
            for shape in ((width, hidden), (hidden, inner))
        ]
        self.places = [self._places(draw, ranks, *weight.shape) for weight in self.weights]

    def _places(self, draw, ranks: int, experts: int, columns: int, k: int) -> ExpertPlaces:
        a = draw.normal(PLACES, experts, ranks, k, dtype=self.dtype, scale=k**-0.5)
        scale = 0.5 * ranks**-0.5
        b = draw.normal(PLACES, experts, columns, ranks, dtype=self.dtype, scale=scale)
        is_used = torch.ones(PLACES, experts + 5, dtype=torch.int32, device=draw.device)
        is_used[UNUSED] = 0
        return ExpertPlaces(a, b, draw.uniform(PLACES, experts, ranks) + 0.5, is_used[:, :experts])

    def run(
        self, x: Tensor, ids: Tensor, weights: Tensor, step: StepUnits, config: ProductConfig
    ) -> Tensor:
        """Computes all tokens with the adapters of a step; returns [tokens, hidden]."""
        (tokens, top_k), hidden = ids.shape, x.shape[1]
        pairs = placed(tokens, top_k, len(self.weights[0]), self.device)
        sort_pairs(pairs, ids, len(self.weights[0]), config.block_m)
        ranks = self.places[0].a.shape[2]

        def memory(*shape: int) -> Tensor:
            return poisoned(*shape, dtype=self.dtype, device=self.device)

        first, last = (
            PairAdapters(memory(tokens * top_k, ranks), places, step, top_k)
            for places in self.places
        )
        activated = memory(tokens * top_k, self.weights[1].shape[2])
        shrink_pairs(first, x, pairs, config.block_m, True)
        gate_and_up(
            activated, x, self.weights[0], None, self.activation, top_k, pairs, config, first
        )
        rows = memory(tokens * top_k, hidden)
        shrink_pairs(last, activated, pairs, config.block_m, False)
        down(rows, activated, self.weights[1], None, top_k, pairs, config, last)
        out = memory(tokens, hidden)
        combine(WeightedSum(out, weights), rows)
        return out

    def merged(self, place: int) -> list[Tensor]:
        """The weights with those of the adapter at a place, in float64."""
        found = []
        for weight, places in zip(self.weights, self.places, strict=True):
            scaled = places.a[place].double() * places.scales[place].double()[..., None]
            change = places.b[place].double() @ scaled
            found.append(weight.double() + change * places.is_used[place][:, None, None])
        return found

    def expected(self, x: Tensor, ids: Tensor, weights: Tensor, rows: list[int]) -> Tensor:
        out = torch.empty_like(x)
        for token, place in enumerate(rows):
            one = slice(token, token + 1)
            own = [w.double() for w in self.weights] if place < 0 else self.merged(place)
            out[one] = plain.experts(
                x[one].double(), ids[one].long(), weights[one].double(), *own,
                activation=self.activation,
            ).to(x.dtype)  # fmt: skip
        return out


def chosen(draw, tokens: int, experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    ids = torch.stack([draw.permutation(experts)[:top_k].sort().values for _ in range(tokens)])
    return ids.int(), draw.uniform(tokens, top_k)


class ExpertLoraConformance:
    @pytest.mark.parametrize("activation", ["silu", "gpt_oss", "relu_squared"])
    @pytest.mark.parametrize(
        ("tokens", "experts", "top_k", "hidden", "inner", "ranks", "config"),
        [
            (1, 4, 2, 32, 16, 16, SMALL),
            (7, 5, 3, 40, 24, 3, SMALL),
            (40, 3, 1, 33, 50, 24, SMALL),
            (21, 6, 2, 64, 48, 32, WIDE),
        ],
    )
    def test_tokens_of_several_adapters_and_of_none(
        self, draw, dtype, tokens, experts, top_k, hidden, inner, ranks, config, activation
    ):
        layer = Layer(draw, dtype, activation, experts, hidden, inner, ranks)
        rows = [(2, -1, 0, 1, 0, 1, -1)[token % 7] for token in range(tokens)]
        x = draw.normal(tokens, hidden, dtype=dtype)
        ids, weights = chosen(draw, tokens, experts, top_k)
        found = layer.run(x, ids, weights, step_of(rows, draw.device), config)
        assert_close(found, layer.expected(x, ids, weights, rows), *tolerances(dtype))
        without = step_of(rows, draw.device)
        without.num_units.zero_()  # what an earlier step left of the others is garbage then
        base = layer.run(x, ids, weights, without, config)
        none = [token for token, place in enumerate(rows) if place < 0]
        assert torch.equal(found[none], base[none])
        for token, place in enumerate(rows):
            is_base = place < 0 or (place == UNUSED[0] and ids[token].tolist() == [UNUSED[1]])
            assert torch.equal(found[token], base[token]) == is_base

    def test_a_token_s_bits_do_not_depend_on_the_batch(self, draw, dtype, monkeypatch):
        monkeypatch.setattr(np, "matmul", product_of_single_rows)
        layer = Layer(draw, dtype, "silu", 4, 48, 24, 16)
        rows = [(0, -1, 2, 1)[token % 4] for token in range(20)]
        x = draw.normal(20, 48, dtype=dtype)
        ids, weights = chosen(draw, 20, 4, 2)
        whole = layer.run(x, ids, weights, step_of(rows, draw.device), SMALL)
        for token in (0, 1, 6, 19):
            one = slice(token, token + 1)
            step = step_of(rows[one], draw.device)
            assert torch.equal(layer.run(x[one], ids[one], weights[one], step, SMALL), whole[one])

    def test_padded_tokens_are_left_out(self, draw, dtype):
        layer = Layer(draw, dtype, "silu", 4, 32, 16, 16)
        x, rows = draw.normal(6, 32, dtype=dtype), [0, 2, 1]
        ids, weights = chosen(draw, 6, 4, 2)
        want = layer.expected(x[:3], ids[:3], weights[:3], rows)
        ids[3:], x[3:] = -1, torch.nan
        found = layer.run(x, ids, weights, step_of([*rows, 0, 2, 1], draw.device), SMALL)
        assert_close(found[:3], want, *tolerances(dtype))

    def test_wrong_arguments_are_refused(self, draw, dtype):
        layer = Layer(draw, dtype, "silu", 3, 16, 16, 16)
        x, ids = draw.normal(2, 16, dtype=dtype), chosen(draw, 2, 3, 1)[0]
        pairs = placed(2, 1, 3, draw.device)
        sort_pairs(pairs, ids, 3, 16)
        step, t = step_of([0, 1], draw.device), draw.normal(2, 16, dtype=dtype)
        for wrong_x, wrong_t, message in (
            (x[:, :15], t, "rows of k"),
            (x, t[:1], "memory for each pair"),
            (x.double(), t, "one dtype"),
        ):
            adapters = PairAdapters(wrong_t, layer.places[0], step, 1)
            with pytest.raises(AssertionError, match=message):
                shrink_pairs(adapters, wrong_x, pairs, 16, True)
