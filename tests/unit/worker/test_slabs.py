"""Slabs: who is covered, what is missing, and that pages stay within the budget."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shmllm.models.config import ModelConfig
from shmllm.worker import slabs as slabs_module
from shmllm.worker.slabs import GROWTH, Slabs

LAYERS, HEADS, DIM = 2, 3, 16
BYTES_PER_TOKEN = 2 * LAYERS * HEADS * DIM * 4


def make_slabs(tokens: int, *, rows: int = 4, longest: int = 500) -> Slabs:
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=10,
        hidden_size=HEADS * DIM,
        intermediate_size=8,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        max_position_embeddings=4096,
        layer_windows=(None,) * LAYERS,
    )
    return Slabs(config, torch.float32, rows, longest, tokens * BYTES_PER_TOKEN)


def cover(slabs, *work, fresh=()):
    """work: (row, start, end). Returns which are covered, and what they lack."""
    rows, starts, ends = np.array(work, np.int64).T
    covered, missing = slabs.cover(rows, starts, ends, np.array(fresh, np.int64))
    return covered.tolist(), missing


def touched_bytes(slabs) -> int:
    """Bytes of the rows that hold something else than zeros, by token."""
    memory = torch.stack([torch.stack(pair) for pair in zip(slabs.keys, slabs.values, strict=True)])
    return int((memory != 0).sum()) * 4


def write(slabs, row, length):
    for half in (*slabs.keys, *slabs.values):
        half[row, :, :length] = 1.0


def test_a_request_that_is_followed_from_its_begin_lacks_nothing():
    slabs = make_slabs(1000)
    assert cover(slabs, (0, 0, 40), fresh=[0]) == ([True], [])
    assert cover(slabs, (0, 40, 41)) == ([True], [])


def test_a_prefix_from_the_cache_is_missing_once():
    slabs = make_slabs(1000)
    assert cover(slabs, (1, 32, 40), fresh=[1]) == ([True], [(0, 0, 32)])
    assert cover(slabs, (1, 40, 41)) == ([True], [])


def test_another_request_in_the_row_has_none_of_the_last_one():
    slabs = make_slabs(1000)
    cover(slabs, (2, 0, 64), fresh=[2])
    assert cover(slabs, (2, 16, 20), fresh=[2]) == ([True], [(0, 0, 16)])


def test_rows_beyond_the_budget_are_not_covered():
    slabs = make_slabs(200)
    work = [(row, 0, 90) for row in range(4)]
    assert cover(slabs, *work, fresh=range(4)) == ([True, True, False, False], [])
    assert slabs.resident_bytes == 2 * 96 * BYTES_PER_TOKEN


def test_rows_that_rest_make_room_and_are_filled_again():
    slabs = make_slabs(200)
    cover(slabs, (0, 0, 90), (1, 0, 90), fresh=[0, 1])
    write(slabs, 0, 90)
    assert cover(slabs, (2, 0, 150), fresh=[2]) == ([True], [])
    assert touched_bytes(slabs) == 0
    assert cover(slabs, (0, 90, 91)) == ([True], [(0, 0, 90)])


def test_a_row_that_outgrows_the_budget_gives_back_what_it_had():
    slabs = make_slabs(3 * GROWTH)
    cover(slabs, (0, 0, GROWTH), (1, 0, 2 * GROWTH), fresh=[0, 1])
    write(slabs, 1, 2 * GROWTH)
    covered, _ = cover(slabs, (0, GROWTH, GROWTH + 1), (1, 2 * GROWTH, 2 * GROWTH + 1))
    assert covered == [True, False]
    assert touched_bytes(slabs) == 0
    assert slabs.resident_bytes == 2 * GROWTH * BYTES_PER_TOKEN


@pytest.mark.parametrize("seed", range(5))
def test_pages_stay_within_the_budget(seed):
    choose = np.random.default_rng(seed)
    slabs = make_slabs(400, rows=8)
    lengths = np.zeros(8, np.int64)
    for _ in range(200):
        rows = choose.permutation(8)[: choose.integers(1, 9)]
        fresh = rows[(choose.random(len(rows)) < 0.1) | (lengths[rows] > 400)]
        lengths[fresh] = 0
        starts = lengths[rows]
        ends = starts + choose.choice([1, 1, 30], len(rows))
        covered, missing = slabs.cover(rows, starts, ends, fresh)
        lengths[rows] = ends
        assert slabs.resident_bytes <= 400 * BYTES_PER_TOKEN
        assert all(covered[index] and end == starts[index] for index, _, end in missing)


def test_release_gives_everything_back():
    slabs = make_slabs(1000)
    cover(slabs, (0, 0, 90), fresh=[0])
    write(slabs, 0, 90)
    slabs.release()
    assert touched_bytes(slabs) == slabs.resident_bytes == 0
    assert cover(slabs, (0, 90, 91)) == ([True], [(0, 0, 90)])


def test_nothing_is_covered_without_memory_or_without_addresses(monkeypatch):
    assert cover(make_slabs(0), (0, 0, 1), fresh=[0]) == ([False], [])

    def refuse(*args, **options):
        raise OSError("no such addresses")

    monkeypatch.setattr(slabs_module.mmap, "mmap", refuse)
    slabs = make_slabs(1000)
    assert cover(slabs, (0, 0, 1), fresh=[0]) == ([False], [])
    slabs.release()
