"""The recipes of the small models in `vision_models.py`, one for each family that sees images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from support.reference_models import BLOCKS_CHOSEN

VOCAB_SIZE = 512
IMAGE_SIZE = 64
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": IMAGE_SIZE,
    "patch_size": 16,
}
CLIP = {"model_type": "clip_vision_model", "num_hidden_layers": 3}
SIGLIP = {"model_type": "siglip_vision_model", "vision_use_head": False}
QWEN: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
}
WHISPER: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "num_mel_bins": 16,
    "max_source_positions": 150,
}
WHISPER_SETTINGS = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 16,
    "chunk_length": 3,
}
QWEN2_ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
CLIP_MEAN = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
IMAGENET_MEAN: dict[str, Any] = {
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}
HALF_MEAN = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
PREPARED = {
    "do_convert_rgb": True,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "rescale_factor": 1 / 255,
}
BICUBIC, BILINEAR, LANCZOS = 3, 2, 1


class VisionFamily(NamedTuple):
    """
    Attributes:
        model: the name of transformers' class, without its end "ForConditionalGeneration".
        text, vision, outer: what config.json has beside TEXT, VISION, and the ids of marks.
        marks: the special tokens; the first one ends an output.
        image: the mark that a placeholder consists of.
        ids: the fields of config.json that name marks.
        chat: what the chat template writes for an image; its text has the turns of ChatML.
        processor: the type of the images' preparation, and the name of transformers' module.
        settings: its settings that differ from PREPARED.
    """

    model: str
    text: dict[str, Any]
    vision: dict[str, Any]
    outer: dict[str, Any]
    marks: Sequence[str]
    image: str
    ids: dict[str, str]
    chat: str
    processor: tuple[str, str]
    settings: dict[str, Any]

    @property
    def architecture(self) -> str:
        """The name of transformers' class; that of the configuration of MiniMax M3 differs."""
        stem = {"MiniMaxM3VL": "MiniMaxM3Sparse"}.get(self.model, self.model)
        return f"{stem}ForConditionalGeneration"


_CHATML = ("<|im_end|>", "<|im_start|>")
_PAD_MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_QWEN_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_OMNI_MARKS = (
    *("<|IMAGE|>", "<|VIDEO|>", "<|AUDIO|>", "<|vision_bos|>", "<|vision_eos|>"),
    *("<|audio_bos|>", "<|audio_eos|>"),
)
_OMNI_IDS = {
    "image_token_index": "<|IMAGE|>",
    "video_token_index": "<|VIDEO|>",
    "audio_token_index": "<|AUDIO|>",
    "vision_start_token_id": "<|vision_bos|>",
    "vision_end_token_id": "<|vision_eos|>",
    "audio_start_token_id": "<|audio_bos|>",
    "audio_end_token_id": "<|audio_eos|>",
}
_GLM_IDS = {
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}
_ERNIE_IDS = {
    "image_token_id": "<|IMAGE_PLACEHOLDER|>",
    "image_start_token_id": "<|IMAGE_START|>",
    "image_end_token_id": "<|IMAGE_END|>",
    "video_token_id": "<|VIDEO_PLACEHOLDER|>",
    "video_start_token_id": "<|VIDEO_START|>",
    "video_end_token_id": "<|VIDEO_END|>",
}
_ROWS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
_TILES = ("<fake_token_around_image>", "<image>", "<global-img>", *_ROWS)
_SOFT_MARKS = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")
_DEEPSEEK_OCR: dict[str, Any] = TEXT | {
    "max_position_embeddings": 2048,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
_SAM: dict[str, Any] = {
    "hidden_size": 16,
    "output_channels": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "image_size": 128,
    "patch_size": 2,
    "window_size": 14,
    "global_attn_indexes": [1],
    "downsample_channels": [10, 32],
}
_OCR_ENCODER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_OCR_PROMPTS: dict[str, Any] = {
    "outer": {},
    "marks": (*_CHATML, "<image>"),
    "image": "<image>",
    "ids": {"image_token_id": "<image>"},
    "chat": "<image>\\n",
    "processor": ("DeepseekOcr2", "deepseek_ocr2"),
}
_WITHIN_SQUARE: dict[str, Any] = HALF_MEAN | {
    "resample": BICUBIC,
    "size": {"height": 128, "width": 128},
    "background_color": [127, 127, 127],
}
_LLAMA4_MARKS = (
    *("<|image_start|>", "<|image_end|>"),
    *("<|tile_x_separator|>", "<|tile_y_separator|>"),
)
_LFM2_MARKS = (
    *("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
    *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)),
)
_KIMI_MARKS = (
    *("<|media_begin|>", "<|media_content|>", "<|media_end|>"),
    "<|kimi_k25_video_placeholder|>",
)
_MINIMAX_MARKS = tuple(
    f"]<]{name}[>[" for name in ("image", "video", "start of image", "end of image")
)
_MINICPM_MARKS = (*("<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>"),)
_MUSE_MARKS = (
    *("<|image_start|>", "<|image_end|>"),
    *("<|vid_start|>", "<|vid_end|>", "<|vid_frame_separator|>"),
)
_HUNYUAN_MARKS = tuple(f"<\uff5chy_place▁holder▁no▁{number}\uff5c>" for number in (102, 100, 101))
_COHERE2 = TEXT | {"model_type": "cohere2", "sliding_window": 16, "logit_scale": 0.25}
_COHERE_MARKS = ("<|START_OF_IMG|>", "<|END_OF_IMG|>")
_COHERE_TILES = ("TILE_GLOBAL", *(f"TILE_{number}" for number in range(1, 5)))
_OVIS_MARKS = [f"<IMG_{name}>" for name in ("START", "GRID", "COL", "ROW", "END")]
_SQUARE = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
_CUT: dict[str, Any] = {
    "crop_to_patches": True,
    "max_patches": 4,
    "min_patches": 1,
    "resample": BICUBIC,
    "size": _SQUARE,
}


