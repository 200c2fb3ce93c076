"""ReceivedMasks: the tokens among which those of an output were drawn, from bytes in any pieces."""

from __future__ import annotations

import numpy as np

from shmllm.frontend.sampling_masks import ReceivedMasks
from shmllm.outputs.sampling_masks import SamplingMasks

MASKS = SamplingMasks.of_entries(4, np.array([0, 0, 2, 3]), np.array([5, 9, 7, 2]))
LISTS = [[5, 9], [], [7], [2]]


def test_bytes_may_end_within_a_token() -> None:
    data, kept = MASKS.encoded(0, 4), ReceivedMasks()
    for place in range(0, len(data), 3):
        kept.add(data[place : place + 3])
    assert kept.between(0, 4) == LISTS
    assert kept.between(2, 3) == [[7]]


def test_tokens_that_come_again_are_the_same() -> None:
    kept = ReceivedMasks()
    kept.add(MASKS.encoded(0, 2) + MASKS.encoded(2, 4)[:2])
    kept.start_over()
    assert kept.between(0, 2) == LISTS[:2]
    kept.add(MASKS.encoded(0, 4))
    assert kept.between(0, 4) == LISTS


def test_some_samples_are_taken() -> None:
    taken = MASKS.take([0, 2])
    kept = ReceivedMasks()
    kept.add(taken.encoded(0, 2))
    assert kept.between(0, 2) == [[5, 9], [7]]


def test_forgotten_tokens_are_expected_once_more() -> None:
    kept = ReceivedMasks()
    kept.add(MASKS.encoded(0, 3))
    assert kept.between(0, 2) == LISTS[:2]
    kept.forget(2)
    assert kept.between(2, 3) == LISTS[2:3]
    kept.start_over()
    kept.add(MASKS.encoded(0, 4))
    assert kept.between(2, 4) == LISTS[2:]
