"""Configurations as the authors of models publish them, with names of fields and classes that
transformers does not write."""

from __future__ import annotations

import json
from dataclasses import replace
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
from support.variants import slow
from transformers import MiMoV2FlashConfig, Mistral3Config

from shmllm.errors import EngineStartError
from shmllm.models.specs import MoESpec

TOKENS = [5, 9, 17, 40, 3, 8]


def test_the_first_name_of_llama(tmp_path: Path) -> None:
    first = read(tmp_path, "LLaMAForCausalLM", max_sequence_length=2048, pad_token_id=-1)
    assert replace(first, architecture="LlamaForCausalLM") == read(tmp_path, "LlamaForCausalLM")


def test_the_fields_of_exaone(tmp_path: Path) -> None:
    model = save(reference_model("exaone", rms_norm_eps=1e-3), tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    own = {
        "num_hidden_layers": "num_layers",
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
    }
    expected = our_logits(load(model), TOKENS)
    published = {own.get(name, name): value for name, value in written.items()}
    published["architectures"] = ["ExaoneForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(published))
    assert torch.equal(our_logits(load(model), TOKENS), expected)


def test_updates_of_exaone_come_under_the_names_of_files_and_modules(tmp_path: Path) -> None:
    model = load(save(reference_model("exaone"), tmp_path / "first"))
    for scale in (1.5, 2.0):
        other = reference_model("exaone", scale)
        tensors = dict(other.named_parameters())
        if scale == 2.0:
            save(other, tmp_path)
            tensors = load_file(tmp_path / "model.safetensors")
            assert "transformer.h.0.mlp.c_fc_0.weight" in tensors
        model.load_weights(list(tensors.items()))
        assert_logits_close(our_logits(model, TOKENS), reference_logits(other, TOKENS), 1e-4)


@pytest.mark.parametrize("end", ["ForCausalLM", "ForSequenceClassification"])
@pytest.mark.parametrize("stem", ["Llama", "Exaone"])
def test_classes_that_transformers_shares_are_told_apart_by_the_type(
    stem: str, end: str, tmp_path: Path
) -> None:
    config = read(tmp_path, stem + end, model_type="exaone")
    assert config.architecture == f"Exaone{end}"


@pytest.mark.parametrize("names", [("qkv_bias", "bias"), ("attention_bias", "mlp_bias")])
def test_the_biases_of_internlm3(names: tuple[str, str], tmp_path: Path) -> None:
    layer = read(tmp_path, "InternLM3ForCausalLM", **dict.fromkeys(names, True)).layers[0]
    assert layer.attention is not None
    assert layer.attention.bias
    assert layer.attention.output_bias
    assert layer.mlp.bias
    with pytest.raises(EngineStartError, match="qkv_bias that differs from bias"):
        read(tmp_path, "InternLM3ForCausalLM", **{names[0]: True})


def test_layers_of_mimo_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    directory = save(reference_model("mimo"), tmp_path)
    expected = our_logits(load(directory), TOKENS)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.mtp_layers.0.input_proj.weight"] = torch.ones(48, 96)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    assert torch.equal(our_logits(load(directory), TOKENS), expected)


def test_sparse_attention_of_minicpm_limits_the_length(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"max_position_embeddings": 65536, "scale_emb": 12}
    sparse = {"kernel_size": 32, "topk": 64, "dense_len": 8192}
    name = "MiniCPMForCausalLM"
    assert read(tmp_path, name, **fields).max_position_embeddings == 65536
    limited = read(tmp_path, name, **fields, sparse_config=sparse)
    assert limited.max_position_embeddings == 8192


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("MiniCPMForCausalLM", {"num_experts": 8}, "num_experts is not supported"),
        ("MiniCPMForCausalLM", {"sparse_config": {"topk": 64}}, "'dense_len' is missing"),
        ("LlamaBidirectionalModel", {"pooling": "cls_avg"}, "pooling 'cls_avg' is not supported"),
        ("LlamaBidirectionalModel", {"temperature": 0.2}, "temperature 0.2 is not supported"),
        ("DeciLMForCausalLM", {}, "'block_configs' must list an object for each of 4 layers"),
        (
            "DeciLMForCausalLM",
            {"block_configs": [{"attention": {"replace_with_linear": True}}] * 4},
            r"block_configs\[0\]: attention: replace_with_linear True is not supported",
        ),
        (
            "DeciLMForCausalLM",
            {"block_configs": [{"attention": {"n_heads_in_group": 4}}] * 4},
            r"n_heads_in_group \(4\) must divide num_attention_heads \(6\)",
        ),
        ("IQuestCoderForCausalLM", {"clip_qkv": 8.0}, "clip_qkv 8.0 is not supported"),
    ],
)
def test_what_these_families_do_not_compute_is_refused(
    name: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=reason):
        read(tmp_path, name, **fields)


