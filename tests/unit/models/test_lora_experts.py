"""Adapters of experts: equal to merged models of transformers, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import lora_adapters, lora_experts
from support.model_helpers import (
    assert_logits_close,
    load,
    our_logits,
    reference_logits,
    reference_model,
    save,
)
from support.reference_models import make_model
from support.variants import slow
from torch import Tensor

from shmllm.errors import EngineStartError
from shmllm.models.lora import LoraWeights, make_lora, read_files
from shmllm.models.lora_targets import LoraTargets

TOKENS = [5, 61, 2, 33, 90, 17, 8, 8, 41, 3, 77, 20, 64, 1, 29, 50, 13, 95, 6, 38]
QWEN = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": QWEN,
    "qwen2_moe": QWEN | {"shared_expert_intermediate_size": 40},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "llama4": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    | {"intermediate_size": 40, "attention_chunk_size": 7},
    "nemotron_3": {"layers_block_type": ["moe", "full_attention"], "head_dim": 16}
    | {"n_routed_experts": 4, "moe_intermediate_size": 24, "moe_latent_size": 20}
    | {"moe_shared_expert_intermediate_size": 40},
}
RANK = 5
FIELDS = {"r": RANK, "lora_alpha": 2 * RANK, "target_parameters": lora_experts.PARAMETERS}


class Case:
    """A random model in both implementations."""

    def __init__(self, family: str, directory: Path) -> None:
        self.reference = reference_model(family, 4.0, **FAMILIES[family])
        self.model = load(save(self.reference, directory / "model"))
        self.targets = LoraTargets(self.model)
        self.directory = directory / "adapter"

    def read(self, tensors: dict[str, Tensor], **fields: Any) -> LoraWeights:
        lora_adapters.write(self.directory, tensors, **(FIELDS | fields))
        return make_lora(*read_files(self.directory), self.targets, 32, torch.float32)

    def assert_merged(self, weights: LoraWeights, merged: Any) -> None:
        expected, base = (reference_logits(each, TOKENS) for each in (merged, self.reference))
        assert (expected - base).abs().max() > 1e-2 * base.abs().max(), "it changes too little"
        assert_logits_close(our_logits(self.model, TOKENS, weights), expected, 1e-4)


@pytest.mark.parametrize(
    "family",
    ["mixtral", "qwen3_moe", slow("qwen2_moe"), "gpt_oss", slow("llama4"), slow("nemotron_3")],
)
def test_fused_experts_equal_the_merged_model(family: str, tmp_path: Path) -> None:
    case = Case(family, tmp_path)
    tensors, changes = lora_experts.fused(case.reference, 1, RANK)
    case.assert_merged(case.read(tensors), lora_experts.merged(case.reference, changes, 2.0))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", slow("qwen2_moe")])
def test_separate_experts_equal_the_merged_model(family: str, tmp_path: Path) -> None:
    case = Case(family, tmp_path)
    tensors, changes = lora_experts.separate(case.reference, 2, RANK)
    case.assert_merged(case.read(tensors), lora_experts.merged(case.reference, changes, 2.0))


@pytest.mark.parametrize(
    "kind",
    [
        "gpt_oss",
        "deepseek_v3",
        *map(slow, ("jamba", "nemotron_h", "nemotron_3", "granite_moe_hybrid")),
    ],
)
def test_parameters_have_the_order_of_transformers_modules(kind: str, tmp_path: Path) -> None:
    """PEFT nests its matrices in this order, and their names do not say which one they change."""
    reference = make_model(kind, tmp_path)
    targets, count = LoraTargets(load(tmp_path)), 0
    for name, module in reference.named_modules():
        own = [f"{name}.{parameter}" for parameter, _ in module.named_parameters(recurse=False)]
        if name.endswith(".experts") and own:
            count += 1
            known = targets.parameters_of(name)
            assert [each for each in known if each in own] == own
            assert sum(len(targets.targets_of(each)) > 1 for each in own) == 2
    assert count > 0


def test_projections_of_latents_and_a_shared_expert_equal_the_merged_model(tmp_path: Path) -> None:
    case = Case("nemotron_3", tmp_path)
    names = ("_latent_proj", "shared_experts.up_proj", "shared_experts.down_proj")
    shapes = lora_adapters.with_suffixes(lora_adapters.linear_modules(case.reference), names)
    tensors = lora_adapters.draw(shapes, 5, RANK)
    weights = case.read(tensors, target_parameters=None)
    case.assert_merged(weights, lora_adapters.merged(case.reference, tensors, 2.0))


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case("qwen3_moe", tmp_path)


def test_a_parameter_may_be_adapted_alone(case: Case) -> None:
    """PEFT wraps the module only once then, so the matrices have the module's own name."""
    tensors, changes = lora_experts.fused(case.reference, 3, RANK)
    for own in ("gate_up_proj", "down_proj"):
        nested = ".base_layer" if own == "gate_up_proj" else ".experts"
        some = {
            name.replace(".base_layer", ""): tensor
            for name, tensor in tensors.items()
            if name.rsplit(".lora_")[0].endswith(nested)
        }
        weights = case.read(some, target_parameters=[f"experts.{own}"])
        left = [change for change in changes if change.parameter.endswith(own)]
        case.assert_merged(weights, lora_experts.merged(case.reference, left, 2.0))


