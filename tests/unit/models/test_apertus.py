"""Apertus: the numbers that its activation learns are weights."""

from __future__ import annotations

from pathlib import Path

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
