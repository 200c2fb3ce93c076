"""PoolingPlan: results of rows equal torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shmllm.frontend.pooling.plan import PoolingPlan
from shmllm.outputs.pooling import LateChunkingMetadata

ROWS = np.random.default_rng(3).standard_normal((7, 6)).astype(np.float32) * 4
TOKENS = [5, 9, 5, 5, 9, 1, 9]


def close(result: np.ndarray, wanted: torch.Tensor) -> None:
    assert result.dtype == np.float32
    assert not result.flags.writeable
    torch.testing.assert_close(torch.from_numpy(result.copy()), wanted, atol=1e-6, rtol=1e-6)


def rows() -> torch.Tensor:
    return torch.from_numpy(ROWS.copy())


def test_an_embedding_is_what_the_engine_returned():
    result = PoolingPlan(task="embed", width=6).finish(ROWS[0].tobytes(), TOKENS)
    assert np.array_equal(result, ROWS[0])


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("none", lambda logits: logits),
        ("sigmoid", torch.sigmoid),
        ("softmax", lambda logits: logits.softmax(-1)),
    ],
)
@pytest.mark.parametrize("task", ["classify", "token_classify"])
def test_scores_are_activated_after_the_calibration(task, activation, function):
    plan = PoolingPlan(task=task, width=6, mean=0.5, sigma=2.0, activation=activation)
    logits = rows()[0] if task == "classify" else rows()
    result = plan.finish(logits.numpy().tobytes(), TOKENS)
    close(result, function((logits - 0.5) / 2))


def test_activations_of_large_logits_are_finite():
    logits = np.array([1e30, -1e30, 800.0, -800.0], np.float32)
    for activation in ("sigmoid", "softmax"):
        plan = PoolingPlan(task="classify", width=4, activation=activation)
        with np.errstate(all="raise", under="ignore"):
            result = plan.finish(logits.tobytes(), [])
        assert result[:2].tolist() == [1.0, 0.0]


def test_steps_are_rows_of_a_token_and_columns_before_the_activation():
    plan = PoolingPlan(
        task="token_classify", width=6, step_tag_id=9, columns=(4, 2), activation="softmax"
    )
    close(plan.finish(ROWS.tobytes(), TOKENS), rows()[[1, 4, 6]][:, [4, 2]].softmax(-1))
    # The rows are those of the last tokens: those before were in the prefix cache.
    close(plan.finish(ROWS[:3].tobytes(), TOKENS), rows()[[0, 2]][:, [4, 2]].softmax(-1))
    nowhere = PoolingPlan(task="token_classify", width=6, step_tag_id=8)
    assert nowhere.finish(ROWS.tobytes(), TOKENS).shape == (0, 6)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("normalize", [False, True])
def test_chunks_are_means_of_rows(size, normalize):
    chunks = LateChunkingMetadata(size, 7, [])
    plan = PoolingPlan(task="token_embed", width=6, chunks=chunks, normalize=normalize)
    wanted = torch.stack([part.mean(0) for part in rows().split(size)])
    if normalize:
        wanted = torch.nn.functional.normalize(wanted, dim=-1)
    close(plan.finish(ROWS.tobytes(), TOKENS), wanted)


def test_dimensions_are_cut_before_rows_are_normalised():
    plan = PoolingPlan(task="token_embed", width=6, columns=(5, 4, 0), dimensions=2, normalize=True)
    wanted = torch.nn.functional.normalize(rows()[:, [5, 4]], dim=-1)
    close(plan.finish(ROWS.tobytes(), TOKENS), wanted)
