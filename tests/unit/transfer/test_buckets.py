"""Buckets have room for all tensors, in order, at aligned places, and are as small as asked."""

from __future__ import annotations

import pytest

from shmllm.transfer.buckets import ALIGNMENT_BYTES, Bucket, plan_buckets

SIZES = [0, 1, 16, 17, 100, 3, 1000, 5]


@pytest.mark.parametrize("most", [0, 1, 48, 160, 10**6])
def test_tensors_lie_in_order_without_overlap(most: int) -> None:
    buckets = [*plan_buckets(SIZES, most)]
    index = 0
    for bucket in buckets:
        assert bucket.first == index
        end = 0
        for offset in bucket.offsets:
            assert offset % ALIGNMENT_BYTES == 0
            assert offset >= end
            end = offset + SIZES[index]
            index += 1
        assert end <= bucket.num_bytes
        assert len(bucket.offsets) == 1 or bucket.num_bytes <= most
    assert index == len(SIZES)
    assert len(buckets) == {0: 8, 10**6: 1}.get(most, len(buckets))


def test_no_tensors_are_no_buckets() -> None:
    assert [*plan_buckets([], 10)] == []
    assert [*plan_buckets([0], 10)] == [Bucket(0, (0,), ALIGNMENT_BYTES)]