def test_patterns_match_the_name_of_the_parameter(case: Case) -> None:
    tensors, changes = lora_experts.fused(case.reference, 4, RANK)
    weights = case.read(
        tensors,
        r=2,
        lora_alpha=3,
        rank_pattern={r".*\.gate_up_proj": RANK, "mlp.experts.down_proj": RANK},
        alpha_pattern={r".*\.gate_up_proj": 2 * RANK, "down_proj": 2 * RANK},
    )
    case.assert_merged(weights, lora_experts.merged(case.reference, changes, 2.0))


def test_the_router_is_a_module_or_a_parameter(tmp_path: Path) -> None:
    """The modules of transformers 5 have the router's weight as a parameter, older ones a linear
    layer. The shared expert and its gate are linear layers in both."""
    case = Case("qwen2_moe", tmp_path)
    shapes = lora_adapters.linear_modules(case.reference)
    own = lora_adapters.with_suffixes(shapes, ["shared_expert_gate", "up_proj", "down_proj"])
    routers = {f"model.layers.{layer}.mlp.gate": (8, 48) for layer in range(3)}
    tensors = lora_adapters.draw(own | routers, 1, RANK, 1.0)
    merged = lora_adapters.merged(case.reference, tensors, 2.0)
    case.assert_merged(case.read(tensors, target_parameters=[]), merged)
    case.assert_merged(case.read(tensors, target_parameters=["gate.weight"]), merged)


EXPERTS = "base_model.model.model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("change", "fields", "message"),
    [
        ({}, {"target_parameters": []}, "'target_parameters' does not name .*experts.base_layer'"),
        (
            {},
            {"target_parameters": ["experts.down_proj"]},
            r"such as 'model.*experts\.gate_up_proj'",
        ),
        ({}, {"target_parameters": "down_proj"}, "'target_parameters' must be a list of strings"),
        ({}, {"r": 4}, r"lora_A has shape \[40, 48\], not \[32, 48\]"),
        ({}, {"r": 33}, r"has rank 33; max_lora_rank is 32"),
        (
            {f"{EXPERTS}.3.up_proj.lora_A.weight": (RANK, 48)}
            | {f"{EXPERTS}.3.up_proj.lora_B.weight": (32, RANK)},
            {},
            r"experts\.3\.up_proj' changes what another module changes",
        ),
        (
            {f"{EXPERTS}.8.up_proj.lora_A.weight": (RANK, 48)}
            | {f"{EXPERTS}.8.up_proj.lora_B.weight": (32, RANK)},
            {},
            r"cannot change 'model\.layers\.0\.mlp\.experts\.8\.up_proj'",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    case: Case, change: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    tensors, _ = lora_experts.fused(case.reference, 5, RANK)
    tensors |= {name: torch.zeros(shape) for name, shape in change.items()}
    with pytest.raises(EngineStartError, match=message) as caught:
        case.read(tensors, **fields)
    assert "\n" not in str(caught.value)
