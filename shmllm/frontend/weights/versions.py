"""The versions of the weights that sampled the output tokens of one completion.

A completion keeps a list of pairs of a weight version and the number of output tokens when the
engine began to use it.
"""

from __future__ import annotations

from shmllm.outputs.request import WeightVersionSpan

VersionStarts = list[tuple[int | str, int]]


def add_version(
    starts: VersionStarts, num_tokens: int, before: int | str, version: int | str
) -> None:
    """Record that the weights changed after the first `num_tokens` output tokens.

    Args:
        starts: the list of the completion.
        num_tokens: the number of its output tokens so far.
        before: the version of the weights until now.
        version: the version of the weights from now on.
    """
    if num_tokens and not starts:
        starts.append((before, 0))
    if starts and starts[-1][1] == num_tokens:
        starts.pop()
    if num_tokens and (not starts or starts[-1][0] != version):
        starts.append((version, num_tokens))


def version_spans(starts: VersionStarts, num_tokens: int) -> list[WeightVersionSpan]:
    """The spans of a completion with `num_tokens` output tokens, without empty ones."""
    ends = [start for _, start in starts[1:]] + [num_tokens]
    return [
        WeightVersionSpan(version, start, end)
        for (version, start), end in zip(starts, ends, strict=True)
        if start < end
    ]
