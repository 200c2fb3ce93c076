"""Multimodal checkpoints, made of those of language models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

NAMES = {
    "new": (("model.", "model.language_model."), "model.visual.patch_embed.weight"),
    "old": (("", "language_model."), "vision_tower.patch_conv.weight"),
}
"""The prefix of the language model's weights and its replacement, and another tensor."""


def renamed(name: str, form: str) -> str:
    (prefix, replacement), _ = NAMES[form]
    return replacement + name.removeprefix(prefix) if name.startswith(prefix) else name


def nest(directory: Path, architecture: str, model_type: str, form: str, **outer: Any) -> None:
    """Makes a multimodal checkpoint of a language model's."""
    text = json.loads((directory / "config.json").read_text())
    kept = {name: text.pop(name) for name in ("dtype", "tie_word_embeddings")}
    text |= {"model_type": model_type, "architectures": None}
    whole = {"architectures": [architecture], "text_config": text, **kept, **outer}
    (directory / "config.json").write_text(json.dumps(whole))
    tensors = load_file(directory / "model.safetensors")
    tensors = {renamed(name, form): tensor for name, tensor in tensors.items()}
    tensors[NAMES[form][1]] = torch.full((2, 2), torch.nan)
    tensors["mtp.layers.0.mlp.up_proj.weight"] = torch.full((2, 2), torch.nan)
    save_file(tensors, directory / "model.safetensors")
