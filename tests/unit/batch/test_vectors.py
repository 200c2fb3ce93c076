"""Vectors in journals, and the .npy files that are made of them."""

from __future__ import annotations

import numpy as np
import pytest
from support.batch_helpers import write_rows

from shmllm.batch.vectors import array_of, encoded, width_in, width_of, write_npy


@pytest.mark.parametrize("width", range(8))
def test_a_vector_is_encoded_and_decoded(width):
    vector = np.random.default_rng(width).standard_normal(width, np.float32)
    assert np.array_equal(array_of(encoded(vector)), vector)
    assert width_of(encoded(vector)) == width_of(vector.tolist()) == width


def test_a_npy_file_has_the_rows_of_the_journal(tmp_path):
    vectors = np.random.default_rng(0).standard_normal((3000, 5), np.float32)
    records = [{"line": i, "v": encoded(vector)} for i, vector in enumerate(vectors, 1)]
    failed = {"line": 8, "error": "too long"}
    journal = write_rows(tmp_path / "journal", [failed, *records, failed])
    failures = []
    write_npy(str(journal), str(tmp_path / "out.npy"), "v", failures.append)
    found = np.load(tmp_path / "out.npy")
    assert (found.dtype, found.shape) == (np.float32, (3002, 5))
    assert np.array_equal(found[1:-1], vectors)
    assert np.isnan(found[[0, -1]]).all()
    assert failures == [failed, failed]
    assert np.array_equal(np.load(tmp_path / "out.npy", mmap_mode="r")[5], vectors[4])


def test_without_a_vector_the_width_is_0(tmp_path):
    journal = write_rows(tmp_path / "journal", [{"line": 1, "error": "x"}])
    write_npy(str(journal), str(tmp_path / "out.npy"), "v")
    assert np.load(tmp_path / "out.npy").shape == (1, 0)
    assert width_in(str(journal), "v") == 0


def test_a_failure_keeps_the_file_of_before(tmp_path):
    journal = write_rows(tmp_path / "journal", [{"line": 1}, "torn"])
    (tmp_path / "out.npy").write_bytes(b"before")
    with pytest.raises(ValueError, match="Expecting"):
        write_npy(str(journal), str(tmp_path / "out.npy"), "v")
    assert (tmp_path / "out.npy").read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal", "out.npy"]
