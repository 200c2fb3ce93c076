"""LogprobsList behaves like a list of dicts."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import asdict, astuple

import pytest

from shmllm.outputs.logprob_lists import LogprobsList, LogprobStore
from shmllm.outputs.logprobs import Logprob
from shmllm.outputs.request import CompletionOutput, RequestOutput

TOKENS = [7, 3, 9]


def store_of(k, *entries):
    """A store with these entries: (logprob, rank, [(id, logprob), ...])."""
    store = LogprobStore()
    store.k = k
    for logprob, rank, top in entries:
        store.logprobs.append(logprob)
        store.ranks.append(rank)
        store.top_ids.extend(token for token, _ in top)
        store.top_logprobs.extend(value for _, value in top)
    return store


@pytest.fixture
def store():
    return store_of(
        2,
        (-0.5, 1, [(7, -0.5), (2, -1.5)]),
        (-4.0, 9, [(8, -0.25), (1, -2.0)]),
        (-1.0, 2, [(4, -0.75), (9, -1.0)]),
    )


EXPECTED = [
    {7: Logprob(-0.5, 1), 2: Logprob(-1.5, 2)},
    {3: Logprob(-4.0, 9), 8: Logprob(-0.25, 1), 1: Logprob(-2.0, 2)},
    {9: Logprob(-1.0, 2), 4: Logprob(-0.75, 1)},
]


def test_the_entry_of_the_token_itself_is_first_and_not_repeated(store):
    entries = LogprobsList(TOKENS, store)
    assert list(entries) == EXPECTED
    assert [list(entry) for entry in entries] == [[7, 2], [3, 8, 1], [9, 4]]


def test_it_equals_a_list_of_the_same_entries(store):
    entries = LogprobsList(TOKENS, store)
    assert entries == EXPECTED
    assert [EXPECTED].index(entries) == 0
    assert entries == LogprobsList(TOKENS, store)
    assert entries != EXPECTED[:2]
    assert entries != [EXPECTED[1], *EXPECTED[1:]]
    assert entries != 5


@pytest.mark.parametrize(
    "index", [slice(None), slice(1, None), slice(-2, None), slice(0, 0), slice(None, None, -1)]
)
def test_a_slice_is_a_logprobs_list(store, index):
    part = LogprobsList(TOKENS, store)[index]
    assert isinstance(part, LogprobsList)
    assert (list(part), len(part)) == (EXPECTED[index], len(EXPECTED[index]))


@pytest.mark.parametrize("index", [0, 2, -1, -3])
def test_an_index_returns_one_entry(store, index):
    assert LogprobsList(TOKENS, store)[index] == EXPECTED[index]


@pytest.mark.parametrize("index", [3, -4])
def test_an_index_out_of_range_raises(store, index):
    with pytest.raises(IndexError):
        LogprobsList(TOKENS, store)[index]


@pytest.mark.parametrize("make_copy", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy])
def test_a_copy_is_equal_and_does_not_need_the_tokenizer(store, make_copy):
    entries = LogprobsList(TOKENS, store, lambda before, token: f"<{token}>")
    copied = make_copy(entries)
    assert copied == entries
    assert copied[0][2].decoded_token == "<2>"


def test_asdict_of_a_result_converts_entries_as_those_of_a_list(store):
    entries = LogprobsList(TOKENS, store, begins_with_none=True)
    for convert in (asdict, astuple):
        results = [
            RequestOutput("0", "a", TOKENS, each, [CompletionOutput(0, "b", [3], 0.5, each)], True)
            for each in (entries, list(entries))
        ]
        assert convert(results[0]) == convert(results[1])
    converted = asdict(results[0])
    assert converted["outputs"][0]["logprobs"][1][2]["rank"] == 2
    assert json.loads(json.dumps(converted))["prompt_logprobs"][1]["7"]["logprob"] == -0.5
    first = CompletionOutput(0, "b", [3], 0.5, entries[1:2])
    assert asdict(first, dict_factory=list) == asdict(
        CompletionOutput(0, "b", [3], 0.5, EXPECTED[:1]), dict_factory=list
    )


def test_a_deep_copy_shares_no_entry(store):
    completion = CompletionOutput(0, "a", TOKENS, logprobs=LogprobsList(TOKENS, store))
    copied = copy.deepcopy(completion)
    assert copied == completion
    copied.logprobs[0][7].logprob = 0.0
    assert completion.logprobs == EXPECTED


def test_the_list_of_a_prompt_begins_with_none(store):
    entries = LogprobsList(TOKENS, store, begins_with_none=True)
    assert entries == [None, *EXPECTED]
    assert entries[1:] == EXPECTED
    assert entries[0] is None


def test_tokens_that_are_appended_later_are_not_part_of_the_list(store):
    tokens = [7]
    growing = store_of(0, (-0.5, 1, []))
    entries = LogprobsList(tokens, growing)
    tokens.append(8)
    growing.logprobs.append(-1.0)
    growing.ranks.append(4)
    assert entries == [{7: Logprob(-0.5, 1)}]
    assert len(LogprobsList(tokens, growing)) == 2


def test_text_of_gets_the_preceding_tokens(store):
    seen = []

    def text_of(before, token):
        seen.append((list(before), token))
        return "x"

    list(LogprobsList(TOKENS, store, text_of, context=[1, 2, 3]))
    assert seen[0] == ([1, 2, 3], 7)
    assert ([1, 2, 3, 7], 3) in seen
    assert seen[-1] == ([2, 3, 7, 3], 4)


def test_its_repr_is_that_of_a_list(store):
    assert repr(LogprobsList(TOKENS, store)) == repr(EXPECTED)


def test_changes_of_an_entry_stay(store: LogprobStore) -> None:
    entries = LogprobsList(TOKENS, store)
    part = entries[-2:]
    for entry in part:
        for token in entry:
            entry[token] = entry[token].logprob
    assert part[0] is part[0]
    assert list(part) == [{t: e.logprob for t, e in each.items()} for each in EXPECTED[-2:]]
    assert entries[-1] is part[-1]
    assert entries[0] == EXPECTED[0]


def test_sums_and_copies_are_lists(store: LogprobStore) -> None:
    entries = LogprobsList(TOKENS, store)
    more = [{5: Logprob(-1.0, 1)}]
    assert entries + more == EXPECTED + more
    assert more + entries == more + EXPECTED
    assert entries + entries == EXPECTED + EXPECTED
    copied = entries.copy()
    copied.pop()
    assert len(copied) == len(entries) - 1
