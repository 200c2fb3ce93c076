"""Ranges of block ids: none overlap, and gaps are used again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shmllm.worker.id_ranges import IdRanges


def test_ranges_follow_each_other_until_none_is_left() -> None:
    ids = IdRanges(100, 10)
    assert [ids.take(4), ids.take(6), ids.take(1)] == [100, 104, None]


def test_a_gap_is_used_if_it_is_large_enough() -> None:
    ids = IdRanges(0, 12)
    assert [ids.take(4), ids.take(4), ids.take(4)] == [0, 4, 8]
    ids.give_back(4)
    assert ids.take(5) is None
    assert [ids.take(3), ids.take(1), ids.take(1)] == [4, 7, None]


def test_neighbouring_gaps_are_one() -> None:
    ids = IdRanges(0, 8)
    firsts = [ids.take(2) for _ in range(4)]
    for first in firsts[1:3]:
        assert first is not None
        ids.give_back(first)
    assert ids.take(4) == 2


@given(st.lists(st.integers(-5, 9).filter(bool), max_size=60))
def test_ranges_that_are_taken_never_overlap(steps: list[int]) -> None:
    """A positive number takes so many ids, a negative one gives a range back."""
    ids, taken = IdRanges(7, 40), list[range]()
    for step in steps:
        if step < 0 and taken:
            ids.give_back(taken.pop(step % len(taken)).start)
        elif step > 0:
            first = ids.take(step)
            free = [n for n in range(7, 47) if not any(n in each for each in taken)]
            runs = [n for n in free if all(n + i in free for i in range(step))]
            assert first == (min(runs) if runs else None)
            if first is not None:
                taken.append(range(first, first + step))
