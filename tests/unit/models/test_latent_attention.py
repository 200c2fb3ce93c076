"""Families with latent attention and DeepSeek's routers: names of weights, FP8, refused fields."""

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
from support.quantized_checkpoints import fp8, load_packed, named, write_checkpoint
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shmllm.config.load import LoadConfig
from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.decoder import DecoderModel
from shmllm.models.latent_attention import LatentAttention
from shmllm.models.quantized import QuantizedMatrix
from shmllm.models.specs import MoESpec
from shmllm.worker.cpu.program import check_model

TOKENS = [int(token) for token in torch.randint(0, 97, (30,), generator=torch.manual_seed(5))]
OPTIONS: dict[str, Any] = {
    "num_key_value_heads": 6,
    "num_hidden_layers": 2,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
BLOCK = (128, 128)


def make(scale: float = 1.0, **options: Any) -> Any:
    return reference_model("deepseek_v3", scale, **(OPTIONS | options))


def assert_computes(model: DecoderModel, reference: Any) -> None:
    logits = our_logits(model, TOKENS)
    assert_logits_close(logits, reference_logits(reference, TOKENS), 1e-4)


def attention_of(model: DecoderModel, layer: int) -> LatentAttention:
    mixer = model.layers[layer].mixer
    assert isinstance(mixer, LatentAttention)
    return mixer


SIZES = {
    "vocab_size": 97,
    "hidden_size": 256,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
}
CLASSES = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | {"mistral4": "Mistral4ForCausalLM"}
REQUIRED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 3},
    "axk1": {},
    "axk2": {},
    "deepseek_v3": {},
    "deepseek_v32": {},
    "deepseek_v4": {"num_key_value_heads": 1},
    "glm_moe_dsa": {},
    "hy_v4": {},
    "dots1": {"n_routed_experts": 12, "num_experts_per_tok": 3, "n_shared_experts": 1},
    "glm4_moe": {},
    "glm4_moe_lite": {},
    "longcat_flash": {},
    "minicpm3": {},
    "mistral4": {},
    "solar_open": {},
    "youtu": {},
}
"""Families, and the fields that they have no defaults for."""


@pytest.mark.parametrize("family", REQUIRED)
def test_absent_fields_agree_with_transformers(family: str, tmp_path: Path) -> None:
    heads = {} if family in ("dots1", "glm4_moe", "solar_open") else {"num_key_value_heads": 32}
    sizes = SIZES | heads | REQUIRED[family]
    assert_absent_fields_agree(tmp_path, CLASSES[family], sizes, CONFIGS[family](**sizes))


def test_an_update_has_the_names_of_transformers_modules(tmp_path: Path) -> None:
    """The biases of routers are buffers, which `named_parameters` leaves out."""
    model = load(save(make(), tmp_path))
    other = make(2.0)
    model.weights_lost()
    written = model.load_weights(other.named_parameters())
    assert "model.layers.1.mlp.experts.gate_up_proj" in written
    assert model.missing == {"model.layers.1.mlp.gate.e_score_correction_bias"}
    buffers = {name: tensor for name, tensor in other.named_buffers() if "correction" in name}
    model.load_weights(buffers.items())
    assert not model.missing
    assert_computes(model, other)


def test_an_update_has_the_names_of_files(tmp_path: Path) -> None:
    model = load(save(make(), tmp_path / "first"))
    other = make(2.0)
    save(other, tmp_path / "other")
    stored = load_file(tmp_path / "other" / "model.safetensors")
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in stored
    model.weights_lost()
    assert model.load_weights(stored.items()) == set(model.named_weights())
    assert_computes(model, other)


def test_the_projection_of_latents_reads_as_it_was_written(tmp_path: Path) -> None:
    reference = make()
    model = load(save(reference, tmp_path))
    [view] = model.named_weights()["model.layers.1.self_attn.kv_b_proj.weight"]
    weight = reference.model.layers[1].self_attn.kv_b_proj.weight.detach()
    assert torch.equal(view.clone(), weight)
    heads = weight.view(6, 22, 20)
    assert torch.equal(attention_of(model, 1).key_up, heads[:, :12].transpose(1, 2))
    assert torch.equal(attention_of(model, 1).value_up, heads[:, 12:])


