"""The weights of experts: their names in files and in transformers' modules, and updates."""

from __future__ import annotations

import json
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
from support.variants import slow

from shmllm.errors import EngineStartError, RequestError
from shmllm.models.config import ModelConfig
from shmllm.models.matrices import QUANTIZATIONS
from shmllm.models.weight_staging import StagedWeights

TOKENS = [int(token) for token in torch.randint(0, 97, (30,), generator=torch.manual_seed(5))]
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 12,
    },
}


def make(family: str, scale: float = 1.0, **options: Any) -> Any:
    options = FAMILIES[family] | {"num_hidden_layers": 2} | options
    return reference_model(family, scale, **options)


def assert_computes(model: Any, reference: Any, tolerance: float = 1e-4) -> None:
    logits = our_logits(model, TOKENS)
    assert_logits_close(logits, reference_logits(reference, TOKENS), tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_has_the_names_of_transformers_modules(family: str, tmp_path: Path) -> None:
    model = load(save(make(family), tmp_path))
    other = make(family, 2.0)
    model.weights_lost()
    written = model.load_weights(other.named_parameters())
    assert "model.layers.1.mlp.experts.gate_up_proj" in written
    assert not model.missing
    assert_computes(model, other)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_has_the_names_of_files(family: str, tmp_path: Path) -> None:
    model = load(save(make(family), tmp_path / "first"))
    other = make(family, 2.0)
    save(other, tmp_path / "other")
    stored = load_file(tmp_path / "other" / "model.safetensors")
    model.weights_lost()
    assert model.load_weights(stored.items()) == set(model.named_weights())
    assert not model.missing
    assert_computes(model, other)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_may_have_the_names_of_transformers_modules(
    family: str, tmp_path: Path
) -> None:
    reference = make(family)
    save(reference, tmp_path)
    save_file(dict(reference.state_dict()), tmp_path / "model.safetensors")
    assert_computes(load(tmp_path), reference)


def test_both_kinds_of_names_have_the_same_memory(tmp_path: Path) -> None:
    model = load(save(make("mixtral"), tmp_path))
    names = model.destinations()
    both = names["model.layers.0.mlp.experts.gate_up_proj"][0]
    for expert in range(4):
        gate = names[f"model.layers.0.block_sparse_moe.experts.{expert}.w1.weight"][0]
        up = names[f"model.layers.0.block_sparse_moe.experts.{expert}.w3.weight"][0]
        assert torch.equal(both[expert], torch.cat([gate, up]))
    down = names["model.layers.1.block_sparse_moe.experts.2.w2.weight"][0]
    names["model.layers.1.mlp.experts.down_proj"][0][2].fill_(7.0)
    assert (down == 7.0).all()


def test_one_experts_weight_is_not_all_of_them(tmp_path: Path) -> None:
    model = load(save(make("mixtral"), tmp_path))
    model.weights_lost()
    everything = set(model.missing)
    name = "model.layers.0.block_sparse_moe.experts.3.w2.weight"
    model.load_weights([(name, torch.ones(48, 80))])
    assert everything - model.missing == {name}
    whole = "model.layers.0.mlp.experts.down_proj"
    model.load_weights([(whole, torch.ones(4, 48, 80))])
    assert everything - model.missing == {name.replace("3", str(expert)) for expert in range(4)}


def test_missing_weights_are_staged_in_their_place_under_a_modules_name(tmp_path: Path) -> None:
    model = load(save(make("mixtral"), tmp_path))
    other = make("mixtral", 2.0)
    model.weights_lost()
    staged = StagedWeights(model)
    for name, values in other.named_parameters():
        flat = values.detach().flatten()
        for begin in range(0, len(flat), 5000):
            staged.put(name, values.shape, begin, flat[begin : begin + 5000])
    assert not staged.uses_host
    staged.check_complete(model.missing)
    staged.copy_into_place()
    assert not model.missing
    assert_computes(model, other)


def test_a_staged_update_that_lacks_an_expert_is_refused(tmp_path: Path) -> None:
    model = load(save(make("mixtral"), tmp_path))
    model.weights_lost()
    staged = StagedWeights(model)
    for name, views in model.named_weights().items():
        if "experts.2.w1" not in name:
            staged.put(name, views[0].shape, 0, torch.zeros(views[0].numel()))
    with pytest.raises(RequestError, match=r"layers\.0\.\S+experts\.2\.w1\.weight is missing"):
        staged.check_complete(model.missing)


def test_a_checkpoint_that_lacks_an_expert_is_refused(tmp_path: Path) -> None:
    save(make("mixtral"), tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    del stored["model.layers.1.block_sparse_moe.experts.0.w3.weight"]
    save_file(stored, path)
    with pytest.raises(EngineStartError, match=r"lacks \S+1\.block\S+experts\.0\.w3\.weight$"):
        load(tmp_path)


@pytest.mark.parametrize("kind", [k if k == "int4" else slow(k) for k in QUANTIZATIONS])
def test_quantized_experts_compute_with_the_rounded_values(kind: str, tmp_path: Path) -> None:
    """The reference computes with the values that the quantized model says it has."""
    reference = make("qwen2_moe", 2.0)
    model = load(save(reference, tmp_path), quantization=kind)
    names = model.destinations()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(names[name][-1].clone())
        table = names["model.embed_tokens.weight"][0]
        assert isinstance(table, torch.Tensor)
    experts = names["model.layers.0.mlp.experts.gate_up_proj"][0]
    assert not isinstance(experts, torch.Tensor)
    assert isinstance(names["model.layers.0.mlp.gate.weight"][0], torch.Tensor)
    assert_computes(model, reference)
    one = names["model.layers.0.mlp.experts.3.up_proj.weight"][0]
    assert torch.equal(one.clone(), experts.clone()[3, 20:])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_experts_per_tok", 9, r"num_experts_per_tok \(9\) is more than num_experts \(5\)"),
        ("hidden_act", "gelu", "experts with hidden_act 'gelu' are not supported"),
        ("mlp_only_layers", "all", "'mlp_only_layers' must list numbers of layers, not 'all'"),
        ("num_experts", 0, "'num_experts' must be an integer of at least 1, not 0"),
    ],
)
def test_fields_that_cannot_be_are_refused(
    field: str, value: object, message: str, tmp_path: Path
) -> None:
    config = make("qwen2_moe").config.to_dict() | {field: value}
    config["architectures"] = ["Qwen2MoeForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineStartError, match=message):
        ModelConfig.from_directory(tmp_path)


def test_olmoe_refuses_bounded_queries(tmp_path: Path) -> None:
    config = reference_model("olmoe", num_experts=4, num_experts_per_tok=2).config.to_dict()
    config |= {"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineStartError, match="'clip_qkv' is not supported; supported: null"):
        ModelConfig.from_directory(tmp_path)
