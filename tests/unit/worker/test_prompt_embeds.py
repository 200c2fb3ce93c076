"""Embeddings given for a prompt lie where the model would look them up, and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shmllm.core.plan import NewRequest, StepPlan
from shmllm.errors import RequestError
from shmllm.params.sampling import SamplingParams
from shmllm.worker.prompt_embeds import EmbedsByRow, check_prompt_embeds


def laid_over(embeds, token_ids, *columns):
    """Token ids and hidden states once the given embeddings were put there."""
    ids, hidden = np.array(token_ids), torch.zeros(len(token_ids), 2)
    embeds.copy_into(hidden, ids, inputs(*columns))
    return ids.tolist(), hidden.tolist()


def admission(row, embeds=None):
    return NewRequest(row, [0], [1], SamplingParams(), 0, 0, (), embeds=embeds)


def inputs(*columns):
    """Of (row, start, count) each."""
    rows, _, counts = (np.array(column) for column in zip(*columns, strict=True))
    return SimpleNamespace(
        rows=rows,
        counts=counts,
        first_tokens=np.cumsum(counts) - counts,
        positions=np.concatenate([np.arange(s, s + n) for _, s, n in columns]),
    )


def test_without_them_all_tokens_are_looked_up():
    embeds = EmbedsByRow()
    embeds.update(StepPlan(0, new_requests=[admission(0)]))
    assert laid_over(embeds, [1], (0, 0, 1)) == ([1], [[0, 0]])


def test_they_cover_their_own_positions_in_every_chunk():
    given = torch.arange(8.0).reshape(4, 2) + 100
    embeds = EmbedsByRow()
    embeds.update(StepPlan(0, new_requests=[admission(1, given), admission(2)]))
    ids, hidden = laid_over(embeds, [5, 6, 7, 7], (2, 0, 2), (1, 1, 2))
    assert (ids, hidden) == ([5, 6, -1, -1], [[0, 0], [0, 0], *given[1:3].tolist()])
    # The last prompt token, the first output token behind it.
    ids, hidden = laid_over(embeds, [7, 9], (1, 3, 2))
    assert (ids, hidden) == ([-1, 9], [given[3].tolist(), [0, 0]])
    assert laid_over(embeds, [9], (1, 4, 1)) == ([9], [[0, 0]])


def test_a_row_that_is_given_to_another_forgets_them():
    embeds = EmbedsByRow()
    embeds.update(StepPlan(0, new_requests=[admission(1, torch.ones(4, 2))]))
    embeds.update(StepPlan(1, new_requests=[admission(1)]))
    assert laid_over(embeds, [1], (1, 0, 1)) == ([1], [[0, 0]])


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
def test_what_would_spoil_the_cache_is_refused(value):
    with pytest.raises(RequestError, match="prompt_embeds"):
        check_prompt_embeds(value, (4, 2), torch.float32)


def test_what_overflows_the_models_dtype_is_refused():
    value = torch.full((4, 2), 1e6)
    assert check_prompt_embeds(value, (4, 2), torch.bfloat16).dtype is torch.bfloat16
    with pytest.raises(RequestError, match="float16"):
        check_prompt_embeds(value, (4, 2), torch.float16)
