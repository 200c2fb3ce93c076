from __future__ import annotations

import copy
import pickle

import pytest

from shmllm.outputs.flat_logprobs import FlatLogprobs
from shmllm.outputs.logprobs import Logprob

POSITIONS = [
    None,
    {3: Logprob(-0.5, 2, "c"), 1: Logprob(-0.1, 1, "a")},
    {7: Logprob(-1.5, 9, None)},
]
READ = [{} if each is None else each for each in POSITIONS]


def test_the_lists_and_the_sequence_say_the_same() -> None:
    flat = FlatLogprobs.of(POSITIONS)
    assert (flat.start_indices, flat.end_indices) == ([0, 0, 2], [0, 2, 3])
    assert flat.token_ids == [3, 1, 7]
    assert flat.logprobs == [-0.5, -0.1, -1.5]
    assert (flat.ranks, flat.decoded_tokens) == ([2, 1, 9], ["c", "a", None])
    assert list(flat) == READ
    assert [flat[index] for index in (0, 1, -1)] == [READ[0], READ[1], READ[2]]
    for copied in (copy.deepcopy(flat), pickle.loads(pickle.dumps(flat))):
        assert copied == flat


@pytest.mark.parametrize("part", [slice(1, 3), slice(None, None, -1), slice(3, 9), slice(0, 2)])
def test_a_slice_begins_with_entry_0(part: slice) -> None:
    flat = FlatLogprobs.of(POSITIONS)[part]
    assert list(flat) == READ[part]
    assert flat == FlatLogprobs.of(READ[part])


def test_positions_can_be_appended_and_nothing_else() -> None:
    flat = FlatLogprobs()
    flat.extend(POSITIONS[:1])
    flat += FlatLogprobs.of(POSITIONS[1:])
    assert list(flat) == READ
    with pytest.raises(TypeError, match="replaced"):
        flat[0] = {}
    with pytest.raises(TypeError, match="deleted"):
        del flat[0]
    with pytest.raises(TypeError, match="inserted"):
        flat.insert(0, {})
    with pytest.raises(IndexError):
        flat[3]
