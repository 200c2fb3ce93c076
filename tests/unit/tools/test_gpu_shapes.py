"""The bytes, flops and parameters of the measured models, against known numbers."""

from __future__ import annotations

import json

import pytest
from gpu.settings import REAL, REHEARSAL
from gpu.shapes import SHAPES
from support.model_sizes import num_allocated, theirs_on_meta

from shmllm.models.config import ModelConfig

PARAMETERS = {"1b": 1_235_814_400, "4b": 4_022_468_096, "8b": 8_030_261_248}
SIZES = list(PARAMETERS)


@pytest.mark.parametrize("size", SIZES)
def test_the_numbers_of_parameters_are_the_published_ones(size):
    assert SHAPES[size].num_parameters == PARAMETERS[size]


@pytest.mark.parametrize("size", SIZES)
def test_config_json_describes_the_same_model_here_and_in_transformers(size, tmp_path):
    shape = SHAPES[size]
    directory = shape.write(tmp_path / size, "bfloat16")
    theirs = theirs_on_meta(directory)
    names = {name: tuple(weight.shape) for name, weight in theirs.named_parameters()}
    assert names == shape.weights()
    assert num_allocated(directory) == theirs.num_parameters() == shape.num_parameters
    assert ModelConfig.from_directory(directory).eos_token_ids == ()


def test_the_bytes_of_a_decode_step():
    # A token's keys and values in 1b: 2 x 16 layers x 8 heads x 64 x 2 bytes.
    assert [SHAPES[size].kv_bytes_per_token(2) for size in SIZES] == [32_768, 147_456, 131_072]
    assert SHAPES["1b"].decode_bytes(1, 1024, 2) == 2 * 1_235_814_400 + 1024 * 32_768
    assert SHAPES["4b"].decode_bytes(8, 1000.5, 2) == 2 * 4_022_468_096 + 8 * 1000.5 * 147_456
    # 8b is untied: its embedding table of 128,256 x 4,096 does not count.
    weights = 8_030_261_248 - 128_256 * 4096
    assert SHAPES["8b"].decode_bytes(256, 1024, 2) == 2 * weights + 256 * 1024 * 131_072
    of_float8 = SHAPES["8b"].decode_bytes(256, 1024, 2, kv_itemsize=1)
    assert of_float8 == 2 * weights + 256 * 1024 * 65_536


def test_the_flops_of_a_prompt():
    layer = 2048 * 2048 * 2 + 2 * 2048 * 512 + 3 * 2048 * 8192
    seen = 8192 * 8193 // 2
    by_hand = 2 * 8192 * 16 * layer + 2 * 128_256 * 2048 + 4 * seen * 32 * 64 * 16
    assert SHAPES["1b"].prefill_flops(8192) == by_hand


@pytest.mark.parametrize("size", SIZES)
def test_the_products_of_a_step_cover_all_matrices(size):
    shape = SHAPES[size]
    matrices = {name: rows * columns for name, (rows, columns) in shape.matrices().items()}
    assert matrices.pop("head") == shape.embedding_parameters
    assert shape.layers * sum(matrices.values()) == shape.matrix_parameters


@pytest.mark.parametrize("settings", [REAL, REHEARSAL], ids=["real", "rehearsal"])
def test_a_model_directory_has_the_shape_and_fits_the_requests(settings, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    config = json.loads((settings.directory("8b") / "config.json").read_text())
    assert config["hidden_size"] == settings.shape("8b").hidden
    assert config["dtype"] == settings.dtype
    longest = settings.context + max(settings.batches.values())
    assert max(longest, settings.prefill_tokens) < settings.max_model_len


def test_the_same_arguments_give_the_same_prompts():
    prompts = REAL.prompts(3, 5, 100, 0)
    assert prompts == REAL.prompts(3, 5, 100, 0) != REAL.prompts(3, 5, 100, 1)
    assert [len(prompt) for prompt in prompts] == [5, 5, 5]
    assert all(0 <= token < 100 for prompt in prompts for token in prompt)
