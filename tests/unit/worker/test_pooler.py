"""The pooler's vectors equal those of a simple reference, for all sizes of chunks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shmllm.core.plan import Pool, StepPlan
from shmllm.params.pooling import Pooling, PoolingType
from shmllm.worker.pooler import Pooler

HIDDEN = 16


def steps_of(lengths, budget, seed):
    """Split prompts of these lengths into steps of at most `budget` tokens, in random order.
    Returns [(prompt, start, count)] for each step."""
    rng = np.random.default_rng(seed)
    left = dict.fromkeys(range(len(lengths)), 0)
    while left:
        step, room = [], budget
        for prompt in rng.permutation(list(left)).tolist():
            count = min(lengths[prompt] - left[prompt], room, int(rng.integers(1, budget + 1)))
            if count:
                step.append((prompt, left[prompt], count))
                room -= count
                left[prompt] += count
        left = {p: done for p, done in left.items() if done < lengths[p]}
        yield step


def expected(hidden, pooling):
    vector = hidden.double().mean(0) if pooling.type is PoolingType.MEAN else hidden[-1].double()
    vector = vector[: pooling.dimensions or None]
    if pooling.normalize:
        vector = vector / vector.norm()
    return vector.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [4, 16, 200])
def test_vectors_equal_the_reference(budget, dtype):
    torch.manual_seed(1)
    lengths = [1, 2, 5, 13, 31, 64, 7]
    states = [torch.randn(n, HIDDEN).to(dtype) for n in lengths]
    poolings = [
        Pooling(list(PoolingType)[i % 2], (0, 3)[i % 3 == 0], i % 5 != 0)
        for i in range(len(lengths))
    ]
    pooler, found = Pooler(), {}
    for step in steps_of(lengths, budget, seed=budget):
        plan = StepPlan(step=0)
        for index, (prompt, start, count) in enumerate(step):
            is_last = start + count == lengths[prompt]
            plan.pools.append(Pool(index, poolings[prompt], is_last))
        prompts, starts, counts = (np.array(column) for column in zip(*step, strict=True))
        first_tokens = np.cumsum(counts) - counts
        inputs = SimpleNamespace(
            item_results={},
            rows=prompts + 3,
            counts=counts,
            first_tokens=first_tokens,
            context_lens=starts + counts,
            positions=np.concatenate([np.arange(s, s + n) for _, s, n in step]),
        )
        hidden = torch.cat([states[p][s : s + n] for p, s, n in step])
        ending = [prompt for prompt, s, n in step if s + n == lengths[prompt]]
        pieces = [piece for piece in pooler(hidden, inputs, plan) if piece.data]
        found |= zip(ending, (piece.data for piece in pieces), strict=True)
    assert found.keys() == set(range(len(lengths)))
    for prompt, vector in found.items():
        wanted = expected(states[prompt], poolings[prompt])
        got = torch.from_numpy(np.frombuffer(vector, np.float32).copy())
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("counts", [(40,), (1,) * 40, (13, 20, 7), (2, 38)])
def test_the_bits_of_a_sum_do_not_depend_on_chunks(counts):
    scale = 2.0 ** torch.arange(-20, 20)[torch.randperm(40)]
    states, pooler = torch.randn(40, HIDDEN) * scale[:, None], Pooler()
    start = 0
    for count in counts:
        inputs = SimpleNamespace(
            item_results={},
            rows=np.array([0]),
            counts=np.array([count]),
            first_tokens=np.array([0]),
            context_lens=np.array([start + count]),
            positions=np.arange(start, start + count),
        )
        plan = StepPlan(step=0, pools=[Pool(0, Pooling(PoolingType.MEAN, 0, False), False)])
        pooler(states[start : start + count], inputs, plan)
        start += count
    wanted = np.zeros(HIDDEN)
    for state in states:
        wanted += state.double().numpy()
    assert np.array_equal(pooler._sums[0], wanted)


def test_a_vector_of_zeros_stays_finite():
    plan = StepPlan(step=0, pools=[Pool(0, Pooling(), True)])
    inputs = SimpleNamespace(
        item_results={},
        rows=np.array([0]),
        counts=np.array([1]),
        first_tokens=np.array([0]),
        context_lens=np.array([1]),
        positions=np.array([0]),
    )
    ((_, vector),) = Pooler()(torch.zeros(1, HIDDEN), inputs, plan)
    assert not np.frombuffer(vector, np.float32).any()
