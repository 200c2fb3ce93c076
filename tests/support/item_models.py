"""Language models of which images are tokens: their positions on three axes, attention up to an
image's end, and what transformers computes. The images are tokens of text here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.model_helpers import reference_model, save
from torch import Tensor
from transformers import Gemma3TextConfig, PreTrainedModel, Qwen3VLTextConfig, Qwen3VLTextModel
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

from shmllm.models.config import ModelConfig
from shmllm.models.mixer_specs import WITHIN_ITEMS, AttentionSpec
from shmllm.worker.arrays import LongArray
from shmllm.worker.rope_positions import PlacedGrid

LENGTH = 44
ITEMS: list[PlacedGrid] = [
    PlacedGrid(3, 1, 3, 4),
    PlacedGrid(17, 1, 5, 1),
    PlacedGrid(22, 1, 2, 7),
]
"""Images in a prompt; the last two are neighbours, and the window of a layer is smaller."""
WINDOW = 5
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_hidden_layers": 2,
}
ROPE = {"rope_type": "default", "rope_theta": 100.0}
MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_5_vl": ("qwen2", {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}}),
    "qwen3_vl": (
        "qwen3",
        {"rope_parameters": ROPE | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}},
    ),
    "qwen3_5": (
        "qwen3_5",
        {
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "rope_parameters": ROPE
            | {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.5},
        },
    ),
    "gemma3": (
        "gemma3",
        {"head_dim": 16, "query_pre_attn_scalar": 9, "sliding_window": WINDOW}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
}
"""Models by name: the family that our model belongs to, and the options of its config."""


def make_items_model(name: str, directory: Path) -> PreTrainedModel:
    """Makes and saves a random model of a name in MADE."""
    family, options = MADE[name]
    model = reference_model(family, 4.0, **SHAPE | options)
    save(model, directory)
    return model


def items_config(directory: Path) -> ModelConfig:
    """Reads a model's configuration; tokens of images see each other, if its family does that."""
    config = ModelConfig.from_directory(directory)
    if config.architecture != "Gemma3ForCausalLM":
        return config
    layers = []
    for layer in config.layers:
        assert isinstance(layer.mixer, AttentionSpec)
        layers.append(replace(layer, mixer=replace(layer.mixer, ahead=WITHIN_ITEMS)))
    return replace(config, layers=tuple(layers))


def positions_of(items: Sequence[PlacedGrid], length: int) -> LongArray:
    """The positions of a request's tokens on three axes, (3, length), one token after the other."""
    found: list[tuple[int, int, int]] = []
    starts, position = {item.begin: (item.rows, item.columns) for item in items}, 0
    while len(found) < length:
        rows, columns = starts.get(len(found), (0, 0))
        found += [
            (position, position + r, position + c) for r in range(rows) for c in range(columns)
        ]
        if rows:
            position += max(rows, columns)
        else:
            found.append((position, position, position))
            position += 1
    return np.array(found[:length], np.int64).T


def item_ends_of(items: Sequence[PlacedGrid], length: int) -> LongArray:
    """The position behind the image that each token belongs to, or behind its own, (length,)."""
    ends = np.arange(length) + 1
    for item in items:
        end = item.begin + item.rows * item.columns
        ends[item.begin : end] = end
    return ends


def _on_axes(
    kind: Any, config: Any, model: Any, ids: Tensor, items: Sequence[PlacedGrid]
) -> Tensor:
    names = *SHAPE, "vocab_size", "rms_norm_eps", "rope_parameters"
    options = {name: getattr(model.config, name) for name in names}
    text = kind(config(**options, head_dim=16)).eval()
    text.load_state_dict(model.model.state_dict())
    positions = torch.from_numpy(positions_of(items, ids.shape[1]))[:, None]
    hidden: Tensor = text(ids, position_ids=positions).last_hidden_state
    return hidden


@cache
def _masks_of(items: tuple[PlacedGrid, ...]) -> dict[str, Tensor]:
    config = Gemma3TextConfig(sliding_window=WINDOW, attn_implementation="eager")
    groups = torch.full((1, LENGTH), -1)
    for index, item in enumerate(items):
        groups[0, item.begin : item.begin + item.rows * item.columns] = index
    masks: dict[str, Tensor] = create_masks_for_vision_model(
        config, torch.zeros(1, LENGTH, 1), None, None, None, groups
    )
    return masks


for _items in ((), ITEMS):
    _masks_of(tuple(_items))  # the fake GPU cannot


def wanted_logits(name: str, model: Any, tokens: list[int], items: Sequence[PlacedGrid]) -> Tensor:
    """What transformers computes of a request with images, [tokens, vocab]."""
    ids = torch.tensor([tokens])
    if name == "qwen2_5_vl":
        hidden = _on_axes(Qwen2_5_VLTextModel, Qwen2_5_VLTextConfig, model, ids, items)
    elif name == "qwen3_vl":
        hidden = _on_axes(Qwen3VLTextModel, Qwen3VLTextConfig, model, ids, items)
    elif name == "qwen3_5":
        positions = torch.from_numpy(positions_of(items, len(tokens)))[:, None]
        hidden = model.model(ids, position_ids=positions).last_hidden_state
    else:
        count = len(tokens)  # no image is cut
        masks = {kind: mask[..., :count, :count] for kind, mask in _masks_of(tuple(items)).items()}
        hidden = model.model(ids, attention_mask=masks).last_hidden_state
    logits: Tensor = model.lm_head(hidden)[0].float()
    return logits
