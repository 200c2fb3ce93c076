"""What config.json and preprocessor_config.json say of a tower of images, from the metadata of its
GGUF file.

A tower is a function and a line in OF_TOWER.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from shmllm.formats.gguf import GgufHeader, shown
from shmllm.formats.gguf_projectors import LAYERS, deepstack_layers

Json = dict[str, Any]

_LANCZOS, _BILINEAR, _BICUBIC = 1, 2, 3
"""pillow's numbers of filters."""
_FRAMES = 2


class Tower:
    """The checked metadata of a file with a tower.

    Args:
        header: of that file.
        text: the header of the text model.
    """

    def __init__(self, header: GgufHeader, text: GgufHeader) -> None:
        self.header = header
        self._tokens = text.metadata.get("tokenizer.ggml.tokens")
        self._text = text

    def whole(self, name: str, default: int | None = None) -> int:
        """A positive whole number of clip.vision."""
        value = self.header.metadata.get(f"clip.vision.{name}", default)
        if type(value) is not int or value < 1:
            raise self.header.error(
                f"clip.vision.{name} must be a positive whole number, found {shown(value)}"
            )
        return value

    def number(self, name: str) -> float:
        """A positive number of clip.vision."""
        value = self.header.metadata.get(f"clip.vision.{name}")
        if not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self.header.error(
                f"clip.vision.{name} must be a positive number, found {shown(value)}"
            )
        return float(value)

    def flag(self, name: str) -> bool:
        """Whether clip says so."""
        return self.header.metadata.get(f"clip.{name}") is True

    def colours(self, name: str) -> list[float]:
        """A number for each colour of clip.vision."""
        value: Any = self.header.metadata.get(f"clip.vision.{name}")
        numbers = value if isinstance(value, list) else []
        if len(numbers) != 3 or not all(
            type(each) is float and math.isfinite(each) for each in numbers
        ):
            raise self.header.error(
                f"clip.vision.{name} must have a number for each colour, found {shown(value)}"
            )
        return numbers

    def rows(self, name: str) -> int:
        """The number of rows of a matrix."""
        found = self.header.tensors.get(name)
        if found is None or len(found.shape) != 2:
            raise self.header.error(f"no matrix {name}")
        return found.shape[0]

    def inner(self) -> int:
        """The width of the activation of an MLP: what the projection to it or from it has beside
        the width of the stream."""
        width = self.whole("embedding_length")
        found = self.header.tensors.get(f"{LAYERS}.0.ffn_up.weight")
        shape = () if found is None else found.shape
        if len(shape) != 2 or width not in shape:
            raise self.header.error(f"no matrix {LAYERS}.0.ffn_up.weight of the width {width:,}")
        return shape[0] if shape[1] == width else shape[1]

    def token(self, text: str) -> int:
        """The id of a token of the text model."""
        if not isinstance(self._tokens, list) or text not in self._tokens:
            raise self._text.error(f"no token {text}, which stands for an image")
        return self._tokens.index(text)


def _encoder(tower: Tower, kind: str) -> Json:
    """The fields of an encoder of squares."""
    return {
        "model_type": kind,
        "hidden_size": tower.whole("embedding_length"),
        "intermediate_size": tower.inner(),
        "num_hidden_layers": tower.whole("block_count"),
        "num_attention_heads": tower.whole("attention.head_count"),
        "image_size": tower.whole("image_size"),
        "patch_size": tower.whole("patch_size"),
        "layer_norm_eps": tower.number("attention.layer_norm_epsilon"),
    }


def _gemma3(tower: Tower) -> tuple[Json, Json]:
    encoder = _encoder(tower, "siglip_vision_model")
    size = encoder["image_size"]
    side = size // encoder["patch_size"] // tower.whole("projector.scale_factor", 4)
    tokens = {
        "boi_token_index": "<start_of_image>",
        "eoi_token_index": "<end_of_image>",
        "image_token_index": "<image_soft_token>",
    }
    fields = {name: tower.token(text) for name, text in tokens.items()}
    processor = {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": size, "width": size},
        "resample": _BILINEAR,
        "image_mean": tower.colours("image_mean"),
        "image_std": tower.colours("image_std"),
    }
    return {"vision_config": encoder, "mm_tokens_per_image": side**2, **fields}, processor


