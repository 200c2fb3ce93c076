"""DeepSeek V4: names of files, adapters, fields of older files, what the cache keeps, and what is
refused. test_architectures.py compares logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import lora_adapters
from support.model_helpers import (
    SIZES,
    assert_logits_close,
    load,
    our_logits,
    reference_logits,
    reference_model,
    save,
)
from support.packed_deepseek_v4 import pack_as_published
from support.quantized_checkpoints import load_packed
from support.reference_models import ENTRIES
from transformers import AutoModelForCausalLM, DeepseekV4Config

from shmllm.core.kv_groups import FullAttention, SlidingWindow
from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.entries import stored_kv
from shmllm.models.lora import make_lora, read_files
from shmllm.models.lora_targets import LoraTargets
from shmllm.models.quantized import QuantizedMatrix
from shmllm.models.sharding import stage_config
from shmllm.worker.memory import layer_rules

TOKENS = [5, 61, 2, 33, 90, 17, 8, 8, 41, 3, 77, 20, 64, 1, 9, 30]
CHOSEN = {"n_routed_experts": 4, "num_experts_per_tok": 4, "index_topk": 100}
NOT_ADAPTED = ("lm_head", ".o_a_proj", ".indexer.q_b_proj", ".weights_proj")
OF_AUTHORS = {
    "model.embed_tokens.": "embed.",
    "model.hc_head.hc_": "hc_head_",
    ".attn.norm.": ".attn.kv_norm.",
    "model.": "",
}
"""What files of the model's authors have in place of parts of names that transformers writes."""
YARN = {"factor": 16, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """transformers' model, and its directory."""
    model = reference_model("deepseek_v4", **ENTRIES | CHOSEN)
    return model, save(model, tmp_path_factory.mktemp("deepseek_v4"))


def read(directory: Path, fields: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(fields))
    return ModelConfig.from_directory(directory)


def test_names_of_both_kinds_of_files_are_known_and_further_layers_left_out(
    made: tuple[Any, Path], tmp_path: Path
) -> None:
    directory = made[1]
    tensors = load_file(directory / "model.safetensors")
    for part, other in OF_AUTHORS.items():
        assert any(part in name for name in tensors), part
        tensors = {name.replace(part, other): tensor for name, tensor in tensors.items()}
    assert {"embed.weight", "head.weight", "norm.weight", "hc_head_fn"} <= {*tensors}
    tensors["mtp.0.e_proj.weight"] = torch.ones(2, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    logits = [our_logits(load(each), TOKENS) for each in (directory, tmp_path)]
    assert torch.equal(*logits)


def test_experts_in_mxfp4_and_matrices_in_fp8_are_those_of_transformers(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 32}
    reference = reference_model("deepseek_v4", **ENTRIES | CHOSEN | sizes)
    plain, quantized = tmp_path / "plain", tmp_path / "packed"
    pack_as_published(save(reference, plain), quantized)
    model = load_packed(quantized)
    views = [view for [view, *_] in model.named_weights().values()]
    kinds = {view.kind for view in views if isinstance(view, QuantizedMatrix)}
    assert "mxfp4" in kinds, kinds
    assert len(kinds) == 2, kinds
    assert_logits_close(our_logits(model, TOKENS), our_logits(load(plain), TOKENS), 1e-4)
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    assert_logits_close(our_logits(model, TOKENS), reference_logits(reference, TOKENS), 1e-4)


def test_an_update_has_the_names_of_transformers_modules(made: tuple[Any, Path]) -> None:
    reference, directory = made
    model, expected = load(directory), our_logits(load(directory), TOKENS)
    buffers = model.save_buffers()
    model.weights_lost()
    model.load_weights(reference.named_parameters())
    assert model.missing == {*buffers}
    assert {name.rsplit(".", 1)[1] for name in buffers} == {"bias", "tid2eid"}
    model.restore_buffers(buffers)
    assert not model.missing
    assert torch.equal(our_logits(model, TOKENS), expected)


def test_adapters_equal_merged_weights(made: tuple[Any, Path], tmp_path: Path) -> None:
    reference, directory = made
    shapes = {
        name: shape
        for name, shape in lora_adapters.linear_modules(reference).items()
        if not any(part in name for part in NOT_ADAPTED)
    }
    assert "model.layers.1.self_attn.compressor.gate_proj" in shapes
    tensors = lora_adapters.draw(shapes)
    base, files = load(directory), read_files(lora_adapters.write(tmp_path, tensors))
    weights = make_lora(*files, LoraTargets(base), 32, torch.float32)
    expected = reference_logits(lora_adapters.merged(reference, tensors, 2.0), TOKENS)
    assert_logits_close(our_logits(base, TOKENS, weights), expected, 1e-4)
    assert (expected - our_logits(base, TOKENS)).abs().max() > 1e-2


@pytest.mark.parametrize(
    "older",
    [
        {"compress_ratios": [0, 128, 4, 0]},
        {"compress_rate_csa": 2, "compress_rate_hca": 16, "num_hash_layers": 2},
        {"rope_scaling": YARN | {"type": "yarn"}, "qk_rope_head_dim": 64, "rope_theta": 50_000},
        {"rope_parameters": YARN | {"rope_type": "yarn"}, "compress_rope_theta": 9e4},
        {"partial_rotary_factor": 0.25, "qk_rope_head_dim": 64},
        {"num_local_experts": 12, "intermediate_size": 40, "moe_intermediate_size": 24},
    ],
)
def test_fields_of_older_files_mean_what_transformers_writes(
    older: dict[str, Any], tmp_path: Path
) -> None:
    few = SIZES | {"num_key_value_heads": 1, "num_attention_heads": 4} | older
    written = DeepseekV4Config(**few).to_dict()
    own = {"architectures": ["DeepseekV4ForCausalLM"]}
    assert read(tmp_path, few | own | {"eos_token_id": 1}) == read(tmp_path, written | own)


def test_the_cache_keeps_rows_of_a_window_and_all_entries(made: tuple[Any, Path]) -> None:
    config = ModelConfig.from_directory(made[1])
    rows = [(each.key_dim, each.index_dim, each.rate) for each in stored_kv(config)[:3] if each]
    entries = [each and (each.key_dim, each.index_dim, each.rate) for each in stored_kv(config)[3:]]
    assert rows == [(10, 0, 1), (10, 2 * 10, 1), (10, 4 * 10 + 4 * 6, 1)]
    assert entries == [None, (10, 0, 8), (10, 6, 4)]
    windows = [(SlidingWindow(7),), (SlidingWindow(8),), (SlidingWindow(8),)]
    kept = (FullAttention(),)
    assert layer_rules(config, False, 1024, 16) == [*windows, (), kept, kept]
    assert layer_rules(config, True, 1024, 16) == [*[kept] * 3, (), kept, kept]


def test_a_pipeline_divides_it(made: tuple[Any, Path]) -> None:
    config = ModelConfig.from_directory(made[1])
    assert stage_config(config, 1, 3).stage.layers == range(1, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu_limit": 0}, "'swiglu_limit' must be a positive number"),
        ({"hc_mult": 9}, "'hc_mult' must be an integer of at most 8"),
        ({"hc_sinkhorn_iters": 0}, "'hc_sinkhorn_iters' must be"),
        ({"layer_types": ["full_attention"] * 3}, "layer type 'full_attention' is not"),
        ({"mlp_layer_types": ["dense"] * 3}, "layer type 'dense' is not"),
        ({"layer_types": None, "compress_ratios": [0, 8, 4]}, "'compress_ratios' must list one of"),
        ({"compress_rates": {"compressed_sparse_attention": 4}}, "'heavily_compressed_attention'"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2 is not supported"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"norm_topk_prob": False}, "norm_topk_prob False is not supported"),
        ({"n_shared_experts": 2}, "n_shared_experts 2 is not supported"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"o_groups": 7}, "o_groups .7. does not divide 6 heads of 10 elements"),
        ({"index_head_dim": 2}, "index_head_dim .2. is less than the 4 elements that rotate"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    changes: dict[str, Any], message: str, made: tuple[Any, Path], tmp_path: Path
) -> None:
    fields = json.loads((made[1] / "config.json").read_text())
    with pytest.raises(EngineStartError, match=message):
        read(tmp_path, fields | changes)