SIZES = [[64, 128], [128, 64], [128, 128], [64, 192]]
"""What the tiles of LLaVA-NeXT but the first make up."""


def _llava(
    vision: dict[str, Any], strategy: str, processor: tuple[str, str], **settings: Any
) -> VisionFamily:
    return VisionFamily(
        model="Llava",
        text=TEXT | {"model_type": "llama"},
        vision=VISION | vision,
        outer={"vision_feature_select_strategy": strategy, "image_seq_length": 16},
        marks=(*_CHATML, "<image>"),
        image="<image>",
        ids={"image_token_index": "<image>"},
        chat="<image>\\n",
        processor=processor,
        settings=settings,
    )


def _tiled(model: str, vision: dict[str, Any], **settings: Any) -> VisionFamily:
    return VisionFamily(
        model=model,
        text=TEXT | {"model_type": "llama"},
        vision=VISION | vision,
        outer={"scale_factor": 2},
        marks=(*_CHATML, *_TILES),
        image="<image>",
        ids={"image_token_id": "<image>"},
        chat="<image>",
        processor=(model, model.lower()),
        settings=HALF_MEAN
        | {
            "do_pad": True,
            "do_image_splitting": True,
            "max_image_size": {"longest_edge": IMAGE_SIZE},
            "size": {"longest_edge": 3 * IMAGE_SIZE},
            "resample": LANCZOS,
        }
        | settings,
    )


def _qwen(
    model: str, text: dict[str, Any], vision: dict[str, Any], **settings: Any
) -> VisionFamily:
    return VisionFamily(
        model=model,
        text=TEXT | text,
        vision=vision,
        outer={},
        marks=(*_CHATML, *_PAD_MARKS),
        image="<|image_pad|>",
        ids=_QWEN_IDS,
        chat="<|vision_start|><|image_pad|><|vision_end|>",
        processor=("Qwen2VL", "qwen2_vl"),
        settings={
            "resample": BICUBIC,
            "temporal_patch_size": 2,
            "merge_size": 2,
        }
        | settings,
    )


def _qwen3(model: str, text: dict[str, Any]) -> VisionFamily:
    rope = {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    return _with_table(
        model,
        {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6} | rope,
        }
        | text,
        {"deepstack_visual_indexes": [0, 1, 2]},
    )


def _qwen3_5(model: str, text: dict[str, Any]) -> VisionFamily:
    """Layers of both kinds; half of a head is rotated, by all axes."""
    rope = {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    return _with_table(
        model,
        {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6} | rope,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        }
        | text,
        {},
    )


def _with_table(model: str, text: dict[str, Any], vision: dict[str, Any]) -> VisionFamily:
    """A tower with a table of positions."""
    return _qwen(
        model,
        text,
        QWEN | {"patch_size": 16, "num_position_embeddings": 256} | vision,
        **HALF_MEAN,
        patch_size=16,
        size={"shortest_edge": 64 * 64, "longest_edge": 64 * 64 * 8},
    )


def _glm(model: str, text: dict[str, Any]) -> VisionFamily:
    return VisionFamily(
        model=model,
        text=TEXT
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "mrope_section": [1, 1, 2],
            }
        }
        | text,
        vision=QWEN | {"depth": 2, "intermediate_size": 48, "patch_size": 14, "image_size": 70},
        outer={},
        marks=(*_CHATML, *_GLM_IDS.values()),
        image="<|image|>",
        ids=_GLM_IDS,
        chat="<|begin_of_image|><|image|><|end_of_image|>",
        processor=("Glm4v", "glm4v") if model.startswith("Glm4v") else ("Glm46V", "glm46v"),
        settings=CLIP_MEAN
        | {
            "resample": BICUBIC,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "size": {"shortest_edge": 2 * 56 * 56, "longest_edge": 2 * 56 * 56 * 8},
        },
    )


_CANVAS_MARKS = {
    "image_start_id": "<image>",
    "image_end_id": "</image>",
    "slice_start_id": "<slice>",
    "slice_end_id": "</slice>",
    "newline_id": "\u010a",
}


def _minicpm(model: str, mode: str, marks: Mapping[str, str] | None = None) -> VisionFamily:
    return VisionFamily(
        model=model,
        text=_qwen3_5("Qwen3_5", {}).text | {"model_type": "qwen3_5_text"},
        vision=VISION | {"num_hidden_layers": 3, "patch_size": 14, "image_size": 70},
        outer={"insert_layer_id": 1},
        marks=(*_CHATML, "<|image_pad|>", *_MINICPM_MARKS),
        image="<|image_pad|>",
        ids={"image_token_id": "<|image_pad|>", **(marks or {})},
        chat="<|image_pad|>",
        processor=("MiniCPMV4_6", "minicpmv4_6"),
        settings=HALF_MEAN
        | {
            "resample": BICUBIC,
            "patch_size": 14,
            "scale_resolution": 84,
            "max_slice_nums": 4,
            "slice_mode": True,
            "downsample_mode": mode,
            "use_image_id": True,
        },
    )


