"""Apertus: the numbers that its activation learns are weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.model_helpers import (
    allocate,
    assert_logits_close,
    load,
    our_logits,
    reference_logits,
    reference_model,
    save,
)
from transformers.activations import ACT2CLS

from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.create import create_model
from shmllm.models.decoder import DecoderModel
from shmllm.models.weights import load_dummy_weights
from shmllm_kernels.reference.activation import xielu

TOKENS = [5, 96, 0, 31, 31, 7, 88]


def test_an_update_by_the_names_of_parameters_leaves_buffers_alone(tmp_path: Path) -> None:
    model = load(save(reference_model("apertus"), tmp_path))
    other = reference_model("apertus", 4.0)
    model.weights_lost()
    model.load_weights(other.named_parameters())
    assert model.missing
    assert all(model.is_buffer(name) for name in model.missing)
    model.load_weights((name, other.state_dict()[name]) for name in tuple(model.missing))
    assert_logits_close(our_logits(model, TOKENS), reference_logits(other, TOKENS), 1e-4)


def test_random_weights_have_the_activation_before_training(tmp_path: Path) -> None:
    config = ModelConfig.from_directory(save(reference_model("apertus"), tmp_path))
    model = create_model(config, torch.float32, allocate)
    assert isinstance(model, DecoderModel)
    load_dummy_weights(model)
    untrained, x = ACT2CLS["xielu"](dtype=torch.float32), torch.linspace(-4, 4, 101)
    found = xielu(x, model.layers[0].mlp.learned)
    torch.testing.assert_close(found, untrained._xielu_python(x).detach())


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_head_has_rows_for_the_first_tokens(quantization: str | None, tmp_path: Path) -> None:
    """The logits of the others are minus infinity, whatever the memory behind those rows has."""
    reference = reference_model("apertus1p5", 4.0, output_vocab_size=60)
    model = load(save(reference, tmp_path), quantization=quantization)
    [head] = model.named_weights()["lm_head.weight"]
    assert head.shape == (60, 48)
    logits = our_logits(model, TOKENS)
    assert (logits[:, 60:] == -torch.inf).all()
    tolerance = 1e-4 if quantization is None else 0.3
    assert_logits_close(logits[:, :60], reference_logits(reference, TOKENS), tolerance)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"output_vocab_size": 98}, r"output_vocab_size \(98\) is more than 97 tokens"),
        ({"output_vocab_size": 0}, "'output_vocab_size' must be an integer of at least 1"),
        ({"tie_word_embeddings": True}, "not supported with tie_word_embeddings true"),
    ],
)
def test_a_head_of_another_size_is_refused(
    fields: dict[str, object], reason: str, tmp_path: Path
) -> None:
    save(reference_model("apertus1p5", output_vocab_size=60), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(EngineStartError, match=reason):
        ModelConfig.from_directory(tmp_path)
