"""Compares the embeddings of sounds of Qwen 3 Omni with transformers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.audio_models import make_omni
from support.model_helpers import load
from support.tower_checks import assert_close, assert_near, check_device, same_on_all_threads
from support.variants import slow
from torch import Tensor

from shmllm.models.decoder import DecoderModel

FRAMES = [1, 7, 8, 9, 50, 99, 100, 101, 107, 108, 109, 200, 201, 215, 400, 433]
"""Of less than a chunk, of whole ones and with a rest; of one window of attention and of several.
"""
VARIANTS: dict[str, dict[str, Any]] = {
    "other activations and features": {"activation_function": "silu", "num_mel_bins": 9},
    "larger chunks": {"n_window": 52, "n_window_infer": 330},
    "the smallest chunks": {"n_window": 49, "n_window_infer": 98},
    "other sizes": {"encoder_attention_heads": 1, "encoder_ffn_dim": 48, "encoder_layers": 1},
}
FIRST, *OTHERS = VARIANTS
make = partial(make_omni, name="qwen3_omni_moe")


def make_sound(frames: int, num_mels: int = 16) -> Tensor:
    """[frames, num_mels]"""
    return torch.randn(frames, num_mels, generator=torch.manual_seed(frames))


@torch.inference_mode()
def reference_embeddings(model: Any, features: Tensor) -> Tensor:
    mask = torch.ones(1, len(features), dtype=torch.long)
    found = model.get_audio_features(features.T[None], mask, return_dict=True)
    embeddings: Tensor = found.last_hidden_state
    return embeddings


@torch.inference_mode()
def embed(model: DecoderModel, features: Tensor) -> Tensor:
    return model.towers["audio"](features, (len(features), 1, 1))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("omni3")


@pytest.fixture(scope="module")
def models(directory: Path) -> tuple[Any, DecoderModel]:
    """transformers' model and ours."""
    return make(directory), load(directory)


@pytest.mark.parametrize("frames", FRAMES)
def test_embeddings_equal_transformers(frames: int, models: tuple[Any, DecoderModel]) -> None:
    reference, model = models
    sound = make_sound(frames)
    ours = embed(model, sound)
    assert model.config.audio is not None
    assert len(ours) == model.config.audio.num_embeddings((frames, 1, 1))
    assert_close(ours, reference_embeddings(reference, sound))


@pytest.mark.parametrize("variant", [FIRST, *map(slow, OTHERS)])
def test_variants_equal_transformers(variant: str, tmp_path: Path) -> None:
    fields = VARIANTS[variant]
    reference = make(tmp_path, fields)
    sound = make_sound(437, fields.get("num_mel_bins", 16))
    assert_close(embed(load(tmp_path), sound), reference_embeddings(reference, sound))


@pytest.mark.parametrize("frames", [3, 99, 333])
def test_the_number_of_threads_changes_no_bit(frames: int, models: tuple[Any, Any]) -> None:
    reference, model = models
    sound = make_sound(frames)
    found = same_on_all_threads(model.towers["audio"], lambda: embed(model, sound))
    assert_close(found, reference_embeddings(reference, sound))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_smaller_dtypes_are_near_to_float32(
    dtype: torch.dtype, directory: Path, models: tuple[Any, DecoderModel]
) -> None:
    sound = make_sound(190)
    ours = embed(load(directory, dtype), sound)
    assert ours.dtype == dtype
    exact = reference_embeddings(models[0], sound)
    assert_near(ours, exact)


def test_everything_is_computed_on_the_device_of_the_weights(
    models: tuple[Any, DecoderModel],
) -> None:
    check_device(models[1].config, "audio", (torch.zeros(130, 16), (130, 1, 1)), 17)


@pytest.mark.parametrize("shape", [(42, 16), (40, 15)])
def test_features_that_differ_from_their_grid_are_refused(
    shape: tuple[int, int], models: tuple[Any, DecoderModel]
) -> None:
    with pytest.raises(ValueError, match=r"40 frames are \[40, 16\], not \[4[02], 1[56]\]"):
        models[1].towers["audio"](torch.zeros(shape), (40, 1, 1))
