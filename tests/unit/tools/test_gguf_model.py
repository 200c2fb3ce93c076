"""GGUF files for the comparison with llama.cpp: written once, and without a vocabulary."""

from __future__ import annotations

import os
from pathlib import Path

import gguf_model
import pytest
from make_model import Size, make, tokenizer

from shmllm.formats.gguf import read_header

SIZE = Size(hidden=64, layers=2, heads=4, kv_heads=2, inner=80, vocab=512)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make(SIZE, tmp_path / "model", seed=0)
    return tmp_path / "model"


def test_a_file_has_no_vocabulary(model: Path) -> None:
    header = read_header(gguf_model.cached(model, "Q4_0"))
    assert header.metadata["tokenizer.ggml.model"] == "none"
    assert header.metadata["llama.vocab_size"] == SIZE.vocab
    assert header.tensors["token_embd.weight"].type_name == "Q4_0"


def test_a_file_is_written_again_only_when_the_weights_are_newer(model: Path) -> None:
    file = gguf_model.cached(model, "Q8_0")
    assert file == model.with_name("model.Q8_0.gguf")
    os.utime(file, (2e9, 2e9))
    assert gguf_model.cached(model, "Q8_0").stat().st_mtime == 2e9
    os.utime(model / "model.safetensors", (3e9, 3e9))
    os.utime(file, (2e9, 2e9))
    assert gguf_model.cached(model, "Q8_0").stat().st_mtime != 2e9
    assert [path.name for path in model.parent.glob(".*.unfinished")] == []


def test_a_large_vocabulary_has_longer_merges() -> None:
    assert tokenizer(70_000).get_vocab_size() == 70_000
