"""Families with experts that are made of what others have: fields, names of weights, and FP8."""

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
from support.variants import slow
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.quantized import QuantizedMatrix
from shmllm.models.specs import MLPSpec, MoESpec

TOKENS = [int(token) for token in torch.randint(0, 97, (30,), generator=torch.manual_seed(5))]
ROUTER = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GRANITE = {"num_local_experts": 5, "num_experts_per_tok": 2}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 2.0,
    "original_max_position_embeddings": 64,
}
UNEQUAL = YARN | {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [1.0] * 4,
    "short_mscale": 1.0,
    "long_mscale": 1.2,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "afmoe": ROUTER | {"head_dim": 16},
    "aria": {"moe_num_experts": 5, "intermediate_size": 24},
    "beam": ROUTER
    | {"head_dim": 16, "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse"]},
    "cohere2_moe": {"num_experts": 5, "num_experts_per_tok": 2, "num_shared_experts": 2}
    | {"head_dim": 16, "intermediate_size": 24},
    "phimoe": {"num_local_experts": 5, "router_jitter_noise": 0.3},
    "ernie4_5_moe": {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 24},
    "exaone_moe": ROUTER | {"sliding_window": 7},
    "flex_olmo": {"num_experts": 5, "num_experts_per_tok": 2},
    "flint": ROUTER | {"head_dim": 16, "shared_expert_intermediate_size": 36},
    "granite_moe": GRANITE,
    "granite_moe_shared": GRANITE | {"shared_intermediate_size": 20},
    "granite_moe_swa": GRANITE | {"shared_intermediate_size": 20, "sliding_window": 7},
    "hy_v3": ROUTER | {"head_dim": 16},
    "llama4": {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16}
    | {"intermediate_size": 24, "intermediate_size_mlp": 40, "attention_chunk_size": 7},
    "kolibri1": ROUTER | {"head_dim": 16, "shared_expert_intermediate_size": 36},
    "mellum": ROUTER | {"head_dim": 16},
    "hunyuan_v1_moe": {"num_experts": 5, "moe_topk": 2, "head_dim": 16},
    "laguna": ROUTER
    | {"head_dim": 16, "shared_expert_intermediate_size": 36, "sliding_window": 7}
    | {"layer_types": ["full_attention", "sliding_attention"]}
    | {"num_attention_heads_per_layer": [4, 6]},
    "mimo_v2_flash": {
        **{"n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        **{"head_dim": 24, "v_head_dim": 16, "num_key_value_heads": 1, "sliding_window": 7},
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "minimax_m2": GRANITE | {"head_dim": 16},
}


def make(family: str, scale: float = 1.0, **options: Any) -> Any:
    return reference_model(family, scale, **OPTIONS[family] | {"num_hidden_layers": 2} | options)


def assert_computes(model: Any, reference: Any) -> None:
    assert_logits_close(our_logits(model, TOKENS), reference_logits(reference, TOKENS), 1e-4)


def read(directory: Path, family: str, **fields: Any) -> ModelConfig:
    """Reads the fields of a small model of a family, with others."""
    written = make(family).config.to_dict()
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[written["model_type"]]
    (directory / "config.json").write_text(
        json.dumps(written | {"architectures": [architecture]} | fields)
    )
    return ModelConfig.from_directory(directory)


@pytest.mark.parametrize("family", OPTIONS)
def test_absent_fields_agree_with_transformers(family: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": 97, "hidden_size": 256, "num_attention_heads": 32}
    written = CONFIGS[family](**sizes)
    architecture, every = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[written.model_type], written.to_dict()
    needed = {"num_hidden_layers", "intermediate_size"} & every.keys()
    required = {name: every[name] for name in needed}
    assert_absent_fields_agree(tmp_path, architecture, sizes | required, written)


@pytest.mark.parametrize("family", OPTIONS)
def test_an_update_has_the_names_of_transformers_modules(family: str, tmp_path: Path) -> None:
    model = load(save(make(family), tmp_path))
    other = make(family, 2.0)
    model.weights_lost()
    model.load_weights(other.named_parameters())
    buffers = {name: tensor for name, tensor in other.named_buffers() if "correction" in name}
    assert len(model.missing) == len(buffers)
    model.load_weights(buffers.items())
    assert not model.missing
    assert_computes(model, other)


def test_transposed_experts_are_rounded(tmp_path: Path) -> None:
    reference = make("llama4")
    model = load(save(reference, tmp_path), quantization="int8")
    values = {name: views[-1].clone() for name, views in model.named_weights().items()}
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            assert name.endswith(("norm.weight", "router.weight", "embed_tokens.weight")) == (
                torch.equal(parameter, values[name])
            )
            parameter.copy_(values[name])
    assert_computes(model, reference)


@pytest.mark.parametrize(
    "family",
    [*("afmoe", "ernie4_5_moe", "exaone_moe", "hy_v3", "minimax_m2"), slow("mimo_v2_flash")],
)
def test_routers_stay_float32_in_a_bfloat16_model(family: str, tmp_path: Path) -> None:
    model = load(save(make(family), tmp_path), torch.bfloat16)
    exact = [views[0] for views in model.named_weights().values()]
    shapes = {tuple(each.shape) for each in exact if each.dtype is torch.float32}
    assert shapes <= {(5,), (1, 5), (5, 48)}
    assert (5, 48) in shapes
    assert len(shapes) == 2


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("afmoe", {"attention_bias": True}, "attention_bias True is not supported"),
        ("afmoe", {"score_func": "softmax"}, "score_func 'softmax' is not supported"),
        ("afmoe", {"route_norm": False}, "route_norm False is not supported; supported: True"),
        ("afmoe", {"n_group": 2}, "n_group 2 is not supported; supported: 1"),
        ("afmoe", {"sliding_window": None}, "no sliding window is enabled"),
        ("cohere2_moe", {"expert_selection_fn": "tanh"}, "expert_selection_fn 'tanh' is not"),
        (
            "cohere2_moe",
            {"shared_expert_combination_strategy": "max"},
            "shared_expert_combination_strategy 'max' is not supported",
        ),
        ("cohere2_moe", {"hidden_act": "gelu"}, "hidden_act 'gelu' are not supported"),
        ("llama4", {"hidden_act": "gelu"}, "hidden_act 'gelu' are not supported"),
        ("llama4", {"layer_types": ["sliding_attention"] * 2}, "type 'sliding_attention' is not"),
        ("llama4", {"no_rope_layers": [1]}, "must have a 0 or 1 for each of 2 layers"),
        ("llama4", {"moe_layers": 2}, "'moe_layers' must list the numbers of layers"),
        ("llama4", {"attn_temperature_tuning": "on"}, "must be a boolean, not 'on'"),
        (
            "llama4",
            {"attention_chunk_size": None},
            "has chunked_attention but attention_chunk_size is null",
        ),
        ("llama4", {"is_causal": False}, "is_causal False is not supported with chunks"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok 3 is not supported, only 2"),
        ("phimoe", {"rope_parameters": UNEQUAL}, "short_mscale 1 beside long_mscale 1.2 is not"),
        ("phimoe", {"rope_parameters": YARN}, "rope type 'yarn' is not supported"),
        ("ernie4_5_moe", {"use_bias": True}, "'use_bias' is not supported; supported: false"),
        ("ernie4_5_moe", {"moe_norm_min": 1e-9}, "moe_norm_min 1e-09 is not supported"),
        ("ernie4_5_moe", {"moe_k": 6}, r"num_experts_per_tok \(6\) is more than"),
        ("ernie4_5_moe", {"hidden_act": "gelu"}, "hidden_act 'gelu' are not supported"),
        ("exaone_moe", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("exaone_moe", {"mlp_layer_types": ["dense"]}, "'mlp_layer_types' must list one"),
        ("exaone_moe", {"mlp_layer_types": ["dense", "moe"]}, "layer type 'moe' is not"),
        (
            "exaone_moe",
            {"layer_types": None, "sliding_window_pattern": "LLLG"},
            "'sliding_window_pattern' must be an integer",
        ),
        ("hunyuan_v1_moe", {"use_cla": True}, "use_cla true is not supported"),
        ("hunyuan_v1_moe", {"use_qk_norm": False}, "use_qk_norm false is not supported"),
        ("hunyuan_v1_moe", {"moe_intermediate_size": [8, 8]}, "moe_intermediate_size 8 is not"),
        ("hunyuan_v1_moe", {"num_shared_expert": 2}, "num_shared_expert 2 is not supported"),
        ("hunyuan_v1_moe", {"moe_topk": [2]}, "'moe_topk' lists 1 layers, fewer than"),
        ("hunyuan_v1_moe", {"moe_topk": 6}, r"num_experts_per_tok \(6\) is more than"),
        ("granite_moe_swa", {"layer_rope_theta": [1e4]}, "'layer_rope_theta' must list a number"),
        (
            "granite_moe_swa",
            {"layer_rope_theta": [1e4, -1]},
            "'layer_rope_theta' must be a positive",
        ),
        ("granite_moe_swa", {"sliding_window": None}, "no sliding window is enabled"),
        ("beam", {"rope_parameters": {"rope_theta": 1e4}}, "must have an object"),
        ("beam", {"n_group": 2}, r"n_group \(2\) does not divide 5 experts"),
        ("beam", {"num_experts_per_tok": 6}, r"num_experts_per_tok \(6\) is more than"),
        ("hy_v3", {"num_shared_experts": 0}, "'num_shared_experts' must be an integer of at least"),
        ("hy_v3", {"hidden_act": "gelu"}, "hidden_act 'gelu' are not supported"),
        (
            "mellum",
            {"rope_parameters": {"rope_theta": 1e4}},
            "must have an object 'full_attention'",
        ),
        ("mellum", {"mlp_layer_types": ["sparse"]}, "'mlp_layer_types' must list one"),
        ("laguna", {"gating": "sigmoid"}, "gating 'sigmoid' is not supported"),
        ("laguna", {"gating_types": ["per_element"] * 2}, "'gating_types' other than 'per-head'"),
        ("laguna", {"attention_bias": True}, "attention_bias True is not supported"),
        ("laguna", {"moe_router_logit_softcapping": 2.0}, "logit_softcapping 2.0 is not"),
        ("laguna", {"moe_apply_router_weight_on_input": True}, "weight_on_input True is not"),
        ("laguna", {"num_attention_heads_per_layer": [4]}, "must list a number for each of 2"),
        ("laguna", {"rope_parameters": {"rope_theta": 1e4}}, "must have an object '"),
        ("mimo_v2_flash", {"attention_projection_layout": "fused_qkv"}, "layout 'fused_qkv' is"),
        ("mimo_v2_flash", {"n_shared_experts": 1}, "n_shared_experts 1 is not supported"),
        ("mimo_v2_flash", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        (
            "mimo_v2_flash",
            {"layer_types": None, "hybrid_layer_pattern": [0, 2]},
            "'hybrid_layer_pattern' must list 0 or 1 for each",
        ),
        (
            "mimo_v2_flash",
            {"mlp_layer_types": None, "moe_layer_freq": [1]},
            "'moe_layer_freq' must list 0 or 1 for each of 2",
        ),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias False is not supported"),
        ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type 'per_head' is not supported"),
        ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size 8 is not"),
        ("minimax_m2", {"attn_type_list": [0, 1]}, "'attn_type_list' is not supported but"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    family: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=message):
        read(tmp_path, family, **fields)


def test_minimax_m2_as_its_authors_write_it(tmp_path: Path) -> None:
    fields = {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "attn_type_list": [1, 1],
        "head_dim": 128,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_attention_heads": 48,
        "num_hidden_layers": 2,
        "qk_norm_type": "per_layer",
        "rope_theta": 5000000,
        "rotary_dim": 64,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "sliding_window": None,
        "use_qk_norm": True,
        "use_routing_bias": True,
        "vocab_size": 200064,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = ModelConfig.from_directory(tmp_path)
    [rope] = config.ropes
    assert (rope.rotary_dim, rope.theta, rope.interleaved) == (64, 5e6, False)
    experts = config.layers[1].mlp
    assert isinstance(experts, MoESpec)
    assert (experts.num_experts, experts.top_k, experts.inner) == (256, 8, 1536)


def test_minimax_m2_in_fp8_with_blocks_of_128(tmp_path: Path) -> None:
    options = {"hidden_size": 192, "intermediate_size": 136}
    plain = save(make("minimax_m2", **options), tmp_path / "plain")
    packed = save(make("minimax_m2", **options), tmp_path / "packed")
    values, tensors = load_file(plain / "model.safetensors"), {}
    for name, tensor in values.items():
        if name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")):
            weight = fp8((tensor.shape[0], tensor.shape[1]), (128, 128))
            scale = 0.08 / weight.values.std()
            weight.parts[".weight_scale_inv"] *= scale
            values[name] = (weight.values * scale).contiguous()
            tensors |= named(name.removesuffix(".weight"), weight)
        else:
            tensors[name] = tensor
    save_file(values, plain / "model.safetensors")
    left = ["gate", "e_score_correction_bias", "lm_head"]
    method = {"quant_method": "fp8", "fmt": "float8_e4m3fn", "activation_scheme": "dynamic"}
    method |= {"weight_block_size": [128, 128], "modules_to_not_convert": left}
    write_checkpoint(packed, method, tensors)
    model = load_packed(packed)
    names = [
        name
        for name, (view, *_) in model.named_weights().items()
        if isinstance(view, QuantizedMatrix)
    ]
    assert "model.layers.1.block_sparse_moe.experts.4.w2.weight" in names
    assert len(names) == 2 * (4 + 3 * 5)
    assert_logits_close(our_logits(model, TOKENS), our_logits(load(plain), TOKENS), 1e-5)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("exaone_moe", "mtp.layers.0.self_attn.q_proj.weight"),
        ("hy_v3", "model.layers.2.self_attn.q_proj.weight"),
        ("mellum", "mtp.layers.0.self_attn.q_proj.weight"),
        ("ernie4_5_moe", "model.mtp_block.0.self_attn.q_proj.weight"),
        ("mimo_v2_flash", "model.mtp.layers.0.self_attn.qkv_proj.weight"),
        ("minimax_m2", "model.layers.4.self_attn.q_proj.weight"),
    ],
)
def test_layers_that_predict_further_tokens_are_left_out(
    family: str, name: str, tmp_path: Path
) -> None:
    reference = make(family)
    save(reference, tmp_path)
    path, config_path = tmp_path / "model.safetensors", tmp_path / "config.json"
    config = json.loads(config_path.read_text()) | {"num_mtp_modules": 3}
    config_path.write_text(json.dumps(config))
    stored = load_file(path)
    save_file(stored | {name: torch.ones(3, 5)}, path)
    assert_computes(load(tmp_path), reference)
    save_file(stored | {"model.layers.5.self_attn.q_proj.weight": torch.ones(3, 5)}, path)
    with pytest.raises(EngineStartError, match=r"the model lacks: model\.layers\.5\."):
        load(tmp_path)


def test_the_last_layer_of_ernie_with_experts_is_the_one_that_the_file_says(tmp_path: Path) -> None:
    layers = {"num_hidden_layers": 6, "moe_layer_start_index": 2, "moe_layer_interval": 2}
    for last, expected in ((-1, [3, 5]), (4, [3])):
        config = read(tmp_path, "ernie4_5_moe", **layers, moe_layer_end_index=last)
        found = [n for n, layer in enumerate(config.layers) if isinstance(layer.mlp, MoESpec)]
        assert found == expected
        assert isinstance(config.layers[0].mlp, MLPSpec)


def test_only_windows_of_afmoe_rotate(tmp_path: Path) -> None:
    config = read(tmp_path, "afmoe", num_hidden_layers=8, layer_types=None, sliding_window=9)
    mixers = [mixer for mixer in config.mixers if isinstance(mixer, AttentionSpec)]
    assert [mixer.window for mixer in mixers] == [9, 9, 9, None] * 2
    assert [mixer.rope is None for mixer in mixers] == [False, False, False, True] * 2
