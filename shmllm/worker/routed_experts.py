"""RoutedExperts: remembers the experts of every token in the KV cache, to report them.

A token's experts lie where its keys and values do, in the blocks of a group of layers that keeps
all tokens. So the prefix cache keeps both, and a request that is preempted finds both again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shmllm.core.kv_groups import FullAttention, KVGroup
from shmllm.core.plan import StepPlan
from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.widths import routed_shape
from shmllm.outputs.columns import Piece
from shmllm.outputs.routed_experts import RoutedShape
from shmllm.worker.arrays import LongArray
from shmllm.worker.batch import InputBatch, StepInputs


def torch_dtype(shape: RoutedShape) -> torch.dtype:
    """Return the dtype of a tensor with the bytes of ``shape.dtype``."""
    return torch.uint8 if shape.dtype.itemsize == 1 else torch.int16


class _Report(NamedTuple):
    """Tokens of a request whose experts are reported behind a step.

    row: the row of the request.
    first: the position of the first token.
    slots: the slots of the tokens in the KV cache.
    num_drafts: how many of the tokens, the last ones, were drafted.
    """

    row: int
    first: int
    slots: LongArray
    num_drafts: int


class ExpectedExperts(NamedTuple):
    """What a step adds.

    slots: (T,) int64, the slots of its tokens.
    reports: what is reported behind it, for each of the plan's `samples`.
    """

    slots: LongArray
    reports: list[_Report]


class RoutedExperts:
    """The experts of the tokens in the KV cache.

    Args:
        shape: the experts of one token.
        groups: the groups of layers of the KV cache.
        num_slots: the number of tokens that the cache has room for.
        batch: the running requests.

    Raises:
        EngineStartError: no group of layers keeps all tokens of a request.
    """

    def __init__(
        self, shape: RoutedShape, groups: Sequence[KVGroup], num_slots: int, batch: InputBatch
    ) -> None:
        found = (i for i, group in enumerate(groups) if group.rule == FullAttention())
        self._group = next(found, -1)
        if self._group < 0:
            raise EngineStartError(
                "enable_return_routed_experts needs layers that keep all tokens of a request, and "
                "this model's forget those behind their windows: pass "
                "disable_hybrid_kv_cache_manager=True, too"
            )
        self._shape = shape
        self._num_slots = num_slots
        self._batch = batch
        self._next = np.zeros(batch.block_tables.shape[1], np.int64)  # to be reported, by row
        self._of_slots: npt.NDArray[Any] | None = None

    @property
    def workspace_bytes(self) -> int:
        """See `memory_owners.Workspace`."""
        return 0 if self._of_slots is None else self._of_slots.nbytes

    def drop_workspace(self) -> None:
        """See `memory_owners.Workspace`."""
        self._of_slots = None

    def expect(self, plan: StepPlan, inputs: StepInputs) -> ExpectedExperts:
        """Say what a step adds, before the batch is changed for the next one.

        Args:
            plan: the plan of the step.
            inputs: its inputs.
        """
        for request in plan.new_requests:
            self._next[request.row] = request.num_routed
        reports = []
        for index in plan.samples:
            row, num_drafts = plan.rows[index], len(plan.drafts.get(index, ()))
            first, end = int(self._next[row]), int(inputs.context_lens[index])
            slots = self._batch.slots_of(row, first, end)[self._group]
            reports.append(_Report(row, first, slots, num_drafts))
            self._next[row] = end
        return ExpectedExperts(inputs.slot_mapping[self._group].copy(), reports)

    def add(
        self, expected: ExpectedExperts, chosen: npt.NDArray[Any], counts: Sequence[int] | None
    ) -> list[Piece]:
        """Remember the experts of a step's tokens. Returns what each of the plan's `samples` has to
        report: the experts of its tokens up to the one behind which a token was sampled.

        Args:
            expected: what `expect` returned.
            chosen: the experts of the step's tokens, (T, mixtures, top_k), or any array with the
                bytes of that.
            counts: how many tokens were sampled for each of the `samples`; None: one each.
        """
        if self._of_slots is None:
            self._of_slots = np.zeros((self._num_slots, *self._shape.of_token), self._shape.dtype)
        chosen = chosen.reshape(-1).view(self._shape.dtype)
        self._of_slots[expected.slots] = chosen.reshape(-1, *self._shape.of_token)
        size, pieces = self._shape.token_bytes, []
        for place, (row, first, slots, num_drafts) in enumerate(expected.reports):
            num_wrong = 0 if counts is None else num_drafts + 1 - counts[place]
            if num_wrong:  # no step is under way behind one with drafts
                slots = slots[: len(slots) - num_wrong]
                self._next[row] -= num_wrong
            pieces.append(Piece(size * first, self._of_slots[slots].tobytes()))
        return pieces


def make_routed_experts(
    model: ModelConfig, groups: Sequence[KVGroup], num_blocks: int, batch: InputBatch
) -> RoutedExperts | None:
    """Make what remembers the experts of tokens; None: nobody asked for them.

    Args:
        model: the model's configuration.
        groups: the groups of layers of the KV cache.
        num_blocks: the number of its blocks.
        batch: the running requests.

    Raises:
        EngineStartError: the model cannot report them.
    """
    if not model.returns_experts:
        return None
    shape = routed_shape(model)
    if shape is None:
        raise EngineStartError(
            f"enable_return_routed_experts is not possible for {model.architecture}, which has no "
            "experts: leave it out"
        )
    return RoutedExperts(shape, groups, num_blocks * batch.block_size, batch)
