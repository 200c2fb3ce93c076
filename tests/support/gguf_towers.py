"""Small models that see images as two GGUF files: the text model, and the tower."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import transformers
from support.gguf_models import CONTROL, NORMAL, UNUSED, Array, write, write_model

TEXT_MODELS = {
    "gemma3": "Gemma3",
    "smolvlm": "Llama",
    "mistral3": "Mistral",
    "qwen2_vl": "Qwen2",
    "qwen2_5_vl": "Qwen2",
    "qwen3_vl": "Qwen3",
    "qwen3_vl_moe": "Qwen3Moe",
    "qwen3_5": "Qwen3_5",
}
"""The beginnings of transformers' classes of the text models, by the names of `vision_models`."""
_TYPES = {
    "gemma3": "gemma3",
    "smolvlm": "idefics3",
    "mistral3": "pixtral",
    "qwen2_vl": "qwen2vl_merger",
    "qwen2_5_vl": "qwen2.5vl_merger",
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5"), "qwen3vl_merger"),
}
"""llama.cpp's types of towers."""
_MERGER = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}
_MERGER |= {"ln_q": "v.post_ln", "mlp.0": "mm.0", "mlp.2": "mm.2"}
_TEXT, _OUTER = ("model.language_model.", "model.text_model."), "model."


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
    text = _text_model(name, model.config.text_config)
    own = {key.replace(_TEXT[0], _OUTER).replace(_TEXT[1], _OUTER): tensors[key] for key in tensors}
    text.load_state_dict({key: own[key] for key in text.state_dict()})
    vocab_size = text.config.vocab_size

    def add_metadata(writer: gguf.GGUFWriter) -> None:
        _add_tokens(writer, source, vocab_size, renamed or {})
        sections = (text.config.rope_parameters or {}).get("mrope_section")
        if sections is not None:
            writer.kv_data[0].pop(f"{writer.arch}.rope.dimension_sections", None)
            writer.add_rope_dimension_sections([*sections, 0])

    write_model(directory / "model.gguf", text, add_metadata)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)

    def fill(writer: gguf.GGUFWriter) -> None:
        settings = json.loads((source / "preprocessor_config.json").read_text())
        _add_sizes(writer, name, model, settings)
        for key, value in (change or {}).items():
            writer.kv_data[0][key].value = value
        for key, tensor in tensors.items():
            if key.startswith(_TEXT) or not key.startswith(_OUTER):
                continue
            inner = key.removeprefix("" if name == "smolvlm" else _OUTER)
            for known, values in _stored(inner, tensor.numpy(), model):
                stored = names.get_name(known, try_suffixes=(".weight", ".bias")) or known
                assert stored.startswith(("v.", "mm.")), key
                if swaps and ".ffn_" in stored:
                    stored = _swapped(stored)
                writer.add_tensor(stored, np.ascontiguousarray(values))

    write(directory / tower, "clip", fill)
    return directory / "model.gguf"


def _text_model(name: str, config: Any) -> Any:
    """An empty text model of a configuration."""
    stem = TEXT_MODELS[name]
    if "_vl" in name:  # whose text model is Qwen's with a rotation by axes
        own = config.to_dict()
        fields = {key: value for key, value in own.items() if key != "model_type"}
        config = getattr(transformers, f"{stem}Config")(**fields)
        config.sections = [*config.rope_parameters["mrope_section"], 0]
    return getattr(transformers, f"{stem}ForCausalLM")(config)


def _stored(key: str, values: Array, model: Any) -> Iterator[tuple[str, Array]]:
    """The tensors that llama.cpp's conversion makes of one of a tower, with names that `gguf`
    knows, or those of the file."""
    vision = model.config.vision_config
    if "soft_emb_norm" in key:
        yield key, values + 1
    elif key == "visual.patch_embed.proj.weight":
        yield "v.patch_embd.weight", values[:, :, 0]
        yield "v.patch_embd.weight.1", values[:, :, 1]
    elif key.startswith("visual.deepstack_merger_list."):
        level, module, kind = key.split(".")[2:]
        layer = vision.deepstack_visual_indexes[int(level)]
        yield f"v.deepstack.{layer}.{module.replace('linear_', '')}.{kind}", values
    elif key.startswith("visual.merger."):
        module, kind = key.removeprefix("visual.merger.").rsplit(".", 1)
        yield f"{_MERGER[module]}.{kind}", values
    elif key.startswith("vision_tower.") and key.endswith(("q_proj.weight", "k_proj.weight")):
        if vision.model_type == "pixtral":
            pairs = values.reshape(vision.num_attention_heads, 2, -1, values.shape[-1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
            yield key, values
        else:
            yield key.replace("vision_tower.", "vision_tower.vision_model."), values
    elif vision.model_type == "pixtral":
        yield key, values
    elif ".attn.qkv." in key and vision.model_type.startswith("qwen2"):
        for part, each in zip("qkv", np.split(values, 3), strict=True):
            yield key.replace("qkv", part), each
    else:
        known = key.replace("_weight", ".weight")
        yield known.replace("vision_tower.", "vision_tower.vision_model."), values


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
    writer.add_clip_projector_type(_TYPES[name])
    writer.add_vision_projection_dim(text.hidden_size)
    writer.add_vision_patch_size(vision.patch_size)
    width = getattr(vision, "embed_dim", vision.hidden_size)
    writer.add_vision_embedding_length(width)
    inner = vision.hidden_size if name == "qwen2_vl" else vision.intermediate_size
    writer.add_vision_feed_forward_length(inner)
    writer.add_vision_image_mean(settings["image_mean"])
    writer.add_vision_image_std(settings["image_std"])
    if name == "mistral3":
        writer.add_vision_image_size(settings["size"]["longest_edge"])
        writer.add_vision_block_count(vision.num_hidden_layers)
        writer.add_vision_head_count(vision.num_attention_heads)
        writer.add_vision_attention_layernorm_eps(1e-5)
        writer.add_vision_use_gelu(vision.hidden_act == "gelu")
        writer.add_vision_use_silu(vision.hidden_act == "silu")
        return
    if name in ("gemma3", "smolvlm"):
        side = vision.image_size // vision.patch_size
        writer.add_vision_image_size(vision.image_size)
        writer.add_vision_block_count(vision.num_hidden_layers)
        writer.add_vision_head_count(vision.num_attention_heads)
        writer.add_vision_attention_layernorm_eps(vision.layer_norm_eps)
        if name == "gemma3":
            factor = side // int(model.config.mm_tokens_per_image**0.5)
        else:
            factor = model.config.scale_factor
            writer.add_vision_preproc_image_size(settings["size"]["longest_edge"])
        writer.add_vision_projector_scale_factor(factor)
        return
    writer.add_vision_image_size(560)
    writer.add_vision_block_count(vision.depth)
    writer.add_vision_head_count(vision.num_heads)
    writer.add_vision_attention_layernorm_eps(1e-6)
    if name == "qwen2_5_vl":
        writer.add_vision_n_wa_pattern(vision.fullatt_block_indexes[0] + 1)
        writer.add_vision_window_size(vision.window_size)
    levels = getattr(vision, "deepstack_visual_indexes", [])
    if levels:
        writer.add_vision_is_deepstack_layers([layer in levels for layer in range(vision.depth)])
    writer.add_vision_min_pixels(settings["size"]["shortest_edge"])
    writer.add_vision_max_pixels(settings["size"]["longest_edge"])
