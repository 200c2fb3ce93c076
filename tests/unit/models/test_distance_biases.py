"""Biases by distance: which bucket each distance is in, and what is written to whom."""

from __future__ import annotations

import torch
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from shmllm.models.bias_specs import DistanceBiases, LinearBiases
from shmllm.models.distance_biases import linear_biases, named_biases
from shmllm.models.matrices import sharded
from shmllm.models.shares import Share

SPEC = DistanceBiases(num_positions=600)
DISTANCES = torch.arange(-599, 600)


def test_buckets_are_those_of_transformers() -> None:
    table = torch.empty(3, SPEC.width)
    learned = torch.randn(32, 3)
    named_biases(table, SPEC).copy_(learned)
    buckets = MPNetEncoder.relative_position_bucket(DISTANCES)
    assert torch.equal(table, learned[buckets].t())
    assert buckets.unique().tolist() == [bucket for bucket in range(32) if bucket != 16]


def test_linear_biases_fall_with_the_distance() -> None:
    """The factors are those of the paper for 8 heads, and of its code for 12."""
    every = linear_biases(LinearBiases(3, 12), range(12))
    slopes = [2.0**-i for i in range(1, 9)] + [2 ** -(i + 0.5) for i in range(4)]
    torch.testing.assert_close(
        every, -torch.tensor(slopes)[:, None] * torch.tensor([2, 1, 0, 1, 2])
    )
    assert torch.equal(linear_biases(LinearBiases(3, 8), range(8)), every[:8])
    assert torch.equal(linear_biases(LinearBiases(3, 12), range(6, 12)), every[6:])


def test_a_copy_has_what_some_distance_has() -> None:
    named = named_biases(torch.empty(3, SPEC.width), SPEC)
    learned = torch.randn(32, 3)
    named.copy_(learned)
    learned[16] = 0  # no key is ahead of its own token by 0
    assert torch.equal(named.clone(), learned)


def test_a_rank_has_the_biases_of_its_heads() -> None:
    table, learned = torch.empty(2, SPEC.width), torch.randn(32, 6)
    share = Share((6, SPEC.width), (torch.tensor([2, 3]), torch.arange(SPEC.width)))
    (named,) = sharded([named_biases(table, SPEC)], [share])
    assert named.shape == (32, 6)
    named.copy_(learned)
    assert torch.equal(table, learned[MPNetEncoder.relative_position_bucket(DISTANCES)].t()[2:4])
