"""Configurations of MiniMax-01, Sarvam and Step 3.5 as their authors publish them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.model_helpers import (
    assert_logits_close,
    load,
    our_logits,
    reference_logits,
    reference_model,
    save,
)
from support.published_configs import SIZES, read
from transformers import (
    MiniMaxConfig,
    SarvamMoEConfig,
    Step3p7Config,
    Step3p7ForConditionalGeneration,
    Step3p7TextConfig,
)

from shmllm.errors import EngineStartError
from shmllm.models.recurrent_specs import LightningSpec
from shmllm.models.specs import MLPSpec, MoESpec

TOKENS = [5, 9, 17, 40, 3, 8]


MINIMAX: dict[str, Any] = {
    "num_hidden_layers": 80,
    "hidden_size": 6144,
    "intermediate_size": 9216,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rotary_dim": 64,
    "rope_theta": 10000000,
    "rms_norm_eps": 1e-05,
    "num_local_experts": 32,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 0,
    "postnorm": True,
    "attn_type_list": [*[0] * 7, 1] * 10,
    "layernorm_full_attention_alpha": 3.5565588200778455,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_alpha": 3.5565588200778455,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_alpha": 3.5565588200778455,
    "layernorm_mlp_beta": 1.0,
}


def test_absent_fields_of_minimax_01_agree_with_transformers(tmp_path: Path) -> None:
    expected = MiniMaxConfig(**SIZES | {"head_dim": 16})
    config = read(tmp_path, "MiniMaxForCausalLM", head_dim=16)
    types = ["full_attention" if mixer.kv else "linear_attention" for mixer in config.mixers]
    assert types == expected.layer_types
    [attention], [experts] = set(config.attentions), config.mixtures
    assert config.max_position_embeddings == expected.max_position_embeddings
    assert (config.norm.eps, config.residual_scale) == (expected.rms_norm_eps, 1.0)
    assert attention.rope is not None
    assert attention.rope.theta == expected.rope_parameters["rope_theta"]
    assert attention.rope.rotary_dim == expected.head_dim
    assert experts.num_experts == expected.num_local_experts
    assert experts.top_k == expected.num_experts_per_tok


@pytest.mark.parametrize("name", ["MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"])
def test_minimax_01_as_its_authors_write_it(name: str, tmp_path: Path) -> None:
    config = read(tmp_path, name, **MINIMAX)
    [attention], [experts] = set(config.attentions), config.mixtures
    nets = [each for each in config.mixers if isinstance(each, LightningSpec)]
    assert len(nets) == 70
    assert config.mixers[7] == attention
    assert {(each.heads, each.head_dim) for each in nets} == {(64, 128)}
    assert [nets[0].slope, nets[69].slope] == pytest.approx([1 + 1e-5, 1 / 79 + 1e-5], abs=1e-6)
    assert attention.rope is not None
    assert (attention.rope.rotary_dim, attention.rope.theta) == (64, 1e7)
    assert (experts.num_experts, experts.top_k, experts.renormalize) == (32, 2, True)
    alpha = MINIMAX["layernorm_mlp_alpha"]
    assert config.residual_scale == config.layers[0].mixed_scale == 1 / alpha
    assert config.layers[0].norms.eps_behind == (1e-5 / alpha**2,) * 2


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"postnorm": False}, "postnorm False is not supported"),
        ({"shared_intermediate_size": 512}, "shared_intermediate_size 512 is not supported"),
        ({"attn_type_list": [2] * 80}, "'attn_type_list' must list 0 or 1 for each layer"),
        ({"attn_type_list": [0] * 79}, "must list one type for each of 80 layers"),
        ({"head_dim": 120}, "head_dim must be a multiple of 16, not 120"),
        ({"rotary_dim": 256}, "'rotary_dim' must be an integer of at most 128"),
        ({"hidden_act": "gelu"}, "experts with hidden_act 'gelu' are not supported"),
        ({"layernorm_mlp_alpha": 0}, "'mlp_alpha_factor' must be a positive number"),
    ],
)
def test_what_minimax_01_does_not_compute_is_refused(
    fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=reason):
        read(tmp_path, "MiniMaxText01ForCausalLM", **MINIMAX | fields)


SARVAM: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "num_hidden_layers": 19,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 128,
    "num_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1024,
    "moe_shared_expert_intermediate_size": 1024,
    "use_qkv_bias": False,
    "use_bias": False,
    "score_function": "sigmoid",
    "rope_theta": 8000000,
}


def test_sarvam_30b_as_its_authors_write_it(tmp_path: Path) -> None:
    config = read(tmp_path, "SarvamMoEForCausalLM", **SARVAM)
    [attention], [experts] = set(config.attentions), config.mixtures
    assert (attention.num_kv_heads, attention.head_dim, attention.qk_norm) == (4, 64, "head")
    assert attention.rope is not None
    assert (attention.rope.rotary_dim, attention.rope.theta) == (64, 8e6)
    assert (experts.num_experts, experts.top_k, experts.weight_scale) == (128, 6, 2.5)
    assert config.max_position_embeddings == 131072
    defaults = SarvamMoEConfig()
    few = {name: SARVAM[name] for name in ("num_attention_heads", "hidden_size")}
    absent = read(tmp_path, "SarvamMoEForCausalLM", **few, num_key_value_heads=4)
    [attention], [experts] = set(absent.attentions), absent.mixtures
    assert attention.head_dim == defaults.head_dim
    assert (experts.num_experts, experts.inner) == (128, defaults.moe_intermediate_size)
    assert [isinstance(each, MoESpec) for each in absent.feed_forwards] == [False, True, True, True]


def test_sarvam_105b_as_its_authors_write_it(tmp_path: Path) -> None:
    fields = SARVAM | {"head_dim": 576, "q_head_dim": 192, "num_key_value_heads": 64}
    fields |= {"num_experts_per_tok": 8, "moe_intermediate_size": 2048, "num_mtp_layers": 1}
    del fields["moe_shared_expert_intermediate_size"]
    yarn = {"type": "deepseek_yarn", "factor": 40, "original_max_position_embeddings": 4096}
    yarn |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    config = read(tmp_path, "SarvamMLAForCausalLM", **fields, rope_scaling=yarn)
    [attention] = set(config.latent_attentions)
    assert (attention.query_rank, attention.rank, attention.value_dim) == (None, 512, 128)
    assert (attention.rope.type, attention.rope.factor, attention.rope.theta) == ("yarn", 40, 8e6)
    assert attention.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert config.skipped_prefixes == ("model.layers.19.",)


@pytest.mark.parametrize("name", ["SarvamMoEForCausalLM", "SarvamMLAForCausalLM"])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"score_function": "softmax"}, "score_function 'softmax' is not supported"),
        ({"use_bias": True}, "use_bias True is not supported"),
        ({"moe_shared_expert_intermediate_size": 7}, "_size 7 is not supported; supported: 1024"),
        ({"num_experts": 5}, r"num_experts_per_tok \(6\) is more than 5 experts"),
        ({"rope_scaling": {"type": "other"}}, "rope type 'other' is not supported"),
    ],
)
def test_what_sarvam_does_not_compute_is_refused(
    name: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=reason):
        read(tmp_path, name, **SARVAM | {"num_key_value_heads": 64} | fields)


def test_updates_of_sarvam_have_the_names_of_transformers_modules(tmp_path: Path) -> None:
    sizes = {"num_experts_per_tok": 2, "n_routed_experts": 4, "moe_intermediate_size": 16}
    reference = reference_model("sarvam_moe", 4.0, head_dim=8, **sizes)
    model = load(save(reference, tmp_path))
    written = load_file(tmp_path / "model.safetensors")
    assert "model.layers.1.attention.query_key_value.weight" in written
    expected = our_logits(model, TOKENS)
    model.load_weights((name, tensor * 0 + 1) for name, tensor in reference.state_dict().items())
    assert not torch.equal(our_logits(model, TOKENS), expected)
    model.load_weights(reference.state_dict().items())
    assert torch.equal(our_logits(model, TOKENS), expected)


STEP: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11264,
    "num_hidden_layers": 45,
    "num_attention_heads": 64,
    "num_attention_groups": 8,
    "num_key_value_heads": None,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-05,
    "moe_intermediate_size": 1280,
    "moe_num_experts": 288,
    "moe_top_k": 8,
    "share_expert_dim": 1280,
    "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 3.0,
    "norm_expert_weight": True,
    "use_moe_router_bias": True,
    "need_fp32_gate": True,
    "use_head_wise_attn_gate": True,
    "att_impl_type": "GQA",
    "num_nextn_predict_layers": 3,
    "layer_types": ["full_attention", *["sliding_attention"] * 3] * 12,
    "sliding_window": 512,
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 96,
        "num_attention_groups": 8,
        "head_dim": 128,
        "true_head_dim": 128,
    },
    "rope_theta": [5000000.0, *[10000.0] * 3] * 12,
    "partial_rotary_factors": [0.5, *[1.0] * 3] * 12,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "original_max_position_embeddings": 131072,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
    "yarn_only_types": ["full_attention"],
    "use_rope_layers": [],
    "swiglu_limits": [*[0.0] * 43, 7, 7, 0.0, 0.0, 0.0],
    "swiglu_limits_shared": [*[0.0] * 44, 16, 0.0, 0.0, 0.0],
    "moe_layers_enum": ",".join(map(str, range(3, 45))),
}


def test_step_3_5_as_its_authors_write_it(tmp_path: Path) -> None:
    config = read(tmp_path, "Step3p5ForCausalLM", **STEP)
    full, sliding = config.attentions[0], config.attentions[1]
    assert (full.num_heads, full.num_kv_heads, full.window) == (64, 8, None)
    assert (sliding.num_heads, sliding.num_kv_heads, sliding.window) == (96, 8, 512)
    assert full.rope is not None
    assert sliding.rope is not None
    assert (full.rope.type, full.rope.rotary_dim, full.rope.theta) == ("llama3", 64, 5e6)
    assert (sliding.rope.type, sliding.rope.rotary_dim, sliding.rope.theta) == ("default", 128, 1e4)
    assert config.norm.offset == 1.0
    assert config.feed_forwards[2] == MLPSpec(inner=11264)
    usual, bounded, last = (config.feed_forwards[index] for index in (3, 43, 44))
    assert isinstance(usual, MoESpec)
    assert isinstance(bounded, MoESpec)
    assert isinstance(last, MoESpec)
    assert (usual.num_experts, usual.top_k, usual.weight_scale) == (288, 8, 3.0)
    assert (usual.activation, usual.shared) == ("silu", MLPSpec(inner=1280))
    assert (bounded.activation, bounded.bound) == ("silu_bounded", 7.0)
    assert (bounded.shared, last.shared) == (MLPSpec(inner=1280), MLPSpec(inner=1280, bound=16.0))
    further = [f"model.layers.{index}." for index in (45, 46, 47)]
    assert list(config.skipped_prefixes[:3]) == further


def test_absent_fields_of_step_3_5_agree_with_transformers(tmp_path: Path) -> None:
    expected = Step3p7TextConfig(**{name: SIZES[name] for name in SIZES if "key" not in name})
    fields = dict.fromkeys(("num_key_value_heads", "intermediate_size"))
    config = read(tmp_path, "Step3p5ForCausalLM", **fields)
    [attention], [experts] = set(config.attentions), config.mixtures
    assert attention.head_dim == expected.head_dim
    assert attention.scale == expected.query_pre_attn_scalar**-0.5
    assert config.max_position_embeddings == expected.max_position_embeddings
    assert config.norm.eps == expected.rms_norm_eps
    types = ["sparse" if isinstance(each, MoESpec) else "dense" for each in config.feed_forwards]
    assert types == expected.mlp_layer_types
    assert (experts.num_experts, experts.top_k) == (288, expected.num_experts_per_tok)
    assert experts.inner == expected.moe_intermediate_size


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate False is not supported"),
        ({"moe_router_activation": "softmax"}, "moe_router_activation 'softmax' is not"),
        ({"use_rope_layers": [False] * 48}, "'use_rope_layers' is not supported"),
        ({"yarn_only_types": ["sliding_attention"]}, "'yarn_only_types' is not supported"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"attention_other_setting": {"head_dim": 64}}, "_setting: head_dim 64 is not supported"),
        ({"per_layer_config": {"1": {"x": 1}}}, "'per_layer_config' is not supported"),
        ({"swiglu_limits": [1.0]}, "'swiglu_limits' must list a number for each layer"),
        ({"swiglu_limits": 7}, "'swiglu_limits' must list a number for each layer"),
        ({"swiglu_limits": [-7] * 48}, "'swiglu_limits' must be a positive number"),
        ({"rope_theta": [1e4]}, "'rope_theta' must list a number for each layer"),
        ({"moe_layers_enum": "3,x"}, "'moe_layers_enum' must list numbers of layers"),
        ({"sliding_window": None}, "no sliding window is enabled"),
        ({"layer_types": ["full_attention"] * 44}, "must list one type for each of 45 layers"),
    ],
)
def test_what_step_3_5_does_not_compute_is_refused(
    fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=reason):
        read(tmp_path, "Step3p5ForCausalLM", **STEP | fields)


def test_layers_of_step_3_5_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    reference = reference_model("step3p5", 4.0, head_dim=8, moe_layers_enum="1,2", **sizes)
    expected = our_logits(load(save(reference, tmp_path)), TOKENS)
    path, config_path = tmp_path / "model.safetensors", tmp_path / "config.json"
    config = json.loads(config_path.read_text()) | {"num_nextn_predict_layers": 1}
    config_path.write_text(json.dumps(config))
    save_file(load_file(path) | {"model.layers.3.eh_proj.weight": torch.ones(3, 5)}, path)
    model = load(tmp_path)
    assert torch.equal(our_logits(model, TOKENS), expected)
    model.load_weights((name, tensor * 0 + 1) for name, tensor in reference.state_dict().items())
    assert not torch.equal(our_logits(model, TOKENS), expected)
    model.load_weights(reference.state_dict().items())
    assert torch.equal(our_logits(model, TOKENS), expected)


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_the_language_model_of_step_3_7_is_step_3_5(prefix: str, tmp_path: Path) -> None:
    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    reference = reference_model("step3p5", 4.0, head_dim=8, moe_layers_enum="1,2", **sizes)
    expected = our_logits(load(save(reference, tmp_path)), TOKENS)
    path, config_path = tmp_path / "model.safetensors", tmp_path / "config.json"
    stored = {name.replace("model.", prefix, 1): each for name, each in load_file(path).items()}
    of_images = ("vision_model.conv1.weight", "vit_large_projector.weight")
    save_file(stored | {name: torch.ones(2) for name in of_images}, path)
    text = json.loads(config_path.read_text())
    outer = {"architectures": ["Step3p7ForConditionalGeneration"], "text_config": text}
    config_path.write_text(json.dumps(outer))
    assert torch.equal(our_logits(load(tmp_path), TOKENS), expected)
    config_path.write_text(json.dumps(outer | {"text_config": text | {"model_type": "llama"}}))
    with pytest.raises(EngineStartError, match="model_type 'llama' is not supported"):
        load(tmp_path)


@pytest.mark.slow
def test_the_language_model_of_step_3_7_equals_transformers(tmp_path: Path) -> None:
    experts = {"moe_layers_enum": "1,2", "n_routed_experts": 4, "num_experts_per_tok": 2}
    layers = {"layer_types": ["full_attention", *["sliding_attention"] * 2], "sliding_window": 3}
    config = reference_model("step3p5", head_dim=16, **experts, **layers).config
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56}
    whole = Step3p7Config(text_config=config.to_dict(), vision_config=sizes, image_token_id=5)
    model = Step3p7ForConditionalGeneration(whole).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    model.save_pretrained(tmp_path)
    tokens = [7, *TOKENS[1:]]
    wanted = reference_logits(model, tokens)
    assert_logits_close(our_logits(load(tmp_path), tokens), wanted, 1e-4)
