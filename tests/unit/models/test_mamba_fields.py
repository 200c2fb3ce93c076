"""Reading config.json of families with Mamba 1 or 2: defaults, old names, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.absent_fields import assert_absent_fields_agree
from support.model_helpers import CONFIGS

from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.recurrent_specs import Mamba2Spec, MambaSpec
from shmllm.models.specs import MLPSpec

SIZES = {"vocab_size": 100, "hidden_size": 128, "num_hidden_layers": 4}
ATTENTION = {"num_attention_heads": 8, "intermediate_size": 96}
NEMOTRON = SIZES | ATTENTION | {"layers_block_type": ["linear_attention", "full_attention", "mlp"]}
BASE: dict[str, dict[str, Any]] = {
    "Mamba2": SIZES | {"hidden_size": 256, "num_heads": 8},
    "Mamba": SIZES,
    "FalconMamba": SIZES,
    "Jamba": SIZES | ATTENTION | {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Bamba": SIZES | ATTENTION | {"mamba_n_heads": 8, "attn_layer_indices": [1]},
    "FalconH1": SIZES | ATTENTION | {"mamba_n_heads": 16},
    "GraniteMoeHybrid": SIZES | ATTENTION | {"mamba_n_heads": 8},
    "NemotronH": NEMOTRON,
    "Zamba2": SIZES | ATTENTION | {"layers_block_type": ["mamba", "hybrid"] * 2},
}
"""Fields that have no default, or whose default does not fit the others."""


def read(directory: Path, family: str, **fields: Any) -> ModelConfig:
    values = {"architectures": [f"{family}ForCausalLM"]} | BASE[family] | fields
    (directory / "config.json").write_text(json.dumps(values))
    return ModelConfig.from_directory(directory)


def first_mamba(config: ModelConfig) -> Mamba2Spec | MambaSpec:
    mixers = (each for each in config.mixers if not isinstance(each, AttentionSpec))
    found = next(mixers)
    assert isinstance(found, Mamba2Spec | MambaSpec)
    return found


def test_absent_fields_have_transformers_defaults(tmp_path: Path) -> None:
    """Each field by the name that transformers' configuration has for it."""
    biases = "proj_bias", "conv_bias"
    names = {
        "mamba2": ("n_groups", "state_size", "conv_kernel", "use_bias", "use_conv_bias"),
        "bamba": tuple(f"mamba_{n}" for n in ("n_groups", "d_state", "d_conv", *biases)),
        "falcon_h1": tuple(f"mamba_{n}" for n in ("n_groups", "d_state", "d_conv", *biases)),
        "nemotron_h": ("n_groups", "ssm_state_size", "conv_kernel", "use_bias", "use_conv_bias"),
    }
    families = {
        "mamba2": "Mamba2",
        "bamba": "Bamba",
        "falcon_h1": "FalconH1",
        "nemotron_h": "NemotronH",
    }
    for kind, fields in names.items():
        config = read(tmp_path, families[kind])
        expected = CONFIGS[kind](**BASE[families[kind]])
        spec = first_mamba(config)
        assert isinstance(spec, Mamba2Spec)
        found = spec.groups, spec.state_size, spec.taps, spec.bias, spec.convolution_bias
        assert found == tuple(getattr(expected, field) for field in fields)
        assert spec.limits == tuple(expected.time_step_limit) == (0.0, math.inf)
    jamba, expected = read(tmp_path, "Jamba"), CONFIGS["jamba"](**BASE["Jamba"])
    spec = first_mamba(jamba)
    assert isinstance(spec, MambaSpec)
    assert (spec.rank, spec.width) == (expected.mamba_dt_rank, 256) == (8, 256)
    assert [isinstance(each, AttentionSpec) for each in jamba.mixers] == [False, True] * 2
    assert jamba.mixtures[0].num_experts == expected.num_experts
    falcon = first_mamba(read(tmp_path, "FalconMamba"))
    assert isinstance(falcon, MambaSpec)
    assert (falcon.norms, falcon.norm_eps) == ("plain", 1e-6)