def test_mistral3_is_tied_where_nothing_says_so(tmp_path: Path) -> None:
    text: dict[str, Any] = SIZES | {"model_type": "mistral"}
    config = read(tmp_path, "Mistral3ForConditionalGeneration", text_config=text)
    assert config.tie_word_embeddings is Mistral3Config().tie_word_embeddings is True
    text["tie_word_embeddings"] = False
    config = read(tmp_path, "Mistral3ForConditionalGeneration", text_config=text)
    assert not config.tie_word_embeddings


def test_mimo_v2_flash_as_its_authors_write_it(tmp_path: Path) -> None:
    fields = {
        "model_type": "mimo_v2_flash",
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "attention_bias": False,
        "attention_chunk_size": 128,
        "attention_value_scale": 0.707,
        "head_dim": 192,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "hybrid_block_size": None,
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "intermediate_size": 16384,
        "layernorm_epsilon": 1e-05,
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": [0, 1, 1, 1],
        "n_group": 1,
        "n_routed_experts": 256,
        "n_shared_experts": None,
        "norm_topk_prob": True,
        "num_attention_heads": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "partial_rotary_factor": 0.334,
        "rope_theta": 5000000,
        "routed_scaling_factor": None,
        "scoring_func": "sigmoid",
        "sliding_window": 128,
        "sliding_window_size": 128,
        "swa_head_dim": 192,
        "swa_num_attention_heads": 64,
        "swa_num_key_value_heads": 8,
        "swa_rope_theta": 10000,
        "swa_v_head_dim": 128,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 152576,
    }
    config = read(tmp_path, "MiMoV2FlashForCausalLM", **fields)
    full, local, *_ = config.attentions
    assert config.attentions == (full, local, local, full)
    assert [(each.num_heads, each.num_kv_heads) for each in (full, local)] == [(64, 4), (64, 8)]
    assert [(each.window, each.sinks) for each in (full, local)] == [(None, False), (129, True)]
    assert {(each.head_dim, each.value_dim) for each in (full, local)} == {(192, 128)}
    assert {each.output_scale for each in (full, local)} == {0.707}
    assert [(each.theta, each.rotary_dim) for each in config.ropes] == [(5e6, 64), (1e4, 64)]
    assert [isinstance(each, MoESpec) for each in config.feed_forwards] == [False, *[True] * 3]
    assert config.norm.eps == 1e-5
    own = {"swa_num_key_value_heads": 16, "swa_head_dim": 96, "swa_v_head_dim": 64}
    other = read(tmp_path, "MiMoV2FlashForCausalLM", **fields | own).attentions[1]
    assert (other.num_kv_heads, other.head_dim, other.value_dim) == (16, 96, 64)
    assert other.scale == 96**-0.5
    assert MiMoV2FlashConfig(**fields).sliding_window == local.window


@pytest.mark.parametrize(
    ("family", "options"),
    [("cohere", {"use_qk_norm": True}), slow("stablelm", {"qk_layernorm": True})],
)
def test_updates_of_norms_of_each_head(
    family: str, options: dict[str, bool], tmp_path: Path
) -> None:
    model = load(save(reference_model(family, **options), tmp_path))
    other = reference_model(family, 2.0, **options)
    model.weights_lost()
    model.load_weights(other.named_parameters())
    assert not model.missing
    assert_logits_close(our_logits(model, TOKENS), reference_logits(other, TOKENS), 1e-4)


