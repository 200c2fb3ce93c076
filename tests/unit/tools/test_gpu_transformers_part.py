"""The weights that transformers' `generate` is measured with: those of the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu.shapes import SHAPES
from gpu.transformers_part import make_model
from support.model_helpers import allocate

from shmllm.models.config import ModelConfig
from shmllm.models.create import create_model
from shmllm.models.weights import load_dummy_weights


@pytest.mark.parametrize("name", ["1b", "4b"])
def test_transformers_has_the_weights_of_the_engine(name: str, tmp_path: Path) -> None:
    directory = SHAPES[name].shrunk().write(tmp_path, "float32")
    ours = create_model(ModelConfig.from_directory(directory), torch.float32, allocate)
    load_dummy_weights(ours)
    theirs = make_model(directory, torch.float32, torch.device("cpu"))
    weights = dict(theirs.named_parameters())
    for key, (view, *_) in ours.named_weights().items():
        assert torch.equal(view, weights[key]), key
