"""MiniMax M3: published fields, names of files, adapters, and what is refused.
test_architectures.py compares logits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file
from support.absent_fields import assert_absent_fields_agree
from support.model_helpers import load, reference_model, save
from support.reference_models import BLOCKS_CHOSEN
from support.vision_models import make_vision_model

from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.indexer_specs import BlockIndexerSpec
from shmllm.models.lora_targets import LoraTargets
from shmllm.models.specs import MLPSpec, MoESpec

KINDS = ["full_attention", "minimax_m3_sparse"]
SIZES: dict[str, Any] = BLOCKS_CHOSEN | {
    **{"num_local_experts": 5, "num_experts_per_tok": 2, "num_hidden_layers": 2},
    **{"layer_types": KINDS, "index_block_size": 16, "index_topk_blocks": 2},
}
SPARSE = {
    "use_sparse_attention": True,
    "sparse_index_dim": 64,
    "sparse_num_index_heads": 4,
    "sparse_topk_blocks": 8,
    "sparse_block_size": 64,
    "sparse_disable_index_value": [0, 1],
    "sparse_score_type": "max",
    "sparse_init_block": 0,
    "sparse_local_block": 2,
    "sparse_attention_freq": [0, 1],
}
PUBLISHED: dict[str, Any] = {
    "architectures": ["MiniMaxM3SparseForCausalLM"],
    **{"vocab_size": 200_064, "hidden_size": 6144, "num_attention_heads": 64},
    **{"num_hidden_layers": 2, "hidden_act": "swigluoai", "moe_layer_freq": [0, 1]},
    **{"rope_theta": 5_000_000, "partial_rotary_factor": 0.5, "rotary_dim": 64},
    **{"scoring_func": "sigmoid", "num_mtp_modules": 1, "sparse_attention_config": SPARSE},
}


def read(directory: Path, fields: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(fields))
    return ModelConfig.from_directory(directory)


def test_fields_of_its_authors_are_read(tmp_path: Path) -> None:
    config = read(tmp_path, PUBLISHED)
    first, second = config.attentions
    assert (first.indexer, second.num_kv_heads, second.head_dim) == (None, 4, 128)
    assert second.indexer == BlockIndexerSpec(head_dim=64, size=64, top_k=8, num_local=2)
    [rope] = config.ropes
    assert (rope.rotary_dim, rope.theta) == (64, 5e6)
    dense, experts = (layer.mlp for layer in config.layers)
    assert isinstance(dense, MLPSpec)
    assert isinstance(experts, MoESpec)
    assert (dense.inner, experts.num_experts, experts.top_k) == (12_288, 128, 4)
    assert experts.shared == replace(dense, inner=3072)


def test_absent_fields_agree_with_transformers(tmp_path: Path) -> None:
    text = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    fields = {"text_config": text | {"vocab_size": 200_064}}
    fields["vision_config"] = {"model_type": "minimax_m3_vl_vision"}
    architecture = "MiniMaxM3SparseForConditionalGeneration"
    config = transformers.MiniMaxM3VLConfig(**fields)
    assert_absent_fields_agree(tmp_path, architecture, fields, config)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: 'swigluoai'"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha 1.0 is not supported"),
        ({"use_gemma_norm": False}, "use_gemma_norm False is not supported"),
        ({"attention_output_gate": True}, "attention_output_gate True is not supported"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ({"n_shared_experts": 2}, "n_shared_experts 2 is not supported"),
        ({"num_key_value_heads": 8}, r"index_n_heads \(4\) must be num_key_value_heads \(8\)"),
        ({"partial_rotary_factor": 1.0}, r"\(64\) is less than the 128 elements that rotate"),
        ({"layer_types": ["sliding_attention"] * 2}, "supported: full_attention, minimax_m3_sp"),
        ({"moe_layer_freq": [0, 2]}, "'moe_layer_freq' must list 0 or 1 for each layer"),
        ({"num_local_experts": 3}, r"num_experts_per_tok \(4\) is more than"),
    ],
)
def test_what_is_not_computed_is_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=message):
        read(tmp_path, PUBLISHED | fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sparse_score_type": "mean"}, "sparse_score_type 'mean' is not supported"),
        ({"sparse_init_block": 1}, "sparse_init_block 1 is not supported"),
        ({"use_sparse_attention": False}, "use_sparse_attention False is not supported"),
        ({"sparse_disable_index_value": [0, 0]}, "0 is not supported in layers that choose"),
        ({"sparse_attention_freq": [1]}, "must list 0 or 1 for each of 2 layers"),
        ({"sparse_index_dim": 65}, "index_head_dim must be even for rotary embedding, not 65"),
        ({"sparse_local_block": 9}, r"index_local_blocks \(9\) is more than index_topk_blocks"),
        ({"sparse_local_block": 0}, "'index_local_blocks' must be an integer of at least 1"),
    ],
)
def test_other_indexers_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=message):
        read(tmp_path, PUBLISHED | {"sparse_attention_config": SPARSE | fields})


def test_the_checkpoint_of_a_model_with_a_tower_has_the_names_of_its_authors(
    tmp_path: Path,
) -> None:
    """transformers writes them for that model, and those of its modules for text alone."""
    make_vision_model("minimax_m3", tmp_path)
    stored = {
        name.removeprefix("language_model.") for name in load_file(tmp_path / "model.safetensors")
    }
    own = load(tmp_path).named_weights().keys()
    assert {name for name in own if name.startswith(("model.layers.", "lm_head."))} <= stored
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in own
    assert "model.layers.1.self_attn.index_k_norm.weight" in own


def test_projections_have_adapters_and_those_of_an_indexer_have_none(tmp_path: Path) -> None:
    model = load(save(reference_model("minimax_m3", **SIZES), tmp_path))
    names = set(LoraTargets(model).names)
    assert "model.layers.1.self_attn.q_proj" in names
    assert not any("index_" in name for name in names)
