"""Low-rank adapters: equal to merged models of transformers, and refused where they do not fit."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support import lora_adapters
from support.model_helpers import (
    assert_logits_close,
    load,
    our_logits,
    reference_logits,
    reference_model,
    save,
)
from support.variants import slow
from torch import Tensor

from shmllm.errors import EngineStartError
from shmllm.models.lora import LoraWeights, make_lora, read_files
from shmllm.models.lora_targets import LoraTargets

TOKENS = [5, 61, 2, 33, 90, 17, 8, 8, 41, 3, 77, 20, 64, 1, 29, 50, 13, 95, 6, 38]
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
DOWN = {"down_proj"}
MLP = {"gate_proj", "up_proj", *DOWN}
DELTA_NET = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
SHARED_EXPERT = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
}
FAMILIES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "llama": ({}, ATTENTION | MLP),
    "qwen3": ({}, ATTENTION | MLP),
    "phi3": ({}, {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}),
    "qwen2_moe": (SHARED_EXPERT, ATTENTION | MLP | {"shared_expert_gate"}),
    "qwen3_5": (
        DELTA_NET,
        ATTENTION | MLP | {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"},
    ),
    "gpt2": (
        {"n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 64},
        {"c_attn", "c_proj", "c_fc"},
    ),
    "deepseek_v3": (
        LATENT,
        {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"} | MLP,
    ),
    "gemma3n": (
        {"head_dim": 16, "num_kv_shared_layers": 0, "layer_types": ["full_attention"] * 3}
        | {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 24, "laurel_rank": 8}
        | {"activation_sparsity_pattern": [0.5, 0.0, 0.0]},
        ATTENTION
        | MLP
        | {"per_layer_input_gate", "per_layer_projection", "linear_left", "linear_right"}
        | {"modality_router", "0", "1", "2"},  # projections of streams
    ),
    "mamba2": (
        {"hidden_size": 64, "num_heads": 4, "head_dim": 32, "n_groups": 2, "state_size": 32},
        {"in_proj", "out_proj"},
    ),
    "falcon_h1": (
        {"mamba_n_heads": 4, "mamba_d_ssm": 64, "mamba_d_state": 16, "num_hidden_layers": 2}
        | {"attention_in_multiplier": 0.7, "key_multiplier": 0.4, "ssm_out_multiplier": 0.6}
        | {"ssm_multipliers": [0.9, 0.7, 0.8, 1.1, 0.6], "mlp_multipliers": [0.88, 0.59]},
        ATTENTION | MLP | {"in_proj", "out_proj"},
    ),
    "kimi_linear": (
        {name: LATENT[name] for name in LATENT if name.endswith(("heads", "rank", "dim"))}
        | {"q_lora_rank": None, "num_hidden_layers": 2, "mlp_layer_types": ["dense", "dense"]}
        | {"layer_types": ["linear_attention", "full_attention"]}
        | {"linear_num_heads": 3, "linear_head_dim": 16},
        ATTENTION
        | MLP
        | {"b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "kv_a_proj_with_mqa"},
    ),
    "bailing_moe_v3": (
        {name: LATENT[name] for name in LATENT if name.endswith(("heads", "rank", "dim"))}
        | {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "dense"]}
        | {"layer_types": ["linear_attention", "full_attention"]}
        | {"linear_num_heads": 3, "linear_head_dim": 16},
        ATTENTION
        | MLP
        | {"b_proj", "f_proj", "g_proj", "kv_a_proj_with_mqa", "q_a_proj", "q_b_proj"},
    ),
}
"""Options of each family, and the modules that adapters can change."""
QUICK = {"llama", "qwen3", "phi3", "qwen2_moe", "qwen3_5", "gpt2"}


class Case:
    """A random model in both implementations, and its modules."""

    def __init__(self, family: str, directory: Path) -> None:
        options, self.suffixes = FAMILIES[family]
        self.reference = reference_model(family, **options)
        self.model = load(save(self.reference, directory / "model"))
        self.targets = LoraTargets(self.model)
        shapes = lora_adapters.linear_modules(self.reference)
        self.shapes = {
            name: shape for name, shape in shapes.items() if self.targets.target_of(name)
        }
        self.directory = directory / "adapter"

    def read(self, max_rank: int = 64) -> LoraWeights:
        config, tensors = read_files(self.directory)
        return make_lora(config, tensors, self.targets, max_rank, torch.float32)

    def assert_merged(self, tensors: dict[str, Tensor], scale: Any) -> None:
        merged = lora_adapters.merged(self.reference, tensors, scale)
        expected = reference_logits(merged, TOKENS)
        base = reference_logits(self.reference, TOKENS)
        assert (expected - base).abs().max() > 1e-2 * base.abs().max(), "it changes too little"
        assert_logits_close(our_logits(self.model, TOKENS, self.read()), expected, 1e-4)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case("qwen3", tmp_path)


@pytest.mark.parametrize(
    "family", [family if family in QUICK else slow(family) for family in FAMILIES]
)
def test_logits_equal_those_of_the_merged_model(family: str, tmp_path: Path) -> None:
    case = Case(family, tmp_path)
    assert {name.split(".")[-1] for name in case.shapes} == case.suffixes
    tensors = lora_adapters.draw(case.shapes)
    lora_adapters.write(case.directory, tensors)
    case.assert_merged(tensors, 2.0)


def test_an_adapter_may_have_some_projections_of_a_product(case: Case) -> None:
    shapes = lora_adapters.with_suffixes(case.shapes, ["v_proj", "up_proj"])
    tensors = lora_adapters.draw(shapes, factor=1.0)
    lora_adapters.write(case.directory, tensors)
    case.assert_merged(tensors, 2.0)


CHOSEN = {
    "one of a product": ("qwen3", ["v_proj"], {"v_proj"}),
    "all of a product": ("qwen3", ["qkv_proj", "down_proj"], {"q_proj", "k_proj", "v_proj"} | DOWN),
    "a whole name": ("qwen3", ["model.layers.1.mlp.up_proj"], {"1.mlp.up_proj"}),
    "a part of a module": ("phi3", ["k_proj", "absent"], {"qkv_proj"}),
    "gates": ("qwen2_moe", ["up_proj", "shared_expert_gate"], {"up_proj", "shared_expert_gate"}),
}
"""A family, `lora_target_modules`, and the ends of the modules that an adapter changes."""


@pytest.mark.parametrize("name", CHOSEN)
def test_an_adapter_changes_chosen_modules_only(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family, chosen, ends = CHOSEN[name]
    case = Case(family, tmp_path)
    every = lora_adapters.draw(case.shapes, factor=1.0)
    lora_adapters.write(case.directory, every)
    left = {
        f"{lora_adapters.PREFIX}{module}.lora_{matrix}.weight"
        for module in lora_adapters.with_suffixes(case.shapes, ends)
        for matrix in "AB"
    }
    tensors = {each: tensor for each, tensor in every.items() if each in left}
    targets = LoraTargets(case.model, chosen)
    found = make_lora(*read_files(case.directory), targets, 64, torch.float32)
    assert f"leaves {len(every) // 2 - len(tensors) // 2} of {len(every) // 2} mod" in caplog.text
    expected = reference_logits(lora_adapters.merged(case.reference, tensors, 2.0), TOKENS)
    assert_logits_close(our_logits(case.model, TOKENS, found, chosen), expected, 1e-4)
    assert [each.num_parts for each in targets.products] != [
        each.num_parts for each in case.targets.products
    ]


def test_what_chooses_no_module_is_refused(case: Case) -> None:
    with pytest.raises(EngineStartError, match=r"\['lm_head'\] names no .* end in down_proj, gate"):
        LoraTargets(case.model, ["lm_head"])
    lora_adapters.write(case.directory, lora_adapters.draw({"lm_head": (97, 48)}))
    files, targets = read_files(case.directory), LoraTargets(case.model, ["q_proj"])
    with pytest.raises(EngineStartError, match="cannot change 'lm_head'"):
        make_lora(*files, targets, 64, torch.float32)


def test_ranks_and_factors_follow_patterns(case: Case) -> None:
    def rank(name: str) -> int:
        return 3 if name.endswith("v_proj") else 40 if name.endswith("1.mlp.up_proj") else 5

    def scale(name: str) -> float:
        return (7.0 if name.endswith("q_proj") else 4.0) / math.sqrt(rank(name))

    tensors = lora_adapters.draw(case.shapes, rank=rank)
    lora_adapters.write(
        case.directory,
        tensors,
        r=5,
        lora_alpha=4,
        use_rslora=True,
        rank_pattern={"v_proj": 3, r"layers\.1\.mlp\.up_proj": 40},
        alpha_pattern={"q_proj": 7},
    )
    case.assert_merged(tensors, scale)


def test_the_digest_says_whether_contents_are_equal(case: Case) -> None:
    tensors = lora_adapters.draw(case.shapes)
    digests = []
    for changed, alpha in ((0.0, 16), (0.0, 16), (0.0, 17), (1e-3, 16)):
        name = f"{lora_adapters.PREFIX}model.layers.2.mlp.down_proj.lora_B.weight"
        one = tensors | {name: tensors[name] + changed}
        lora_adapters.write(case.directory, one, lora_alpha=alpha)
        digests.append(case.read().digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "LOHA"}, "'peft_type' must be 'LORA', not 'LOHA'"),
        ({"bias": "all"}, "'bias' must be 'none', not 'all'"),
        ({"use_dora": True}, "'use_dora' is not supported"),
        ({"lora_bias": True}, "'lora_bias' is not supported"),
        ({"modules_to_save": ["lm_head"]}, "'modules_to_save' is not supported"),
        ({"layer_replication": [[0, 2]]}, "'layer_replication' is not supported"),
        ({"target_parameters": [1]}, "'target_parameters' must be a list of strings"),
        ({"alora_invocation_tokens": [1]}, "'alora_invocation_tokens' is not supported"),
        ({"init_lora_weights": "pissa"}, "'init_lora_weights' 'pissa' changes the base's weights"),
        ({"r": 0}, "'r' must be an integer of at least 1, not 0"),
        ({"lora_alpha": "x"}, "'lora_alpha' must be a positive number, not 'x'"),
        ({"rank_pattern": {"(": 3}}, r"'rank_pattern' has the invalid pattern '\('"),
        ({"rank_pattern": {"q_proj": 0}}, "'rank_pattern': 'q_proj' must be an integer"),
        ({"r": 4}, r"lora_A has shape \[8, 80\], not \[4, 80\]"),
    ],
)
def test_fields_are_refused_by_name(case: Case, fields: dict[str, Any], message: str) -> None:
    lora_adapters.write(case.directory, lora_adapters.draw(case.shapes), **fields)
    with pytest.raises(EngineStartError, match=message) as caught:
        case.read()
    assert "\n" not in str(caught.value)


def test_a_rank_above_the_bound_is_refused(case: Case) -> None:
    lora_adapters.write(case.directory, lora_adapters.draw(case.shapes))
    with pytest.raises(EngineStartError, match="has rank 8; max_lora_rank is 7"):
        case.read(max_rank=7)


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_model.model.lm_head.lora_A.weight": (8, 48)}, "cannot change 'lm_head'"),
        ({"base_model.model.model.norm.lora_A.weight": (8, 48)}, r"cannot change 'model\.norm'"),
        ({"base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": (8, 48)}, "cannot change"),
        (
            {"base_model.model.model.embed_tokens.lora_embedding_A": (8, 97)},
            "embed_tokens.lora_embedding_A' is not supported",
        ),
        ({f"{Q}.lora_magnitude_vector": (96,)}, "lora_magnitude_vector' is not supported"),
        ({f"{Q}.lora_B.bias": (96,)}, "lora_B.bias' is not supported"),
        ({"base_model.model.lm_head.weight": (97, 48)}, "lm_head.weight' is not supported"),
        ({f"{Q}.lora_B.weight": None}, "q_proj' has no lora_B"),
        ({f"{Q}.lora_B.weight": (95, 8)}, r"q_proj.lora_B has shape \[95, 8\], not \[96, 8\]"),
        ({f"{Q}.lora_A.weight": (8, 47)}, r"q_proj.lora_A has shape \[8, 47\], not \[8, 48\]"),
        ({f"{Q}.lora_A.weight": "nan"}, "q_proj.lora_A has values that are not finite"),
    ],
)
def test_tensors_are_refused_by_name(case: Case, change: dict[str, Any], message: str) -> None:
    tensors: dict[str, Any] = lora_adapters.draw(case.shapes)
    for name, shape in change.items():
        if shape is None:
            del tensors[name]
        elif shape == "nan":
            tensors[name][0, 0] = float("nan")
        else:
            tensors[name] = torch.zeros(shape)
            if name.endswith("lora_A.weight"):
                tensors[name.replace("_A", "_B")] = torch.zeros(shape[1], shape[0])
    lora_adapters.write(case.directory, tensors)
    with pytest.raises(EngineStartError, match=message) as caught:
        case.read()
    assert "\n" not in str(caught.value)


def test_missing_and_damaged_files_are_refused(case: Case) -> None:
    with pytest.raises(EngineStartError, match=r"cannot read .*adapter_config\.json"):
        case.read()
    lora_adapters.write(case.directory, lora_adapters.draw(case.shapes))
    weights = case.directory / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    with pytest.raises(EngineStartError, match="damaged or not a safetensors file"):
        case.read()
    weights.unlink()
    with pytest.raises(EngineStartError, match=r"cannot read .*adapter_model\.safetensors"):
        case.read()


def test_tensors_are_not_awaited_from_a_pipe(case: Case) -> None:
    lora_adapters.write(case.directory, lora_adapters.draw(case.shapes))
    weights = case.directory / "adapter_model.safetensors"
    weights.unlink()
    os.mkfifo(weights)
    # With this end open, no open(2) of the other one waits: the deadline of a test ends Python
    # code, but not a library's.
    end = os.open(weights, os.O_RDWR)
    try:
        with pytest.raises(EngineStartError, match=r"adapter_model\.saf.* not a regular file"):
            case.read()
    finally:
        os.close(end)
