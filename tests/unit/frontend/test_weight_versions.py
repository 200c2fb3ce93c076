"""The spans of weight versions in a completion."""

from __future__ import annotations

import pytest

from shmllm.frontend.weights.versions import VersionStarts, add_version, version_spans


@pytest.mark.parametrize(
    ("changes", "spans"),
    [
        ([(5, 1)], [(0, 0, 5), (1, 5, 9)]),
        ([(0, 1)], []),
        ([(5, 1), (5, 2)], [(0, 0, 5), (2, 5, 9)]),
        ([(5, 1), (5, 0)], [(0, 0, 9)]),
        ([(5, 1), (7, "x"), (7, 1)], [(0, 0, 5), (1, 5, 9)]),
        ([(5, 1), (9, 2)], [(0, 0, 5), (1, 5, 9)]),
    ],
    ids=[
        "in the middle",
        "before the first token",
        "twice between two tokens",
        "back between two tokens",
        "back to the version of a span",
        "behind the last token",
    ],
)
def test_spans(changes: list[tuple[int, int | str]], spans: list[tuple[int | str, int, int]]):
    """Without a change while it had tokens, a completion has no starts: its end adds one."""
    starts: VersionStarts = []
    before: int | str = 0
    for num_tokens, version in changes:
        add_version(starts, num_tokens, before, version)
        before = version
    if not spans:
        assert not starts
        return
    found = [(span.version, span.start, span.end) for span in version_spans(starts, 9)]
    assert found == spans
