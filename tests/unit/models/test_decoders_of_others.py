"""Families that are GPT-2, OPT, GPT-NeoX or others but for a little: fields, names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.absent_fields import assert_absent_fields_agree
from support.model_helpers import (
    CONFIGS,
    assert_logits_close,
    load,
    our_logits,
    reference_logits,
    reference_model,
    save,
)
from support.reference_models import PHI4_TOWERS

from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig

TOKENS = [5, 96, 0, 31, 31, 7, 88, 2, 45, 13, 64, 9, 77, 1, 50, 20, 33]
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 6,
    "intermediate_size": 80,
}
OF_GPT = {"n_embd": 768, "n_layer": 12, "n_head": 12}
OF_XGLM = {"d_model": 256, "attention_heads": 4, "num_layers": 6}
ROPES = {"full_attention": {"rope_type": "default", "rope_theta": 5e4}}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus1p5": ("Apertus1p5TextForCausalLM", SIZES),
    "biogpt": ("BioGptForCausalLM", SIZES),
    "cohere_compass": ("CohereCompassForCausalLM", SIZES | {"rope_parameters": ROPES}),
    "gpt_neox_japanese": ("GPTNeoXJapaneseForCausalLM", SIZES),
    "modernbert_decoder": ("ModernBertDecoderForCausalLM", SIZES),
    "openai_gpt": ("OpenAIGPTLMHeadModel", OF_GPT),
    "persimmon": ("PersimmonForCausalLM", SIZES),
    "phi4_multimodal": ("Phi4MultimodalForCausalLM", SIZES | {"num_attention_heads": 8}),
    "xglm": ("XGLMForCausalLM", OF_XGLM),
}
OPTIONS = {"cohere_compass": {"rope_parameters": ROPES}, "phi4_multimodal": PHI4_TOWERS}
"""What small models of some families need besides."""


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_fields_agree_with_transformers(family: str, tmp_path: Path) -> None:
    architecture, fields = FAMILIES[family]
    assert_absent_fields_agree(tmp_path, architecture, fields, CONFIGS[family](**fields))


@pytest.mark.parametrize("family", ["openai_gpt", "xglm"])
def test_these_need_no_field(family: str, tmp_path: Path) -> None:
    assert_absent_fields_agree(tmp_path, FAMILIES[family][0], {}, CONFIGS[family]())


@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_has_the_names_of_transformers_modules(family: str, tmp_path: Path) -> None:
    options = OPTIONS.get(family, {})
    model = load(save(reference_model(family, **options), tmp_path))
    other = reference_model(family, 2.0, **options)
    model.weights_lost()
    model.load_weights(other.named_parameters())
    buffers = ("act_fn.beta", "act_fn.eps")
    model.load_weights(each for each in other.named_buffers() if each[0].endswith(buffers))
    assert not model.missing
    ours = our_logits(model, TOKENS)
    assert_logits_close(ours, reference_logits(other, TOKENS), 1e-4)


def test_files_of_the_bare_model(tmp_path: Path) -> None:
    """As GPT's are published."""
    reference = reference_model("openai_gpt", 4.0)
    path = save(reference, tmp_path) / "model.safetensors"
    tensors = {name.removeprefix("transformer."): each for name, each in load_file(path).items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 4, 4) for layer in range(3)}
    save_file(tensors | masks, path, {"format": "pt"})
    ours = our_logits(load(tmp_path), TOKENS)
    assert_logits_close(ours, reference_logits(reference, TOKENS), 1e-4)


def test_phi4_as_its_authors_publish_it(tmp_path: Path) -> None:
    """Adapters are beside the projections of all layers."""
    reference = reference_model("phi4_multimodal", 4.0, **PHI4_TOWERS)
    path = save(reference, tmp_path) / "model.safetensors"
    tensors = load_file(path)
    for name in [each for each in tensors if each.endswith("_proj.weight") and "layers" in each]:
        if name.startswith("model.layers."):
            stem = name.removesuffix(".weight")
            tensors[f"{stem}.base_layer.weight"] = tensors.pop(name)
            tensors[f"{stem}.lora_A.vision.weight"] = torch.full((2, 2), torch.nan)
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["Phi4MMForCausalLM"], "model_type": "phi4mm"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = our_logits(load(tmp_path), TOKENS)
    assert_logits_close(ours, reference_logits(reference, TOKENS), 1e-4)


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("openai_gpt", {"afn": "tanh"}, "afn 'tanh' is not supported"),
        ("modernbert_decoder", {"classifier_activation": "tanh"}, "'tanh' is not supported"),
        ("modernbert_decoder", {"local_attention": 1}, "'local_attention' must be an integer"),
        ("modernbert_decoder", {"local_attention": None}, "local_attention null is not"),
        ("phi4_multimodal", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear' is not"),
        ("openai_gpt", {"n_head": 7}, "must be a multiple of num_attention_heads"),
        ("biogpt", {"hidden_act": "tanh"}, "hidden_act 'tanh' is not supported"),
        ("biogpt", {"scale_embedding": 2}, "'scale_embedding' must be true or false"),
        ("gpt_neox_japanese", {"rotary_pct": 3.0}, "partial_rotary_factor 3 of a head_dim"),
        ("gpt_neox_japanese", {"intermediate_multiple_size": 0}, "'intermediate_multiple_size'"),
        ("persimmon", {"qk_layernorm": "no"}, "'qk_layernorm' must be true or false"),
        ("xglm", {"pad_token_id": 7}, "pad_token_id 7 is not supported"),
        ("xglm", {"add_cross_attention": True}, "add_cross_attention true is not supported"),
        ("cohere_compass", {"layer_types": ["sliding_attention"] * 6}, "an object 'sliding_att"),
        ("cohere_compass", {"rope_parameters": {"full_attention": 3}}, "full_attention"),
    ],
)
def test_wrong_fields_are_refused(
    family: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    architecture, sizes = FAMILIES[family]
    values = sizes | fields | {"architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(EngineStartError, match=reason):
        ModelConfig.from_directory(tmp_path)
