"""Histograms, compared with the durations that they counted."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from shmllm.ipc import layout
from shmllm.ipc.histogram import (
    SUM_WORD,
    Durations,
    HistogramWriter,
    bucket_of,
    by_octave,
    lower_bound_ns,
    read_histogram,
)


def test_a_duration_lies_within_the_bounds_of_its_bucket() -> None:
    rng = random.Random(1)
    for _ in range(20_000):
        duration = int(10 ** rng.uniform(0, 12))
        bucket = bucket_of(duration)
        assert lower_bound_ns(bucket) <= duration < lower_bound_ns(bucket + 1)


def test_bounds_grow_by_an_eighth_at_most_above_the_first_bucket() -> None:
    bounds = [lower_bound_ns(bucket) for bucket in range(1, layout.HISTOGRAM_BUCKETS + 1)]
    assert bounds[0] == 1024
    pairs = list(itertools.pairwise(bounds))
    assert all(low < high <= low * 1.125 for low, high in pairs)
    assert [bucket_of(bound) for bound in bounds[:-1]] == list(range(1, layout.HISTOGRAM_BUCKETS))
    assert [bucket_of(bound - 1) for bound in bounds[:-1]] == list(
        range(layout.HISTOGRAM_BUCKETS - 1)
    )


@pytest.mark.parametrize("duration", [2**43, 2**62])
def test_the_last_bucket_counts_all_longer_durations(duration: int) -> None:
    assert bucket_of(duration) == layout.HISTOGRAM_BUCKETS - 1


def counted(durations: list[int]) -> Durations:
    memory = memoryview(bytearray(layout.HISTOGRAM_WORDS * layout.WORD_BYTES))
    writer = HistogramWriter(memory, 0)
    for duration in durations:
        writer.add(duration)
    return read_histogram(memory, 0)


@pytest.mark.parametrize("scale", [2e4, 3e6, 5e9])
def test_quantiles_are_within_an_eighth_of_numpys(scale: float) -> None:
    durations = (np.random.default_rng(7).lognormal(0, 0.8, 5000) * scale).astype(int)
    found = counted(durations.tolist())
    assert found.count == 5000
    assert found.total_ns == durations.sum()
    assert found.mean_ns == pytest.approx(durations.mean())
    for share in (0.01, 0.1, 0.5, 0.9, 0.99, 1.0):
        exact = np.quantile(durations, share, method="inverted_cdf")
        assert found.quantile_ns(share) == pytest.approx(exact, rel=0.125)


def test_the_difference_to_an_earlier_reading() -> None:
    early, late = [2_000_000] * 5, [90_000_000] * 3
    since = counted(early + late).since(counted(early))
    assert since.count == 3
    assert since.total_ns == sum(late)
    assert since.quantile_ns(0.0) >= lower_bound_ns(bucket_of(90_000_000))


def test_an_empty_histogram() -> None:
    nothing = counted([])
    assert (nothing.count, nothing.mean_ns, nothing.quantile_ns(0.5)) == (0, 0.0, 0.0)


def test_a_duration_can_be_counted_several_times() -> None:
    memory = memoryview(bytearray(layout.HISTOGRAM_WORDS * layout.WORD_BYTES))
    HistogramWriter(memory, 0).add(5_000, times=64)
    found = read_histogram(memory, 0)
    assert (found.count, found.total_ns, found.mean_ns) == (64, 320_000, 5_000)


def test_counts_by_octave_are_exact() -> None:
    rng = random.Random(4)
    durations = [int(10 ** rng.uniform(4, 11)) for _ in range(2000)]
    durations += [2**20, 2**20 - 1]
    for bound, count in by_octave(counted(durations), 15, 36):
        assert count == sum(duration < bound for duration in durations)


def test_the_words_are_those_of_the_layout() -> None:
    assert SUM_WORD * layout.WORD_BYTES == layout.HISTOGRAM_SUM_OFFSET
    assert SUM_WORD == layout.HISTOGRAM_BUCKETS
