"""Which tokens of a draft model are computed, and which of its blocks count as filled."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from shmllm.core.plan import BlockAppend, NewRequest, StepPlan
from shmllm.params.sampling import SamplingParams
from shmllm.worker.batch import InputBatch
from shmllm.worker.draft_model import DraftModel
from shmllm.worker.step_inputs import StepInputs

BLOCK_SIZE, NUM_BLOCKS, MAX_TOKENS = 4, 32, 10
FIRST_DRAFTED = 90


class RecordedSteps:
    """Samples FIRST_DRAFTED and the following numbers, and hands them over in `finish`.

    Attributes:
        steps: (rows, positions, whether the tokens are drafted ones; None without a sample) of each
            step.
    """

    def __init__(self, batch: InputBatch) -> None:
        self.steps: list[tuple[list[int], list[int], bool | None]] = []
        self._batch = batch
        self._num_sampled = 0
        self._pending: list[tuple[StepInputs, range]] = []

    def compute(self, inputs: StepInputs) -> None:
        assert not len(inputs.sample_rows)
        self.steps.append((inputs.rows.tolist(), inputs.positions.tolist(), None))

    def sample(self, inputs: StepInputs, are_drafted: bool) -> None:
        self.steps.append((inputs.rows.tolist(), inputs.positions.tolist(), are_drafted))
        begin = FIRST_DRAFTED + self._num_sampled
        self._num_sampled += len(inputs.rows)
        self._pending.append((inputs, range(begin, begin + len(inputs.rows))))

    def finish(self) -> None:
        for inputs, tokens in self._pending:
            self._batch.token_ids[inputs.sample_rows, inputs.sample_positions] = tokens
        self._pending = []


class Drafting:
    """A drafter of requests, and the steps of its model."""

    def __init__(self) -> None:
        self.batch = InputBatch(4, 40, BLOCK_SIZE, 100, max_drafts=8)
        self._steps = RecordedSteps(self.batch)
        self._drafter = DraftModel(self._steps, self.batch, 0, NUM_BLOCKS, MAX_TOKENS)

    @property
    def steps(self) -> list[tuple[list[int], list[int], bool | None]]:
        """Those of the last step of the large model."""
        return self._steps.steps

    def add(self, row: int, num_tokens: int, blocks: Sequence[int], num_hit: int = 0) -> None:
        """Run a step that computes a new request's tokens behind a hit of the prefix cache."""
        count = num_tokens - num_hit
        plan = StepPlan(1, rows=[row], starts=[num_hit], counts=[count], samples=[0])
        tokens, params = list(range(num_tokens)), SamplingParams()
        plan.new_requests = [NewRequest(row, tokens, [list(blocks)], params, 0, 0, ())]
        self._run(plan, None)
        assert not self.steps

    def step(
        self,
        drafts: dict[int, tuple[int, int]],
        counts: list[int],
        append: tuple[int, int, int] | None = None,
    ) -> list[list[int]]:
        """Run a step with drafts, and return them.

        Args:
            drafts: by row, the position of the last known token, and the number of drafts.
            counts: how many tokens each row gets.
            append: a row, the index of a new block in its table, and the block.
        """
        plan = StepPlan(2, samples=list(range(len(drafts))))
        for row, (last, size) in drafts.items():
            plan.drafts[len(plan.rows)] = [-1] * size
            plan.rows.append(row)
            plan.starts.append(last)
            plan.counts.append(1 + size)
        if append is not None:
            row, first, block = append
            plan.block_appends = [BlockAppend(row, [first], [[block]])]
        self._run(plan, counts)
        return [list(tokens) for tokens in plan.drafts.values()]

    def _run(self, plan: StepPlan, counts: list[int] | None) -> None:
        self._steps.steps = []
        plan.num_tokens = sum(plan.counts)
        plan.num_sampled = plan.num_tokens if counts else len(plan.samples)
        self.batch.update(plan)
        self._drafter.draft(plan)
        inputs = self.batch.inputs(plan)
        self._drafter.follow(plan, inputs, torch.empty(0), counts)


def test_drafts_follow_the_tokens_before_them() -> None:
    drafting = Drafting()
    drafting.add(2, 5, [1, 2])
    assert drafting.step({2: (5, 3)}, [1]) == [[90, 91, 92]]
    computed = [([2], [0, 1, 2, 3, 4, 5], False), ([2], [6], True), ([2], [7], True)]
    assert drafting.steps == computed
    assert drafting.batch.token_ids[2, 6:9].tolist() == [90, 91, 92]


@pytest.mark.parametrize(
    ("count", "computed"),
    [(1, [6]), (2, [7]), (3, [8]), (4, [8, 9])],
    ids=["none right", "one right", "two right", "all right"],
)
def test_what_was_computed_of_wrong_drafts_is_computed_again(
    count: int, computed: list[int]
) -> None:
    drafting = Drafting()
    drafting.add(0, 5, [1, 2, 3])
    drafting.step({0: (5, 3)}, [count])
    drafting.step({0: (5 + count, 1)}, [1])
    assert drafting.steps == [([0], computed, False)]


def test_requests_with_fewer_drafts_leave_a_step() -> None:
    drafting = Drafting()
    drafting.add(0, 2, [1])
    drafting.add(3, 1, [2])
    assert drafting.step({0: (2, 1), 3: (1, 2)}, [1, 1]) == [[90], [91, 92]]
    assert drafting.steps == [([0, 3], [0, 1, 2, 0, 1], False), ([3], [2], True)]


def test_what_was_missed_is_computed_in_steps_of_the_token_budget() -> None:
    drafting = Drafting()
    drafting.add(0, 25, range(1, 8))
    drafting.add(1, 5, [10, 11])
    drafting.step({0: (25, 1), 1: (5, 1)}, [1, 1])
    assert drafting.steps == [
        ([0], list(range(10)), None),
        ([0], list(range(10, 20)), None),
        ([0], list(range(20, 25)), None),
        ([0, 1], [25, 0, 1, 2, 3, 4, 5], False),
    ]


def test_a_prefix_that_it_has_computed_is_not_computed_again() -> None:
    drafting = Drafting()
    drafting.add(0, 9, [1, 2, 3])
    drafting.step({0: (9, 1)}, [1])
    drafting.add(1, 9, [1, 2, 4], num_hit=8)
    drafting.step({1: (9, 1)}, [1])
    assert drafting.steps == [([1], [8, 9], False)]


def test_a_prefix_that_only_the_large_model_has_computed_is_computed() -> None:
    drafting = Drafting()
    drafting.add(0, 9, [1, 2, 3])
    drafting.add(1, 9, [1, 2, 4], num_hit=8)
    drafting.step({1: (9, 1)}, [1])
    assert drafting.steps == [([1], list(range(10)), False)]


def test_a_block_that_was_allocated_again_is_empty() -> None:
    drafting = Drafting()
    drafting.add(0, 9, [1, 2, 3])
    drafting.step({0: (9, 1)}, [1])
    drafting.add(1, 4, [5])
    drafting.step({1: (4, 1)}, [1], append=(1, 1, 2))
    drafting.add(2, 9, [1, 2, 4], num_hit=8)
    drafting.step({2: (9, 1)}, [1])
    assert drafting.steps == [([2], [4, 5, 6, 7, 8, 9], False)]
