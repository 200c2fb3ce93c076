"""Tests which shared experts a GPU computes in the launches of the other experts."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor

from shmllm.models.experts import MoE
from shmllm.models.layers import Storage
from shmllm.models.matrices import MixedMatrix
from shmllm.models.specs import MLPSpec, MoESpec
from shmllm.worker.gpu.experts import ExpertOps
from shmllm.worker.gpu.group import NoMeetings
from shmllm.worker.gpu.inputs import GpuInputs
from shmllm.worker.gpu.lora import GpuLora
from shmllm.worker.gpu.products import GpuProducts

HIDDEN = 16
SPEC = MoESpec(num_experts=3, top_k=2, inner=24, shared=MLPSpec(inner=48))


class Meetings(NoMeetings):
    """Stands in for those of ranks, of whose products some are parts of sums."""

    def __init__(self, *partial: object) -> None:
        self._partial = partial

    def is_partial(self, weight: object) -> bool:
        return any(weight is each for each in self._partial)


def mixture(spec: MoESpec) -> MoE:
    return MoE(
        HIDDEN, spec, Storage(lambda shape, dtype: torch.zeros(shape, dtype=dtype), torch.float32)
    )


def parts(moe: MoE, meetings: NoMeetings | None = None, lora: GpuLora | None = None) -> int | None:
    """The number of parts of a shared expert; None: it has launches of its own."""
    ops = ExpertOps(cast(GpuInputs, None), {}, cast(GpuProducts, None), lora, meetings)
    found = ops.joined_shared(moe)
    return None if found is None else found.parts


def test_a_shared_expert_as_wide_as_two_others() -> None:
    assert parts(mixture(SPEC)) == 2


@pytest.mark.parametrize(
    "spec",
    [
        replace(SPEC, shared=None),
        replace(SPEC, shared=MLPSpec(inner=40)),
        replace(SPEC, shared=MLPSpec(inner=48, activation="gelu_tanh")),
        replace(SPEC, shared=MLPSpec(inner=48, gated=False)),
        replace(SPEC, activation="relu_squared"),
        replace(SPEC, bias=True),
        replace(SPEC, shared=MLPSpec(inner=48, bias=True)),
    ],
    ids=["none", "width", "activation", "gate", "experts' activation", "experts' bias", "bias"],
)
def test_others_have_launches_of_their_own(spec: MoESpec) -> None:
    assert parts(mixture(spec)) is None


def test_matrices_of_several_formats_have_launches_of_their_own() -> None:
    moe = mixture(SPEC)
    assert moe.shared is not None
    weight = moe.shared.gate_up_proj.weight
    assert isinstance(weight, Tensor)
    moe.shared.gate_up_proj.weight = MixedMatrix([*weight.chunk(2)])
    assert parts(moe) is None


def test_with_adapters_it_has_launches_of_its_own() -> None:
    assert parts(mixture(SPEC), lora=cast(GpuLora, object())) is None


def test_it_is_a_part_of_a_sum_where_the_others_are() -> None:
    moe = mixture(SPEC)
    assert moe.shared is not None
    both = moe.down_proj.weight, moe.shared.down_proj.weight
    assert parts(moe, Meetings(*both)) == 2
    assert parts(moe, Meetings(both[0])) is None
    assert parts(moe, Meetings(both[1])) is None