def test_absent_fields_of_falcon_h1(tmp_path: Path) -> None:
    config, expected = read(tmp_path, "FalconH1"), CONFIGS["falcon_h1"](**BASE["FalconH1"])
    mamba, attention = config.layers[0].mixers
    assert isinstance(mamba, Mamba2Spec)
    assert isinstance(attention, AttentionSpec)
    assert config.layers == config.layers[:1] * 4
    assert (mamba.width, mamba.head_dim) == (expected.mamba_d_ssm, expected.mamba_d_head)
    assert (mamba.norm, mamba.factors, mamba.output_bias) == (None, None, False)
    assert attention.num_kv_heads == expected.num_key_value_heads
    assert (attention.scale, attention.bias) == (16**-0.5, False)
    assert [rope.theta for rope in config.ropes] == [expected.rope_parameters["rope_theta"]]
    assert config.layer_kv == (attention.kv,) * 4
    assert config.layer_state_bytes == (mamba.state_bytes,) * 4
    scales = config.embedding_scale, config.residual_scale, config.logits_scale
    assert scales == (1.0, 1.0, 1.0)
    assert config.max_position_embeddings == expected.max_position_embeddings
    assert config.norm.eps == expected.rms_norm_eps
    wide = read(tmp_path, "FalconH1", mamba_d_ssm=None)
    assert wide.layers[0].mixers[0].width == 256
    norms = {
        mode: read(tmp_path, "FalconH1", mamba_rms_norm=True, mamba_norm_before_gate=mode)
        for mode in (True, False, None)
    }
    found = {mode: first_mamba(each) for mode, each in norms.items()}
    assert {mode: each.norm for mode, each in found.items() if isinstance(each, Mamba2Spec)} == {
        True: "before gates",
        False: "behind gates",
        None: "behind gates",
    }


def test_limits_may_be_infinite_in_two_ways(tmp_path: Path) -> None:
    for most in (math.inf, {"__float__": "Infinity"}):
        spec = first_mamba(read(tmp_path, "Mamba2", time_step_limit=[0.5, most]))
        assert isinstance(spec, Mamba2Spec)
        assert spec.limits == (0.5, math.inf)


def test_old_names_of_types_of_layers(tmp_path: Path) -> None:
    types = ["mamba", "attention", "mamba", "mamba"]
    granite = read(tmp_path, "GraniteMoeHybrid", layers_block_type=types)
    assert isinstance(granite.layers[1].mixer, AttentionSpec)
    nemotron = read(tmp_path, "NemotronH", layers_block_type=None, hybrid_override_pattern="M-*-M")
    kinds = [type(layer.mixer or layer.mlp) for layer in nemotron.layers]
    assert kinds == [Mamba2Spec, MLPSpec, AttentionSpec, MLPSpec, Mamba2Spec]
    assert nemotron == read(
        tmp_path, "NemotronH", layers_block_type=["mamba", "mlp", "attention", "mlp", "mamba"]
    )


@pytest.mark.parametrize("given", [{}, {"num_hidden_layers": 54, "layers_block_type": None}])
def test_absent_fields_of_zamba2(given: dict[str, Any], tmp_path: Path) -> None:
    sizes = BASE["Zamba2"] | given
    assert_absent_fields_agree(tmp_path, "Zamba2ForCausalLM", sizes, CONFIGS["zamba2"](**sizes))


def test_layers_of_zamba2_share_weights(tmp_path: Path) -> None:
    config = read(tmp_path, "Zamba2", layers_block_type=["hybrid"] * 4, num_mem_blocks=3)
    sources = [layer.branch and layer.branch.source for layer in config.layers]
    assert sources == [0, None, 2, None, 4, None, 0, None]
    assert config.skipped_prefixes == ("model.layers.3.shared_transformer.",)
    long = read(tmp_path, "Zamba2", use_long_context=True)
    assert long.max_position_embeddings == 16_384


