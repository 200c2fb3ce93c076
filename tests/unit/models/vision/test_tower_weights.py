"""The weights of towers: their names in files and in memory, updates, parts of models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.model_helpers import allocate, load
from support.vision_models import EACH_FAMILY, make_vision_model

from shmllm.errors import EngineStartError, RequestError
from shmllm.models.config import ModelConfig
from shmllm.models.create import create_model
from shmllm.models.decoder import DecoderModel
from shmllm.models.shard import Shard
from shmllm.models.sharding import shard_config, stage_config
from shmllm.models.weight_names import TOWER_PREFIXES, model_name, tower_name
from shmllm.models.weight_staging import StagedWeights
from shmllm.models.weights import load_dummy_weights, load_weights

OLD_NAMES = (
    "deepseek_vl",
    "vipllava",
    "llava",
    "llava_next",
    "llava_onevision",
    "llava-siglip",
    "gemma3",
    "lfm2_vl",
    "aya_vision",
)
"""The families whose older files have encoders below "vision_tower.vision_model.", or below
"vision_model.vision_model."."""
TOWERS = tuple(TOWER_PREFIXES.values())
CHANGED_ROWS = {"muse_glimmer": ("model.embed_tokens.weight",)}
"""The weights that are other numbers than those of the file."""


def tower_of(weights: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in weights.items() if name.startswith(TOWERS)}


def values_of(model: DecoderModel) -> dict[str, torch.Tensor]:
    return {name: views[0].clone() for name, views in model.named_weights().items()}


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_every_weight_of_the_file_that_is_needed_is_loaded(name: str, tmp_path: Path) -> None:
    make_vision_model(name, tmp_path)
    model = load(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    known = {model.destination_name(each, t.shape): t for each, t in stored.items()}
    left_out = [each for each in stored if model.known_name(each) is None]
    allowed = (
        *("post_layernorm", "encoder.layers.2.", "encoder.layers.1.", "audio_bos_eos_token"),
        *("vqmodel.", "generation_", "connector.fine.", "density_router.", "vit_merger."),
        *("image_sep", "vision.attn_pool."),
    )
    assert all(any(part in each for part in allowed) for each in left_out)
    assert bool(left_out) == name.startswith(
        (
            "llava",
            "aya",
            "deepseek_vl2",
            "qwen2_5_omni",
            "granite",
            "hunyuan",
            "janus",
            "minicpm_ocr",
            "vip",
        )
    )
    needed = {each: tensor for each, tensor in known.items() if each is not None}
    assert model.written(needed) == set(model.named_weights())
    views = model.destinations()
    for changed in CHANGED_ROWS.get(name, ()):
        del needed[changed]
    assert_equal({each: views[each][0].clone() for each in needed}, needed)
    assert len(tower_of(values_of(model))) > (9 if name == "gemma4_unified" else 20)


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_names_in_memory_reach_the_same_weights(name: str, tmp_path: Path) -> None:
    reference = make_vision_model(name, tmp_path)
    model = load(tmp_path)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_()
    written = model.load_weights(reference.state_dict().items())
    assert model.written(written) == set(model.named_weights())
    reference.save_pretrained(tmp_path)
    assert_equal(values_of(model), values_of(load(tmp_path)))


@pytest.mark.parametrize("name", OLD_NAMES)
def test_older_files_have_an_inner_prefix(name: str, tmp_path: Path) -> None:
    make_vision_model(name, tmp_path)
    before = values_of(load(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    outer = "vision_model." if name == "deepseek_vl" else "vision_tower."
    inner = f"{outer}vision_model."
    renamed = {each.replace(outer, inner): tensor for each, tensor in tensors.items()}
    before_inner = "model." if name == "deepseek_vl" else ""
    renamed[f"{before_inner}{inner}embeddings.position_ids"] = torch.arange(17)[None]
    renamed[f"{before_inner}{inner}head.probe"] = torch.ones(1, 1, 32)
    save_file(renamed, tmp_path / "model.safetensors")
    assert_equal(values_of(load(tmp_path)), before)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "mistral3"])
def test_newer_files_have_the_names_in_memory(name: str, tmp_path: Path) -> None:
    reference = make_vision_model(name, tmp_path)
    before = values_of(load(tmp_path))
    save_file(reference.state_dict(), tmp_path / "model.safetensors")
    assert_equal(values_of(load(tmp_path)), before)


def test_files_of_hyperclova_x_have_a_whole_language_model(tmp_path: Path) -> None:
    make_vision_model("hyperclovax_vision_v2", tmp_path)
    before = values_of(load(tmp_path))
    inner, head = "model.language_model.", "model.language_model.lm_head.weight"
    stored = load_file(tmp_path / "model.safetensors")
    assert head in stored
    names = {each: each.replace(inner, f"{inner}model.") for each in stored if each != head}
    whole = {names.get(each, each): tensor for each, tensor in stored.items()}
    save_file(whole, tmp_path / "model.safetensors")
    path, own = tmp_path / "config.json", "HyperCLOVAXVisionV2ForConditionalGeneration"
    path.write_text(path.read_text().replace(own, "HCXVisionV2ForCausalLM"))
    assert_equal(values_of(load(tmp_path)), before)


def test_glm_ocr_leaves_out_a_layer_that_predicts_further_tokens(tmp_path: Path) -> None:
    make_vision_model("glm_ocr", tmp_path, num_nextn_predict_layers=1)
    before = values_of(load(tmp_path))
    stored = load_file(tmp_path / "model.safetensors")
    further = {f"model.language_model.layers.3.{name}": torch.ones(2) for name in ("enorm", "x.y")}
    save_file(stored | further, tmp_path / "model.safetensors")
    assert_equal(values_of(load(tmp_path)), before)


def experts_transposed(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a file of Qwen 3 VL with experts as the model's authors have them."""
    ends = ".experts.gate_up_proj", ".experts.down_proj"
    return {
        each: tensor.transpose(1, 2).contiguous() if each.endswith(ends) else tensor
        for each, tensor in stored.items()
    }


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_experts_have_two_layouts(quantization: str | None, tmp_path: Path) -> None:
    make_vision_model("qwen3_vl_moe", tmp_path)
    before = values_of(load(tmp_path, quantization=quantization))
    stored = load_file(tmp_path / "model.safetensors")
    others = experts_transposed(stored)
    changed = [each for each in stored if stored[each].shape != others[each].shape]
    assert len(changed) == 4  # of two layers
    save_file(others, tmp_path / "model.safetensors")
    model = load(tmp_path, quantization=quantization)
    assert_equal(values_of(model), before)
    for tensors in (stored, others):
        for view in model.named_weights().values():
            view[0].copy_(torch.ones(view[0].shape))
        written = model.load_weights(tensors.items())
        assert model.written(written) == set(model.named_weights())
        assert_equal(values_of(model), before)
        staged = StagedWeights(model)
        for name, tensor in tensors.items():
            staged.put(name, tensor.shape, 0, tensor.flatten() * 2)
        staged.check_complete(set(model.named_weights()))
        staged.copy_into_place()
        assert_equal(values_of(model), {name: 2 * value for name, value in before.items()})
    wrong = {changed[0]: torch.ones(4, 9, 9)}
    with pytest.raises(RequestError, match=r"has shape .* is \[4, 64, 24\]"):
        model.load_weights(wrong.items())


