"""Compares what models make of sounds with transformers, from samples on."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from support.audio_models import RATE, audio_inputs
from torch import Tensor

from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.items.registry import processors_of_model
from shmllm.models.config import ModelConfig
from shmllm.models.decoder import DecoderModel


def noise(seconds: float, seed: int = 3) -> npt.NDArray[np.float32]:
    """A sound with RATE samples a second and a loud beginning, so that the features of a later part
    show whether they depend on the first one."""
    length = int(RATE * seconds)
    samples = np.random.default_rng(seed).standard_normal(length) * 0.3
    return (samples * np.exp(-np.arange(length) / 20_000)).astype(np.float32)


def prepared(directory: Path, samples: npt.NDArray[np.float32]) -> PreparedItem:
    """The sound as the front end of a model prepares it."""
    config = json.loads((directory / "config.json").read_text())
    audio = processors_of_model(directory, config)["audio"]
    return audio.prepare(audio.open("a sound", (samples, RATE)))


@torch.inference_mode()
def embed(model: DecoderModel, item: PreparedItem) -> Tensor:
    """Its embeddings, [embeddings, hidden_size]."""
    tower = model.towers["audio"]
    return torch.cat([tower(torch.tensor(part.data), part.grid) for part in item.parts])


@torch.inference_mode()
def check_embeddings(directory: Path, reference: Any, model: DecoderModel, seconds: float) -> None:
    """Compares the embeddings of noise with those of transformers, whose model is `reference`."""
    samples = noise(seconds)
    item = prepared(directory, samples)
    inputs = audio_inputs([samples], reference.config.model_type)
    if "input_ids" in inspect.signature(reference.get_audio_features).parameters:
        token = reference.config.audio_token_id
        inputs["input_ids"] = torch.full((1, item.num_tokens), token)
    theirs = reference.get_audio_features(**inputs).pooler_output.flatten(0, -2)
    ours = embed(model, item)
    assert ours.shape == theirs.shape
    assert len(ours) == item.num_tokens
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 2e-5


def read_config(directory: Path, whole: dict[str, Any]) -> ModelConfig:
    """Reads the fields of a config.json."""
    (directory / "config.json").write_text(json.dumps(whole))
    return ModelConfig.from_directory(directory)
