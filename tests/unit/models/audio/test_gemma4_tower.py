"""Gemma 4's embeddings of sounds: those of transformers, its weights, its fields of config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.audio_models import audio_inputs, gemma4_embeddings, make_gemma4
from support.model_helpers import allocate, load
from support.tower_checks import assert_close, check_device, same_on_all_threads
from torch import Tensor
from transformers import Gemma4AudioConfig, Gemma4Config

from shmllm.errors import EngineStartError, RequestError
from shmllm.models.audio.specs import Gemma4AudioTower
from shmllm.models.config import ModelConfig
from shmllm.models.create import create_model
from shmllm.models.decoder import DecoderModel
from shmllm.models.weight_staging import StagedWeights
from shmllm.models.weights import load_dummy_weights

FRAMES = [1, 2, 3, 4, 5, 8, 16, 17, 99, 300]
VARIANTS: dict[str, dict[str, Any]] = {
    "positions behind": {"attention_context_right": 3, "attention_chunk_size": 3},
    "distances without an embedding": {"attention_context_right": 6, "attention_chunk_size": 2},
    "more before": {"attention_context_left": 14, "attention_chunk_size": 12},
    "without bounds": {"use_clipped_linears": False, "hidden_act": "gelu"},
    "other numbers": {"attention_logit_cap": 2.0, "residual_weight": 0.8, "rms_norm_eps": 1e-3},
    "a bound of the stream": {"gradient_clipping": 1.5, "conv_kernel_size": 3},
    "one head": {"num_attention_heads": 1, "subsampling_conv_channels": [16, 3]},
}


def make_sound(frames: int) -> dict[str, Tensor]:
    """What transformers' model takes for noise of so many frames."""
    samples = np.random.default_rng(frames).standard_normal(160 * frames + 1) * 0.2
    found = audio_inputs([samples.astype(np.float32)], "gemma4")
    assert int(found["input_features_mask"].sum()) == frames
    return found


@torch.inference_mode()
def embed(model: DecoderModel, sound: dict[str, Tensor]) -> Tensor:
    frames = int(sound["input_features_mask"].sum())
    return model.towers["audio"](sound["input_features"][0][:frames], (frames, 1, 1))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gemma4")


@pytest.fixture(scope="module")
def models(directory: Path) -> tuple[Any, DecoderModel]:
    """transformers' model and ours."""
    return make_gemma4(directory), load(directory)


