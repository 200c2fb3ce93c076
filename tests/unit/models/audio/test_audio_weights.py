"""The weights of towers for sounds: their names in files and in memory, models without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.audio_models import make_audio_model
from support.model_helpers import allocate, load
from support.variants import slow

from shmllm.config.load import with_only_text
from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.config_file import read_fields
from shmllm.models.create import create_model
from shmllm.models.decoder import DecoderModel
from shmllm.models.weights import load_dummy_weights, load_weights

TOWER = ("audio_tower.", "multi_modal_projector.")


def values_of(model: DecoderModel) -> dict[str, torch.Tensor]:
    return {name: views[0].clone() for name, views in model.named_weights().items()}


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def tower_of(weights: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in weights.items() if name.startswith(TOWER)}


@pytest.fixture(params=["qwen2_audio", slow("voxtral")])
def reference(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return make_audio_model(tmp_path, request.param)


@pytest.mark.usefixtures("reference")
def test_names_of_files_reach_every_weight(tmp_path: Path) -> None:
    stored = load_file(tmp_path / "model.safetensors")
    prefixes = {name.split(".")[0] for name in stored}
    assert prefixes == {"audio_tower", "multi_modal_projector", "language_model"}
    assert any(name.startswith("language_model.model.layers.") for name in stored)
    model = load(tmp_path)
    known = {model.known_name(name): tensor for name, tensor in stored.items()}
    assert None not in known
    assert_equal(values_of(model), {name: t for name, t in known.items() if name is not None})
    assert len(tower_of(values_of(model))) == 4 + 1 + 2 * 15 + 2 + 2


def test_names_of_modules_reach_every_weight(reference: Any, tmp_path: Path) -> None:
    before = values_of(load(tmp_path))
    modules = reference.state_dict()
    assert any(name.startswith("model.audio_tower.layers.") for name in modules)
    assert any(name.startswith("model.multi_modal_projector.") for name in modules)
    save_file(modules, tmp_path / "model.safetensors")
    assert_equal(values_of(load(tmp_path)), before)


def test_an_update_with_names_of_modules_is_written(reference: Any, tmp_path: Path) -> None:
    model = load(tmp_path)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_()
    written = model.load_weights(reference.state_dict().items())
    assert written == set(model.named_weights())
    reference.save_pretrained(tmp_path)
    assert_equal(values_of(model), values_of(load(tmp_path)))


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("how", ["language_model_only", "null", "absent"])
def test_without_audio_config_the_tower_is_left_out(how: str, tmp_path: Path) -> None:
    expected = values_of(load(tmp_path))
    overrides: dict[str, Any] = {}
    if how == "language_model_only":
        overrides = with_only_text({}, True)
    else:
        whole = json.loads((tmp_path / "config.json").read_text())
        whole["audio_config"] = None
        if how == "absent":
            del whole["audio_config"]
        (tmp_path / "config.json").write_text(json.dumps(whole))
    config = ModelConfig.from_fields(read_fields(tmp_path, overrides), tmp_path)
    assert config.audio is None
    model = create_model(config, torch.float32, allocate)
    load_weights(model, tmp_path)
    assert model.towers == {}
    for name in tower_of(expected):
        del expected[name]
        assert model.known_name(name) is None
    assert_equal(values_of(model), expected)


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("part", ["conv2.bias", "layers.1.fc1.weight", "linear"])
def test_a_missing_or_an_unknown_weight_is_named(part: str, tmp_path: Path) -> None:
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(each for each in tower_of(tensors) if part in each)
    without = {each: tensor for each, tensor in tensors.items() if each != name}
    assert len(without) == len(tensors) - 1
    save_file(without, tmp_path / "model.safetensors")
    with pytest.raises(EngineStartError, match=f"lacks {name}"):
        load(tmp_path)
    save_file(tensors | {f"{name}.other": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(EngineStartError, match=f"a tensor the model lacks: {name}.other"):
        load(tmp_path)


@pytest.mark.usefixtures("reference")
def test_towers_are_not_quantized(tmp_path: Path) -> None:
    exact, model = load(tmp_path), load(tmp_path, quantization="int8")
    assert_equal(tower_of(values_of(model)), tower_of(values_of(exact)))


@pytest.mark.usefixtures("reference")
def test_random_weights_leave_norms_neutral(tmp_path: Path) -> None:
    model = create_model(ModelConfig.from_directory(tmp_path), torch.float32, allocate)
    load_dummy_weights(model)
    found = tower_of(values_of(model))
    norms = [name for name in found if "norm" in name and name.endswith("weight")]
    assert len(norms) == 5
    assert all(torch.equal(found[name], torch.ones(32)) for name in norms)
    assert all(torch.isfinite(value).all() for value in found.values())