@pytest.mark.parametrize(
    "options",
    [
        {"q_lora_rank": 120},  # as wide as all queries
        {"q_lora_rank": 92},  # as wide as these with a latent and its key part
        {"q_lora_rank": None},
        {"q_lora_rank": None, "attention_bias": True},  # of latents alone
        {"attention_bias": True},
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_queries_are_computed_in_each_way(
    options: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    reference = make(**options, first_k_dense_replace=2)  # no choice of experts that is close
    if "attention_bias" in options:
        for name, parameter in reference.named_parameters():
            if name.endswith(".bias"):
                torch.nn.init.normal_(parameter)
    model = load(save(reference, tmp_path), getattr(torch, dtype))
    if dtype == "float32":
        return assert_computes(model, reference)
    found, want = our_logits(model, TOKENS), reference_logits(reference.bfloat16(), TOKENS)
    assert_logits_close(found, want, 0.05)


def test_routers_stay_float32_in_a_bfloat16_model(tmp_path: Path) -> None:
    model = load(save(make(), tmp_path), torch.bfloat16)
    dtypes = {name: views[0].dtype for name, views in model.named_weights().items()}
    exact = {name for name, dtype in dtypes.items() if dtype is torch.float32}
    prefix = "model.layers.1.mlp.gate"
    assert exact == {f"{prefix}.weight", f"{prefix}.e_score_correction_bias"}


def quantized_pair(directory: Path) -> tuple[Path, Path]:
    """The directories of a checkpoint in DeepSeek's FP8, and of one with the same values."""
    options = {"hidden_size": 192, "intermediate_size": 136, "kv_lora_rank": 130}
    plain = save(make(**options), directory / "plain")
    packed = save(make(**options), directory / "packed")
    tensors: dict[str, torch.Tensor] = {}
    values = load_file(plain / "model.safetensors")
    for name, tensor in values.items():
        if name.endswith(("_proj.weight", "kv_a_proj_with_mqa.weight")):
            weight = fp8((tensor.shape[0], tensor.shape[1]), BLOCK)
            scale = 0.08 / weight.values.std()
            weight.parts[".weight_scale_inv"] *= scale
            values[name] = (weight.values * scale).contiguous()
            tensors |= named(name.removesuffix(".weight"), weight)
        else:
            tensors[name] = tensor
    save_file(values, plain / "model.safetensors")
    write_checkpoint(
        packed, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": BLOCK}, tensors
    )
    return packed, plain


def test_fp8_in_blocks_stays_packed_but_for_the_projections_of_heads(tmp_path: Path) -> None:
    packed, plain = quantized_pair(tmp_path)
    model = load_packed(packed)
    floats = {
        name
        for name, (view, *_) in model.named_weights().items()
        if name.endswith("_proj.weight") and not isinstance(view, QuantizedMatrix)
    }
    assert floats == {f"model.layers.{n}.self_attn.kv_b_proj.weight" for n in range(2)}
    assert isinstance(attention_of(model, 0).in_proj.weight, QuantizedMatrix)
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    assert_computes(model, reference)
    assert_logits_close(our_logits(model, TOKENS), our_logits(load(plain), TOKENS), 1e-5)


def test_layers_that_predict_several_tokens_are_left_out(tmp_path: Path) -> None:
    reference = make(num_nextn_predict_layers=2)
    save(reference, tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    for name in ("eh_proj.weight", "shared_head.norm.weight", "mlp.experts.0.up_proj.weight"):
        stored |= {f"model.layers.{layer}.{name}": torch.ones(3, 5) for layer in (2, 3)}
    save_file(stored, path)
    assert_computes(load(tmp_path), reference)
    save_file(stored | {"model.layers.4.eh_proj.weight": torch.ones(3, 5)}, path)
    with pytest.raises(EngineStartError, match=r"the model lacks: model\.layers\.4\.eh_proj"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "projector"),
    [
        ("KimiK25", "mm_projector.proj.0"),
        ("Kimi_K25", "mm_projector.proj.0"),
        ("KimiVL", "multi_modal_projector.linear_1"),
    ],
)
def test_the_language_model_of_kimi_with_images_is_that_of_deepseek_v3(
    name: str, projector: str, tmp_path: Path
) -> None:
    reference = make(num_nextn_predict_layers=0)
    save(reference, tmp_path)
    path, config_path = tmp_path / "model.safetensors", tmp_path / "config.json"
    stored = {f"language_model.{name}": tensor for name, tensor in load_file(path).items()} | {
        "vision_tower.x.weight": torch.ones(2),
        f"{projector}.weight": torch.ones(2),
    }
    save_file(stored, path)
    text = json.loads(config_path.read_text()) | {"model_type": "kimi_k2"}
    outer = {"architectures": [f"{name}ForConditionalGeneration"], "text_config": text}
    config_path.write_text(json.dumps(outer))
    assert_computes(load(tmp_path), reference)
    config_path.write_text(json.dumps(outer | {"text_config": text | {"model_type": "llama"}}))
    with pytest.raises(EngineStartError, match="model_type 'llama' is not supported"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("V3", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("V3", {"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
        ("V3", {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported; supported: 1"),
        ("V3", {"n_group": 3}, r"n_group \(3\) does not divide 8 experts"),
        ("V3", {"n_group": 8}, r"n_group \(8\) leaves 1 experts in a group"),
        ("V3", {"topk_group": 5}, r"topk_group \(5\) does not suit 3 experts"),
        ("V3", {"topk_group": 1}, r"topk_group \(1\) does not suit 3 experts for each token"),
        ("V3", {"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\) is more than 8 experts"),
        ("V3", {"hidden_act": "gelu"}, "experts with hidden_act 'gelu' are not supported"),
        ("V3", {"num_key_value_heads": 2}, r"num_key_value_heads \(2\) differs from"),
        ("V3", {"qk_rope_head_dim": 7}, "not an even number of elements"),
        ("V3", {"first_k_dense_replace": -1}, "'first_k_dense_replace' must be an integer"),
        ("V2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        ("V2", {"norm_topk_prob": True}, "norm_topk_prob true is not supported"),
        ("V2", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported"),
        ("V2", {"topk_method": "group_limited_greedy", "n_group": None}, "'n_group' is missing"),
    ],
)
def test_fields_that_cannot_be_are_refused(
    family: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    config = make().config.to_dict() | {"architectures": [f"Deepseek{family}ForCausalLM"]}
    if family == "V2":
        config |= {"norm_topk_prob": False}
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(EngineStartError, match=message) as caught:
        ModelConfig.from_directory(tmp_path)
    assert "\n" not in str(caught.value)


def test_glm_lists_the_layers_with_experts(tmp_path: Path) -> None:
    config = make().config.to_dict() | {"architectures": ["Glm4MoeLiteForCausalLM"]}
    config |= {"mlp_layer_types": ["sparse", "dense"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    layers = ModelConfig.from_directory(tmp_path).layers
    assert [isinstance(layer.mlp, MoESpec) for layer in layers] == [True, False]
    (tmp_path / "config.json").write_text(json.dumps(config | {"mlp_layer_types": ["sparse"]}))
    with pytest.raises(EngineStartError, match="'mlp_layer_types' must list"):
        ModelConfig.from_directory(tmp_path)


def test_a_cache_of_8_bits_is_refused(tmp_path: Path) -> None:
    config = ModelConfig.from_directory(save(make(), tmp_path))
    load = LoadConfig(directory=str(tmp_path), kv_cache_dtype="int8")
    with pytest.raises(EngineStartError, match="kv_cache_dtype='int8' is not possible for Deep"):
        check_model(config, load, "float32")


def test_ax_k1_as_its_files_are_published(tmp_path: Path) -> None:
    """They have norms behind the MLPs of dense layers, too, a further layer, and no biases of the
    choice."""
    options = {name: OPTIONS[name] for name in OPTIONS if name != "num_hidden_layers"}
    reference = reference_model("axk1", 4.0, **options)
    path = save(reference, tmp_path) / "model.safetensors"
    with torch.no_grad():
        for layer in reference.model.layers[1:]:
            layer.mlp.gate.e_score_correction_bias.zero_()
    tensors = load_file(path)
    unread = {name: each for name, each in tensors.items() if "e_score_correction" not in name}
    norm = tensors["model.layers.1.post_mlp_layernorm.weight"]
    unread |= {f"model.layers.{i}.post_mlp_layernorm.weight": norm.clone() for i in (0, 3)}
    save_file(unread, path, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"num_nextn_predict_layers": 1, "topk_method": "greedy"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load(tmp_path)
    assert "model.layers.0.post_mlp_layernorm.weight" not in model.named_weights()
    assert_computes(model, reference)


@pytest.mark.parametrize(
    "fields",
    [
        {"architectures": ["AXK1ForCausalLM"], "q_lora_rank": None},
        {"architectures": ["AXK2ForCausalLM"], "q_lora_rank": None},
        {"architectures": ["AXK2ForCausalLM"], "gated_norm_rank": 0},
        {"architectures": ["AXK2ForCausalLM"], "layer_types": ["full_attention"] * 5},
    ],
)
def test_what_ax_k_has_not_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES | fields))
    with pytest.raises(EngineStartError, match=r"q_lora_rank null|gated_norm_rank|layer type"):
        ModelConfig.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("axk1", "mlp.post_mlp_layernorm.weight"),
        ("axk2", "self_attn.q_gate_proj.weight"),
    ],
)
def test_an_update_has_the_names_of_modules_of_ax_k(family: str, name: str, tmp_path: Path) -> None:
    model = load(save(reference_model(family, **OPTIONS), tmp_path))
    other = reference_model(family, 2.0, **OPTIONS)
    model.weights_lost()
    assert f"model.layers.1.{name}" in model.load_weights(other.named_parameters())
    model.load_weights([each for each in other.named_buffers() if "correction" in each[0]])
    assert not model.missing
    assert_computes(model, other)
