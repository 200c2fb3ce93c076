"""Tests a shared expert within other launches under Triton's interpreter: what programs of its
parts read beside its weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conformance import shared_expert_kernels
from conformance.expert_kernels import placed
from conformance.shared_expert_kernels import SharedExpertConformance, case_of
from support.guarded_memory import GuardedMemory, check_in_a_child

from shmllm_kernels.gpu.expert_sums import WeightedSum
from shmllm_kernels.gpu.packings import Rows
from shmllm_kernels.gpu.pairs import SortedPairs


class TestSharedExpert(SharedExpertConformance):
    pass


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("kind", [None, "int4"])
def test_nothing_beside_choices_blocks_and_weights_is_read(
    draw, dtype, monkeypatch, kind, tokens, is_before
):
    """The programs of parts have no choice and no block."""
    case, memory = case_of(draw, dtype, tokens, 2, kind, "silu", True), GuardedMemory()

    def guard(tensor: torch.Tensor) -> torch.Tensor:
        return memory.guard(tensor, is_before)

    def guard_rows(rows: Rows) -> Rows:
        if isinstance(rows, torch.Tensor):
            return guard(rows)
        return rows._replace(codes=guard(rows.codes), parameters=guard(rows.parameters))

    def guarded_room(*sizes: object) -> SortedPairs:
        room = placed(*sizes)
        return replace(
            room, pairs=guard(room.pairs), blocks=guard(room.blocks),
            num_blocks=guard(room.num_blocks),
        )  # fmt: skip

    def run() -> None:
        case.run(case.shared, WeightedSum(guard(out), case.weights, None, case.gates))

    monkeypatch.setattr(shared_expert_kernels, "placed", guarded_room)
    case.matrices = [guard_rows(each) for each in case.matrices]
    gate_up, down = case.matrices[2:]
    case.shared = replace(case.shared, gate_up=gate_up, down=down)
    case.ids, case.weights = guard(case.ids), guard(case.weights)
    case.x, case.gates = guard(case.x), guard(case.gates.contiguous())
    out = torch.zeros_like(case.x)
    try:
        check_in_a_child(run)
    finally:
        memory.free()
