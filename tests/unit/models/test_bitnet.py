"""Ternary checkpoints of BitNet: the logits are those of transformers' modules for them.

These round activations to 8 bits, and we do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from support.model_helpers import (
    allocate,
    assert_logits_close,
    our_logits,
    reference_logits,
    reference_model,
    save,
)
from support.quantized_checkpoints import load_packed, read_weight, write_checkpoint
from support.variants import slow
from torch import Tensor
from transformers import BitNetQuantConfig, PreTrainedModel

from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.packed import PACKINGS
from shmllm.models.specs import NormSpec

with mock.patch.object(torch, "compile", lambda function: function):
    from transformers.integrations import bitnet  # it would compile functions of few small tensors

TOKENS = [int(token) for token in torch.randint(0, 97, (40,), generator=torch.manual_seed(3))]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
AUTO, BIT = "autobitlinear", "bitlinear"
PROJECTION = "_proj.weight"


@pytest.fixture
def _exact_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bitnet.ActQuant, "apply", lambda activation: activation)
    monkeypatch.setattr(
        bitnet.BitLinear, "activation_quant", lambda self, x: (x, torch.ones(len(x), 1))
    )


PUBLISHED: dict[str, Any] = {
    "architectures": ["BitNetForCausalLM"],
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "relu2",
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "max_position_embeddings": 4096,
    "model_type": "bitnet",
    "num_attention_heads": 20,
    "num_hidden_layers": 30,
    "num_key_value_heads": 5,
    "quantization_config": {
        "linear_class": AUTO,
        "quant_method": "bitnet",
        "quantization_mode": "offline",
    },
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
"""BitNet b1.58 2B4T."""


def test_fields_of_the_published_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED))
    config = ModelConfig.from_directory(tmp_path)
    [attention], [mlp] = set(config.attentions), set(config.dense_mlps)
    sizes = attention.num_heads, attention.num_kv_heads, attention.head_dim
    assert (*sizes, attention.output_norm, attention.bias) == (20, 5, 128, True, False)
    assert (mlp.activation, mlp.gated, mlp.norm) == ("relu_squared", True, NormSpec(eps=1e-5))
    assert attention.rope is not None
    assert (attention.rope.theta, config.tie_word_embeddings) == (5e5, True)
    known = ("hidden_act", "num_key_value_heads", "rms_norm_eps", "rope_theta")
    path.write_text(json.dumps({k: v for k, v in PUBLISHED.items() if k not in known}))
    assert ModelConfig.from_directory(tmp_path) == config


def parts_of(weight: Tensor, linear_class: str) -> dict[str, Tensor]:
    """What a checkpoint with packed weights has of one."""
    mean = weight.abs().mean()
    numbers = (weight / mean).round().clamp(-1, 1)
    scale = (mean if linear_class == AUTO else 1 / mean).bfloat16().view(1)
    return {"weight": bitnet.pack_weights(numbers), "weight_scale": scale}


def quantized(
    directory: Path, mode: str, linear_class: str, family: str = "bitnet"
) -> tuple[Path, PreTrainedModel]:
    """A checkpoint, and transformers' model of it."""
    model = reference_model(family, 4.0, **SIZES)
    path = save(model, directory)
    tensors = load_file(path / "model.safetensors")
    config = BitNetQuantConfig(linear_class=linear_class, quantization_mode=mode)
    model = bitnet.replace_with_bitnet_linear(model, ["lm_head"], config)
    if mode == "offline":
        for name in [name for name in tensors if name.endswith(PROJECTION)]:
            module = name.removesuffix(".weight")
            parts = parts_of(tensors.pop(name), linear_class)
            tensors |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
    state = dict(tensors)
    if mode == "offline" and linear_class == AUTO:
        packed = [name for name in state if name.endswith(PROJECTION)]
        state |= {name: bitnet.unpack_weights(state[name], torch.float32) for name in packed}
    for name, each in state.items():
        state[name] = each if each.dtype == torch.uint8 else each.float()
    model.load_state_dict(state, assign=True)
    return write_checkpoint(path, config.to_dict(), tensors), model


