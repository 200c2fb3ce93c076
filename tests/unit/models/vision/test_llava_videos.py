"""Compares the embeddings of frames of LLaVA's videos with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.model_helpers import load
from support.variants import slow
from support.vision_models import make_vision_model, normalised

from shmllm.errors import EngineStartError

CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llava_onevision", {"patch_size": 20}, {}),  # three patches in a row
    slow(
        "llava_onevision",
        {"model_type": "clip_vision_model"},
        {"vision_feature_select_strategy": "default"},
    ),
    ("llava_next_video", {}, {"spatial_pool_stride": 3}),
    slow("llava_next_video", {}, {"spatial_pool_mode": "max"}),
]


@pytest.mark.parametrize(("name", "vision", "outer"), CASES)
@torch.inference_mode()
def test_frames_equal_transformers(
    name: str, vision: dict[str, Any], outer: dict[str, Any], tmp_path: Path
) -> None:
    reference = make_vision_model(name, tmp_path, vision=vision, outer=outer)
    model = load(tmp_path)
    frames = np.random.default_rng(3).integers(0, 256, (3, 64, 64, 3), dtype=np.uint8)
    pixels, tower = normalised(name, frames), model.towers["video"]
    found = [tower.embed_frame(each[None], (1, 1, 1)) for each in pixels]
    behind = [] if tower.behind_video is None else [tower.behind_video]
    ours, wanted = torch.cat(found + behind), reference.get_video_features(pixels[None])
    spec = model.config.vision
    assert spec is not None
    assert len(ours) == spec.num_video_embeddings((3, 1, 1))
    (expected,) = wanted.pooler_output
    assert ours.shape == expected.shape
    assert float((ours - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"spatial_pool_mode": "conv"}, "spatial_pool_mode 'conv' is not supported"),
        ({"spatial_pool_stride": 5}, "'spatial_pool_stride' must be an integer of at most 4"),
    ],
)
def test_other_pools_are_refused(field: dict[str, Any], message: str, tmp_path: Path) -> None:
    outer = {"spatial_pool_stride": 2, "spatial_pool_mode": "average"} | field
    make_vision_model("llava_next_video", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | outer))
    with pytest.raises(EngineStartError, match=message):
        load(tmp_path)
