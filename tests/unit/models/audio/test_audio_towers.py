"""Compares the embeddings of sounds with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.audio_models import AUDIO, audio_inputs, make_audio_model
from support.model_helpers import load
from support.tower_checks import assert_close, assert_near, check_device, same_on_all_threads
from torch import Tensor

from shmllm.formats.audio_settings import FRAMES_BEHIND
from shmllm.models.decoder import DecoderModel

MOST = 2 * int(AUDIO["max_source_positions"])
FRAMES = [3, 4, 5, 6, 7, 8, 33, 126, 127, MOST - 3, MOST - 2, MOST - 1, MOST]
"""Odd and even numbers of frames and of positions, from one embedding to the most."""
VARIANTS: dict[str, dict[str, Any]] = {
    "another activation": {"activation_function": "silu"},
    "gelu of tanh": {"activation_function": "gelu_pytorch_tanh"},
    "one layer": {"encoder_layers": 1},
    "one head": {"encoder_attention_heads": 1, "encoder_ffn_dim": 48},
    "a scale that transformers never uses": {"scale_embedding": True},
}


def make_sound(frames: int, seed: int = 0) -> dict[str, Tensor]:
    """What transformers' model takes for noise of so many frames."""
    rng = np.random.default_rng([seed, frames])
    samples = rng.standard_normal(frames * 160 - 37) * 0.2
    found = audio_inputs([samples.astype(np.float32)])
    assert int(found["feature_attention_mask"].sum()) == frames
    return found


def inputs_of(sound: dict[str, Tensor]) -> tuple[Tensor, tuple[int, int, int]]:
    """Features and grid, as our tower takes them."""
    frames = int(sound["feature_attention_mask"].sum())
    features = sound["input_features"][0].T[: frames + FRAMES_BEHIND]
    return features.contiguous(), (frames, 1, 1)


@torch.inference_mode()
def reference_embeddings(model: Any, sound: dict[str, Tensor], count: int) -> Tensor:
    """What transformers' model puts in place of audio tokens."""
    found: list[Tensor] = []
    hook = model.model.multi_modal_projector.register_forward_hook(
        lambda _module, _inputs, output: found.append(output)
    )
    try:
        ids = torch.tensor([[0] + [model.config.audio_token_id] * count])
        model(input_ids=ids, attention_mask=torch.ones_like(ids), **sound)
    finally:
        hook.remove()
    return found[0][0, :count]


@torch.inference_mode()
def embed(model: DecoderModel, sound: dict[str, Tensor]) -> Tensor:
    return model.towers["audio"](*inputs_of(sound))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qwen2_audio")


@pytest.fixture(scope="module")
def models(directory: Path) -> tuple[Any, DecoderModel]:
    """transformers' model and ours."""
    return make_audio_model(directory), load(directory)


@pytest.mark.parametrize("frames", FRAMES)
def test_embeddings_equal_transformers(frames: int, models: tuple[Any, DecoderModel]) -> None:
    reference, model = models
    sound = make_sound(frames)
    ours = embed(model, sound)
    assert model.config.audio is not None
    assert len(ours) == model.config.audio.num_embeddings((frames, 1, 1)) == (frames + 1) // 4
    assert_close(ours, reference_embeddings(reference, sound, len(ours)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_equal_transformers(variant: str, tmp_path: Path) -> None:
    reference = make_audio_model(tmp_path, **VARIANTS[variant])
    sound = make_sound(50)
    ours = embed(load(tmp_path), sound)
    assert_close(ours, reference_embeddings(reference, sound, len(ours)))


@pytest.mark.parametrize("frames", [3, 99, MOST])
def test_the_number_of_threads_changes_no_bit(frames: int, models: tuple[Any, Any]) -> None:
    reference, model = models
    sound = make_sound(frames)
    found = same_on_all_threads(model.towers["audio"], lambda: embed(model, sound))
    assert_close(found, reference_embeddings(reference, sound, len(found)))


def test_a_sound_ends_where_its_frames_end(models: tuple[Any, DecoderModel]) -> None:
    """The frames behind it count as far as the convolutions read them, and no further."""
    _, model = models
    features, grid = inputs_of(make_sound(40))
    tower = model.towers["audio"]
    with torch.inference_mode():
        before = tower(features, grid)
        changed = features.clone()
        changed[-1] += 1
        assert torch.equal(tower(changed, grid), before)  # frames 0 to 40 are read
        changed[-2] += 1
        assert not torch.equal(tower(changed, grid), before)


def test_different_sounds_have_different_embeddings(models: tuple[Any, DecoderModel]) -> None:
    _, model = models
    first, second = (embed(model, make_sound(40, seed)) for seed in range(2))
    assert float((first - second).abs().max()) > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_smaller_dtypes_are_near_to_float32(
    dtype: torch.dtype, directory: Path, models: tuple[Any, DecoderModel]
) -> None:
    reference, _ = models
    sound = make_sound(90)
    ours = embed(load(directory, dtype), sound)
    assert ours.dtype == dtype
    exact = reference_embeddings(reference, sound, len(ours))
    assert_near(ours, exact)


def test_everything_is_computed_on_the_device_of_the_weights(
    models: tuple[Any, DecoderModel],
) -> None:
    check_device(models[1].config, "audio", inputs_of(make_sound(30)), 7)


@pytest.mark.parametrize(
    ("shape", "frames", "message"),
    [
        ((40, 16), 40, r"40 frames are \[42, 16\], not \[40, 16\]"),
        ((42, 15), 40, r"40 frames are \[42, 16\], not \[42, 15\]"),
        ((MOST + 1, 16), MOST - 1, r"299 frames are \[300, 16\], not \[301, 16\]"),
    ],
)
def test_features_that_differ_from_their_grid_are_refused(
    shape: tuple[int, int], frames: int, message: str, models: tuple[Any, DecoderModel]
) -> None:
    with pytest.raises(ValueError, match=message):
        models[1].towers["audio"](torch.zeros(shape), (frames, 1, 1))
