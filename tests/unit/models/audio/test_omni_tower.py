"""Compares the embeddings of sounds of Qwen 2.5 Omni with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.audio_models import audio_inputs, make_omni
from support.model_helpers import load
from support.tower_checks import assert_close, assert_near, check_device, same_on_all_threads
from support.variants import slow
from torch import Tensor

from shmllm.models.audio.omni_specs import Qwen2_5OmniAudioTower
from shmllm.models.decoder import DecoderModel

FRAMES = [3, 4, 5, 19, 20, 21, 22, 23, 41, 60, 163, 300]
"""Odd and even numbers of frames and of positions, of one chunk, of whole ones and with a rest."""
VARIANTS: dict[str, dict[str, Any]] = {
    "another activation": {"activation_function": "silu"},
    "an odd number of positions in a chunk": {"n_window": 7},
    "one position in a chunk": {"n_window": 1},
    "the longest chunks": {"n_window": 150},
    "other sizes": {"encoder_attention_heads": 1, "encoder_ffn_dim": 48, "encoder_layers": 1},
    "a scale that transformers never uses": {"scale_embedding": True},
}
FIRST, *OTHERS = VARIANTS


def make_sound(frames: int, seed: int = 0) -> dict[str, Tensor]:
    """What transformers' model takes for noise of so many frames."""
    samples = np.random.default_rng([seed, frames]).standard_normal(frames * 160 - 37) * 0.2
    return audio_inputs([samples.astype(np.float32)])


@torch.inference_mode()
def reference_embeddings(model: Any, sound: dict[str, Tensor]) -> Tensor:
    found: Tensor = model.get_audio_features(**sound, return_dict=True).last_hidden_state
    return found


@torch.inference_mode()
def embed(model: DecoderModel, sound: dict[str, Tensor]) -> Tensor:
    frames = int(sound["feature_attention_mask"].sum())
    features = sound["input_features"][0].T[:frames].contiguous()
    return model.towers["audio"](features, (frames, 1, 1))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("omni")


@pytest.fixture(scope="module")
def models(directory: Path) -> tuple[Any, DecoderModel]:
    """transformers' model and ours."""
    return make_omni(directory), load(directory)


@pytest.mark.parametrize("frames", FRAMES)
def test_embeddings_equal_transformers(frames: int, models: tuple[Any, DecoderModel]) -> None:
    reference, model = models
    sound = make_sound(frames)
    ours = embed(model, sound)
    assert model.config.audio is not None
    assert len(ours) == model.config.audio.num_embeddings((frames, 1, 1)) == (frames + 1) // 4
    assert_close(ours, reference_embeddings(reference, sound))


@pytest.mark.parametrize("variant", [FIRST, *map(slow, OTHERS)])
def test_variants_equal_transformers(variant: str, tmp_path: Path) -> None:
    reference, sound = make_omni(tmp_path, VARIANTS[variant]), make_sound(112)
    assert_close(embed(load(tmp_path), sound), reference_embeddings(reference, sound))


def test_chunks_that_are_computed_at_a_time_change_nothing(
    models: tuple[Any, DecoderModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, model = models
    sound = make_sound(171)
    monkeypatch.setattr(Qwen2_5OmniAudioTower, "chunks_at_once", 3)
    assert_close(embed(model, sound), reference_embeddings(reference, sound))


@pytest.mark.parametrize("frames", [3, 99, 160])
def test_the_number_of_threads_changes_no_bit(frames: int, models: tuple[Any, Any]) -> None:
    reference, model = models
    sound = make_sound(frames)
    found = same_on_all_threads(model.towers["audio"], lambda: embed(model, sound))
    assert_close(found, reference_embeddings(reference, sound))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_smaller_dtypes_are_near_to_float32(
    dtype: torch.dtype, directory: Path, models: tuple[Any, DecoderModel]
) -> None:
    sound = make_sound(90)
    ours = embed(load(directory, dtype), sound)
    assert ours.dtype == dtype
    exact = reference_embeddings(models[0], sound)
    assert_near(ours, exact)


def test_everything_is_computed_on_the_device_of_the_weights(
    models: tuple[Any, DecoderModel],
) -> None:
    check_device(models[1].config, "audio", (torch.zeros(30, 16), (30, 1, 1)), 7)


@pytest.mark.parametrize("shape", [(42, 16), (40, 15)])
def test_features_that_differ_from_their_grid_are_refused(
    shape: tuple[int, int], models: tuple[Any, DecoderModel]
) -> None:
    with pytest.raises(ValueError, match=r"40 frames are \[40, 16\], not \[4[02], 1[56]\]"):
        models[1].towers["audio"](torch.zeros(shape), (40, 1, 1))
