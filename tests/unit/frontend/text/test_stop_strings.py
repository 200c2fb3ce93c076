"""StopStringChecker: the matches, and the text that a stream may emit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmllm.frontend.text.stop_strings import StopStringChecker


def feed_all(checker, deltas):
    for delta in deltas:
        checker.feed(delta)
    return checker.match


@pytest.mark.parametrize(
    ("stops", "deltas", "stop", "kept"),
    [
        (["END"], ["one EN", "D two"], "END", "one "),
        (["END"], ["one END two"], "END", "one "),
        (["END"], ["E", "N", "D"], "END", ""),
        (["END"], ["ENEND"], "END", "EN"),
        (["aab"], ["a", "a", "a", "b"], "aab", "a"),
        (["b", "ab"], ["xab"], "b", "xa"),
        (["ab", "b"], ["xab"], "ab", "x"),
        (["b", "ab"], ["xa", "b"], "b", "xa"),
        (["abcd", "bc"], ["abcd"], "bc", "a"),
        (["\n\n", "\n"], ["a\n", "\nb"], "\n", "a"),
        (["x", "x"], ["ax"], "x", "a"),
        (["中"], ["text 中"], "中", "text "),
    ],
)
def test_the_stop_string_that_is_complete_first_is_found(stops, deltas, stop, kept):
    text = "".join(deltas)
    match = feed_all(StopStringChecker(stops), deltas)
    assert (match.stop, text[: match.text_length]) == (stop, kept)
    included = feed_all(StopStringChecker(stops, include_stop=True), deltas)
    assert text[: included.text_length] == kept + stop


@pytest.mark.parametrize("stops", [["END"], [], [""]])
def test_text_without_a_stop_string_has_no_match(stops):
    checker = StopStringChecker(stops)
    assert feed_all(checker, ["E", "N", "", "E"]) is None


@pytest.mark.parametrize(
    ("stops", "text", "held"),
    [
        (["END"], "one EN", 2),
        (["END"], "one", 0),
        (["END"], "E", 1),
        (["aab"], "xaa", 2),
        (["ab", "bcde"], "abc"[1:], 2),
        (["x"], "yyy", 0),
    ],
)
def test_only_text_that_may_begin_a_stop_string_is_held_back(stops, text, held):
    checker = StopStringChecker(stops)
    checker.feed(text)
    assert checker.num_held == held
    including = StopStringChecker(stops, include_stop=True)
    including.feed(text)
    assert including.num_held == 0


def test_unchecked_text_never_matches_but_may_begin_a_match():
    checker = StopStringChecker(["END"])
    assert checker.feed("END EN", check=False) is None
    assert checker.num_held == 2
    match = checker.feed("D")
    assert match.text_length == 4
    assert checker.feed("END") is match


@given(
    deltas=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_the_result_does_not_depend_on_the_pieces_and_emitted_text_stays(deltas, stops, include):
    text = "".join(deltas)
    ends = {text.find(stop) + len(stop) for stop in stops if stop in text}
    checker = StopStringChecker(stops, include)
    seen, emitted = "", ""
    for delta in deltas:
        seen += delta
        if checker.feed(delta):
            break
        visible = seen[: len(seen) - checker.num_held]
        assert visible.startswith(emitted)
        emitted = visible
    assert (checker.match is not None) == bool(ends)
    if checker.match is None:
        assert text[: len(text) - checker.num_held] == emitted
        return
    kept = text[: checker.match.text_length]
    assert kept.startswith(emitted)
    end = min(ends)
    first = next(stop for stop in stops if text[:end].endswith(stop))
    assert checker.match.stop == first
    assert kept == text[: end if include else end - len(first)]
