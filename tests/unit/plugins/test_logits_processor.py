"""What a processor keeps of single requests, through changes of the batch."""

from __future__ import annotations

from typing import Any

import pytest

from shmllm.params.sampling import SamplingParams
from shmllm.plugins.logits_processor import (
    BatchUpdate,
    MoveDirectionality,
    process_dict_updates,
)

SWAP, ALONE = MoveDirectionality.SWAP, MoveDirectionality.UNIDIRECTIONAL
KEPT, LEFT_OUT = SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)


def came(index: int, params: SamplingParams) -> Any:
    return index, params, [5], []


def entry(params: SamplingParams, prompt: list[int] | None, output: list[int]) -> str | None:
    return f"{prompt}{output}" if params is KEPT else None


@pytest.mark.parametrize(
    ("removed", "added", "moved", "expected", "changes"),
    [
        ([], [], [], {0: "a", 1: "b"}, False),
        ([1], [], [], {0: "a"}, True),
        ([3], [], [(4, 5, ALONE)], {0: "a", 1: "b"}, False),
        ([], [came(2, KEPT)], [], {0: "a", 1: "b", 2: "[5][]"}, True),
        ([], [came(2, LEFT_OUT)], [], {0: "a", 1: "b"}, False),
        ([0], [came(0, KEPT)], [], {0: "[5][]", 1: "b"}, True),
        ([], [came(0, LEFT_OUT)], [], {1: "b"}, True),
        ([], [], [(0, 1, SWAP)], {0: "b", 1: "a"}, True),
        ([], [], [(3, 1, SWAP)], {0: "a", 3: "b"}, True),
        ([0], [], [(1, 0, ALONE)], {0: "b"}, True),
    ],
)
def test_entries_follow_their_requests(
    removed: Any, added: Any, moved: Any, expected: dict[int, str], changes: bool
) -> None:
    entries = {0: "a", 1: "b"}
    update = BatchUpdate(8, removed, added, moved)
    assert process_dict_updates(entries, update, entry) == changes
    assert entries == expected


def test_without_an_update_nothing_changes() -> None:
    entries = {0: "a"}
    assert process_dict_updates(entries, None, entry) is False
    assert entries == {0: "a"}
