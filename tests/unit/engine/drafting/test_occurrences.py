"""Occurrences against a search of the whole text."""

from __future__ import annotations

import random
from array import array

import pytest

from shmllm.engine.drafting.occurrences import END, MOST_FOUND, SIZES, Occurrences


def by_search(text: list[int], tail: list[int], size: int) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for place in range(len(text) - 1, 0, -1):
        before = text[:place]
        length = 0
        while length < min(len(tail), place) and before[-length - 1] == tail[-length - 1]:
            length += 1
        if length >= size:
            found.setdefault(length, []).append(place)
    return found


@pytest.mark.parametrize("num_expected", [1, 64])
@pytest.mark.parametrize("seed", range(10))
def test_a_growing_text_has_the_occurrences_of_a_search(seed: int, num_expected: int) -> None:
    rng = random.Random(seed)
    letters = [END, *range(rng.randint(2, 4))]
    text = array("i")
    known, num_found = Occurrences(text, num_expected), 0
    while len(text) < MOST_FOUND:
        text.extend(rng.choices(letters, k=rng.randint(1, 6)))
        known.index()
        tail = array("i", rng.choices(letters[1:], k=rng.randint(8, 20)))
        repeated = rng.randint(0, len(tail))
        tail = array("i", [*tail, *text[rng.randint(0, len(text)) :][:repeated]])
        for size in SIZES:
            found = known.find(tail, size)
            assert found == by_search(text.tolist(), tail.tolist(), size)
            num_found += len(found)
    assert num_found


def test_only_the_latest_occurrences_are_found() -> None:
    text = array("i", [7] * (3 * MOST_FOUND))
    known = Occurrences(text, len(text))
    known.index()
    (places,) = known.find(array("i", [7]), 1).values()
    assert places == list(range(len(text) - 1, len(text) - 1 - MOST_FOUND, -1))


def test_a_text_that_is_much_longer_than_expected_costs_no_endless_search() -> None:
    rng = random.Random(1)
    text = array("i", rng.choices(range(50_000), k=5_000))
    known = Occurrences(text, 1)
    known.index()
    assert known.find(text[-8:], 8) == {}
    assert known.find(array("i", [*text[-40:-30]]), 8) == {10: [len(text) - 30]}