def _smolvlm(tower: Tower) -> tuple[Json, Json]:
    encoder = _encoder(tower, "smolvlm_vision")
    size = encoder["image_size"]
    fields = {
        "scale_factor": tower.whole("projector.scale_factor", 2),
        "image_token_id": tower.token("<image>"),
    }
    processor = {
        "image_processor_type": "SmolVLMImageProcessor",
        "do_image_splitting": True,
        "size": {"longest_edge": tower.whole("preproc_image_size", 4 * size)},
        "max_image_size": {"longest_edge": size},
        "resample": _LANCZOS,
        "image_mean": tower.colours("image_mean"),
        "image_std": tower.colours("image_std"),
    }
    return {"vision_config": encoder, **fields}, processor


def _mistral3(tower: Tower) -> tuple[Json, Json]:
    """Files do not say how large images may be, which is what the tower was trained for."""
    if "mm.patch_merger.weight" not in tower.header.tensors:
        raise tower.header.error("the tower of Pixtral 12B is not supported")
    encoder = _encoder(tower, "pixtral") | {
        "hidden_act": "gelu" if tower.flag("use_gelu") else "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    del encoder["layer_norm_eps"]
    merge, patch = tower.whole("spatial_merge_size", 2), encoder["patch_size"]
    fields = {
        "spatial_merge_size": merge,
        "vision_feature_layer": -1,
        "multimodal_projector_bias": "mm.1.bias" in tower.header.tensors,
        "projector_hidden_act": "gelu",
        "image_token_index": tower.token("[IMG]"),
    }
    processor = {
        "image_processor_type": "PixtralImageProcessorFast",
        "size": {"longest_edge": encoder["image_size"]},
        "patch_size": patch,
        "spatial_merge_size": merge,
        "resample": _BICUBIC,
        "image_mean": tower.colours("image_mean"),
        "image_std": tower.colours("image_std"),
    }
    return {"vision_config": encoder, **fields}, processor


def _qwen(tower: Tower, *, fewest: int, most: int) -> tuple[Json, Json]:
    """What all have, with the bounds of the pixels of an image where the file says none."""
    merge, patch = tower.whole("spatial_merge_size", 2), tower.whole("patch_size")
    encoder = {
        "depth": tower.whole("block_count"),
        "num_heads": tower.whole("attention.head_count"),
        "patch_size": patch,
        "spatial_merge_size": merge,
        "temporal_patch_size": _FRAMES,
    }
    tokens = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    fields = {name: tower.token(text) for name, text in tokens.items()}
    processor = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {
            "shortest_edge": tower.whole("image_min_pixels", fewest),
            "longest_edge": tower.whole("image_max_pixels", most),
        },
        "patch_size": patch,
        "temporal_patch_size": _FRAMES,
        "merge_size": merge,
        "image_mean": tower.colours("image_mean"),
        "image_std": tower.colours("image_std"),
    }
    return {"vision_config": encoder, **fields}, processor


def _qwen2_vl(tower: Tower) -> tuple[Json, Json]:
    """Files have the width of the embeddings in place of that of an MLP's activation."""
    fields, processor = _qwen(tower, fewest=56**2, most=3584**2)
    width = tower.whole("embedding_length")
    fields["vision_config"] |= {
        "embed_dim": width,
        "hidden_size": tower.whole("projection_dim"),
        "mlp_ratio": tower.inner() // width,
        "hidden_act": "quick_gelu",
    }
    return fields, processor


def _qwen2_5_vl(tower: Tower) -> tuple[Json, Json]:
    fields, processor = _qwen(tower, fewest=56**2, most=3584**2)
    period, depth = tower.whole("n_wa_pattern"), fields["vision_config"]["depth"]
    fields["vision_config"] |= {
        "hidden_size": tower.whole("embedding_length"),
        "intermediate_size": tower.inner(),
        "out_hidden_size": tower.whole("projection_dim"),
        "window_size": tower.whole("window_size", 112),
        "fullatt_block_indexes": list(range(period - 1, depth, period)),
        "tokens_per_second": 2,
        "hidden_act": "silu",
    }
    return fields, processor


def _qwen3_vl(tower: Tower) -> tuple[Json, Json]:
    fields, processor = _qwen(tower, fewest=256**2, most=4096**2)
    fields["vision_config"] |= {
        "hidden_size": tower.whole("embedding_length"),
        "intermediate_size": tower.inner(),
        "out_hidden_size": tower.whole("projection_dim"),
        "num_position_embeddings": tower.rows("v.position_embd.weight"),
        "deepstack_visual_indexes": deepstack_layers(tower.header),
        "hidden_act": "gelu_pytorch_tanh",
    }
    return fields, processor


OF_TOWER: dict[str, Callable[[Tower], tuple[Json, Json]]] = {
    "gemma3": _gemma3,
    "smolvlm": _smolvlm,
    "mistral3": _mistral3,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
}
"""By the type of the tower."""
