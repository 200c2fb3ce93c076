"""GGUF files for llama.cpp, read back by the engine's own reader of such files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
import gguf_model
import pytest
from make_model import Size, make, tokenizer
from safetensors.torch import load_file

from shmllm.formats.gguf import read_header
from shmllm.frontend.gguf.config import model_config
from shmllm.models.gguf_file import GgufFile

SIZE = Size(hidden=64, layers=2, heads=4, kv_heads=2, inner=80, vocab=512)
LARGEST_ERROR = {"F32": 0.0, "F16": 2.0**-11, "BF16": 2.0**-8, "Q8_0": 1 / 250, "Q4_0": 1 / 7.9}
"""Of an element, relative to the largest of its matrix."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make(SIZE, tmp_path / "model", seed=0)
    return tmp_path / "model"


@pytest.mark.parametrize("kind", LARGEST_ERROR)
def test_a_file_has_the_checkpoints_tensors(kind: str, model: Path, tmp_path: Path) -> None:
    gguf_model.write(model, tmp_path / "m.gguf", kind)
    expected = load_file(model / "model.safetensors")
    with GgufFile(tmp_path / "m.gguf") as file:
        assert set(file.shapes()) == set(expected)
        for name, values in expected.items():
            with file.tensor(name) as found:
                error = (found.float() - values).abs().max().item()
            is_norm = values.ndim == 1
            allowed = 0.0 if is_norm else LARGEST_ERROR[kind] * values.abs().max().item()
            assert error <= allowed, name


def test_a_file_has_the_models_sizes_and_no_vocabulary(model: Path, tmp_path: Path) -> None:
    gguf_model.write(model, tmp_path / "m.gguf", "Q4_0")
    header = read_header(tmp_path / "m.gguf")
    expected = json.loads((model / "config.json").read_text())
    found = model_config(header)
    for name in (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
        "tie_word_embeddings",
    ):
        assert found[name] == expected[name], name
    assert header.metadata["tokenizer.ggml.model"] == "none"


def test_all_matrices_are_quantized_except_those_with_incomplete_blocks(
    model: Path, tmp_path: Path
) -> None:
    gguf_model.write(model, tmp_path / "m.gguf", "Q4_0")
    tensors = read_header(tmp_path / "m.gguf").tensors
    kinds = {name: entry.type_name for name, entry in tensors.items()}
    assert kinds["token_embd.weight"] == kinds["blk.1.attn_output.weight"] == "Q4_0"
    assert kinds["blk.0.ffn_down.weight"] == "F16"  # its rows have 80 elements
    assert kinds["output_norm.weight"] == "F32"
    assert "output.weight" not in kinds


def test_a_file_is_written_again_only_when_the_weights_are_newer(model: Path) -> None:
    file = gguf_model.cached(model, "Q8_0")
    assert file == model.with_name("model.Q8_0.gguf")
    os.utime(file, (2e9, 2e9))
    assert gguf_model.cached(model, "Q8_0").stat().st_mtime == 2e9
    os.utime(model / "model.safetensors", (3e9, 3e9))
    os.utime(file, (2e9, 2e9))
    assert gguf_model.cached(model, "Q8_0").stat().st_mtime != 2e9
    assert [path.name for path in model.parent.glob("*.unfinished")] == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, "Qwen3ForCausalLM, not"),
        ({"attention_bias": True}, "the attention has biases"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "extends the context length"),
    ],
)
def test_a_model_that_cannot_be_written_is_refused(
    change: dict[str, object], reason: str, model: Path, tmp_path: Path
) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(click.ClickException, match=reason):
        gguf_model.write(model, tmp_path / "m.gguf", "F32")
    assert not (tmp_path / "m.gguf").exists()


def test_a_large_vocabulary_has_longer_merges() -> None:
    assert tokenizer(70_000).get_vocab_size() == 70_000
