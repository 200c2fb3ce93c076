"""The towers of images in GGUF files of their own ("mmproj"). A tower is a row of PROJECTORS.

The names on one side are llama.cpp's, on the other transformers'. This module must not know the
fields of config.json, nor import torch.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from shmllm.formats.gguf import GgufHeader, shown
from shmllm.formats.gguf_family import NUM_HEADS, GgufFamily, Place, Places
from shmllm.formats.gguf_places import MLP, gated_mlp

ARCHITECTURE = "clip"
"""The architecture of all files with towers."""
LAYERS = "v.blk"

_PREFERRED = (r"(?<!b)f16", "bf16", "f32")
_NAME = "mmproj"

_SIGLIP: Places = {
    **{f"attn_{kind}": f"self_attn.{kind}_proj" for kind in "qkv"},
    "attn_out": "self_attn.out_proj",
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_PIXTRAL: Places = {
    **{f"attn_{kind}": f"attention.{kind}_proj" for kind in "qkv"},
    "attn_out": "attention.o_proj",
    "ln1": "attention_norm",
    "ln2": "ffn_norm",
    **gated_mlp("ffn_{}", "feed_forward"),
}
_SIGLIP_TOWER = "vision_tower.vision_model"
_QWEN_LAYER: Places = {"attn_out": "attn.proj", "ln1": "norm1", "ln2": "norm2"}
_QWEN: Places = {
    **_QWEN_LAYER,
    "attn_qkv": "attn.qkv",
    "ffn_up": "mlp.linear_fc1",
    "ffn_down": "mlp.linear_fc2",
}
_QWEN_APART: Places = {
    **_QWEN_LAYER,
    **{
        f"attn_{kind}": Place(name="attn.qkv", part=part, num_parts=3, in_turn=False)
        for part, kind in enumerate("qkv")
    },
}
_QWEN_TOWER = "model.visual"
_PATCHES = Place(name=f"{_QWEN_TOWER}.patch_embed.proj.weight", layout="frames", num_parts=2)
_QWEN_PATCHES: Places = {
    "v.patch_embd.weight": _PATCHES,
    "v.patch_embd.weight.1": replace(_PATCHES, part=1),
}
_QWEN_MERGER: Places = {
    "v.post_ln": f"{_QWEN_TOWER}.merger.ln_q",
    "mm.0": f"{_QWEN_TOWER}.merger.mlp.0",
    "mm.2": f"{_QWEN_TOWER}.merger.mlp.2",
}
_DEEPSTACK = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}

PROJECTORS: dict[str, GgufFamily] = {
    "gemma3": GgufFamily(
        title="the tower of Gemma 3",
        architecture="Gemma3ForConditionalGeneration",
        model_type="gemma3",
        modules=_SIGLIP,
        outside={
            "v.patch_embd": f"{_SIGLIP_TOWER}.embeddings.patch_embedding",
            "v.position_embd": f"{_SIGLIP_TOWER}.embeddings.position_embedding",
            "v.post_ln": f"{_SIGLIP_TOWER}.post_layernorm",
            "mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight",
            "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
        },
        layers=f"{_SIGLIP_TOWER}.encoder.layers",
        stored_layers=LAYERS,
        norm_offset=1.0,
        is_written=False,
    ),
    "idefics3": GgufFamily(
        title="the tower of SmolVLM and Idefics 3",
        architecture="SmolVLMForConditionalGeneration",
        model_type="smolvlm",
        modules=_SIGLIP,
        outside={
            "v.patch_embd": "model.vision_model.embeddings.patch_embedding",
            "v.position_embd": "model.vision_model.embeddings.position_embedding",
            "v.post_ln": "model.vision_model.post_layernorm",
            "mm.model.fc": "model.connector.modality_projection.proj",
        },
        layers="model.vision_model.encoder.layers",
        stored_layers=LAYERS,
        is_written=False,
    ),
    "pixtral": GgufFamily(
        title="the tower of Mistral 3",
        architecture="Mistral3ForConditionalGeneration",
        model_type="mistral3",
        modules=_PIXTRAL,
        outside={
            "v.patch_embd": "vision_tower.patch_conv",
            "v.pre_ln": "vision_tower.ln_pre",
            "mm.input_norm": "multi_modal_projector.norm",
            "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer",
            "mm.1": "multi_modal_projector.linear_1",
            "mm.2": "multi_modal_projector.linear_2",
        },
        layers="vision_tower.transformer.layers",
        stored_layers=LAYERS,
        is_permuted=True,
        head_count=f"vision.{NUM_HEADS}",
        is_written=False,
    ),
    "qwen3vl_merger": GgufFamily(
        title="the tower of Qwen 3 VL and Qwen 3.5",
        architecture="Qwen3VLForConditionalGeneration",
        model_type="qwen3_vl",
        modules=_QWEN,
        outside={
            **_QWEN_PATCHES,
            "v.patch_embd.bias": f"{_QWEN_TOWER}.patch_embed.proj.bias",
            "v.position_embd": f"{_QWEN_TOWER}.pos_embed",
            "v.post_ln": f"{_QWEN_TOWER}.merger.norm",
            "mm.0": f"{_QWEN_TOWER}.merger.linear_fc1",
            "mm.2": f"{_QWEN_TOWER}.merger.linear_fc2",
        },
        layers=f"{_QWEN_TOWER}.blocks",
        stored_layers=LAYERS,
        is_written=False,
    ),
    "qwen2vl_merger": GgufFamily(
        title="the tower of Qwen 2 VL",
        architecture="Qwen2VLForConditionalGeneration",
        model_type="qwen2_vl",
        modules={**_QWEN_APART, "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        outside={**_QWEN_PATCHES, **_QWEN_MERGER},
        layers=f"{_QWEN_TOWER}.blocks",
        stored_layers=LAYERS,
        is_written=False,
    ),
    "qwen2.5vl_merger": GgufFamily(
        title="the tower of Qwen 2.5 VL",
        architecture="Qwen2_5_VLForConditionalGeneration",
        model_type="qwen2_5_vl",
        modules={**_QWEN_APART, **MLP},
        outside={**_QWEN_PATCHES, **_QWEN_MERGER},
        layers=f"{_QWEN_TOWER}.blocks",
        stored_layers=LAYERS,
        is_written=False,
    ),
}
"""The towers by llama.cpp's type of what projects their embeddings."""