def test_heads_of_null_have_the_default_width(tmp_path: Path) -> None:
    found = [first_mamba(read(tmp_path, "NemotronH", mamba_head_dim=width)) for width in (None, 64)]
    assert found[0] == found[1]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Mamba2", {"head_dim": 24}, "head_dim must be a multiple of 16, not 24"),
    ("Mamba2", {"n_groups": 3}, r"num_heads \(8\) must be a multiple of n_groups \(3\)"),
    ("Mamba2", {"n_groups": 1, "state_size": 4}, "n_groups . state_size must be a multiple of 8"),
    ("Mamba2", {"expand": 3}, r"expand \* hidden_size \(768\) must be num_heads \* head_dim"),
    ("Mamba2", {"conv_kernel": 5}, "'conv_kernel' must be an integer of at most 4"),
    ("Mamba2", {"hidden_act": "gelu"}, "Mamba with hidden_act 'gelu' is not supported"),
    ("Mamba2", {"time_step_limit": [1.0, 0.5]}, "'time_step_limit' must be two ascending numbers"),
    ("Mamba2", {"time_step_limit": [0.0]}, "'time_step_limit' must be two ascending numbers"),
    ("Mamba", {"state_size": 256}, "'state_size' must be an integer of at most 128"),
    ("Mamba", {"time_step_rank": 129}, "'time_step_rank' must be an integer of at most 128"),
    ("Mamba", {"intermediate_size": 90}, r"the width \(90\) must be a multiple of 16"),
    ("Jamba", {"attn_layer_offset": 2}, r"attn_layer_offset \(2\) must be below attn_layer_per"),
    ("Jamba", {"expert_layer_period": 1}, r"expert_layer_offset \(1\) must be below expert_lay"),
    ("Bamba", {"mamba_n_heads": 7}, r"mamba_n_heads \(7\) must divide mamba_expand \* hidden_size"),
    ("Bamba", {"attn_layer_indices": ["1"]}, "'attn_layer_indices' must list numbers of layers"),
    ("FalconH1", {"mamba_n_heads": 7}, r"mamba_n_heads \(7\) must divide mamba_d_ssm \(1024\)"),
    ("FalconH1", {"mamba_d_head": 32}, r"mamba_d_ssm \(1024\) must be mamba_n_heads \* mamba_d_h"),
    ("FalconH1", {"ssm_multipliers": [1.0]}, "'ssm_multipliers' must list 5 numbers, not"),
    ("FalconH1", {"mlp_multipliers": [0, 1.0]}, "'mlp_multipliers' must be a positive number"),
    (
        "FalconH1",
        {"attention_bias": True, "attention_in_multiplier": 0.5},
        "attention_bias with attention_in_multiplier of 0.5 is not supported",
    ),
    (
        "FalconH1",
        {"mlp_bias": True, "mlp_multipliers": [0.5, 1.0]},
        "mlp_bias with mlp_multipliers of 0.5 is not supported",
    ),
    (
        "FalconH1",
        {"mamba_proj_bias": True, "ssm_in_multiplier": 0.5},
        "mamba_proj_bias with ssm_in_multiplier of 0.5 is not supported",
    ),
    ("GraniteMoeHybrid", {"layer_types": ["x"] * 4}, "layer type 'x' is not supported"),
    (
        "GraniteMoeHybrid",
        {"layer_types": ["full_attention"] * 4, "position_embedding_type": "alibi"},
        "position_embedding_type 'alibi' is not supported",
    ),
    ("NemotronH", {"hybrid_override_pattern": "MX", "layers_block_type": None}, "layer type 'X'"),
    ("NemotronH", {"layers_block_type": "M"}, "'layers_block_type' must list a type for each"),
    (
        "NemotronH",
        {"block_configs": [{"block_type": "attention", "sliding_window": 7}]},
        "'sliding_window' of layer 0 in 'block_configs' is not supported",
    ),
    ("NemotronH", {"block_configs": ["moe"]}, "'block_configs' must list an object"),
    ("NemotronH", {"block_configs": [{"block_type": "x"}]}, "layer type 'x' is not supp"),
    ("NemotronH", {"block_configs": [{}]}, "layer type None is not supported"),
    ("NemotronH", {"attention_bias": True}, "attention_bias True is not supported"),
    ("NemotronH", {"sliding_window": 7}, "sliding_window 7 is not supported"),
    ("NemotronH", {"tie_word_embeddings": True}, "tie_word_embeddings True is not supported"),
    (
        "NemotronH",
        {"layers_block_type": ["linear_attention", "moe"], "moe_latent_size": 5000},
        r"moe_latent_size \(5,000\) is more than hidden_size \(\d+\)",
    ),
    (
        "NemotronH",
        {"layers_block_type": ["linear_attention", "moe"], "moe_latent_size": 0},
        "'moe_latent_size' must be an integer of at least 1, not 0",
    ),
    (
        "NemotronH",
        {"layers_block_type": ["linear_attention", "moe"], "mlp_hidden_act": "silu"},
        "experts with mlp_hidden_act 'silu' are not supported",
    ),
    (
        "NemotronH",
        {"layers_block_type": ["linear_attention", "moe"], "num_experts_per_tok": 9},
        r"num_experts_per_tok \(9\) is more than n_routed_experts \(8\)",
    ),
    ("Zamba2", {"layers_block_type": None}, "'layers_block_type' must list a type for each of 4"),
    ("Zamba2", {"layers_block_type": ["attention"] * 4}, "layer type 'attention' is not supported"),
    ("Zamba2", {"tie_word_embeddings": False}, "tie_word_embeddings false is not supported"),
    (
        "Zamba2",
        {"num_attention_heads": 7},
        r"num_attention_heads \(7\) does not divide 2 \* hidden",
    ),
    ("Zamba2", {"adapter_rank": 0}, "'adapter_rank' must be an integer of at least 1, not 0"),
    (
        "Zamba2",
        {"use_shared_attention_adapter": True, "num_key_value_heads": 4},
        "use_shared_attention_adapter with 4 num_key_value_heads is not supported, only with 8",
    ),
    ("NemotronH", {"layers_block_type": ["mlp"]}, "models without a layer that mixes tokens"),
]


@pytest.mark.parametrize(("family", "fields", "reason"), REFUSED)
def test_what_is_not_computed_is_refused_by_name(
    family: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=reason) as caught:
        read(tmp_path, family, **fields)
    assert "\n" not in str(caught.value)
