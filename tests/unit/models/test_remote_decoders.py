"""Dense decoders whose repositories bring code of their own: the fields of published files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.model_helpers import (
    assert_logits_close,
    load,
    our_logits,
    reference_logits,
    reference_model,
    save,
)

from shmllm.errors import EngineStartError
from shmllm.models.bias_specs import LinearBiases
from shmllm.models.config import ModelConfig
from shmllm.models.families import baichuan
from shmllm.models.head_specs import DenseSpec
from shmllm.models.specs import MLPSpec, NormSpec

TOKENS = [5, 96, 0, 31, 31, 7, 88, 2, 45, 13, 64, 9, 77, 1, 50, 20, 33]


def read(directory: Path, fields: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(fields))
    return ModelConfig.from_directory(directory)


def sizes_of(config: ModelConfig) -> tuple[int, ...]:
    """The layers, heads, key heads and the width of heads, and the largest number of positions."""
    [attention] = {(each.num_heads, each.num_kv_heads, each.head_dim) for each in config.attentions}
    return config.num_layers, *attention, config.max_position_embeddings


INTERNLM2: dict[str, Any] = {
    "architectures": ["InternLM2ForCausalLM"],
    "attn_implementation": "eager",
    "bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "internlm2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 2.0, "type": "dynamic"},
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 92544,
}
"""InternLM 2.5 7B."""


def test_internlm2_as_its_authors_write_it(tmp_path: Path) -> None:
    config = read(tmp_path, INTERNLM2)
    [attention] = set(config.attentions)
    assert sizes_of(config) == (32, 32, 8, 128, 32768)
    assert not attention.bias
    assert not attention.output_bias
    assert attention.rope is not None
    assert (attention.rope.theta, config.norm.eps) == (1e6, 1e-5)
    absent = read(tmp_path, {k: v for k, v in INTERNLM2.items() if k != "bias"})
    assert absent.attentions[0].bias


def test_a_reward_model_of_internlm2_has_one_projection(tmp_path: Path) -> None:
    config = read(tmp_path, INTERNLM2 | {"architectures": ["InternLM2ForRewardModel"]})
    assert config.head is not None
    assert config.head.steps == (DenseSpec(name="v_head", inputs=4096, outputs=1),)
    assert not config.lm_head


ORION: dict[str, Any] = {
    "architectures": ["OrionForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 15360,
    "max_position_embeddings": 4096,
    "model_type": "orion",
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "num_key_value_heads": 40,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 84608,
}
"""Orion 14B."""
BAICHUAN: dict[str, Any] = {
    "architectures": ["BaichuanForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_max_length": 4096,
    "model_type": "baichuan",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "vocab_size": 125696,
}
"""Baichuan 2 7B."""
BAICHUAN_13B = {name: x for name, x in BAICHUAN.items() if name != "max_position_embeddings"}
BAICHUAN_13B |= {"hidden_size": 5120, "intermediate_size": 13696}
BAICHUAN_13B |= {"num_attention_heads": 40, "num_hidden_layers": 40}


def test_orion_as_its_authors_write_it(tmp_path: Path) -> None:
    config = read(tmp_path, ORION)
    assert sizes_of(config) == (40, 40, 40, 128, 4096)
    assert config.norm == NormSpec(kind="layer", eps=1e-5, bias=True)
    absent = {k: v for k, v in ORION.items() if k not in ("rms_norm_eps", "rope_theta")}
    assert read(tmp_path, absent) == config


def test_baichuan_as_its_authors_write_it(tmp_path: Path) -> None:
    config = read(tmp_path, BAICHUAN)
    assert sizes_of(config) == (32, 32, 32, 128, 4096)
    assert config.attentions[0].biases is None
    assert config.attentions[0].rope is not None
    config = read(tmp_path, BAICHUAN_13B)
    assert sizes_of(config) == (40, 40, 40, 128, 4096)
    assert config.attentions[0].biases == LinearBiases(4096, 40)
    assert config.attentions[0].rope is None


def test_rows_of_the_lm_head_of_baichuan_2_have_the_length_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baichuan, "VOCABULARY_OF_2", 97)
    reference = reference_model("baichuan", 4.0)
    model = load(save(reference, tmp_path))
    ours, expected = our_logits(model, TOKENS), reference_logits(reference, TOKENS)
    assert_logits_close(ours, expected, 1e-4)
    [head] = model.named_weights()["lm_head.weight"]
    assert torch.allclose(head.clone().norm(dim=1), torch.ones(97))


LING: dict[str, Any] = {
    "architectures": ["BailingMoeForCausalLM"],
    "eos_token_id": 126081,
    "first_k_dense_replace": 0,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 16384,
    "max_window_layers": 28,
    "model_type": "bailing_moe",
    "moe_intermediate_size": 1408,
    "norm_head": False,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "num_shared_experts": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 600000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "use_bias": False,
    "use_qkv_bias": False,
    "use_sliding_window": False,
    "vocab_size": 126464,
}
"""Ling-lite."""


def test_ling_as_its_authors_write_it(tmp_path: Path) -> None:
    config = read(tmp_path, LING)
    assert sizes_of(config) == (28, 16, 4, 128, 16384)
    [experts] = config.mixtures
    assert (experts.num_experts, experts.top_k, experts.inner) == (64, 6, 1408)
    assert (experts.scoring, experts.renormalize) == ("softmax", True)
    assert experts.shared == MLPSpec(inner=2816)
    absent = {k: v for k, v in LING.items() if k not in ("norm_topk_prob", "head_dim")}
    assert read(tmp_path, absent) == config


def test_internlm_as_its_authors_write_it(tmp_path: Path) -> None:
    fields = {k: v for k, v in INTERNLM2.items() if k not in ("bias", "rope_scaling", "rope_theta")}
    fields |= {"architectures": ["InternLMForCausalLM"], "num_key_value_heads": None}
    config = read(tmp_path, fields | {"rotary": {"base": 20000, "type": "dynamic"}})
    [attention] = set(config.attentions)
    assert (attention.bias, attention.output_bias, attention.num_kv_heads) == (True, True, 32)
    assert attention.rope is not None
    assert (attention.rope.theta, attention.rope.type) == (20000, "default")


TELECHAT2: dict[str, Any] = {
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["TeleChat2ForCausalLM"],
    "base_seqlen": 8192,
    "embed_layernorm": False,
    "eos_token_id": 2,
    "ffn_hidden_size": 12288,
    "flash_attn": True,
    "hidden_size": 4096,
    "layer_norm_epsilon": 1e-05,
    "logn": False,
    "model_type": "telechat",
    "n_head": 32,
    "n_layer": 30,
    "num_key_value_heads": 32,
    "tie_word_embeddings": False,
    "training_seqlen": 8192,
    "vocab_size": 131072,
}
"""TeleChat 2 7B."""


def test_telechat2_as_its_authors_write_it(tmp_path: Path) -> None:
    config = read(tmp_path, TELECHAT2)
    assert sizes_of(config) == (30, 32, 32, 128, 8192)
    [attention], [mlp] = set(config.attentions), set(config.dense_mlps)
    assert (attention.bias, attention.output_bias) == (False, True)
    assert (mlp.inner, mlp.bias, mlp.up_bias) == (12288, True, False)
    assert attention.rope is not None
    assert attention.rope.theta == 10000
    absent = {k: v for k, v in TELECHAT2.items() if "seqlen" not in k and "eps" not in k}
    assert read(tmp_path, absent) == config
    [long] = read(tmp_path, TELECHAT2 | {"training_seqlen": 32768}).ropes
    assert long.theta == pytest.approx(10000 * 7 ** (128 / 126))


STABLELM: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rope_theta": 10000,
    "vocab_size": 50304,
}
FALCON: dict[str, Any] = {"bias": False, "hidden_size": 4544, "vocab_size": 65024}
FALCON |= {"alibi": False, "layer_norm_epsilon": 1e-05, "parallel_attn": True}
NAMES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stablelm": (
        {"architectures": ["StableLMEpochForCausalLM"], "norm_eps": 1e-4, "rope_pct": 0.5},
        {"architectures": ["StableLmForCausalLM"], "layer_norm_eps": 1e-4}
        | {"partial_rotary_factor": 0.5},
    ),
    "falcon 7b": (
        {"architectures": ["RWForCausalLM"], "n_head": 71, "n_layer": 32, "multi_query": True},
        {"architectures": ["FalconForCausalLM"], "num_attention_heads": 71}
        | {"num_hidden_layers": 32, "multi_query": True},
    ),
    "falcon 40b": (
        {"architectures": ["RWForCausalLM"], "n_head": 64, "n_layer": 60, "n_head_kv": 8}
        | {"hidden_size": 8192},
        {"architectures": ["FalconForCausalLM"], "num_attention_heads": 64, "hidden_size": 8192}
        | {"num_hidden_layers": 60, "num_kv_heads": 8, "new_decoder_architecture": True},
    ),
}
"""Fields of the first files of some models, and those that they have now."""


@pytest.mark.parametrize("case", NAMES)
def test_first_files_have_other_names(case: str, tmp_path: Path) -> None:
    common = STABLELM if case == "stablelm" else FALCON
    first, now = (read(tmp_path, common | fields) for fields in NAMES[case])
    assert replace(first, architecture=now.architecture) == now


SAME = {
    **dict.fromkeys(("Aquila", "TeleChat3", "TeleFLM", "Xverse"), "Llama"),
    "Param2MoE": "BailingMoeV2",
}
"""Names of what is another family; Tele-FLM is Llama without factors."""


@pytest.mark.parametrize("name", SAME)
def test_names_of_what_is_another_family(name: str, tmp_path: Path) -> None:
    name, own = f"{name}ForCausalLM", f"{SAME[name]}ForCausalLM"
    first, now = (read(tmp_path, STABLELM | {"architectures": [each]}) for each in (name, own))
    assert replace(first, architecture=own) == now


PANGU: dict[str, Any] = {
    "architectures": ["PanguEmbeddedForCausalLM"],
    "bias": True,
    "eos_token_id": 45892,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12800,
    "max_position_embeddings": 32768,
    "model_type": "PanguEmbedded",
    "num_attention_heads": 32,
    "num_hidden_layers": 34,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 16000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 153376,
}
"""openPangu Embedded 7B."""


def test_openpangu_as_its_authors_write_it(tmp_path: Path) -> None:
    config = read(tmp_path, PANGU)
    assert sizes_of(config) == (34, 32, 8, 128, 32768)
    [attention] = set(config.attentions)
    assert (attention.bias, attention.output_bias) == (True, True)
    assert attention.rope is not None
    assert (attention.rope.theta, config.norm.eps) == (16e6, 1e-5)
    known = {"bias", "max_position_embeddings", "rms_norm_eps", "rope_theta"}
    known |= {"num_key_value_heads", "tie_word_embeddings", "hidden_act"}
    absent = {name: value for name, value in PANGU.items() if name not in known}
    assert read(tmp_path, absent) == config


TELEFLM = STABLELM | {"architectures": ["TeleFLMForCausalLM"], "use_mup": True}

DOMYN: dict[str, Any] = {
    "architectures": ["DomynEdgeForCausalLM"],
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "vocab_size": 115269,
}
"""Domyn Edge: all that its configuration class has no other default for."""
OF_LAYERS = {"position_layers": ["nope", "rope"], "window_sizes": [[-1, 0], [511, 0]]}
TWO: dict[str, Any] = DOMYN | OF_LAYERS | {"num_hidden_layers": 2, "head_sizes": [64, 32]}


def test_absent_fields_of_domyn_edge(tmp_path: Path) -> None:
    config = read(tmp_path, DOMYN)
    assert (config.num_layers, config.max_position_embeddings) == (36, 8192)
    assert config.tie_word_embeddings
    narrow = {(each.head_dim, each.window, each.num_kv_heads) for each in config.attentions[2:5]}
    assert narrow == {(64, 1025, 8)}
    for index in (0, 1, 5, 33, 34, 35):
        attention = config.attentions[index]
        assert (attention.head_dim, attention.window, attention.rope) == (256, None, None)
        assert attention.scale == 1 / 16
    assert sum(each.rope is not None for each in config.attentions) == 24


@pytest.mark.parametrize(
    "widths",
    [{"head_sizes": [128, 32]}, {"head_dim": 128, "per_layer_config": {"1": {"head_dim": 32}}}],
)
def test_widths_of_the_heads_of_domyn_edge(widths: dict[str, Any], tmp_path: Path) -> None:
    wide, narrow = read(tmp_path, TWO | widths).attentions
    assert (wide.head_dim, narrow.head_dim, narrow.window) == (128, 32, 512)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (INTERNLM2 | {"hidden_act": "mish"}, "hidden_act 'mish' is not supported"),
        (INTERNLM2 | {"rope_scaling": {"type": "half"}}, "half"),
        (INTERNLM2 | {"num_key_value_heads": 5}, "num_attention_heads"),
        (ORION | {"rms_norm_eps": 0}, "'rms_norm_eps'"),
        (TELECHAT2 | {"embed_layernorm": True}, "embed_layernorm True is not supported"),
        (TELECHAT2 | {"training_seqlen": 0}, "'training_seqlen'"),
        (LING | {"use_bias": True}, "use_bias true is not supported"),
        (LING | {"norm_head": True}, "norm_head True is not supported"),
        (LING | {"score_function": "sigmoid"}, "score_function 'sigmoid' is not supported"),
        (LING | {"multi_gate": True}, "multi_gate True is not supported"),
        (LING | {"use_qk_norm": True}, "use_qk_norm True is not supported"),
        (
            INTERNLM2 | {"architectures": ["InternLMForCausalLM"], "rotary": {"type": "linear"}},
            "type 'linear' is not supported",
        ),
        (BAICHUAN | {"tie_word_embeddings": True}, "tie_word_embeddings true is not supported"),
        (BAICHUAN_13B | {"model_max_length": 2**30}, "'model_max_length'"),
        (PANGU | {"param_sink_number": 128}, "param_sink_number 128 is not supported"),
        (PANGU | {"is_causal": False}, "is_causal False is not supported"),
        (PANGU | {"sandwich_norm": True}, "sandwich_norm True is not supported"),
        (PANGU | {"qkv_bias": False}, "qkv_bias False is not supported; supported: True"),
        (TELEFLM, "'output_mult' is missing"),
        (TELEFLM | {"output_mult": 1.0}, "'mup_scale_factor' is missing"),
        (TELEFLM | {"input_mult": 0}, "'input_mult' must be a positive number"),
        (TWO | {"attention_bias": True}, "attention_bias is not supported"),
        (TWO | {"position_layers": ["nope", "alibi"]}, "layer type 'alibi' is not supported"),
        (TWO | {"head_sizes": [64]}, "'head_sizes' must be a list for 2 layers"),
        (TWO | {"head_sizes": [64, 31]}, "head_dim must be even"),
        (TWO | {"head_sizes": [64, "a"]}, "'head_sizes' must be an integer"),
        (TWO | {"window_sizes": [[-1, 0], [5, 1]]}, r"\[5, 1\] in 'window_sizes' is not supported"),
        (TWO | {"window_sizes": [[-1, 0], 5]}, "5 in 'window_sizes' is not supported"),
        (
            TWO | {"head_dim": 64, "per_layer_config": {"1": {"num_attention_heads": 4}}},
            "'num_attention_heads' is not supported",
        ),
    ],
)
def test_what_is_not_computed_is_refused(
    fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=reason):
        read(tmp_path, fields)
