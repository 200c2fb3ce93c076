"""How tensors are put into buckets of bytes, equally at both ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ALIGNMENT_BYTES = 16
"""Every tensor begins at a multiple of this, so that its bytes can be viewed as any dtype."""


@dataclass(frozen=True)
class Bucket:
    """
    Attributes:
        first: the index of its first tensor.
        offsets: where each of its tensors begins, in bytes.
        num_bytes: its size, at least ALIGNMENT_BYTES.
    """

    first: int
    offsets: tuple[int, ...]
    num_bytes: int


def plan_buckets(sizes: Sequence[int], most_bytes: int) -> Iterator[Bucket]:
    """Divide tensors into buckets, in their order.

    Args:
        sizes: the sizes of the tensors in bytes.
        most_bytes: the largest bucket; a larger tensor has a bucket for itself. With 0 each tensor
            has one.
    """
    first, offsets, end = 0, list[int](), 0
    for index, size in enumerate(sizes):
        padded = max(-(-size // ALIGNMENT_BYTES), 1) * ALIGNMENT_BYTES
        if offsets and end + padded > most_bytes:
            yield Bucket(first, tuple(offsets), end)
            first, offsets, end = index, [], 0
        offsets.append(end)
        end += padded
    if offsets:
        yield Bucket(first, tuple(offsets), end)
