"""Small models that see images as two GGUF files: the text model, and the tower."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import transformers
from support.gguf_models import CONTROL, NORMAL, UNUSED, write, write_model

TEXT_MODELS = {"gemma3": "Gemma3ForCausalLM"}
"""transformers' classes of the text models, by the names of `vision_models`."""
_TEXT, _OUTER = "model.language_model.", "model."


def write_pair(
    name: str,
    model: Any,
    source: Path,
    directory: Path,
    *,
    tower: str = "mmproj-F16.gguf",
    swaps: bool = False,
    change: Mapping[str, Any] | None = None,
    renamed: Mapping[str, str] | None = None,
) -> Path:
    """Writes the files of what `make_vision_model` returned, and returns that of the text model.

    Args:
        name: one of TEXT_MODELS.
        model: the model.
        source: its directory, with its tokenizer.
        directory: where the files go.
        tower: the name of the file with the tower.
        swaps: whether the projections of MLPs have each other's names.
        change: other metadata of the tower.
        renamed: other texts of tokens.
    """
    directory.mkdir()
    tensors = model.state_dict()
    text = getattr(transformers, TEXT_MODELS[name])(model.config.text_config)
    own = {key.replace(_TEXT, "model."): value for key, value in tensors.items()}
    text.load_state_dict({key: own[key] for key in text.state_dict()})
    write_model(
        directory / "model.gguf",
        text,
        lambda writer: _add_tokens(writer, source, text.config.vocab_size, renamed or {}),
    )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)

    def fill(writer: gguf.GGUFWriter) -> None:
        _add_sizes(
            writer, name, model, json.loads((source / "preprocessor_config.json").read_text())
        )
        for key, value in (change or {}).items():
            writer.kv_data[0][key].value = value
        for key, tensor in tensors.items():
            if key.startswith(_TEXT) or not key.startswith(_OUTER):
                continue
            known = key.removeprefix(_OUTER).replace("_weight", ".weight")
            known = known.replace("vision_tower.", "vision_tower.vision_model.")
            stored = names.get_name(known, try_suffixes=(".weight", ".bias"))
            assert stored is not None, key
            offset = 1 if "soft_emb_norm" in key else 0
            if swaps and ".ffn_" in stored:
                stored = _swapped(stored)
            writer.add_tensor(stored, np.ascontiguousarray(tensor.numpy() + offset))

    write(directory / tower, "clip", fill)
    return directory / "model.gguf"


def _swapped(stored: str) -> str:
    one, other = ("ffn_up", "ffn_down") if "ffn_up" in stored else ("ffn_down", "ffn_up")
    return stored.replace(one, other)


def _add_tokens(
    writer: gguf.GGUFWriter, source: Path, vocab_size: int, renamed: Mapping[str, str]
) -> None:
    """Puts the model's own vocabulary in place of the bundled one."""
    content = json.loads((source / "tokenizer.json").read_text())
    added = {each["content"]: each["id"] for each in content["added_tokens"]}
    ids = content["model"]["vocab"] | added
    tokens = [renamed.get(token, token) for token in sorted(ids, key=ids.__getitem__)]
    kinds = [CONTROL if token in added else NORMAL for token in tokens]
    missing = range(len(tokens), vocab_size)
    merges = content["model"]["merges"]
    known = writer.kv_data[0]
    known["tokenizer.ggml.tokens"].value = [*tokens, *(f"[PAD{index}]" for index in missing)]
    known["tokenizer.ggml.token_type"].value = [*kinds, *(UNUSED for _ in missing)]
    known["tokenizer.ggml.merges"].value = [" ".join(pair) for pair in merges]
    settings = json.loads((source / "tokenizer_config.json").read_text())
    known["tokenizer.chat_template"].value = settings["chat_template"]


def _add_sizes(writer: gguf.GGUFWriter, name: str, model: Any, settings: dict[str, Any]) -> None:
    vision, text = model.config.vision_config, model.config.text_config
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(name)
    writer.add_vision_projection_dim(text.hidden_size)
    writer.add_vision_image_size(vision.image_size)
    writer.add_vision_patch_size(vision.patch_size)
    writer.add_vision_embedding_length(vision.hidden_size)
    writer.add_vision_feed_forward_length(vision.intermediate_size)
    writer.add_vision_block_count(vision.num_hidden_layers)
    writer.add_vision_head_count(vision.num_attention_heads)
    writer.add_vision_attention_layernorm_eps(vision.layer_norm_eps)
    writer.add_vision_image_mean(settings["image_mean"])
    writer.add_vision_image_std(settings["image_std"])
    side = vision.image_size // vision.patch_size
    writer.add_vision_projector_scale_factor(side // int(model.config.mm_tokens_per_image**0.5))
