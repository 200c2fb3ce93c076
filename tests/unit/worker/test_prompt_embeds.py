"""A prompt's embeddings replace those that the model looks up, at the prompt's positions only."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shmllm.core.plan import NewRequest, StepPlan
from shmllm.errors import RequestError
from shmllm.params.sampling import SamplingParams
from shmllm.worker.prompt_embeds import EmbedsByRow, check_prompt_embeds


def copied(embeds, token_ids, *columns):
    """Return the token ids and hidden states after the embeddings are copied into them."""
    ids, hidden = np.array(token_ids), torch.zeros(len(token_ids), 2)
    embeds.copy_into(hidden, ids, inputs(*columns))
    return ids.tolist(), hidden.tolist()


def new_request(row, embeds=None):
    return NewRequest(row, [0], [[1]], SamplingParams(), 0, 0, (), embeds=embeds)


def inputs(*columns):
    """Make the inputs of a step from columns of (row, start, count)."""
    rows, _, counts = (np.array(column) for column in zip(*columns, strict=True))
    return SimpleNamespace(
        rows=rows,
        counts=counts,
        first_tokens=np.cumsum(counts) - counts,
        positions=np.concatenate([np.arange(s, s + n) for _, s, n in columns]),
    )


def test_without_embeddings_all_tokens_are_looked_up():
    embeds = EmbedsByRow()
    embeds.update(StepPlan(0, new_requests=[new_request(0)]))
    assert copied(embeds, [1], (0, 0, 1)) == ([1], [[0, 0]])


def test_embeddings_are_multiplied_by_the_models_factor():
    embeds = EmbedsByRow(3.0)
    embeds.update(StepPlan(0, new_requests=[new_request(0, torch.ones(2, 2))]))
    assert copied(embeds, [1, 1], (0, 0, 2))[1] == [[3, 3], [3, 3]]
    assert copied(embeds, [1, 1], (0, 0, 2))[1] == [[3, 3], [3, 3]]


def test_every_chunk_gets_the_embeddings_of_its_positions():
    given = torch.arange(8.0).reshape(4, 2) + 100
    embeds = EmbedsByRow()
    embeds.update(StepPlan(0, new_requests=[new_request(1, given), new_request(2)]))
    ids, hidden = copied(embeds, [5, 6, 7, 7], (2, 0, 2), (1, 1, 2))
    assert (ids, hidden) == ([5, 6, -1, -1], [[0, 0], [0, 0], *given[1:3].tolist()])
    # The last prompt token and the first output token.
    ids, hidden = copied(embeds, [7, 9], (1, 3, 2))
    assert (ids, hidden) == ([-1, 9], [given[3].tolist(), [0, 0]])
    assert copied(embeds, [9], (1, 4, 1)) == ([9], [[0, 0]])


def test_a_new_request_in_a_row_has_no_old_embeddings():
    embeds = EmbedsByRow()
    embeds.update(StepPlan(0, new_requests=[new_request(1, torch.ones(4, 2))]))
    embeds.update(StepPlan(1, new_requests=[new_request(1)]))
    assert copied(embeds, [1], (1, 0, 1)) == ([1], [[0, 0]])


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3, 2),
        torch.ones(4, 3),
        torch.ones(4, 2, dtype=torch.int64),
        torch.full((4, 2), float("nan")),
        torch.full((4, 2), float("inf")),
        torch.full((4, 2), 1e20),
        torch.tensor([[1e30, 0.0]] * 4, dtype=torch.float64),
    ],
)
def test_values_that_would_reach_the_cache_as_nan_are_refused(value):
    with pytest.raises(RequestError, match="prompt_embeds"):
        check_prompt_embeds(value, (4, 2), torch.float32)


def test_values_that_overflow_the_models_dtype_are_refused():
    value = torch.full((4, 2), 1e6)
    assert check_prompt_embeds(value, (4, 2), torch.bfloat16).dtype is torch.bfloat16
    with pytest.raises(RequestError, match="float16"):
        check_prompt_embeds(value, (4, 2), torch.float16)