@pytest.mark.parametrize("frames", FRAMES)
def test_embeddings_equal_transformers(frames: int, models: tuple[Any, DecoderModel]) -> None:
    reference, model = models
    sound = make_sound(frames)
    ours = embed(model, sound)
    assert model.config.audio is not None
    assert len(ours) == model.config.audio.num_embeddings((frames, 1, 1)) == -(-frames // 4)
    assert_close(ours, gemma4_embeddings(reference, sound))


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_equal_transformers(variant: str, tmp_path: Path) -> None:
    reference = make_gemma4(tmp_path, VARIANTS[variant])
    sound = make_sound(90)
    assert_close(embed(load(tmp_path), sound), gemma4_embeddings(reference, sound))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_smaller_dtypes_are_near_to_float32(
    dtype: torch.dtype, directory: Path, models: tuple[Any, DecoderModel]
) -> None:
    sound = make_sound(90)
    ours = embed(load(directory, dtype), sound)
    assert ours.dtype == dtype
    exact = gemma4_embeddings(models[0], sound)
    assert 0 < float((ours.float() - exact).norm() / exact.norm()) < 0.05


def test_the_number_of_threads_changes_no_bit(models: tuple[Any, DecoderModel]) -> None:
    sound = make_sound(299)
    same_on_all_threads(models[1].towers["audio"], lambda: embed(models[1], sound))


def test_everything_is_computed_on_the_device_of_the_weights(
    models: tuple[Any, DecoderModel],
) -> None:
    inputs = torch.zeros(30, 16), (30, 1, 1)
    tower = check_device(models[1].config, "audio", inputs, 8)
    with pytest.raises(ValueError, match=r"30 frames are \[30, 16\], not \[31, 16\]"):
        tower(torch.zeros((31, 16), device="meta"), (30, 1, 1))


def test_names_of_modules_reach_every_weight(tmp_path: Path) -> None:
    reference = make_gemma4(tmp_path)
    model = load(tmp_path)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_()
    written = model.load_weights(reference.state_dict().items())
    assert model.written(written) == set(model.named_weights())
    parameters = {model.known_name(name) for name, _ in reference.named_parameters()}
    buffers = {name for name in model.named_weights() if model.is_buffer(name)}
    assert "audio_tower.layers.0.self_attn.q_proj.input_min" in buffers
    assert buffers == set(model.named_weights()) - model.written(parameters)
    reference.save_pretrained(tmp_path)
    stored = load(tmp_path).named_weights()
    for name, (view, *_) in model.named_weights().items():
        assert torch.equal(view.clone(), stored[name][0].clone()), name


def test_random_weights_have_no_bounds(models: tuple[Any, DecoderModel]) -> None:
    model = create_model(models[1].config, torch.float32, allocate)
    load_dummy_weights(model)
    (bound,) = model.named_weights()["audio_tower.layers.0.lconv1d.linear_end.output_max"]
    assert float(bound.clone()) == torch.finfo(torch.float32).max


def configure(directory: Path, **changes: Any) -> ModelConfig:
    whole = Gemma4Config(vision_config=None, audio_config={}).to_dict()
    whole["architectures"] = ["Gemma4ForConditionalGeneration"]
    whole["audio_config"] = {"a": 1} | changes
    (directory / "config.json").write_text(json.dumps(whole))
    return ModelConfig.from_directory(directory)


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    theirs = Gemma4AudioConfig()
    found = configure(tmp_path).audio
    assert found is not None
    assert found.token == Gemma4Config().audio_token_id
    assert found.tower == Gemma4AudioTower(
        hidden_size=theirs.hidden_size,
        num_layers=theirs.num_hidden_layers,
        num_heads=theirs.num_attention_heads,
        activation="silu",
        channels=(theirs.subsampling_conv_channels[0], theirs.subsampling_conv_channels[1]),
        kernel=theirs.conv_kernel_size,
        chunk=theirs.attention_chunk_size,
        before=theirs.attention_context_left,
        behind=theirs.attention_context_right,
        cap=theirs.attention_logit_cap,
        residual_scale=theirs.residual_weight,
        bound=theirs.gradient_clipping,
        eps=theirs.rms_norm_eps,
        clips=theirs.use_clipped_linears,
        adapted=theirs.output_proj_dims,
        most_frames=2999,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3n_audio"}, "model_type 'gemma3n_audio' is not supported"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"num_attention_heads": 3}, r"num_attention_heads \(3\) must divide hidden_size"),
        ({"subsampling_conv_channels": [128]}, "'subsampling_conv_channels' must be two integers"),
        ({"subsampling_conv_channels": [3, 9]}, "must be an integer of at least 4, not 3"),
        ({"attention_context_left": 1}, "'attention_context_left' must be an integer of at least"),
        ({"attention_invalid_logits_value": -1.0}, "must be below -10,000, not -1.0"),
        ({"use_clipped_linears": "yes"}, "'use_clipped_linears' must be true or false"),
    ],
)
def test_what_is_not_computed_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=rf"config\.json: audio_config: .*{message}"):
        configure(tmp_path, **changes)


def test_models_whose_images_attend_both_ways_take_no_sounds(tmp_path: Path) -> None:
    make_gemma4(tmp_path, use_bidirectional_attention="vision")
    model = load(tmp_path)
    assert set(model.towers) == {"image", "video"}
    assert model.known_name("model.embed_audio.embedding_projection.weight") is None


def test_bounds_of_an_update_may_be_infinite(tmp_path: Path) -> None:
    make_gemma4(tmp_path)
    model = load(tmp_path)
    name = "audio_tower.layers.0.lconv1d.linear_end.output_max"
    for values in ([float("inf")], [3.0]):
        bound = torch.tensor(values)[0]
        model.load_weights([(f"model.{name}", bound)])
        assert float(model.named_weights()[name][0].clone()) == values[0]
    staged = StagedWeights(model)
    staged.put(f"model.{name}", (), 0, torch.tensor([float("-inf")]))
    staged.copy_into_place()
    assert float(model.named_weights()[name][0].clone()) == -float("inf")
    for update in ((name, torch.tensor(float("nan"))), (f"{name[:-11]}.linear.weight", inf_like())):
        with pytest.raises(RequestError, match="has values that are not finite"):
            model.load_weights([update])


def inf_like() -> Tensor:
    return torch.full((32, 32), float("inf"))
