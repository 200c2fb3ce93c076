"""The weights of Kimi K2.5 and Kimi-VL as the models' authors publish them.

transformers 5.24 reads these names, and writes others: its ``save_pretrained`` calls layers of the
language model blocks, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

_RENAMED = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.vision_tower.layers.": "vision_tower.encoder.blocks.",
    "model.vision_tower.final_layernorm.": "vision_tower.encoder.final_layernorm.",
    "model.vision_tower.patch_embed.pos_emb.position_embeddings": (
        "vision_tower.patch_embed.pos_emb.weight"
    ),
    "model.vision_tower.": "vision_tower.",
    "model.mm_projector.in_proj.": "mm_projector.proj.0.",
    "model.mm_projector.out_proj.": "mm_projector.proj.2.",
    "model.mm_projector.": "mm_projector.",
}
_IN_LAYERS = {
    ".norm1.": ".norm0.",
    ".norm2.": ".norm1.",
    ".mlp.fc1.": ".mlp.fc0.",
    ".mlp.fc2.": ".mlp.fc1.",
    ".attn.proj.": ".wo.",
}
_OF_VL = {
    "mm_projector.proj.0.": "multi_modal_projector.linear_1.",
    "mm_projector.proj.2.": "multi_modal_projector.linear_2.",
    "mm_projector.pre_norm.": "multi_modal_projector.pre_norm.",
}
_OF_K25 = {
    "hidden_size": "vt_hidden_size",
    "num_hidden_layers": "vt_num_hidden_layers",
    "num_attention_heads": "vt_num_attention_heads",
    "intermediate_size": "vt_intermediate_size",
    "pos_emb_height": "init_pos_emb_height",
    "pos_emb_width": "init_pos_emb_width",
}


def published_weights(model: Any) -> dict[str, Tensor]:
    """The weights of transformers' `Kimi_K25ForConditionalGeneration` under the authors' names."""
    weights = model.state_dict()
    num_heads = model.config.vision_config.num_attention_heads
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if ".attn.q_proj." in name:
            parts = [weights[name.replace("q_proj", f"{each}_proj")] for each in "qkv"]
            for index in range(2):  # the elements of a pair become neighbours
                halves = parts[index].unflatten(0, (num_heads, 2, -1))
                parts[index] = halves.transpose(1, 2).flatten(0, 2)
            found[_renamed(name.replace("attn.q_proj", "wqkv"))] = torch.cat(parts)
        elif ".attn.k_proj." not in name and ".attn.v_proj." not in name:
            found[_renamed(name)] = tensor.detach().clone().contiguous()
    return found


def save_published(model: Any, save: Callable[[Path], None], directory: Path) -> None:
    """Writes what ``save_pretrained`` writes, but the weights under the authors' names."""
    save(directory)
    save_file(published_weights(model), directory / "model.safetensors")


def publish_k25(directory: Path) -> None:
    """Writes the settings of a directory as the authors of Kimi K2.5 publish them."""
    config = json.loads((directory / "config.json").read_text())
    vision = {_OF_K25.get(name, name): value for name, value in config["vision_config"].items()}
    for name in ("hidden_act", "pos_emb_time", "rope_parameters", "model_type"):
        del vision[name]
    vision |= {"mm_hidden_size": config.pop("projection_hidden_size"), "merge_type": "sd2_tpool"}
    vision |= {"projector_ln_eps": config.pop("projection_layer_norm_eps")}
    vision |= {"mm_projector_type": "patchmerger", "text_hidden_size": 64}
    config |= {"vision_config": vision, "architectures": ["KimiK25ForConditionalGeneration"]}
    config["media_placeholder_token_id"] = config.pop("image_token_id")
    config["text_config"]["model_type"] = "kimi_k2"
    (directory / "config.json").write_text(json.dumps(config))
    settings = {
        "in_patch_limit": 32,
        "patch_size": 14,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "merge_kernel_size": 2,
        "fixed_output_tokens": None,
        "patch_limit_on_one_side": 512,
    }
    _write_settings(directory, {"media_proc_cfg": settings})


def become_kimi_vl(model: Any, directory: Path) -> None:
    """Writes the same model as Kimi-VL into a directory that has it as Kimi K2.5."""
    weights = published_weights(model)
    for old, new in _OF_VL.items():
        weights = {name.replace(old, new): tensor for name, tensor in weights.items()}
    save_file(weights, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    vision = config["vision_config"]
    for side in ("height", "width"):
        vision[f"init_pos_emb_{side}"] = vision.pop(f"pos_emb_{side}")
    for name in ("hidden_act", "pos_emb_time", "rope_parameters"):
        del vision[name]
    vision["model_type"] = "moonvit"
    for name in ("projection_hidden_size", "projection_layer_norm_eps", "video_token_id"):
        del config[name]
    config["media_placeholder_token_id"] = config.pop("image_token_id")
    config |= {"architectures": ["KimiVLForConditionalGeneration"], "model_type": "kimi_vl"}
    (directory / "config.json").write_text(json.dumps(config))
    settings = {
        "auto_map": {"AutoImageProcessor": "image_processing_kimi_vl.KimiVLImageProcessor"},
        "in_token_limit": 32,
        "patch_size": 14,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "pad_input": True,
    }
    _write_settings(directory, settings)


def _write_settings(directory: Path, settings: dict[str, Any]) -> None:
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))


def _renamed(name: str) -> str:
    if ".vision_tower.layers." in name:
        part = next((each for each in _IN_LAYERS if each in name), None)
        name = name if part is None else name.replace(part, _IN_LAYERS[part])
    prefix = next(each for each in _RENAMED if name.startswith(each))
    return _RENAMED[prefix] + name.removeprefix(prefix)
