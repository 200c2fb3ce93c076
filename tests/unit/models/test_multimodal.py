"""Multimodal checkpoints: their language model runs, and what else they have is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.model_helpers import (
    SIZES,
    assert_logits_close,
    load,
    our_logits,
    reference_logits,
    reference_model,
    save,
)
from support.multimodal_models import NAMES, nest, renamed

from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.weight_names import model_name
from shmllm.models.weight_staging import StagedWeights

TOKENS = [3, 14, 15, 92, 65]
QWEN3_VL = "qwen3", "Qwen3VLForConditionalGeneration", "qwen3_vl_text"
MISTRAL3 = "mistral", "Mistral3ForConditionalGeneration", "mistral"
MINISTRAL3 = "ministral3", "Mistral3ForConditionalGeneration", "ministral3"
GEMMA4 = "gemma4", "Gemma4ForConditionalGeneration", "gemma4_text"
GEMMA3N = "gemma3n", "Gemma3nForConditionalGeneration", "gemma3n_text"
APERTUS = "apertus1p5", "Apertus1p5ForConditionalGeneration", "apertus1p5_text"
ARIA = "aria", "AriaForConditionalGeneration", "aria_text"
COMPASS = "cohere_compass", "CohereCompassForConditionalGeneration", "cohere_compass_text"
LLAMA4 = "llama4", "Llama4ForConditionalGeneration", "llama4_text"
OPTIONS = {
    "gemma3n": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 97}
    | {"layer_types": ["full_attention"] * 3, "head_dim": 16},
    "llama4": {"num_local_experts": 2, "attention_chunk_size": 3, "intermediate_size_mlp": 40},
    "gemma4": {"vocab_size_per_layer_input": 97, "global_head_dim": 32},
    "cohere_compass": {"rope_parameters": {"full_attention": None}},
    "aria": {"moe_num_experts": 4, "intermediate_size": 24},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
}
GEMMA3 = "gemma3", "Gemma3ForConditionalGeneration", "gemma3_text"
LFM2_VL = "lfm2", "Lfm2VlForConditionalGeneration", "lfm2"
NESTED = [
    *(QWEN3_VL, MISTRAL3, MINISTRAL3, GEMMA3, GEMMA3N, GEMMA4, LFM2_VL, LLAMA4),
    *(APERTUS, ARIA, COMPASS),
]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("form", NAMES)
@pytest.mark.parametrize("family", NESTED)
def test_the_language_model_runs_alone(
    family: tuple[str, str, str], form: str, tied: bool, tmp_path: Path
) -> None:
    text, architecture, model_type = family
    options = OPTIONS.get(text, {})
    save(reference_model(text, tie_word_embeddings=tied, eos_token_id=7, **options), tmp_path)
    plain = load(tmp_path)
    nest(tmp_path, architecture, model_type, form)
    model = load(tmp_path)
    assert (model.config.architecture, model.config.eos_token_ids) == (architecture, (7,))
    assert set(model.named_weights()) == set(plain.named_weights())
    assert torch.equal(our_logits(model, TOKENS), our_logits(plain, TOKENS))


def test_fields_beside_text_config_win(tmp_path: Path) -> None:
    save(reference_model("mistral"), tmp_path)
    nest(tmp_path, *MISTRAL3[1:], "old", eos_token_id=[8, 9], vocab_size=5, dtype="float16")
    config = ModelConfig.from_directory(tmp_path)
    assert (config.eos_token_ids[:2], config.dtype, config.vocab_size) == ((8, 9), "float16", 97)


def test_another_language_model_in_a_known_architecture_is_refused(tmp_path: Path) -> None:
    save(reference_model("mistral"), tmp_path)
    nest(tmp_path, MISTRAL3[1], "mixtral", "old")
    others = "mistral, ministral3, mistral4"
    with pytest.raises(EngineStartError, match=rf"model_type 'mixtral' is not.*: {others}$"):
        ModelConfig.from_directory(tmp_path)


def test_an_error_names_the_nested_object(tmp_path: Path) -> None:
    save(reference_model("mistral"), tmp_path)
    nest(tmp_path, *MISTRAL3[1:], "old")
    whole = json.loads((tmp_path / "config.json").read_text())
    del whole["text_config"]["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(EngineStartError, match=r"config.json: text_config: .*'hidden_size'"):
        ModelConfig.from_directory(tmp_path)


def test_updates_come_under_the_checkpoints_names(tmp_path: Path) -> None:
    save(reference_model("qwen3"), tmp_path)
    other = reference_model("qwen3", 2.0)
    nest(tmp_path, *QWEN3_VL[1:], "new")
    model = load(tmp_path)
    update = {renamed(name, "new"): tensor for name, tensor in other.state_dict().items()}
    update["model.visual.patch_embed.weight"] = torch.ones(2, 2)
    norm = "model.norm.weight"
    assert model.load_weights(
        [("model.language_model.norm.weight", update.pop(renamed(norm, "new")))]
    ) == {norm}
    staged = StagedWeights(model)
    for name, tensor in update.items():
        staged.put(name, tensor.shape, 0, tensor.flatten())
    staged.check_complete(set(model.named_weights()) - {norm})
    staged.copy_into_place()
    assert_logits_close(our_logits(model, TOKENS), reference_logits(other, TOKENS), 1e-4)


def test_names_of_other_parts_are_known_and_others_stay() -> None:
    assert model_name("vision_tower.ln.weight", False) is None
    assert model_name("model.vision_tokenizer.quant_conv.weight", False) is None
    assert model_name("model.language_model.norm.weight", False) == "model.norm.weight"
    assert model_name("language_model.lm_head.weight", False) == "lm_head.weight"
    assert model_name("language_model.lm_head.weight", True) is None
    assert model_name("my_vision_tower.weight", False) == "my_vision_tower.weight"


@pytest.mark.parametrize("family", ["Qwen3VL", "Mistral3", "Gemma3", "Lfm2Vl", "Llama4", "Mllama"])
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    import transformers

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    text = SIZES | {"head_dim": 16, "rope_parameters": rope}
    vision: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16}
    outer: dict[str, Any] = {"tie_word_embeddings": False}
    if family == "Qwen3VL":
        vision |= {"depth": 1, "num_heads": 2, "out_hidden_size": 48, "num_position_embeddings": 16}
        vision |= {"deepstack_visual_indexes": [0]}
        outer |= {"image_token_id": 96}
    elif family == "Gemma3":
        del text["rope_parameters"]
        text |= {"num_hidden_layers": 7, "sliding_window": 2}
        vision |= {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
        outer |= {"image_token_index": 96, "mm_tokens_per_image": 1}
    elif family == "Llama4":
        del text["rope_parameters"]
        text |= {"num_local_experts": 2, "attention_chunk_size": 3, "intermediate_size_mlp": 40}
        vision |= {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
        vision |= {"intermediate_size": 64, "vision_output_dim": 16, "projector_input_dim": 16}
        vision |= {"projector_output_dim": 16}
        outer |= {"image_token_index": 96}
    elif family == "Mllama":
        text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "head_dim": None}
        text |= {"num_hidden_layers": 4, "cross_attention_layers": [1, 3]}
        vision |= {"num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2}
        vision |= {"image_size": 28, "patch_size": 14, "vision_output_dim": 32}
        vision |= {"intermediate_layers_indices": [0]}
        outer |= {"image_token_index": 97}
    elif family == "Lfm2Vl":
        text |= {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]}
        del text["rope_parameters"]
        vision |= {"num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 2}
        outer |= {"image_token_id": 96, "projector_hidden_size": 16}
    else:
        text |= {"model_type": "mistral", "rope_parameters": {"rope_type": "default"}}
        vision |= {"model_type": "pixtral", "num_hidden_layers": 1, "num_attention_heads": 2}
        vision |= {"image_size": 28, "patch_size": 14}
    make_config = getattr(transformers, f"{family}Config")
    config = make_config(text_config=text, vision_config=vision, **outer)
    reference = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    save(reference, tmp_path)
    if family == "Llama4":  # the whole module fails without images in transformers 5.24
        reference = reference.language_model
    ours, expected = our_logits(load(tmp_path), TOKENS), reference_logits(reference, TOKENS)
    ours, others = ours.tensor_split([expected.shape[1]], 1)
    assert (others == -torch.inf).all()  # of an LM head without the tokens of images
    assert_logits_close(ours, expected, 1e-4)


def read_llama_vision(directory: Path, **text: Any) -> ModelConfig:
    """Reads the fields of Llama 3.2 Vision 11B, some of the text replaced."""
    import transformers

    fields = transformers.MllamaConfig().to_dict()
    fields |= {"architectures": ["MllamaForConditionalGeneration"]}
    (directory / "config.json").write_text(json.dumps(fields))
    every = ModelConfig.from_directory(directory)
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    few = {name: fields["text_config"][name] for name in (*kept, "num_attention_heads")}
    fields |= {"text_config": few | text}
    (directory / "config.json").write_text(json.dumps(fields))
    assert text or ModelConfig.from_directory(directory).layers == every.layers
    return ModelConfig.from_directory(directory)


def test_llama_vision_has_layers_for_images_alone(tmp_path: Path) -> None:
    config = read_llama_vision(tmp_path)
    assert [index for index, layer in enumerate(config.layers) if layer.mixer is None] == [
        *range(3, 40, 5)
    ]
    [attention] = set(config.attentions)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (32, 8, 128)
    assert (config.vocab_size, config.num_outputs) == (128_264, 128_256)
    assert (config.max_position_embeddings, config.norm.eps) == (131_072, 1e-5)
    assert config.ropes[0].theta == 500_000


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"cross_attention_layers": "3"}, "'cross_attention_layers' must list numbers"),
        ({"hidden_act": "tanh"}, "hidden_act 'tanh' is not supported"),
    ],
)
def test_wrong_fields_of_llama_vision_are_refused(
    fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=reason):
        read_llama_vision(tmp_path, **fields)