def _gemma4(text: dict[str, Any], vision: dict[str, Any]) -> VisionFamily:
    return VisionFamily(
        model="Gemma4",
        text=TEXT
        | {"head_dim": 16, "global_head_dim": 32, "sliding_window": 16, "pad_token_id": 9}
        | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE}
        | {"num_hidden_layers": 4, "num_kv_shared_layers": 2}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2}
        | text,
        vision={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 160,
            "use_clipped_linears": True,
        }
        | vision,
        outer={},
        marks=(
            *("<turn|>", "<|turn>", "<|image|>", "<|image>", "<image|>"),
            *("<|audio|>", "<|audio>", "<audio|>", "<|video|>"),
        ),
        image="<|image|>",
        ids={
            "image_token_id": "<|image|>",
            "boi_token_id": "<|image>",
            "eoi_token_id": "<image|>",
            "audio_token_id": "<|audio|>",
            "video_token_id": "<|video|>",
        },
        chat="<|image|>",
        processor=("Gemma4", "gemma4"),
        settings={
            "do_normalize": False,
            "image_mean": [0.0] * 3,
            "image_std": [1.0] * 3,
            "resample": BICUBIC,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "max_soft_tokens": 70,
        },
    )


_LLAVA_VIDEO: dict[str, Any] = {
    "marks": (*_CHATML, "<image>", "<video>"),
    "ids": {"image_token_index": "<image>", "video_token_index": "<video>"},
}
"""What the recipes of those that take videos have in place of the marks of others."""