LING: dict[str, Any] = {
    "attention_dropout": 0.0,
    "eos_token_id": 156892,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "max_position_embeddings": 32768,
    "model_type": "bailing_moe",
    "moe_intermediate_size": 512,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 512,
    "n_group": 8,
    "norm_head": False,
    "norm_softmax": False,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 20,
    "num_key_value_heads": 4,
    "num_shared_experts": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 600000,
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "rotary_dim": 64,
    "score_function": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "use_bias": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_rmsnorm": True,
    "using_split_qkv_in_self_attention": False,
    "vocab_size": 157184,
}
"""Ling-mini-2.0."""


def test_ling_2_as_its_authors_write_it(tmp_path: Path) -> None:
    config = read(tmp_path, "BailingMoeV2ForCausalLM", **LING)
    [attention] = set(config.attentions)
    sizes = attention.num_heads, attention.num_kv_heads, attention.head_dim
    assert (*sizes, attention.qk_norm, attention.bias) == (16, 4, 128, "head", False)
    assert attention.rope is not None
    assert (attention.rope.rotary_dim, attention.rope.theta) == (64, 6e5)
    [experts] = config.mixtures
    assert (experts.num_experts, experts.top_k, experts.num_groups) == (256, 8, 8)
    assert (experts.top_groups, experts.weight_scale, experts.inner) == (4, 2.5, 512)
    assert [isinstance(each, MoESpec) for each in config.feed_forwards] == [False, *[True] * 19]
    known = {"head_dim", "n_group", "topk_group", "num_experts", "moe_intermediate_size"}
    known |= {"num_experts_per_tok", "rope_theta", "max_position_embeddings"}
    absent = dict.fromkeys(known)
    assert read(tmp_path, "BailingMoeV2ForCausalLM", **LING | absent) == config


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"norm_head": True}, "norm_head True is not supported"),
        ({"norm_topk_prob": False}, "norm_topk_prob False is not supported"),
        ({"score_function": "softmax"}, "score_function 'softmax' is not supported"),
        ({"moe_shared_expert_intermediate_size": 64}, "intermediate_size 64 is not supported"),
        ({"moe_router_enable_expert_bias": False}, "expert_bias False is not supported"),
    ],
)
def test_what_ling_2_does_not_compute_is_refused(
    fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=reason):
        read(tmp_path, "BailingMoeV2ForCausalLM", **LING | fields)


def test_layers_of_ling_2_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    reference = reference_model(
        "bailing_moe_v2", head_dim=8, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16
    )
    save(reference, tmp_path)
    path, config_path = tmp_path / "model.safetensors", tmp_path / "config.json"
    config = json.loads(config_path.read_text()) | {"num_nextn_predict_layers": 1}
    config_path.write_text(json.dumps(config))
    further = "model.layers.3.eh_proj.weight"
    save_file(load_file(path) | {further: torch.ones(3, 5)}, path)
    ours = our_logits(load(tmp_path), TOKENS)
    assert_logits_close(ours, reference_logits(reference, TOKENS), 1e-4)


def test_deepseek_moe_as_its_authors_write_it(tmp_path: Path) -> None:
    fields = {
        "aux_loss_alpha": 0.001,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "max_position_embeddings": 4096,
        "model_type": "deepseek",
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 28,
        "num_key_value_heads": 16,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000,
        "scoring_func": "softmax",
        "seq_aux": True,
        "vocab_size": 102400,
    }
    config = read(tmp_path, "DeepseekForCausalLM", **fields)
    [attention], [experts] = set(config.attentions), config.mixtures
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (16, 16, 128)
    assert (experts.num_experts, experts.top_k, experts.inner) == (64, 6, 1408)
    assert (experts.scoring, experts.renormalize, experts.weight_scale) == ("softmax", False, 1.0)
    assert experts.shared is not None
    assert experts.shared.inner == 2816
    assert [isinstance(each, MoESpec) for each in config.feed_forwards] == [False, *[True] * 27]
    with pytest.raises(EngineStartError, match="scoring_func 'sigmoid' is not supported"):
        read(tmp_path, "DeepseekForCausalLM", **fields | {"scoring_func": "sigmoid"})
