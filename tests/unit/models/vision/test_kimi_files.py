"""Kimi K2.5 and Kimi-VL as their authors publish them, and prompts of both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.kimi_files import become_kimi_vl, publish_k25
from support.model_helpers import load, our_logits
from support.vision_models import make_vision_model, normalised, reference_embeddings

from shmllm.frontend.items.registry import processors_of_model
from shmllm.models.config import ModelConfig
from shmllm.models.vision.squares_specs import KimiTower

TOKENS = [5, 100, 7, 300, 9, 1]
GRID = (1, 4, 6)


@pytest.mark.parametrize("name", ["kimi_k25", "kimi_vl"])
def test_published_files_are_the_same_model(name: str, tmp_path: Path) -> None:
    reference = make_vision_model("kimi_k25", tmp_path)
    before = load(tmp_path)
    if name == "kimi_vl":
        become_kimi_vl(reference, tmp_path)
    else:
        publish_k25(tmp_path)
    model = load(tmp_path)
    assert model.config.architecture != before.config.architecture
    assert torch.equal(our_logits(model, TOKENS), our_logits(before, TOKENS))
    generator = torch.Generator().manual_seed(1)
    tiles = torch.randint(0, 256, (1, 56, 84, 3), generator=generator, dtype=torch.uint8).numpy()
    pixels = normalised("kimi_k25", tiles)
    with torch.inference_mode():
        ours = model.towers["image"](pixels, GRID)
    expected = reference_embeddings(reference, tiles, GRID)
    assert float((ours - expected).abs().max() / expected.abs().max()) < 1e-5

    config = json.loads((tmp_path / "config.json").read_text())
    images = processors_of_model(tmp_path, config)["image"]
    assert images.token_id == model.config.vision.image_token  # type: ignore[union-attr]
    begin = {"kimi_k25": "begin", "kimi_vl": "start"}[name]
    assert images.mark == f"<|media_{begin}|>image<|media_content|><|media_pad|><|media_end|>"


def test_authors_fields_have_defaults(tmp_path: Path) -> None:
    text = {
        "model_type": "deepseek_v3",
        "vocab_size": 163840,
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": None,
    }
    whole = {
        "architectures": ["KimiVLForConditionalGeneration"],
        "media_placeholder_token_id": 163605,
        "model_type": "kimi_vl",
        "text_config": text,
        "vision_config": {"model_type": "moonvit", "merge_kernel_size": [2, 2]},
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    vision = ModelConfig.from_directory(tmp_path).vision
    assert vision is not None
    tower = vision.tower
    assert isinstance(tower, KimiTower)
    assert (tower.hidden_size, tower.num_layers, tower.num_heads, tower.inner) == (
        1152, 27, 16, 4304,
    )  # fmt: skip
    assert (tower.patch_size, tower.table_side, tower.is_k25) == (14, 64, False)
    assert vision.num_embeddings((1, 64, 64)) == 1024
    assert vision.num_embeddings((1, 514, 2)) == 0