@pytest.mark.usefixtures("_exact_activations")
@pytest.mark.parametrize(
    ("mode", "linear_class", "kind"),
    [
        ("offline", AUTO, "ternary"),
        ("offline", BIT, "ternary-f32"),
        ("online", AUTO, "ternary-f32"),
    ],
)
def test_logits_equal_transformers_without_rounded_activations(
    mode: str, linear_class: str, kind: str, tmp_path: Path
) -> None:
    path, reference = quantized(tmp_path, mode, linear_class)
    model = load_packed(path)
    assert {layer.mixer.o_proj.weight.kind for layer in model.layers} == {kind}
    ours, expected = our_logits(model, TOKENS), reference_logits(reference, TOKENS)
    assert_logits_close(ours, expected, 1e-4)
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))


def test_rounded_activations_of_transformers_change_logits_a_little(tmp_path: Path) -> None:
    path, reference = quantized(tmp_path, "offline", AUTO)
    ours, expected = our_logits(load_packed(path), TOKENS), reference_logits(reference, TOKENS)
    assert 1e-3 < (ours - expected).norm() / expected.norm() < 0.1


@pytest.mark.usefixtures("_exact_activations")
@pytest.mark.parametrize("mode", [slow("offline"), slow("online")])
def test_other_families_have_ternary_checkpoints(mode: str, tmp_path: Path) -> None:
    path, reference = quantized(tmp_path, mode, AUTO, family="llama")
    ours, expected = our_logits(load_packed(path), TOKENS), reference_logits(reference, TOKENS)
    assert_logits_close(ours, expected, 1e-4)


def one_weight(
    directory: Path, tensors: dict[str, Tensor], **options: Any
) -> tuple[str | None, Tensor, Tensor]:
    config = {"quant_method": "bitnet", "linear_class": AUTO} | options
    named = {f"m.up_proj.{part}": tensor for part, tensor in tensors.items()}
    write_checkpoint(directory, config, named)
    return read_weight(directory, "m.up_proj.weight", torch.float32)


@pytest.mark.parametrize("width", [64, 200])
@pytest.mark.parametrize(("number", "kind"), [(1.25, "ternary"), (0.3, "ternary-f32")])
def test_values_of_packed_weights(number: float, kind: str, width: int, tmp_path: Path) -> None:
    numbers = torch.randint(-1, 2, (24, width)).float()
    scale = torch.tensor([number])
    parts = {"weight": bitnet.pack_weights(numbers.clone()), "weight_scale": scale}
    found, values, widened = one_weight(tmp_path, parts)
    assert found == kind
    assert torch.equal(values, numbers * scale)
    assert torch.equal(widened, numbers * scale)


def test_copies_that_transformers_saves_have_floating_numbers(tmp_path: Path) -> None:
    numbers, scale = torch.randint(-1, 2, (24, 64)).float(), torch.tensor([0.3])
    found, values, _ = one_weight(tmp_path, {"weight": numbers, "weight_scale": scale})
    assert found is None
    assert torch.equal(values, numbers * scale)


@pytest.mark.parametrize("kind", ["ternary", "ternary-f32"])
def test_ternary_values_stay_what_they_are_when_rounded_again(kind: str) -> None:
    values = torch.randint(-1, 2, (8, 192)).float() * 0.25
    matrix = PACKINGS[kind].make((8, 192), torch.float32, allocate)
    matrix.copy_(values)
    assert torch.equal(matrix.clone(), values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"linear_class": "linear"}, "linear_class 'linear' is not supported"),
        ({"quantization_mode": "both"}, "quantization_mode 'both' is not supported"),
        ({"quantization_mode": "online", "linear_class": BIT}, "needs linear_class"),
        ({"use_rms_norm": True}, "use_rms_norm true is not supported"),
        (
            {"quantization_mode": "online", "modules_to_not_convert": ["q_proj"]},
            "modules_to_not_convert",
        ),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=message):
        one_weight(tmp_path, {"weight": torch.zeros(8, 64)}, **options)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "weight_scale is missing"),
        ({"weight_scale": torch.ones(2)}, "must be one number"),
        ({"weight_scale": torch.tensor([float("nan")])}, "not finite"),
    ],
)
def test_damaged_components(parts: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=message):
        one_weight(tmp_path, {"weight": torch.zeros(8, 64, dtype=torch.uint8)} | parts)
