"""Writes the configurations of DeepSeek-OCR and DeepSeek-OCR 2 as their authors publish them,
beside weights to which transformers gives the authors' names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SAM = {"hidden_size": "width", "num_hidden_layers": "layers", "num_attention_heads": "heads"}
_OF_TEXT = {
    "kv_lora_rank": None,
    "lm_head": True,
    "n_group": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 0,
    "qk_rope_head_dim": 0,
    "rm_head": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "use_mla": False,
    "v_head_dim": 0,
}
_KEPT = (
    *("bos_token_id", "eos_token_id", "hidden_size", "intermediate_size", "n_routed_experts"),
    *("max_position_embeddings", "moe_intermediate_size", "n_shared_experts", "vocab_size"),
    *("num_attention_heads", "num_experts_per_tok", "num_hidden_layers", "num_key_value_heads"),
)
OF_PROCESSOR = {
    "add_special_token": False,
    "candidate_resolutions": [[1024, 1024]],
    "downsample_ratio": 4,
    "ignore_id": -100,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "image_token": "<image>",
    "mask_prompt": False,
    "normalize": True,
    "patch_size": 16,
    "processor_class": "DeepseekVLV2Processor",
    "sft_format": "deepseek",
}
"""The authors' processor_config.json, which says nothing of tiles."""


def save_published(save: Callable[[Any], None], directory: Path) -> None:
    """Saves one of transformers' models, and changes its directory to a published one."""
    save(directory)
    publish(directory)


def publish(directory: Path) -> None:
    """Changes config.json, and takes the files for transformers' processor away."""
    path = directory / "config.json"
    whole = json.loads(path.read_text())
    is_second = whole["model_type"] == "deepseek_ocr2"
    kinds = whole["text_config"]["mlp_layer_types"]
    text = {name: whole["text_config"][name] for name in _KEPT} | _OF_TEXT
    text |= {"first_k_dense_replace": kinds.count("dense"), "torch_dtype": "float32"}
    if whole["tie_word_embeddings"]:
        text["tie_word_embeddings"] = True
    sam, reader = (whole["vision_config"][f"{name}_config"] for name in ("sam", "encoder"))
    own = {_SAM.get(name, name): value for name, value in sam.items()}
    width = reader["hidden_size"]
    if is_second:
        own["downsample_channels"] = [sam["downsample_channels"][0], width + 1]  # as published
        widths = {"sam_vit_b": own, "qwen2-0-5b": reader | {"dim": width}}
    else:
        clip = {_SAM.get(name, name): value for name, value in reader.items()}
        widths = {"sam_vit_b": own, "clip-l-14-224": clip}
    published = text | {
        "_name_or_path": "deepseek-ai/DeepSeek-OCR",
        "architectures": [f"DeepseekOCR{'2' * is_second}ForCausalLM"],
        "candidate_resolutions": [[1024, 1024]],
        "global_view_pos": "head",
        "image_token_index": whole["image_token_id"],  # of files without a tokenizer
        "language_config": text,
        "model_type": "deepseek_vl_v2",
        "projector_config": {
            "input_dim": width * (1 if is_second else 2),
            "model_type": "mlp_projector",
            "n_embed": text["hidden_size"],
            "projector_type": "linear",
        },
        "tile_tag": "2D",
        "vision_config": {
            "image_size": sam["image_size"],
            "mlp_ratio": 3.7362,
            "model_name": "deepencoderv2" if is_second else "deeplip_b_l",
            "model_type": "vision",
            "width": widths,
        },
    }
    path.write_text(json.dumps(published))
    (directory / "processor_config.json").write_text(json.dumps(OF_PROCESSOR))
    (directory / "preprocessor_config.json").unlink(missing_ok=True)
