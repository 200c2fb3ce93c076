"""Reading config.json: the fields, their defaults, and the errors for invalid ones."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.model_helpers import CONFIGS, reference_model, save
from support.reference_models import MAMBAS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig, RopeConfig
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.own_names import STEMS
from shmllm.models.specs import MLPSpec, MoESpec, NormSpec
from shmllm.models.stream_specs import AltUpSpec

MINIMAL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 4}
MISTRAL = {"architectures": ["MistralForCausalLM"]}
OF_DEEPSEEK = (
    "deepseek_v2",
    "deepseek_v3",
    "axk1",
    "axk2",
    "deepseek_v32",
    "deepseek_v4",
    "sarvam_mla",
    "glm_moe_dsa",
    "hy_v4",
    "dots1",
    "glm4_moe",
    "glm4_moe_lite",
    "longcat_flash",
    "youtu",
    "minicpm3",
    "mistral4",
)
"""The families whose defaults `test_latent_attention` compares."""
OTHERS = (
    "bailing_moe_v2",
    "bailing_moe_v3",
    "baichuan",
    "domyn_edge",
    "nemotron_h_puzzle",
    "pangu_embedded",
    "telechat2",
    "teleflm",
    "bailing_moe",
    "aria",
    "apertus1p5",
    "biogpt",
    "cohere_compass",
    "modernbert_decoder",
    "persimmon",
    "phi4_multimodal",
    "xglm",
    "gpt_neox_japanese",
    "openai_gpt",
    "internlm",
    "bitnet",
    "bloom",
    "mpt",
    "deepseek",
    "dbrx",
    "decilm",
    "falcon",
    "gpt2",
    "codegen",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "gemma3n",
    "gemma4",
    "gemma4_unified",
    "helium",
    "kimi_linear",
    "beam",
    "lara_mini",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "minimax",
    "olmo_hybrid",
    "step3p5",
    "opt",
    *OF_DEEPSEEK,
    *MAMBAS,
)
NAMED_LIKE_LLAMA = [family for family in CONFIGS if family not in OTHERS]
"""Our families whose fields and weights have Llama's names, and whose layers have the same
heads."""


def read(directory: Path, **fields: Any) -> ModelConfig:
    """Reads MINIMAL with some fields replaced."""
    (directory / "config.json").write_text(json.dumps(MINIMAL | fields))
    return ModelConfig.from_directory(directory)


def test_no_config_and_no_family_imports_torch() -> None:
    code = (
        "import sys; from shmllm.models.registry import ARCHITECTURES, find_family;"
        "import shmllm.models.config, shmllm.models.features;"
        "[find_family(name) for name in ARCHITECTURES];"
        "assert not {'torch', 'numpy', 'transformers', 'safetensors'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_absent_fields_get_transformers_defaults(tmp_path: Path) -> None:
    attention = AttentionSpec(
        num_heads=8,
        num_kv_heads=8,
        head_dim=8,
        scale=8**-0.5,
        rope=RopeConfig(rotary_dim=8, type="default", theta=10000.0),
    )
    assert read(tmp_path) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=100,
        hidden_size=64,
        max_position_embeddings=2048,
        layers=(LayerSpec(mixer=attention, mlp=MLPSpec(inner=96)),) * 4,
        norm=NormSpec(eps=1e-6),
    )


DELTA_NETS = {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
OPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), DELTA_NETS),
    **dict.fromkeys(("flint", "hy_v3", "kolibri1", "laguna", "mellum"), FEW_EXPERTS),
    "mimo_v2_flash": {  # layers with a window have other heads
        **{"layer_types": ["full_attention"] * 3, "head_dim": 24, "n_routed_experts": 4},
        **{"num_experts_per_tok": 2, "moe_intermediate_size": 24},
    },
    # Without the width of heads transformers makes no model of these.
    **{kind: {"head_dim": 8} for kind in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
}


@pytest.mark.parametrize("family", NAMED_LIKE_LLAMA)
def test_absent_fields_agree_with_transformers(family: str, tmp_path: Path) -> None:
    sizes = {name: value for name, value in MINIMAL.items() if name != "architectures"}
    wide = {"num_attention_heads": 32, "hidden_size": 256}
    expected = CONFIGS[family](**sizes | wide)
    name = type(expected).__name__.replace("Text", "").replace("Config", "ForCausalLM")
    config = read(tmp_path, architectures=[name], **wide)
    assert config.attentions[0].num_kv_heads == (expected.num_key_value_heads or 32)
    assert config.attentions[0].head_dim == (getattr(expected, "head_dim", None) or 8)
    assert config.max_position_embeddings == expected.max_position_embeddings
    names = "layer_norm_eps", "norm_epsilon", "norm_eps", "rms_norm_eps"
    found = (getattr(expected, eps) for eps in names if hasattr(expected, eps))
    assert config.norm.eps == next(found, 1e-5)  # OLMo has no such field
    assert config.tie_word_embeddings == expected.tie_word_embeddings
    ropes = expected.rope_parameters
    by_type = ropes.values() if "rope_theta" not in ropes else [ropes]
    assert {rope.theta for rope in config.ropes} <= {rope["rope_theta"] for rope in by_type}
    assert {rope.type for rope in config.ropes} <= {rope["rope_type"] for rope in by_type}


_EXPERTS: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 2}
_DENSE_MLPS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("Qwen2Moe", {"num_key_value_heads": 8}, {"mlp_only_layers": [1]}),
    ("Qwen3Moe", {}, {"decoder_sparse_step": 2}),
    ("Qwen3Next", DELTA_NETS, {"mlp_only_layers": [1]}),
    ("DeepseekV2", _EXPERTS, {"first_k_dense_replace": 1}),
    ("Dots1", _EXPERTS | {"num_key_value_heads": 8}, {"first_k_dense_replace": 1}),
]
"""Families with experts, fields that they need, and fields that ask for dense layers."""


@pytest.mark.parametrize(("family", "fields", "dense"), _DENSE_MLPS)
def test_only_dense_layers_need_an_intermediate_size(
    family: str, fields: dict[str, Any], dense: dict[str, Any], tmp_path: Path
) -> None:
    values = {"architectures": [f"{family}ForCausalLM"], "intermediate_size": None} | fields
    config = read(tmp_path, **values)
    assert all(isinstance(layer.mlp, MoESpec) for layer in config.layers)
    with pytest.raises(EngineStartError, match="field 'intermediate_size' is missing"):
        read(tmp_path, **values | dense)
    config = read(tmp_path, **values | dense | {"intermediate_size": 48})
    assert MLPSpec(inner=48) in [layer.mlp for layer in config.layers]


@pytest.mark.parametrize("given", [{}, {"rope_scaling": None}, {"rope_theta": 1234.0}])
def test_gpt_oss_without_parameters_of_a_rotation(given: dict[str, Any], tmp_path: Path) -> None:
    sizes = {name: value for name, value in MINIMAL.items() if name != "architectures"}
    every = CONFIGS["gpt_oss"](**sizes | given).to_dict()
    own = ["GptOssForCausalLM"]
    few = read(tmp_path, architectures=own, **given)
    whole = read(tmp_path, architectures=own, rope_parameters=every["rope_parameters"])
    assert few.ropes == whole.ropes
    assert few.ropes[0].type == "yarn"


@pytest.mark.parametrize("family", NAMED_LIKE_LLAMA)
def test_a_saved_model_reads_back(family: str, tmp_path: Path) -> None:
    reference = reference_model(
        family, dtype="bfloat16", eos_token_id=[7, 9], **OPTIONS.get(family, {})
    )
    config = ModelConfig.from_directory(save(reference, tmp_path))
    written, own = STEMS.get(("model_type", reference.config.model_type), ("", ""))
    assert config.architecture == own + type(reference).__name__.removeprefix(written)
    assert config.dtype == "bfloat16"
    assert config.eos_token_ids == (7, 9)
    attention = config.attentions[0]
    assert (attention.num_heads, attention.num_kv_heads) == (6, 2)
    layer = next(n for n, each in enumerate(config.layers) if each.mixer in config.attentions)
    output = "dense" if family == "phi" else "o_proj"
    projection = reference.get_submodule(f"model.layers.{layer}.self_attn.{output}")
    assert attention.width == projection.in_features
    names = [name for name, _ in reference.named_parameters()]
    assert config.attentions[0].bias == any(name.endswith("q_proj.bias") for name in names)


@pytest.mark.parametrize("family", ["gemma4", "gemma4_unified"])
def test_absent_fields_of_gemma4_agree_with_transformers(family: str, tmp_path: Path) -> None:
    sizes = {name: value for name, value in MINIMAL.items() if name != "architectures"}
    sizes |= {"num_hidden_layers": 13, "num_attention_heads": 8}
    expected = CONFIGS[family](**sizes)
    name = type(expected).__name__.replace("TextConfig", "ForCausalLM")
    config = read(tmp_path, architectures=[name], **sizes)
    for index, attention in enumerate(config.attentions):
        own = expected.per_layer_config[index]
        heads = own.num_key_value_heads, own.head_dim
        assert (attention.num_kv_heads, attention.head_dim) == heads
        is_full = expected.layer_types[index] == "full_attention"
        assert attention.window == (None if is_full else expected.sliding_window)
        parameters = expected.rope_parameters[expected.layer_types[index]]
        assert attention.rope.theta == parameters["rope_theta"]
    assert config.max_position_embeddings == expected.max_position_embeddings
    assert config.norm.eps == expected.rms_norm_eps
    assert config.tie_word_embeddings == expected.tie_word_embeddings
    if width := getattr(expected, "hidden_size_per_layer_input", 0):
        assert config.per_layer.width == width
        assert config.per_layer.vocab_size == expected.vocab_size_per_layer_input
    else:
        assert config.per_layer is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not"),
        ({"per_layer_config": {"0": {"window": 5}}}, "per_layer_config: 0: 'window' is not"),
        ({"per_layer_config": {"x": {}}}, "per_layer_config: 'x' is not the number of one layer"),
        ({"per_layer_config": {"0": {}, "00": {}}}, "'00' is not the number of one layer"),
        ({"per_layer_config": {"0": {"head_dim": 7}}}, "layer 0: 4 key-value heads with a head_d"),
        ({"global_head_dim": 31}, "layer 5: 4 key-value heads with a head_dim of 31 do not fit"),
        ({"num_kv_shared_layers": 2}, r"num_kv_shared_layers \(2\) leaves no layer of type 'full"),
        ({"vocab_size_per_layer_input": 50}, r"vocab_size_per_layer_input \(50\) has no row"),
        ({"enable_moe_block": True, "num_experts": 2, "top_k_experts": 3}, "is more than num_exp"),
        ({"rope_parameters": {"full_attention": {}}}, "must have an object 'sliding_attention'"),
    ],
)
def test_wrong_fields_of_gemma4_are_refused(
    fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    sizes = {"num_hidden_layers": 6, "num_attention_heads": 8}
    with pytest.raises(EngineStartError, match=reason):
        read(tmp_path, architectures=["Gemma4ForCausalLM"], **sizes | fields)


@pytest.mark.parametrize("num_layers", [None, 8])
def test_absent_fields_of_gemma3n_agree_with_transformers(
    tmp_path: Path, num_layers: int | None
) -> None:
    fields = {} if num_layers is None else {"num_hidden_layers": 8, "num_kv_shared_layers": 3}
    values = {"architectures": ["Gemma3nForCausalLM"], **fields}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config, expected = ModelConfig.from_directory(tmp_path), CONFIGS["gemma3n"](**fields)
    names = "vocab_size", "hidden_size", "max_position_embeddings", "tie_word_embeddings"
    for name in names:
        assert getattr(config, name) == getattr(expected, name)
    assert config.norm == NormSpec(eps=expected.rms_norm_eps)
    assert config.logits_cap == expected.final_logit_softcapping
    for index, layer in enumerate(config.layers):
        attention, kind = layer.mixer, expected.layer_types[index]
        assert attention.num_heads == expected.num_attention_heads
        assert attention.num_kv_heads == expected.num_key_value_heads
        assert attention.head_dim == expected.head_dim
        assert attention.bias == expected.attention_bias
        is_full = kind == "full_attention"
        assert attention.window == (None if is_full else expected.sliding_window)
        assert attention.rope.theta == expected.rope_parameters[kind]["rope_theta"]
        assert (attention.source is None) == (expected.kv_sharing_modes[index] != "reuse")
        inner, sparsity = expected.intermediate_size, expected.activation_sparsity_pattern
        mlp = MLPSpec(inner=inner[index], activation="gelu_tanh", sparsity=sparsity[index])
        assert layer.mlp == mlp
        assert layer.laurel_rank == expected.laurel_rank
    of_layers = expected.vocab_size_per_layer_input, expected.hidden_size_per_layer_input
    assert (config.per_layer.vocab_size, config.per_layer.width) == of_layers
    streams = expected.altup_num_inputs, expected.altup_active_idx, expected.altup_correct_scale
    assert config.altup == AltUpSpec(num_streams=streams[0], active=streams[1], scaled=streams[2])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"altup_num_inputs": 9}, "'altup_num_inputs' must be an integer of at most 8"),
        ({"altup_active_idx": 4}, "'altup_active_idx' must be an integer of at most 3"),
        ({"activation_sparsity_pattern": [0.5]}, "'activation_sparsity_pattern' must list a numb"),
        ({"activation_sparsity_pattern": [0.5] * 19 + [1.0]}, "from 0 to below 1, not 1.0"),
        ({"intermediate_size": [64] * 3}, "'intermediate_size' must list a number for each of 20"),
        ({"intermediate_size": [64] * 19 + [0]}, "'intermediate_size' must be an integer of at l"),
        ({"num_kv_shared_layers": 18}, "leaves no layer of type 'full_attention'"),
        ({"hidden_size_per_layer_input": 0}, "'hidden_size_per_layer_input' must be an integer"),
        ({"laurel_rank": 64}, r"laurel_rank \(64\) must not be hidden_size"),
        ({"hidden_activation": "tanh"}, "hidden_activation 'tanh' is not supported"),
    ],
)
def test_wrong_fields_of_gemma3n_are_refused(
    fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    sizes = {"num_hidden_layers": 20, "num_attention_heads": 8, "laurel_rank": 8}
    with pytest.raises(EngineStartError, match=reason):
        read(tmp_path, architectures=["Gemma3nForCausalLM"], **sizes | fields)


def test_absent_fields_of_opt_agree_with_transformers(tmp_path: Path) -> None:
    values = {"architectures": ["OPTForCausalLM"], "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config, expected = ModelConfig.from_directory(tmp_path), CONFIGS["opt"](num_hidden_layers=3)
    assert config.vocab_size == expected.vocab_size
    assert config.hidden_size == expected.hidden_size
    assert config.attentions[0].num_heads == expected.num_attention_heads
    mlp = config.layers[0].mlp
    assert mlp == MLPSpec(inner=expected.ffn_dim, activation="relu", gated=False, bias=True)
    assert config.max_position_embeddings == expected.max_position_embeddings
    assert config.tie_word_embeddings == expected.tie_word_embeddings


DENSE = {
    "gpt_neox": ("GPTNeoXForCausalLM", MINIMAL, "layer_norm_eps"),
    "codegen": ("CodeGenForCausalLM", {}, "layer_norm_epsilon"),
    "gptj": ("GPTJForCausalLM", {}, "layer_norm_epsilon"),
    "helium": (
        "HeliumForCausalLM",
        MINIMAL | {"hidden_size": 2560, "num_attention_heads": 20},
        "rms_norm_eps",
    ),
}
"""Families with names of fields, or limits of sizes, of their own."""


@pytest.mark.parametrize("family", DENSE)
def test_absent_fields_of_dense_families_agree_with_transformers(
    family: str, tmp_path: Path
) -> None:
    architecture, sizes, eps = DENSE[family]
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"architectures": [architecture]}))
    config, expected = ModelConfig.from_directory(tmp_path), CONFIGS[family](**sizes)
    (attention,) = set(config.attentions)
    assert len(config.layers) == expected.num_hidden_layers
    assert attention.width == config.hidden_size == expected.hidden_size
    assert attention.num_heads == attention.num_kv_heads == expected.num_attention_heads
    assert config.max_position_embeddings == expected.max_position_embeddings
    assert config.norm.eps == getattr(expected, eps)
    assert config.tie_word_embeddings == expected.tie_word_embeddings
    assert attention.rope is not None
    ropes = getattr(expected, "rope_parameters", {"rope_theta": 10_000.0})
    assert attention.rope.theta == ropes["rope_theta"]
    partial = attention.head_dim * ropes.get("partial_rotary_factor", 1.0)
    assert attention.rope.rotary_dim == getattr(expected, "rotary_dim", partial)


@pytest.mark.parametrize(
    "family",
    [
        *("apertus", "codegen", "cwm", "falcon", "gpt_bigcode", "gpt_neo"),
        *("granite_swa", "hyperclovax", "jais2", "vaultgemma"),
    ],
)
def test_what_transformers_writes_of_its_defaults_changes_nothing(
    family: str, tmp_path: Path
) -> None:
    """It writes all fields of a configuration."""
    written = CONFIGS[family]()
    named = {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[written.model_type]]}
    every = written.to_dict()
    sizes = ("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers")
    few = {name: every[name] for name in (*sizes, "intermediate_size") if name in every}
    configs = []
    for fields in (few, every):
        (tmp_path / "config.json").write_text(json.dumps(fields | named))
        configs.append(ModelConfig.from_directory(tmp_path))
    assert replace(configs[0], eos_token_ids=configs[1].eos_token_ids) == configs[1]


def test_old_names_of_the_rotation_of_gpt_neox(tmp_path: Path) -> None:
    own = {"rotary_emb_base": 500.0, "rotary_pct": 0.5}
    config = read(tmp_path, architectures=["GPTNeoXForCausalLM"], **own)
    assert config.ropes == (RopeConfig(rotary_dim=4, theta=500.0),)


@pytest.mark.parametrize(
    ("architecture", "fields", "reason"),
    [
        ("OPT", {"do_layer_norm_before": False}, "do_layer_norm_before false is not supported"),
        ("OPT", {"word_embed_proj_dim": 32}, "word_embed_proj_dim other than hidden_size"),
        ("Exaone4", {"sliding_window_pattern": "LLLG"}, "'sliding_window_pattern' must be an int"),
        ("Gemma", {"hidden_activation": "relu"}, "hidden_activation 'relu' beside hidden_act"),
        ("Gemma", {"use_bidirectional_attention": True}, "attention is causal"),
        ("GPTJ", {"rotary_dim": None}, "rotary_dim null is not supported"),
        ("GPTJ", {"rotary_dim": 7}, "rotary_dim .7. must be even and at most 256"),
        ("Falcon", {"alibi": True}, "alibi true is not supported: positions are rotations"),
        ("Falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn 2 is not supported"),
        (
            "Falcon",
            {"new_decoder_architecture": True, "parallel_attn": False},
            "parallel_attn false and new_decoder_architecture exclude each other",
        ),
        ("GPTBigCode", {"add_cross_attention": True}, "add_cross_attention true is not supported"),
        ("CodeGen", {"rotary_dim": None}, "rotary_dim null is not supported"),
        (
            "CodeGen",
            {"n_embd": 96, "rotary_dim": 6},
            "heads of 6 elements are not supported: no multiple of 4",
        ),
        ("GPTNeo", {"num_layers": 4}, "'attention_types' are those of 24 layers, not 4"),
        ("GPTNeo", {"attention_types": [[["axial"], 4]]}, "'axial' is not supported"),
        ("GPTNeo", {"attention_types": ["local"]}, "'attention_types' must list pairs of a list"),
        ("Helium", {}, "the width of all heads .1024. must be hidden_size .128."),
        ("Olmo", {"clip_qkv": -8.0}, "'clip_qkv' must be a positive number"),
        ("VaultGemma", {"use_bidirectional_attention": True}, "attention is causal"),
    ],
)
def test_what_no_kernel_computes_is_refused(
    architecture: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    usual = {"num_key_value_heads": 4, "hidden_size": 128}
    with pytest.raises(EngineStartError, match=reason):
        read(tmp_path, architectures=[f"{architecture}ForCausalLM"], **usual | fields)


@pytest.mark.parametrize(
    ("fields", "activation"),
    [
        ({}, "gelu_tanh"),
        ({"hidden_act": "gelu"}, "gelu_tanh"),
        ({"hidden_act": "gelu", "hidden_activation": None}, "gelu_tanh"),
        ({"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_new"}, "gelu_tanh"),
        ({"hidden_act": "silu", "hidden_activation": "silu"}, "silu"),
    ],
)
def test_gelu_of_gemmas_first_files_is_the_approximation(
    fields: dict[str, Any], activation: str, tmp_path: Path
) -> None:
    config = read(tmp_path, architectures=["GemmaForCausalLM"], num_key_value_heads=1, **fields)
    assert {mlp.activation for mlp in config.dense_mlps} == {activation}


def test_absent_fields_of_gpt2_agree_with_transformers(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], "n_layer": 3}))
    config, expected = ModelConfig.from_directory(tmp_path), CONFIGS["gpt2"](n_layer=3)
    attention = config.layers[0].mixer
    assert (attention.num_heads, attention.num_kv_heads) == (expected.n_head, expected.n_head)
    assert (config.hidden_size, attention.head_dim) == (expected.n_embd, 64)
    assert config.num_learned_positions == config.max_position_embeddings == expected.n_positions
    assert (config.vocab_size, len(config.layers)) == (expected.vocab_size, 3)
    assert config.norm.eps == expected.layer_norm_epsilon
    assert config.tie_word_embeddings == expected.tie_word_embeddings


def test_absent_fields_of_gpt_bigcode_agree_with_transformers(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"architectures": ["GPTBigCodeForCausalLM"], "n_layer": 3}))
    config, expected = ModelConfig.from_directory(tmp_path), CONFIGS["gpt_bigcode"](n_layer=3)
    attention, mlp = config.layers[0].mixer, config.layers[0].mlp
    assert (attention.num_heads, attention.num_kv_heads) == (expected.n_head, 1)
    assert attention.scale == (expected.n_embd / expected.n_head) ** -0.5
    assert mlp == MLPSpec(inner=4 * expected.n_embd, activation="gelu_tanh", gated=False, bias=True)
    assert config.num_learned_positions == config.max_position_embeddings == expected.n_positions
    assert (config.vocab_size, len(config.layers)) == (expected.vocab_size, 3)
    assert config.norm.eps == expected.layer_norm_epsilon
    assert config.tie_word_embeddings == expected.tie_word_embeddings


def test_absent_fields_of_gpt_neo_agree_with_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPTNeoForCausalLM"]}))
    config, expected = ModelConfig.from_directory(tmp_path), CONFIGS["gpt_neo"]()
    attention, mlp = config.layers[0].mixer, config.layers[0].mlp
    assert (attention.num_heads, attention.num_kv_heads) == (expected.num_heads,) * 2
    assert mlp.inner == 4 * expected.hidden_size
    local = [kind == "local" for kind in expected.attention_layers]
    assert list(config.layer_windows) == [expected.window_size if each else None for each in local]
    assert config.max_position_embeddings == expected.max_position_embeddings
    assert config.num_learned_positions == expected.max_position_embeddings
    assert config.norm.eps == expected.layer_norm_epsilon
    assert config.tie_word_embeddings == expected.tie_word_embeddings


@pytest.mark.parametrize(
    ("fields", "num_kv_heads", "norms"),
    [
        ({}, 1, ("input_layernorm", None)),
        (
            {"multi_query": None, "parallel_attn": None},
            8,
            ("input_layernorm", "post_attention_layernorm"),
        ),
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2, ("ln_attn", "ln_mlp")),
        (
            {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
            8,
            ("input_layernorm", None),
        ),
    ],
)
def test_the_forms_of_falcon(
    fields: dict[str, Any], num_kv_heads: int, norms: tuple[str | None, ...], tmp_path: Path
) -> None:
    config = read(tmp_path, architectures=["FalconForCausalLM"], n_embed=128, **fields)
    expected = CONFIGS["falcon"](num_attention_heads=8, n_embed=128)
    (layer,) = set(config.layers)
    assert (layer.mixer.num_kv_heads, layer.mixer.head_dim) == (num_kv_heads, expected.head_dim)
    assert (layer.norms.before_mixer, layer.norms.before_mlp) == norms
    assert layer.mlp == MLPSpec(inner=expected.ffn_hidden_size, activation="gelu", gated=False)
    assert config.max_position_embeddings == expected.max_position_embeddings
    assert config.tie_word_embeddings == expected.tie_word_embeddings
    assert config.norm.eps == expected.layer_norm_epsilon


@pytest.mark.parametrize("name", ["scale_attn_by_inverse_layer_idx", "add_cross_attention"])
def test_a_flag_of_gpt2_without_a_kernel_is_refused(name: str, tmp_path: Path) -> None:
    fields = {"architectures": ["GPT2LMHeadModel"], name: True}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(EngineStartError, match=f"{name} True is not supported"):
        ModelConfig.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"torch_dtype": None}, None),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"dtype": None, "torch_dtype": "torch.float16"}, "float16"),
    ],
)
def test_dtype(fields: dict[str, Any], expected: str | None, tmp_path: Path) -> None:
    assert read(tmp_path, **fields).dtype == expected


@pytest.mark.parametrize(
    ("model", "generation", "expected"),
    [
        (None, None, ()),
        (2, None, (2,)),
        (2, {"eos_token_id": 2}, (2,)),
        (2, {"eos_token_id": [5, 2]}, (2, 5)),
        ([3, 4], {}, (3, 4)),
        (None, {"eos_token_id": 0}, (0,)),
    ],
)
def test_eos_token_ids(
    model: Any, generation: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read(tmp_path, eos_token_id=model).eos_token_ids == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"sliding_window": 9}, (None,) * 4),
        (MISTRAL, (4096,) * 4),
        (MISTRAL | {"sliding_window": None}, (None,) * 4),
        (MISTRAL | {"sliding_window": 9}, (9,) * 4),
        (QWEN2 | {"sliding_window": 9}, (None,) * 4),
        (QWEN2 | {"sliding_window": 9, "use_sliding_window": True}, (None,) * 4),
        (
            QWEN2 | {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 3},
            (None, None, None, 9),
        ),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 0}, (4096,) * 4),
        (
            QWEN2
            | {
                "sliding_window": 9,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            (None, 9, None, 9),
        ),
    ],
)
def test_layer_windows(
    fields: dict[str, Any], expected: tuple[int | None, ...], tmp_path: Path
) -> None:
    assert read(tmp_path, **fields).layer_windows == expected


@pytest.mark.parametrize(
    ("fields", "attention", "mlp"),
    [
        ({"attention_bias": True, "mlp_bias": True}, True, True),
        (QWEN2 | {"attention_bias": False, "mlp_bias": True}, True, False),
        (MISTRAL | {"attention_bias": True, "mlp_bias": True}, False, False),
        ({"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 4}, False, False),
    ],
)
def test_biases(fields: dict[str, Any], attention: bool, mlp: bool, tmp_path: Path) -> None:
    layer = read(tmp_path, **fields).layers[0]
    assert (layer.mixer.bias, layer.mlp.bias) == (attention, mlp)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"architectures": ["LlaMAForCausalLM"]},
            ["'LlaMAForCausalLM'", "LlamaForCausalLM", "models/README.md"],
        ),
        ({"architectures": None}, ["architectures", "LlamaForCausalLM", "docs/models.md"]),
        ({"architectures": []}, ["architectures"]),
        ({"vocab_size": None}, ["vocab_size", "missing"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers", "True"]),
        ({"num_hidden_layers": 10**6}, ["num_hidden_layers", "at most 4,096", "1000000"]),
        ({"vocab_size": 2**31}, ["vocab_size", "at most 2,147,483,647", "2147483648"]),
        (
            {"hidden_size": 2**25, "vocab_size": 2**30},
            ["its sizes are those of ", " parameters: one of them is wrong"],
        ),
        ({"rms_norm_eps": -1}, ["rms_norm_eps", "-1"]),
        ({"rms_norm_eps": 10**400}, ["rms_norm_eps", "positive", "1000"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "yes"]),
        ({"num_key_value_heads": 3}, ["(8)", "(3)"]),
        ({"num_attention_heads": 7}, ["head_dim", "64", "7"]),
        ({"head_dim": 7}, ["head_dim", "even", "7"]),
        ({"hidden_act": "tanh"}, ["hidden_act", "tanh", "silu"]),
        ({"torch_dtype": "float64"}, ["torch_dtype", "float64", "bfloat16"]),
        ({"eos_token_id": "2"}, ["eos_token_id", "'2'"]),
        ({"eos_token_id": [1, -1]}, ["eos_token_id", "-1"]),
        (
            {"quantization_config": {"bits": 4}},
            ["quant_method None", "auto-round, awq"],
        ),
        ({"quantization_config": {"quant_method": ["x"]}}, ["quant_method ['x']"]),
        ({"quantization_config": "yes"}, ["quantization_config", "object"]),
        ({"rope_scaling": {"type": "ntk"}}, ["ntk", "default, linear, llama3, yarn"]),
        ({"rope_scaling": {"type": "dynamic"}}, ["rope_scaling", "factor", "missing"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling", "factor", "missing"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, ["low_freq_factor"]),
        ({"rope_scaling": "linear"}, ["rope_scaling", "object"]),
        ({"rope_parameters": {"rope_theta": 0}}, ["rope_theta", "positive"]),
        ({"rope_parameters": {"full_attention": {}}}, ["rope_parameters", "layer type"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        (MISTRAL | {"sliding_window": -1}, ["sliding_window", "-1"]),
        (QWEN2 | {"layer_types": ["full_attention"]}, ["layer_types", "4 layers"]),
        (QWEN2 | {"layer_types": ["sliding_attention"] * 4}, ["sliding window"]),
        (QWEN2 | {"layer_types": ["linear_attention"] * 4}, ["linear_attention", "full_"]),
    ],
)
def test_an_invalid_field_is_an_error_that_names_it(
    fields: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError) as caught:
        read(tmp_path, **fields)
    message = str(caught.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


def test_llama3_factors_must_be_ordered(tmp_path: Path) -> None:
    rope = {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 3}
    with pytest.raises(EngineStartError, match="high_freq_factor"):
        read(tmp_path, rope_scaling=rope)


def test_missing_config_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=r"looked for .*config\.json"):
        ModelConfig.from_directory(tmp_path)
    with pytest.raises(EngineStartError, match=r"nowhere.config\.json"):
        ModelConfig.from_directory(tmp_path / "nowhere")


@pytest.mark.parametrize("content", ["", "{", "[]", "\xff\xfe"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_malformed_json_names_the_file(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MINIMAL))
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(EngineStartError, match=f"{name}.* (JSON|valid)") as caught:
        ModelConfig.from_directory(tmp_path)
    assert "\n" not in str(caught.value)
