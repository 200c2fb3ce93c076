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
from torch import Tensor

from shmllm.config.routed_experts import RoutedInfo
from shmllm.core.kv_groups import FullAttention, KVGroup
from shmllm.core.plan import StepPlan
from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.layers import Allocator
from shmllm.outputs.columns import Piece
from shmllm.worker.arrays import LongArray
from shmllm.worker.batch import InputBatch
from shmllm.worker.step_inputs import StepInputs


def routed_info(config: ModelConfig) -> RoutedInfo | None:
    """Return the form of the experts that a model reports; None: it reports none."""
    own = {
        index: layer.mlp.mixtures[0]
        for index, layer in enumerate(config.layers)
        if layer.mlp is not None and layer.mlp.mixtures
    }
    if not config.returns_experts or not own:
        return None
    if any(each.tokens is not None for each in own.values()):
        raise EngineStartError(
            f"enable_return_routed_experts is not possible for {config.architecture}: its layers "
            "have experts for text and others for images; leave it out"
        )
    top_k = max(each.top_k for each in own.values())
    num_experts = max(each.num_choices for each in own.values())
    return RoutedInfo(tuple(own), config.num_layers, top_k, num_experts)


def allocate_routed(allocate: Allocator, config: ModelConfig, max_tokens: int) -> Tensor | None:
    """Allocate what a step writes the experts of its tokens to, (max_tokens, mixtures, top_k) in
    one or two bytes each; None: it writes none."""
    info = routed_info(config)
    if info is None:
        return None
    return allocate((max_tokens, *info.shape), torch.uint8 if info.item_bytes == 1 else torch.int16)


class ExpectedExperts(NamedTuple):
    """What a step adds, and what is reported behind it for each of the plan's `samples`: the tokens
    of a request that no step has reported.

    slots: (T,) int64, the slots of the step's tokens in the KV cache.
    rows: the rows of the requests.
    firsts: the position of the first token of each.
    ends: the position behind the last one, drafted ones included.
    reported: int64, the slots of all these tokens, request by request.
    num_drafts: how many of the last tokens of each were drafted.
    """

    slots: LongArray
    rows: LongArray
    firsts: list[int]
    ends: list[int]
    reported: LongArray
    num_drafts: list[int]


class RoutedExperts:
    """The experts of the tokens in the KV cache.

    Args:
        info: the form of the experts of one token.
        groups: the groups of layers of the KV cache.
        num_slots: the number of tokens that the cache has room for.
        batch: the running requests.

    Raises:
        EngineStartError: no group of layers keeps all tokens of a request.
    """

    def __init__(
        self, info: RoutedInfo, groups: Sequence[KVGroup], num_slots: int, batch: InputBatch
    ) -> None:
        found = (i for i, group in enumerate(groups) if group.rule == FullAttention())
        self._group = next(found, -1)
        if self._group < 0:
            raise EngineStartError(
                "enable_return_routed_experts needs layers that keep all tokens of a request, and "
                "this model's forget those behind their windows: pass "
                "disable_hybrid_kv_cache_manager=True, too"
            )
        self._info = info
        self._dtype = np.dtype(f"u{info.item_bytes}")
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
        samples = np.array(plan.samples, np.int64)
        rows, ends = inputs.rows[samples], inputs.context_lens[samples]
        firsts, slots = self._next[rows], inputs.slot_mapping[self._group].copy()
        self._next[rows] = ends
        if (ends - firsts == 1).all():
            reported = slots[inputs.sample_tokens]
        else:
            spans = zip(rows, firsts, ends, strict=True)
            each = [self._batch.slots_of(*span)[self._group] for span in spans]
            reported = np.concatenate(each)
        num_drafts = [len(plan.drafts.get(index, ())) for index in plan.samples]
        return ExpectedExperts(slots, rows, firsts.tolist(), ends.tolist(), reported, num_drafts)

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
            self._of_slots = np.zeros((self._num_slots, *self._info.shape), self._dtype)
        chosen = chosen.reshape(-1).view(self._dtype)
        self._of_slots[expected.slots] = chosen.reshape(-1, *self._info.shape)
        data, begin, pieces = self._of_slots[expected.reported].tobytes(), 0, []
        size = self._info.token_bytes
        for first, last in zip(expected.firsts, expected.ends, strict=True):
            end = begin + size * (last - first)
            pieces.append(Piece(size * first, data[begin:end]))
            begin = end
        return pieces if counts is None else self._without_wrong(expected, pieces, counts)

    def _without_wrong(
        self, expected: ExpectedExperts, pieces: list[Piece], counts: Sequence[int]
    ) -> list[Piece]:
        """Return the pieces without drafted tokens that were wrong, whose positions the next step
        computes again: no step is under way behind one with drafts."""
        right, size = [], self._info.token_bytes
        sampled = zip(expected.rows, expected.num_drafts, counts, pieces, strict=True)
        for row, num_drafts, count, piece in sampled:
            num_wrong = num_drafts + 1 - count
            self._next[row] -= num_wrong
            right.append(Piece(piece.offset, piece.data[: len(piece.data) - size * num_wrong]))
        return right


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
    info = routed_info(model)
    if info is None:
        raise EngineStartError(
            f"enable_return_routed_experts is not possible for {model.architecture}, which has no "
            "experts: leave it out"
        )
    return RoutedExperts(info, groups, num_blocks * batch.block_size, batch)