_LLAVA_NEXT = _llava(
    CLIP,
    "default",
    ("LlavaNext", "llava_next"),
    **CLIP_MEAN,
    do_center_crop=True,
    do_pad=True,
    resample=BICUBIC,
    size={"shortest_edge": IMAGE_SIZE},
    crop_size=_SQUARE,
    image_grid_pinpoints=SIZES,
)._replace(
    model="LlavaNext",
    outer={"vision_feature_select_strategy": "default", "image_grid_pinpoints": SIZES},
)
FAMILIES = {
    "llava": _llava(
        CLIP,
        "default",
        ("CLIP", "clip"),
        **CLIP_MEAN,
        do_center_crop=True,
        resample=BICUBIC,
        size={"shortest_edge": IMAGE_SIZE},
        crop_size=_SQUARE,
    ),
    "vipllava": _llava(
        CLIP,
        "default",
        ("CLIP", "clip"),
        **CLIP_MEAN,
        do_center_crop=True,
        resample=BICUBIC,
        size={"shortest_edge": IMAGE_SIZE},
        crop_size=_SQUARE,
    )._replace(
        model="VipLlava",
        outer={"vision_feature_layer": [-2, 1, -3], "image_seq_length": 16},
    ),
    "llava_next": _LLAVA_NEXT,
    "granite4_vision": _LLAVA_NEXT._replace(
        model="Granite4Vision",
        text=TEXT | {"num_hidden_layers": 7, "embedding_multiplier": 2.0, "logits_scaling": 3.0},
        vision=VISION | SIGLIP | {"hidden_size": 64, "num_hidden_layers": 3},
        outer={
            "vision_feature_select_strategy": "full",
            "image_grid_pinpoints": SIZES,
            "downsample_rate": "1/2",
            "deepstack_layer_map": [[-2, 1], [1, 0]],
            "spatial_target_layers": [2, 5, 3, 6],
            "qformer_config": {
                "model_type": "blip_2_qformer",
                "num_hidden_layers": 1,
                "cross_attention_frequency": 1,
                "intermediate_size": 96,
            },
        },
    ),
    "llava_next_video": _LLAVA_NEXT._replace(model="LlavaNextVideo", **_LLAVA_VIDEO),
    "llava_onevision": _llava(
        SIGLIP,
        "full",
        ("LlavaOnevision", "llava_onevision"),
        **CLIP_MEAN,
        do_pad=True,
        resample=BICUBIC,
        size=_SQUARE,
        image_grid_pinpoints=SIZES,
    )._replace(
        model="LlavaOnevision",
        text=TEXT | {"model_type": "qwen2"},
        outer={"image_grid_pinpoints": SIZES, "vision_aspect_ratio": "anyres_max_3"},
        **_LLAVA_VIDEO,
    ),
    "llava-siglip": _llava(
        SIGLIP,
        "full",
        ("Siglip", "siglip"),
        **HALF_MEAN,
        resample=BICUBIC,
        size=_SQUARE,
    ),
    "smolvlm": _tiled("SmolVLM", {"model_type": "smolvlm_vision"}),
    "idefics3": _tiled("Idefics3", {"model_type": "idefics3_vision"}),
    "granite_docling": VisionFamily(
        model="GraniteDocling",
        text=TEXT
        | {"model_type": "granite_docling_text", "pad_token_id": None, "embedding_multiplier": 3.0}
        | {"attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 2.0},
        vision=VISION
        | {"num_hidden_layers": 3, "out_hidden_size": 64, "scale_factor": 2}
        | {"deepstack_visual_indexes": [0, 1]},
        outer={"density_router_hidden_size": 8},
        marks=(*_CHATML, "<image>", "<fake_token_around_image>", "<global-img>", *_ROWS),
        image="<image>",
        ids={"image_token_id": "<image>"},
        chat="<image>",
        processor=("GraniteDocling", "granite_docling"),
        settings=CLIP_MEAN | _CUT,
    ),
    "qwen2_vl": _qwen(
        "Qwen2VL",
        {"rope_parameters": QWEN2_ROPE},
        {
            "depth": 4,
            "embed_dim": 32,
            "hidden_size": 64,
            "mlp_ratio": 2,
            "num_heads": 2,
            "patch_size": 14,
        },
        **CLIP_MEAN,
        patch_size=14,
        size={"shortest_edge": 56 * 56, "longest_edge": 56 * 56 * 8},
    ),
    "qwen2_5_vl": _qwen(
        "Qwen2_5_VL",
        {"rope_parameters": QWEN2_ROPE},
        QWEN
        | {
            "patch_size": 14,
            "window_size": 56,
            "fullatt_block_indexes": [1, 3],
            "tokens_per_second": 2,
        },
        **CLIP_MEAN,
        patch_size=14,
        size={"shortest_edge": 56 * 56, "longest_edge": 56 * 56 * 8},
    ),
    "exaone4_5": _qwen(
        "Exaone4_5_",
        {"model_type": "exaone4", "sliding_window": 16}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        QWEN
        | {"hidden_size": 64, "num_heads": 4, "num_key_value_heads": 2}
        | {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1, 3]},
        **CLIP_MEAN,
        patch_size=14,
        size={"shortest_edge": 56 * 56, "longest_edge": 56 * 56 * 8},
    )._replace(
        marks=(*_CHATML, *_PAD_MARKS[:2], "<vision>", "</vision>"),
        ids=dict([*_QWEN_IDS.items()][:2]),
        chat="<vision><|image_pad|></vision>",
    ),
    "minimax_m3": _qwen(
        "MiniMaxM3VL",
        {key: BLOCKS_CHOSEN[key] for key in BLOCKS_CHOSEN if key != "intermediate_size"}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "index_block_size": 64}
        | {"layer_types": ["full_attention", *["minimax_m3_sparse"] * 2], "index_topk_blocks": 2}
        | {"mlp_layer_types": ["dense", "sparse", "dense"]},
        {key: VISION[key] for key in VISION if key != "image_size"} | {"patch_size": 14},
        **CLIP_MEAN,
        patch_size=14,
        size={"shortest_edge": 56 * 56, "longest_edge": 56 * 56 * 8},
    )._replace(
        outer={"projector_hidden_size": 40},
        marks=(*_CHATML, *_MINIMAX_MARKS),
        image=_MINIMAX_MARKS[0],
        ids={"image_token_index": _MINIMAX_MARKS[0], "video_token_index": _MINIMAX_MARKS[1]},
        chat=_MINIMAX_MARKS[0],
    ),
    "video_llama_3": _qwen(
        "VideoLlama3",
        {"model_type": "qwen2"},
        {key: VISION[key] for key in VISION if key != "image_size"},
        **HALF_MEAN,
        patch_size=16,
        temporal_patch_size=1,
        merge_size=1,
        size={"shortest_edge": 32 * 32, "longest_edge": 64 * 64 * 2},
    )._replace(
        marks=(*_CHATML, *_PAD_MARKS[:2]),
        ids=dict([*_QWEN_IDS.items()][:2]),
        chat="<|image_pad|>",
        processor=("VideoLlama3", "video_llama_3"),
    ),
    "dots_ocr": _qwen(
        "DotsOCR",
        {},
        {
            "embed_dim": 32,
            "hidden_size": TEXT["hidden_size"],
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": 14,
            "post_norm": True,
            "rms_norm_eps": 1e-5,
            "spatial_merge_size": 2,
            "temporal_patch_size": 1,
            "use_bias": False,
        },
        **CLIP_MEAN,
        patch_size=14,
        temporal_patch_size=1,
        size={"shortest_edge": 56 * 56, "longest_edge": 56 * 56 * 8},
    )._replace(
        marks=(*_CHATML, "<|imgpad|>", "<|img|>", "<|endofimg|>"),
        image="<|imgpad|>",
        ids={"image_token_id": "<|imgpad|>"},
        chat="<|img|><|imgpad|><|endofimg|>",
    ),
    "ernie4_5_vl_moe": _qwen(
        "Ernie4_5_VLMoe",
        {
            "max_position_embeddings": 2048,
            "moe_intermediate_size": [32, 16],
            "moe_k": 2,
            "moe_num_experts": 4,
            "moe_num_shared_experts": 1,
            "rope_parameters": QWEN2_ROPE | {"mrope_section": [3, 3, 2]},
        },
        {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 14},
        **CLIP_MEAN,
        patch_size=14,
        temporal_patch_size=1,
        size={"shortest_edge": 56 * 56, "longest_edge": 56 * 56 * 8},
    )._replace(
        marks=(*_CHATML, *_ERNIE_IDS.values()),
        image="<|IMAGE_PLACEHOLDER|>",
        ids=_ERNIE_IDS,
        chat="Picture 1:<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        processor=("Ernie4_5_VLMoe", "ernie4_5_vl_moe"),
    ),
    "hunyuan_vl": _qwen(
        "HunYuanVL",
        {
            "head_dim": 16,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0}
            | {"alpha": 4.0, "mrope_section": [2, 2, 2, 2]},
        },
        {key: VISION[key] for key in VISION if key != "image_size"} | {"max_image_size": 80},
        **CLIP_MEAN,
        patch_size=16,
        temporal_patch_size=1,
        size={"shortest_edge": 64 * 64, "longest_edge": 64 * 64 * 8},
    )._replace(
        marks=(*_CHATML, *_HUNYUAN_MARKS),
        image=_HUNYUAN_MARKS[0],
        ids={"image_token_id": _HUNYUAN_MARKS[0]},
        chat=f"{_HUNYUAN_MARKS[1]}{_HUNYUAN_MARKS[0]}{_HUNYUAN_MARKS[2]}",
        processor=("HunYuanVL", "hunyuan_vl"),
    ),
    "hyperclovax_vision_v2": _qwen(
        "HyperCLOVAXVisionV2",
        {"model_type": "hyperclovax", "logits_scaling": 0.5, "residual_multiplier": 0.7},
        QWEN
        | {"hidden_size": 64, "num_heads": 4, "out_hidden_size": 48}
        | {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1, 3]},
        **CLIP_MEAN,
        patch_size=14,
        size={"shortest_edge": 56 * 56, "longest_edge": 56 * 56 * 8},
    )._replace(
        marks=(*_CHATML, *_PAD_MARKS[:2]),
        ids=dict([*_QWEN_IDS.items()][:2]),
        chat="<|image_pad|>",
    ),
    "qwen2_5_omni": _qwen(
        "Qwen2_5OmniThinker",
        {"rope_parameters": QWEN2_ROPE},
        QWEN | {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1, 3]},
        **CLIP_MEAN,
        patch_size=14,
        size={"shortest_edge": 56 * 56, "longest_edge": 56 * 56 * 8},
    )._replace(
        outer={
            "audio_config": WHISPER | {"n_window": 10, "output_dim": 64},
            "position_id_per_seconds": 5,
        },
        marks=(*_CHATML, *_OMNI_MARKS),
        image="<|IMAGE|>",
        ids=_OMNI_IDS,
        chat="<|vision_bos|><|IMAGE|><|vision_eos|>",
    ),
    "qwen3_vl": _qwen3("Qwen3VL", {}),
    "qwen3_vl_moe": _qwen3(
        "Qwen3VLMoe",
        {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
        | {"mlp_only_layers": [1]},
    ),
    "qwen3_omni_moe": _qwen3(
        "Qwen3OmniMoeThinker",
        {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
        | {"mlp_only_layers": [1]},
    )._replace(
        outer={
            "audio_config": WHISPER
            | {"output_dim": 64, "n_window_infer": 200, "downsample_hidden_size": 6},
            "position_id_per_seconds": 6,
        },
        marks=(*_CHATML, *_PAD_MARKS, "<|audio_pad|>", "<|audio_start|>", "<|audio_end|>"),
        ids=_QWEN_IDS
        | {
            "audio_token_id": "<|audio_pad|>",
            "audio_start_token_id": "<|audio_start|>",
            "audio_end_token_id": "<|audio_end|>",
        },
    ),
    "qwen3_5": _qwen3_5("Qwen3_5", {}),
    "qwen3_5_moe": _qwen3_5(
        "Qwen3_5Moe",
        {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 32}
        | {"num_experts": 4, "num_experts_per_tok": 2},
    ),
    "glm4v": _glm("Glm4v", {"model_type": "glm4v_text"}),
    "glm4v_moe": _glm(
        "Glm4vMoe",
        {"model_type": "glm4v_moe_text", "moe_intermediate_size": 24, "n_routed_experts": 4}
        | {"num_experts_per_tok": 2},
    ),
    "glm46v": _glm("Glm46V", {"model_type": "glm4v_text"}),
    "kimi_k25": VisionFamily(
        model="Kimi_K25",
        text=TEXT
        | {"model_type": "deepseek_v3", "num_key_value_heads": 4, "moe_intermediate_size": 32}
        | {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
        | {"q_lora_rank": 24, "kv_lora_rank": 16, "first_k_dense_replace": 1}
        | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
        | {"num_nextn_predict_layers": 0},
        vision={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": 14,
            "pos_emb_height": 6,
            "pos_emb_width": 6,
        },
        outer={"projection_hidden_size": 32},
        marks=(*_CHATML, "<|media_pad|>", *_KIMI_MARKS),
        image="<|media_pad|>",
        ids={
            "image_token_id": "<|media_pad|>",
            "video_token_id": "<|kimi_k25_video_placeholder|>",
        },
        chat="<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
        processor=("Kimi_K25", "kimi_k25"),
        settings=HALF_MEAN
        | {
            "resample": BICUBIC,
            "size": {"max_height": 512, "max_width": 512},
            "max_patches": 32,
            "patch_size": 14,
            "merge_size": 2,
        },
    ),
    "muse_glimmer": VisionFamily(
        model="MuseGlimmer",
        text=TEXT | {"head_dim": 16, "num_hidden_layers": 4, "sliding_window": 16},
        vision={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "patch_size": 14,
            "pos_emb_height": 6,
            "pos_emb_width": 6,
            "layer_types": ["window_attention", "full_attention", "window_attention"],
        },
        outer={"out_hidden_size": 128, "projector_hidden_size": 48},
        marks=(*_CHATML, "<|patch|>", "<|video|>", *_MUSE_MARKS),
        image="<|patch|>",
        ids={"image_token_id": "<|patch|>", "video_token_id": "<|video|>"},
        chat="<|patch|>",
        processor=("MuseGlimmer", "muse_glimmer"),
        settings=HALF_MEAN
        | {
            "resample": LANCZOS,
            "max_image_tokens": 8,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
        },
    ),
    "minicpmv4_6": _minicpm("MiniCPMV4_6", "16x"),
    "minicpmv4_7": _minicpm("MiniCPMV4_7", "16x", _CANVAS_MARKS),
    "minicpm_ocr": _minicpm("MiniCPMOcr", "4x"),
    "glm_ocr": _glm(
        "GlmOcr",
        {"model_type": "glm_ocr_text", "head_dim": 32}
        | {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6]}},
    ),
    "paddleocr_vl": VisionFamily(
        model="PaddleOCRVL",
        text=TEXT
        | {"model_type": "paddleocr_vl_text", "head_dim": 16}
        | {"rope_parameters": QWEN2_ROPE},
        vision=VISION | {"patch_size": 14, "image_size": 70},
        outer={},
        marks=(*_CHATML, "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>"),
        image="<|IMAGE_PLACEHOLDER|>",
        ids={"image_token_id": "<|IMAGE_PLACEHOLDER|>"},
        chat="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        processor=("PaddleOCRVL", "paddleocr_vl"),
        settings=HALF_MEAN
        | {
            "resample": BICUBIC,
            "patch_size": 14,
            "temporal_patch_size": 1,
            "merge_size": 2,
            "size": {"shortest_edge": 56 * 56, "longest_edge": 56 * 56 * 8},
        },
    ),
    "mistral3": VisionFamily(
        model="Mistral3",
        text=TEXT | {"model_type": "mistral"},
        vision=VISION | {"model_type": "pixtral"},
        outer={},
        marks=(*_CHATML, "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        image="[IMG]",
        ids={"image_token_index": "[IMG]"},
        chat="[IMG]",
        processor=("Pixtral", "pixtral"),
        settings=CLIP_MEAN
        | {
            "resample": BICUBIC,
            "size": {"longest_edge": 2 * IMAGE_SIZE},
            "patch_size": 16,
            "spatial_merge_size": 2,
        },
    ),
    "pixtral": VisionFamily(
        model="Llava",
        text=TEXT | {"model_type": "mistral"},
        vision=VISION | {"model_type": "pixtral"},
        outer={"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        marks=(*_CHATML, "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        image="[IMG]",
        ids={"image_token_index": "[IMG]"},
        chat="[IMG]",
        processor=("Pixtral", "pixtral"),
        settings=CLIP_MEAN
        | {"resample": BICUBIC, "size": {"longest_edge": 2 * IMAGE_SIZE}, "patch_size": 16},
    ),
    "lighton_ocr": VisionFamily(
        model="LightOnOcr",
        text=TEXT | {"model_type": "qwen3", "head_dim": 16},
        vision=VISION | {"model_type": "pixtral", "patch_size": 14},
        outer={},
        marks=(*_CHATML, "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
        image="<|image_pad|>",
        ids={"image_token_id": "<|image_pad|>"},
        chat="<|vision_start|><|image_pad|><|vision_end|>",
        processor=("Pixtral", "pixtral"),
        settings=CLIP_MEAN
        | {"resample": BICUBIC, "size": {"longest_edge": 2 * IMAGE_SIZE}, "patch_size": 14},
    ),
    "got_ocr2": VisionFamily(
        model="GotOcr2",
        text=TEXT | {"model_type": "qwen2"},
        vision={
            "hidden_size": 32,
            "output_channels": 24,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": IMAGE_SIZE,
            "patch_size": 4,
            "window_size": 5,
            "global_attn_indexes": [1],
            "mlp_dim": 64,
        },
        outer={},
        marks=(*_CHATML, "<imgpad>", "<img>", "</img>"),
        image="<imgpad>",
        ids={"image_token_index": "<imgpad>"},
        chat="<img><imgpad></img>",
        processor=("GotOcr2", "got_ocr2"),
        settings=CLIP_MEAN
        | {
            "crop_to_patches": False,
            "max_patches": 12,
            "min_patches": 1,
            "resample": BICUBIC,
            "size": _SQUARE,
        },
    ),
    "deepseek_ocr": VisionFamily(
        model="UnlimitedOcr",  # the same tower; so wide a window is none
        text=_DEEPSEEK_OCR | {"sliding_window": 2048},
        vision={
            "sam_config": _SAM | {"mlp_dim": 64},
            "encoder_config": _OCR_ENCODER | {"num_attention_heads": 2, "image_size": 56},
        },
        **_OCR_PROMPTS,
        settings=_WITHIN_SQUARE | {"tile_size": 80},
    ),
    "deepseek_ocr2": VisionFamily(
        model="DeepseekOcr2",
        text=_DEEPSEEK_OCR | {"model_type": "deepseek_ocr2_text"},
        vision={
            "sam_config": _SAM | {"mlp_ratio": 2.0},
            "encoder_config": _OCR_ENCODER | {"num_attention_heads": 4, "num_key_value_heads": 2},
        },
        **_OCR_PROMPTS,
        settings=_WITHIN_SQUARE | {"tile_size": 96},
    ),
    "deepseek_vl2": VisionFamily(
        model="DeepseekVL2",  # see `deepseek_vl2_model`
        text=TEXT
        | {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
        | {"v_head_dim": 12, "num_key_value_heads": 4, "moe_intermediate_size": 24}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
        | {"n_shared_experts": 2, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
        vision={
            "model_type": "vision",
            "layers": 2,
            "width": 32,
            "heads": 2,
            "mlp_ratio": 2.1,
            "image_size": IMAGE_SIZE,
            "patch_size": 12,
        },
        outer={},
        marks=(*_CHATML, "<image>"),
        image="<image>",
        ids={"image_token_id": "<image>"},
        chat="<image>\\n",
        processor=("", ""),
        settings=HALF_MEAN,
    ),
    "ovis2": VisionFamily(
        model="Ovis2",
        text=TEXT | {"model_type": "qwen2"},
        vision=VISION | {"vocab_size": 45, "hidden_stride": 2},
        outer={"vocab_size": VOCAB_SIZE, "hidden_size": 64}
        | {"visual_indicator_token_ids": [443, 444, 445, 446, 447]},
        marks=(*_CHATML, "<IMG_ATOM>", *_OVIS_MARKS, "<image>"),
        image="<image>",
        ids={"image_token_id": "<IMG_ATOM>"},
        chat="<image>\\n",
        processor=("Ovis2", "ovis2"),
        settings=CLIP_MEAN | _CUT,
    ),
    "internvl": VisionFamily(
        model="InternVL",
        text=TEXT | {"model_type": "qwen2"},
        vision=VISION | {"use_qk_norm": True, "attention_bias": True},
        outer={"image_seq_length": 4},
        marks=(*_CHATML, "<IMG_CONTEXT>", "<img>", "</img>"),
        image="<IMG_CONTEXT>",
        ids={"image_token_id": "<IMG_CONTEXT>"},
        chat="<IMG_CONTEXT>\\n",
        processor=("GotOcr2", "got_ocr2"),
        settings=IMAGENET_MEAN | _CUT,
    ),
    "qianfan_ocr": VisionFamily(
        model="QianfanOCR",
        text=TEXT | {"model_type": "qwen3", "head_dim": 16},
        vision=VISION,
        outer={"image_seq_length": 4},
        marks=(*_CHATML, "<IMG_CONTEXT>", "<img>", "</img>", "<image>"),
        image="<IMG_CONTEXT>",
        ids={"image_token_id": "<IMG_CONTEXT>"},
        chat="<image>\\n",
        processor=("GotOcr2", "got_ocr2"),
        settings=IMAGENET_MEAN | _CUT,
    ),
    "aya_vision": VisionFamily(
        model="AyaVision",
        text=_COHERE2,
        vision=VISION | SIGLIP,
        outer={"alignment_intermediate_size": 48},
        marks=(*_CHATML, "<image>", "<|IMG_PATCH|>", *_COHERE_MARKS, *_COHERE_TILES),
        image="<image>",
        ids={"image_token_index": "<|IMG_PATCH|>"},
        chat="<image>",
        processor=("GotOcr2", "got_ocr2"),
        settings=HALF_MEAN | _CUT,
    ),
    "cohere2_vision": VisionFamily(
        model="Cohere2Vision",
        text=_COHERE2,
        vision=VISION | SIGLIP,
        outer={"alignment_intermediate_size": 48},
        marks=(*_CHATML, "<|IMG_PATCH|>", *_COHERE_MARKS, "<|IMG_LINE_BREAK|>"),
        image="<|IMG_PATCH|>",
        ids={"image_token_id": "<|IMG_PATCH|>"},
        chat="<|IMG_PATCH|>",
        processor=("Cohere2Vision", "cohere2_vision"),
        settings=CLIP_MEAN
        | {
            "crop_to_patches": True,
            "max_patches": 4,
            "min_patches": 1,
            "patch_size": 2,
            "resample": BICUBIC,
            "size": _SQUARE,
        },
    ),
    "llama4": VisionFamily(
        model="Llama4",
        text=TEXT
        | {"head_dim": 16, "intermediate_size": 32, "intermediate_size_mlp": 96}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "interleave_moe_layer_step": 2}
        | {"no_rope_layer_interval": 3, "attention_chunk_size": 24, "floor_scale": 16},
        vision=VISION
        | {"intermediate_size": 128, "projector_input_dim": 48, "projector_output_dim": 48}
        | {"vision_output_dim": 48},
        outer={},
        marks=(*_CHATML, "<|image|>", "<|patch|>", *_LLAMA4_MARKS),
        image="<|image|>",
        ids={
            "image_token_index": "<|patch|>",
            "boi_token_index": "<|image_start|>",
            "eoi_token_index": "<|image_end|>",
        },
        chat="<|image|>",
        processor=("Llama4", "llama4"),
        settings=HALF_MEAN
        | {
            "max_patches": 4,
            "resample": BILINEAR,
            "resize_to_max_canvas": False,
            "size": _SQUARE,
        },
    ),
    "lfm3_vl": _qwen(
        "Lfm3Vl",
        {
            "model_type": "lfm3",
            "layer_types": ["conv", "full_attention", "sliding_attention"],
            **{"conv_L_cache": 3, "head_dim": 16, "sliding_window": 32, "pad_token_id": None},
        },
        VISION
        | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
        | {"num_key_value_heads": 1},
        **HALF_MEAN,
        patch_size=16,
        size={"shortest_edge": 64 * 64, "longest_edge": 64 * 64 * 8},
    )._replace(outer={"projector_hidden_size": 48}),
    "lfm2_vl": VisionFamily(
        model="Lfm2Vl",
        text=TEXT
        | {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]}
        | {"conv_L_cache": 3, "block_multiple_of": 32},
        vision=VISION
        | {"model_type": "siglip2_vision_model", "vision_use_head": False, "num_patches": 36},
        outer={"projector_hidden_size": 48},
        marks=(*_CHATML, "<image>", *_LFM2_MARKS),
        image="<image>",
        ids={"image_token_id": "<image>"},
        chat="<image>",
        processor=("Lfm2Vl", "lfm2_vl"),
        settings=HALF_MEAN
        | {
            "resample": BILINEAR,
            "downsample_factor": 2,
            "encoder_patch_size": 16,
            "tile_size": IMAGE_SIZE,
            "min_tiles": 2,
            "max_tiles": 4,
            "min_image_tokens": 2,
            "max_image_tokens": 6,
            "max_pixels_tolerance": 1.5,
            "use_thumbnail": True,
        },
    ),
    "janus": VisionFamily(
        model="Janus",
        text=TEXT | {"model_type": "llama"},
        vision={
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "mlp_ratio": 2.0,
            "image_size": IMAGE_SIZE,
            "patch_size": 16,
            "projection_dim": 64,
        },
        outer={
            "vq_config": {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1}
            | {"latent_channels": 32, "num_embeddings": 16, "image_token_embed_dim": 64}
            | {"projection_dim": 64}
        },
        marks=(*_CHATML, "<image_placeholder>", "<begin_of_image>", "<end_of_image>"),
        image="<image_placeholder>",
        ids={"image_token_id": "<image_placeholder>"},
        chat="<image_placeholder>\\n",
        processor=("Janus", "janus"),
        settings=CLIP_MEAN | {"do_pad": True, "min_size": 14, "resample": BICUBIC, "size": _SQUARE},
    ),
    "deepseek_vl": VisionFamily(
        model="DeepseekVL",
        text=TEXT | {"model_type": "llama"},
        vision=VISION | SIGLIP,
        outer={},
        marks=(*_CHATML, "<image_placeholder>"),
        image="<image_placeholder>",
        ids={"image_token_id": "<image_placeholder>"},
        chat="<image_placeholder>\\n",
        processor=("DeepseekVL", "deepseek_vl"),
        settings=CLIP_MEAN | {"do_pad": True, "min_size": 14, "resample": BICUBIC, "size": _SQUARE},
    ),
    "gemma3": VisionFamily(
        model="Gemma3",
        text=TEXT
        | {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 16}
        | {"query_pre_attn_scalar": 16}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        vision=VISION | SIGLIP | {"patch_size": 8},
        outer={"mm_tokens_per_image": 16},
        marks=("<end_of_turn>", "<start_of_turn>", *_SOFT_MARKS),
        image="<image_soft_token>",
        ids={
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        chat="<start_of_image>",
        processor=("Gemma3", "gemma3"),
        settings=HALF_MEAN
        | {
            "do_pan_and_scan": None,
            "resample": BILINEAR,
            "size": _SQUARE,
            "image_seq_length": 16,
        },
    ),
    "paligemma": VisionFamily(
        model="PaliGemma",
        text=TEXT
        | {"model_type": "gemma", "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh"},
        vision=VISION | SIGLIP | {"projection_dim": 64},
        outer={"projection_dim": 64},
        marks=("<eos>", "<bos>", "<image>"),
        image="<image>",
        ids={"image_token_index": "<image>"},
        chat="<image>",
        processor=("Siglip", "siglip"),
        settings=HALF_MEAN | {"resample": BICUBIC, "size": _SQUARE, "image_seq_length": 16},
    ),
    "blip_2": VisionFamily(
        model="Blip2",
        text=TEXT
        | {"model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 64}
        | {"max_position_embeddings": 512},
        vision=VISION,
        outer={
            "num_query_tokens": 16,
            "qformer_config": {
                "hidden_size": 48,
                "intermediate_size": 64,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
            },
        },
        marks=("</s>", "<s>", "<image>"),
        image="<image>",
        ids={"image_token_index": "<image>"},
        chat="<image>",
        processor=("Blip", "blip"),
        settings=CLIP_MEAN | {"resample": BICUBIC, "size": _SQUARE},
    ),
    "gemma4": _gemma4({"use_bidirectional_attention": "vision"}, {"standardize": True}),
    "gemma4_unified": _gemma4(
        {"use_bidirectional_attention": "vision", "attention_k_eq_v": True}
        | {"num_kv_shared_layers": 0, "num_global_key_value_heads": 1}
        | {"hidden_size_per_layer_input": 0},
        {},
    )._replace(
        model="Gemma4Unified",
        vision={
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "mm_embed_dim": 48,
            "output_proj_dims": 48,
            "mm_posemb_size": 80,
        },
        processor=("Gemma4Unified", "gemma4_unified"),
    ),
    "gemma4-large": _gemma4(
        {"use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0}
        | {"num_kv_shared_layers": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        {"standardize": True, "use_clipped_linears": False},
    ),
}
