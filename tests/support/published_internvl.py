"""Writes InternVL's models as their authors publish them: other fields and names of weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.remote_decoders import as_internlm2
from torch import Tensor

_RENAMED = {
    r"^vision_tower\.embeddings\.cls_token": "vision_model.embeddings.class_embedding",
    r"^vision_tower\.embeddings\.position_embeddings": (
        "vision_model.embeddings.position_embedding"
    ),
    r"^vision_tower\.embeddings\.patch_embeddings\.projection": (
        "vision_model.embeddings.patch_embedding"
    ),
    r"^vision_tower\.encoder\.layer\.": "vision_model.encoder.layers.",
    r"\.attention\.projection_layer\.": ".attn.proj.",
    r"\.attention\.([qk])_norm\.": r".attn.\1_norm.",
    r"\.layernorm_before\.": ".norm1.",
    r"\.layernorm_after\.": ".norm2.",
    r"\.lambda_([12])$": r".ls\1",
    r"^multi_modal_projector\.layer_norm\.": "mlp1.0.",
    r"^multi_modal_projector\.linear_1\.": "mlp1.1.",
    r"^multi_modal_projector\.linear_2\.": "mlp1.3.",
}

_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""It takes texts only; the text of an image is part of them."""


def publish(directory: Path, **fields: Any) -> None:
    """Changes a directory of transformers' InternVL.

    Args:
        directory: the directory.
        fields: take the place of those in config.json.
    """
    path = directory / "model.safetensors"
    config = json.loads((directory / "config.json").read_text())
    weights, text = _published(load_file(path)), config["text_config"]
    text["architectures"] = ["Qwen2ForCausalLM"]
    if text["model_type"] == "llama":
        weights = _with_internlm2(weights, text["num_key_value_heads"])
        own = {"model_type": "internlm2", "architectures": ["InternLM2ForCausalLM"], "bias": False}
        text |= own
    save_file(weights, path)
    settings = json.loads((directory / "preprocessor_config.json").read_text())
    vision = config["vision_config"]
    size = vision["image_size"]
    side = size[0] if isinstance(size, list) else size
    patch = vision["patch_size"]
    vision |= {
        "model_type": "intern_vit_6b",
        "image_size": side,
        "patch_size": patch[0] if isinstance(patch, list) else patch,
        "qk_normalization": vision.pop("use_qk_norm"),
        "qkv_bias": vision.pop("attention_bias"),
    }
    published = {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "auto_map": {"AutoModel": "modeling_internvl_chat.InternVLChatModel"},
        "downsample_ratio": config["downsample_ratio"],
        "dynamic_image_size": True,
        "force_image_size": side,
        "llm_config": text,
        "max_dynamic_patch": settings["max_patches"],
        "min_dynamic_patch": settings["min_patches"],
        "pad2square": False,
        "ps_version": "v2",
        "select_layer": -1,
        "template": "internvl2_5",
        "torch_dtype": "float32",
        "use_thumbnail": True,
        "vision_config": vision,
    }
    (directory / "config.json").write_text(json.dumps(published | fields))
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": _TEMPLATE}))
    of_clip = {"crop_size": 448, "feature_extractor_type": "CLIPFeatureExtractor", "size": 448}
    (directory / "preprocessor_config.json").write_text(json.dumps(of_clip))


def _with_internlm2(weights: dict[str, Tensor], groups: int) -> dict[str, Tensor]:
    """The same with the language model's tensors as InternLM 2 has them."""
    prefix = "language_model."
    text = {name.removeprefix(prefix): each for name, each in weights.items() if prefix in name}
    found = {f"{prefix}{name}": each for name, each in as_internlm2(text, groups).items()}
    return {name: each for name, each in weights.items() if prefix not in name} | found


def _published(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if re.search(r"^vision_tower.*\.attention\.[kv]_proj\.", name) or "mask_token" in name:
            continue
        if name.startswith("vision_tower.") and ".attention.q_proj." in name:
            tensor = torch.cat([weights[name.replace(".q_", f".{each}_")] for each in "qkv"])
            name = name.replace(".attention.q_proj.", ".attn.qkv.")
        for pattern, own in _RENAMED.items():
            name = re.sub(pattern, own, name)
        found[name] = tensor
    return found