def deepstack_layers(header: GgufHeader) -> list[int]:
    """Returns the layers that give levels of embeddings, too."""
    flags = header.metadata.get("clip.vision.is_deepstack_layers", [])
    return [layer for layer, gives in enumerate(flags if isinstance(flags, list) else []) if gives]


def is_projector(path: Path) -> bool:
    """Returns whether a file has the name of one with a tower, as all of them have."""
    return _NAME in path.name.lower()


def projectors_beside(model: Path) -> list[Path]:
    """Returns the files with towers that lie beside a model: of copies in several precisions first
    that in float16, then that in bfloat16 and that in float32."""

    def rank(path: Path) -> tuple[int, str]:
        matches = (bool(re.search(each, path.stem.lower())) for each in _PREFERRED)
        return next((n for n, found in enumerate(matches) if found), len(_PREFERRED)), path.name

    return sorted(filter(is_projector, model.parent.glob("*.gguf")), key=rank)


def projector_of(header: GgufHeader) -> GgufFamily:
    """Returns the tower of a file. Those of llama.cpp's first converters have the projections of
    MLPs under each other's names.

    Raises:
        EngineStartError: the tower is not known; the message names those that are.
    """
    known = header.metadata
    kind = known.get("clip.vision.projector_type", known.get("clip.projector_type"))
    if not isinstance(kind, str) or kind not in PROJECTORS:
        raise header.error(
            f"the tower {shown(kind)} is not supported; supported: {', '.join(PROJECTORS)}"
        )
    family = PROJECTORS[kind]
    levels = {
        f"v.deepstack.{layer}.{name}": f"{_QWEN_TOWER}.deepstack_merger_list.{level}.{module}"
        for level, layer in enumerate(deepstack_layers(header))
        for name, module in _DEEPSTACK.items()
    }
    family = replace(family, outside={**family.outside, **levels})
    up = header.tensors.get(f"{LAYERS}.0.ffn_up.weight")
    if up is None or up.shape[1:] == (known.get("clip.vision.embedding_length"),):
        return family
    modules = dict(family.modules)
    modules["ffn_up"], modules["ffn_down"] = modules["ffn_down"], modules["ffn_up"]
    return replace(family, modules=modules)
