"""`InputBatch` turns plans into the arrays of a step."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from shmllm.core.plan import BlockAppend, NewRequest, StepPlan
from shmllm.params.sampling import SamplingParams
from shmllm.worker.batch import SAMPLED_FOR_ROW, InputBatch
from shmllm.worker.step_inputs import StepInputs

BLOCK_SIZE = 4


@pytest.fixture
def batch():
    return InputBatch(num_rows=4, max_model_len=20, block_size=BLOCK_SIZE, vocab_size=100)


def new_request(row, token_ids, block_ids, *, seed=0, min_position=0, forbidden_ids=(), **options):
    params = SamplingParams(**options)
    return NewRequest(row, token_ids, [block_ids], params, seed, min_position, forbidden_ids)


def plan_of(*columns, samples=(), new_requests=(), appends=()):
    """Make a plan from columns of (row, start, count)."""
    rows, starts, counts = (list(column) for column in zip(*columns, strict=True))
    return StepPlan(
        step=0,
        rows=rows,
        starts=starts,
        counts=counts,
        samples=list(samples),
        new_requests=list(new_requests),
        block_appends=list(appends),
        num_tokens=sum(counts),
    )


def inputs_of(batch, plan):
    batch.update(plan)
    return batch.inputs(plan)


@pytest.fixture
def mixed(batch):
    """A step in which row 2 decodes its tenth token, and row 0 computes 6 of 9 prompt tokens."""
    decode = new_request(2, list(range(40, 50)), [7, 3, 5])
    inputs_of(batch, plan_of((2, 0, 9), new_requests=[decode]))
    prompt = new_request(0, list(range(20, 29)), [6, 2])
    return inputs_of(batch, plan_of((2, 9, 1), (0, 0, 6), samples=[0], new_requests=[prompt]))


def test_tokens_are_concatenated_in_the_order_of_the_plan(mixed):
    assert mixed.token_ids.tolist() == [49, 20, 21, 22, 23, 24, 25]
    assert mixed.positions.tolist() == [9, 0, 1, 2, 3, 4, 5]


def test_slots_come_from_the_block_table(mixed):
    assert mixed.slot_mapping[0].tolist() == [21, 24, 25, 26, 27, 8, 9]


def test_requests_have_the_index_and_number_of_their_tokens(mixed):
    assert mixed.rows.tolist() == [2, 0]
    assert mixed.first_tokens.tolist() == [0, 1]
    assert mixed.counts.tolist() == [1, 6]
    assert mixed.context_lens.tolist() == [10, 6]


def test_samples_are_taken_at_the_last_token_of_their_request(batch):
    new_requests = [new_request(row, list(range(9)), [row + 1, 8, 9]) for row in range(3)]
    plan = plan_of((1, 0, 4), (0, 0, 2), (2, 0, 3), samples=[0, 2], new_requests=new_requests)
    inputs = inputs_of(batch, plan)
    assert inputs.sample_tokens.tolist() == [3, 8]
    assert inputs.sample_rows.tolist() == [1, 2]


def test_a_step_without_samples_has_empty_columns(batch):
    inputs = inputs_of(batch, plan_of((0, 0, 4), new_requests=[new_request(0, [1] * 9, [1, 2, 3])]))
    assert inputs.sample_tokens.shape == (0,)


def test_indices_are_int64(mixed):
    for name in ("token_ids", "positions", "slot_mapping", "rows", "first_tokens", "context_lens"):
        assert getattr(mixed, name).dtype == np.int64


def test_a_step_of_decodes_has_one_token_each(batch):
    new_requests = [new_request(row, [10 + row] * 6, [row + 1, row + 5]) for row in range(3)]
    inputs_of(batch, plan_of((0, 0, 5), (1, 0, 5), (2, 0, 5), new_requests=new_requests))
    inputs = inputs_of(batch, plan_of((2, 5, 1), (0, 5, 1), samples=[0, 1]))
    assert inputs.token_ids.tolist() == [12, 10]
    assert inputs.slot_mapping[0].tolist() == [29, 21]
    assert inputs.sample_tokens.tolist() == [0, 1]


def test_sampled_tokens_are_the_next_inputs(batch):
    new_requests = [new_request(0, [1, 2, 3], [1]), new_request(1, [4, 5], [2])]
    inputs = inputs_of(
        batch, plan_of((0, 0, 3), (1, 0, 2), samples=[0, 1], new_requests=new_requests)
    )
    batch.append(inputs, np.array([77, 88]))
    assert inputs_of(batch, plan_of((1, 2, 1), (0, 3, 1))).token_ids.tolist() == [88, 77]


def test_a_token_sampled_at_max_model_len_changes_no_other_row(batch):
    tokens = list(range(20))
    inputs = inputs_of(
        batch, plan_of((0, 0, 20), samples=[0], new_requests=[new_request(0, tokens, [1])])
    )
    batch.append(inputs, np.array([77]))
    assert batch.token_ids[0].tolist() == [*tokens, 77]
    assert not batch.token_ids[1:].any()


def test_the_inputs_of_a_repeated_decode_equal_those_gathered_again(batch):
    """The steps cross block boundaries, and another batch gathers its inputs in each step."""
    other = InputBatch(4, 20, 4, 100)
    new_requests = [new_request(2, [1, 2, 3], [1]), new_request(0, [4, 5, 6, 7, 8], [2, 3])]
    for each in (batch, other):
        inputs = inputs_of(
            each, plan_of((2, 0, 3), (0, 0, 5), samples=[0, 1], new_requests=new_requests)
        )
        each.append(inputs, np.array([10, 20]))
    for step in range(10):
        appends = []
        if (3 + step) % 4 == 0:
            appends.append(BlockAppend(2, [(3 + step) // 4], [[10 + step]]))
        if (5 + step) % 4 == 0:
            appends.append(BlockAppend(0, [(5 + step) // 4], [[30 + step]]))
        plan = plan_of((2, 3 + step, 1), (0, 5 + step, 1), samples=[0, 1])
        plan.block_appends = appends
        expected = inputs_of(other, plan)
        plan.is_repeat = step > 0
        inputs = inputs_of(batch, plan)
        for field in fields(StepInputs):
            found, wanted = (getattr(each, field.name) for each in (inputs, expected))
            assert np.array_equal(found, wanted) or found is wanted is None, field.name
        for each, given in ((batch, inputs), (other, expected)):
            each.append(given, np.array([50 + step, 70 + step]))


def test_appended_blocks_follow_the_blocks_of_the_row(batch):
    inputs_of(batch, plan_of((0, 0, 4), new_requests=[new_request(0, [1] * 12, [3])]))
    inputs = inputs_of(batch, plan_of((0, 4, 8), appends=[BlockAppend(0, [1], [[9, 2]])]))
    assert inputs.slot_mapping[0].tolist() == [36, 37, 38, 39, 8, 9, 10, 11]


def test_a_new_request_replaces_the_state_of_its_row(batch):
    first = new_request(0, [1] * 12, [3, 4, 5], temperature=0.5, top_k=7, top_p=0.5, min_p=0.25)
    inputs_of(batch, plan_of((0, 0, 12), new_requests=[first]))
    second = new_request(0, [2, 2], [6], temperature=0)
    inputs = inputs_of(batch, plan_of((0, 0, 2), new_requests=[second]))
    assert inputs.token_ids.tolist() == [2, 2]
    assert inputs.slot_mapping[0].tolist() == [24, 25]
    row = (batch.temperature[0], batch.top_k[0], batch.top_p[0], batch.min_p[0])
    assert row == (0, 0, 1, 0)


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        ({"temperature": 0.75}, "temperature", 0.75),
        ({"temperature": 0.0}, "temperature", 0.0),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 40}, "top_k", 40),
        ({"top_p": 0.5}, "top_p", 0.5),
        ({"min_p": 0.25}, "min_p", 0.25),
        ({"seed": 2**63 - 1}, "seeds", 2**63 - 1),
        ({"seed": -2}, "seeds", 2**64 - 2),
    ],
)
def test_sampling_parameters_are_kept_by_row(batch, options, name, value):
    taken = new_request(3, [1], [1], **{"seed": 0} | options)
    inputs_of(batch, plan_of((3, 0, 1), new_requests=[taken]))
    assert getattr(batch, name)[3] == value


def test_a_row_has_a_logits_state_while_its_request_needs_one(batch):
    taken = new_request(1, [1], [1], min_position=9, forbidden_ids=[4, 5])
    inputs_of(batch, plan_of((1, 0, 1), new_requests=[taken, new_request(2, [1], [2])]))
    assert batch.logits_states.keys() == {1}
    assert batch.logits_states[1].banned(batch.token_ids[1, :8]).tolist() == [4, 5]
    assert batch.logits_states[1].banned(batch.token_ids[1, :9]).tolist() == []
    inputs_of(batch, plan_of((1, 0, 1), new_requests=[new_request(1, [1], [1])]))
    assert not batch.logits_states


@pytest.fixture
def ahead():
    return InputBatch(4, 20, BLOCK_SIZE, vocab_size=100, samples_ahead=True)


def test_a_token_that_only_the_device_knows_is_named_by_its_row(ahead):
    given = [new_request(2, list(range(40, 45)), [7, 3]), new_request(1, [30, 31], [5])]
    first = inputs_of(ahead, plan_of((2, 0, 5), (1, 0, 2), samples=[0, 1], new_requests=given))
    assert first.token_ids.tolist() == [*range(40, 45), 30, 31]
    again = inputs_of(ahead, plan_of((2, 5, 1), (1, 2, 1), samples=[0, 1]))
    assert again.token_ids.tolist() == [SAMPLED_FOR_ROW - 2, SAMPLED_FOR_ROW - 1]


def test_a_repeated_step_names_rows_even_after_a_known_token(ahead):
    recomputed = new_request(3, list(range(40, 46)), [7, 3])
    inputs_of(ahead, plan_of((3, 0, 5), new_requests=[recomputed]))
    known = inputs_of(ahead, plan_of((3, 5, 1), samples=[0]))
    assert known.token_ids.tolist() == [45]
    plan = plan_of((3, 6, 1), samples=[0])
    plan.is_repeat = True
    assert inputs_of(ahead, plan).token_ids.tolist() == [SAMPLED_FOR_ROW - 3]


def test_late_tokens_are_stored_at_their_positions(ahead):
    given = [new_request(0, [10, 11], [7]), new_request(1, [20, 21, 22], [5])]
    inputs = inputs_of(ahead, plan_of((0, 0, 2), (1, 0, 3), samples=[0, 1], new_requests=given))
    expected = ahead.expect(inputs)
    plan = plan_of((0, 2, 1), (1, 3, 1), samples=[0, 1])
    later = ahead.expect(inputs_of(ahead, plan))
    plan.is_repeat = True
    inputs_of(ahead, plan)
    ahead.fill(expected, np.array([12, 23]))
    ahead.fill(later, np.array([13, 24]))
    assert ahead.token_ids[0, :4].tolist() == [10, 11, 12, 13]
    assert ahead.token_ids[1, :5].tolist() == [20, 21, 22, 23, 24]


def test_a_late_token_of_a_rows_former_request_is_dropped(ahead):
    given = [new_request(0, [10, 11], [7]), new_request(1, [20, 21, 22], [5])]
    inputs = inputs_of(ahead, plan_of((0, 0, 2), (1, 0, 3), samples=[0, 1], new_requests=given))
    expected = ahead.expect(inputs)
    inputs_of(ahead, plan_of((0, 0, 4), new_requests=[new_request(0, [50, 51, 52, 53], [6])]))
    ahead.fill(expected, np.array([12, 23]))
    assert ahead.token_ids[0, :4].tolist() == [50, 51, 52, 53]
    assert ahead.token_ids[1, :4].tolist() == [20, 21, 22, 23]
