"""Adapters that PEFT writes, against PEFT's own merged models."""

from __future__ import annotations

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

from shmllm.errors import EngineStartError
from shmllm.models.lora import make_lora, read_files
from shmllm.models.lora_targets import LoraTargets

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's about transformers

TOKENS = [5, 61, 2, 33, 90, 17, 8, 8, 41, 3, 77, 20, 64, 1]
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "all-linear": {"r": 4, "lora_alpha": 3, "target_modules": "all-linear"},
    "rslora": {"r": 9, "lora_alpha": 4, "target_modules": ["o_proj"], "use_rslora": True},
    "patterns": {
        "r": 6,
        "lora_alpha": 12,
        "target_modules": ["q_proj", "k_proj", "up_proj", "down_proj"],
        "rank_pattern": {"k_proj": 2, r"layers\.1\.mlp\.up_proj": 17},
        "alpha_pattern": {"down_proj": 30, "model.layers.0.self_attn.q_proj": 1},
    },
    "layers": {
        "r": 5,
        "target_modules": ["gate_proj"],
        "layers_to_transform": [2],
        "init_lora_weights": "gaussian",
    },
}


def adapted(reference: Any, options: dict[str, Any]) -> Any:
    """A model of PEFT whose adapter has random matrices."""
    model = peft.get_peft_model(reference, peft.LoraConfig(**options))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.2)
    return model.eval()


@pytest.mark.parametrize("family", ["qwen3", slow("llama"), slow("phi3"), slow("gpt2")])
@pytest.mark.parametrize("name", ADAPTERS)
def test_logits_equal_those_of_peft_merged(family: str, name: str, tmp_path: Path) -> None:
    options = ADAPTERS[name]
    if family in ("phi3", "gpt2"):
        options = options | {"target_modules": "all-linear", "layers_to_transform": None}
    base = load(save(reference_model(family), tmp_path / "base"))
    model = adapted(reference_model(family), options)
    model.save_pretrained(tmp_path / "adapter")
    weights = make_lora(*read_files(tmp_path / "adapter"), LoraTargets(base), 32, torch.float32)
    expected = reference_logits(model.merge_and_unload(), TOKENS)
    plain = our_logits(base, TOKENS)
    assert (expected - plain).abs().max() > 1e-2 * plain.abs().max()
    assert_logits_close(our_logits(base, TOKENS, weights), expected, 1e-4)


MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "llama4": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    | {"intermediate_size": 40, "attention_chunk_size": 7},
}
PARAMETERS = [
    ["experts.gate_up_proj", "experts.down_proj"],
    ["experts.gate_up_proj"],
    ["gate.weight", "router.weight", "experts.down_proj"],
]


@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", slow("gpt_oss"), slow("llama4")])
def test_parameters_of_experts_equal_those_of_peft_merged(
    family: str, parameters: list[str], tmp_path: Path
) -> None:
    reference = reference_model(family, 4.0, **MIXTURES[family])
    base = load(save(reference, tmp_path / "base"))
    options = {"target_modules": ["q_proj"], "rank_pattern": {"experts.down_proj": 3}}
    model = adapted(reference, options | {"r": 5, "target_parameters": parameters})
    model.save_pretrained(tmp_path / "adapter")
    weights = make_lora(*read_files(tmp_path / "adapter"), LoraTargets(base), 32, torch.float32)
    expected, plain = reference_logits(model.merge_and_unload(), TOKENS), our_logits(base, TOKENS)
    assert (expected - plain).abs().max() > 1e-2 * plain.abs().max()
    assert_logits_close(our_logits(base, TOKENS, weights), expected, 1e-4)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_separate_experts_equal_what_peft_makes_of_them(family: str, tmp_path: Path) -> None:
    """PEFT converts adapters of older modules to parameters of all experts, whose ranks are the
    sums of those of gate and up. Both the old files and what it saves again are read."""
    reference = reference_model(family, 4.0, **MIXTURES[family])
    targets = LoraTargets(base := load(save(reference, tmp_path / "base")))
    found = {name: targets.target_of(name) for name in targets.names}
    shapes = {
        name.replace("mlp.gate", "block_sparse_moe.gate") if family == "mixtral" else name: (
            target.out_features,
            target.in_features,
        )
        for name, target in found.items()
        if target is not None
    }
    tensors = lora_adapters.draw(shapes, 1, 3, 1.2)
    fields = {"r": 3, "lora_alpha": 6, "task_type": "CAUSAL_LM"}
    old = lora_adapters.write(tmp_path / "old", tensors, **fields)
    model = peft.PeftModel.from_pretrained(reference, old).eval()
    model.save_pretrained(tmp_path / "new")
    expected, plain = reference_logits(model.merge_and_unload(), TOKENS), our_logits(base, TOKENS)
    assert (expected - plain).abs().max() > 1e-2 * plain.abs().max()
    for directory in (old, tmp_path / "new"):
        weights = make_lora(*read_files(directory), targets, 32, torch.float32)
        assert_logits_close(our_logits(base, TOKENS, weights), expected, 1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "'use_dora' is not supported"),
        ({"lora_bias": True}, "'lora_bias' is not supported"),
        ({"bias": "all"}, "'bias' must be 'none', not 'all'"),
        ({"modules_to_save": ["lm_head"]}, "'modules_to_save' is not supported"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens.* is not supported"),
        ({"target_modules": ["lm_head"]}, r"'base_model\.model\.lm_head\..*' is not supported"),
        ({"init_lora_weights": "pissa"}, "'init_lora_weights' 'pissa' changes the base's weights"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    base = load(save(reference_model("qwen3"), tmp_path / "base"))
    options = {"r": 4, "target_modules": ["q_proj"]} | options
    adapted(reference_model("qwen3"), options).save_pretrained(tmp_path / "adapter")
    with pytest.raises(EngineStartError, match=message):
        make_lora(*read_files(tmp_path / "adapter"), LoraTargets(base), 32, torch.float32)