def test_each_expert_may_have_tensors_of_its_own(tmp_path: Path) -> None:
    make_vision_model("qwen3_vl_moe", tmp_path)
    before = load(tmp_path)
    save_file(values_of(before), tmp_path / "model.safetensors")
    assert_equal(values_of(load(tmp_path)), values_of(before))


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_without_vision_the_tower_is_left_out(name: str, tmp_path: Path) -> None:
    make_vision_model(name, tmp_path)
    whole = load(tmp_path)
    config = replace(whole.config, vision=None, audio=None)
    model = create_model(config, torch.float32, allocate)
    load_weights(model, tmp_path)
    assert model.towers == {}
    expected = values_of(whole)
    for each in tower_of(expected):
        del expected[each]
        assert model.known_name(each) is None
    assert_equal(values_of(model), expected)


@pytest.mark.parametrize("name", ["llava", "qwen3_vl"])
def test_a_missing_or_an_unknown_weight_is_named(name: str, tmp_path: Path) -> None:
    make_vision_model(name, tmp_path)
    model = load(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    first = next(each for each in tensors if tower_name(each) in model.named_weights())
    without = {each: tensor for each, tensor in tensors.items() if each != first}
    save_file(without, tmp_path / "model.safetensors")
    with pytest.raises(EngineStartError, match=f"lacks {tower_name(first)}"):
        load(tmp_path)
    save_file(tensors | {f"{first}.other": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(EngineStartError, match=f"a tensor the model lacks: {first}.other"):
        load(tmp_path)


def test_a_sleeping_model_takes_no_weights(tmp_path: Path) -> None:
    make_vision_model("qwen3_vl", tmp_path)
    model = load(tmp_path)
    model.is_asleep = True
    update = [("model.visual.pos_embed.weight", torch.ones(256, 32))]
    with pytest.raises(RequestError, match="asleep"):
        model.load_weights(update)
    model.is_asleep = False
    model.weights_lost()
    assert "visual.pos_embed.weight" in model.missing
    assert model.load_weights(update) == {"visual.pos_embed.weight"}
    assert "visual.pos_embed.weight" not in model.missing
    assert "visual.merger.norm.weight" in model.missing


def test_staged_updates_reach_towers(tmp_path: Path) -> None:
    reference = make_vision_model("gemma3", tmp_path)
    model = load(tmp_path)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_()
    staged = StagedWeights(model)
    for name, tensor in reference.state_dict().items():
        staged.put(name, tensor.shape, 0, tensor.flatten())
    staged.check_complete(set(model.named_weights()))
    staged.copy_into_place()
    reference.save_pretrained(tmp_path)
    assert_equal(values_of(model), values_of(load(tmp_path)))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_towers_are_not_quantized(quantization: str, tmp_path: Path) -> None:
    make_vision_model("qwen3_vl", tmp_path)
    exact = load(tmp_path)
    model = load(tmp_path, quantization=quantization)
    assert_equal(tower_of(values_of(model)), tower_of(values_of(exact)))


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_the_first_rank_has_the_tower(name: str, tmp_path: Path) -> None:
    make_vision_model(name, tmp_path)
    whole = load(tmp_path)
    first, other = (
        create_model(shard_config(whole.config, Shard(rank, 2)), torch.float32, allocate)
        for rank in range(2)
    )
    for part in (first, other):
        load_weights(part, tmp_path)
    assert_equal(tower_of(values_of(first)), tower_of(values_of(whole)))
    views = tower_of(other.named_weights())
    assert views.keys() == tower_of(values_of(whole)).keys()
    assert all(type(view).__name__ == "Elsewhere" for (view,) in views.values())


def test_the_first_stage_has_the_tower(tmp_path: Path) -> None:
    make_vision_model("qwen2_5_vl", tmp_path)
    whole = load(tmp_path)
    first, last = (
        create_model(stage_config(whole.config, stage, 2), torch.float32, allocate)
        for stage in range(2)
    )
    for stage in (first, last):
        load_weights(stage, tmp_path)
    assert_equal(tower_of(values_of(first)), tower_of(values_of(whole)))
    views = tower_of(last.named_weights())
    assert views.keys() == tower_of(values_of(whole)).keys()
    assert all(type(view).__name__ == "Elsewhere" for (view,) in views.values())


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_random_weights_leave_norms_neutral(name: str, tmp_path: Path) -> None:
    make_vision_model(name, tmp_path)
    model = create_model(ModelConfig.from_directory(tmp_path), torch.float32, allocate)
    load_dummy_weights(model)
    found = tower_of(values_of(model))
    norms = [each for each in found if "norm" in each or "ln_q" in each]
    assert norms
    for each in norms:
        is_weight, offset = each.endswith("weight"), "soft_emb" in each
        expected = torch.full_like(found[each], 0.0 if offset else 1.0)
        assert torch.equal(found[each], expected) == is_weight
    assert all(torch.isfinite(value).all() for value in found.values())


def test_towers_of_language_models_are_left_out() -> None:
    for prefix, meaning in TOWER_PREFIXES.items():
        assert model_name(f"{prefix}layers.0.weight", False) is None
        assert tower_name(f"{prefix}layers.0.weight") == f"{meaning}layers.0.weight"
    assert tower_name("model.visual.rotary_pos_emb.inv_freq") is None
    assert tower_name("model.layers.0.weight") is None
    assert model_name("model.text_model.norm.weight", False) == "model.norm.weight"
