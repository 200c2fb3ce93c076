"""The files of a model that sees images, from the metadata of its text model and of the GGUF file
with its tower: config.json and preprocessor_config.json.

A tower is a function and a line in OF_TOWER.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shmllm.errors import EngineStartError
from shmllm.formats.gguf import GgufHeader, read_header, shown
from shmllm.formats.gguf_projectors import ARCHITECTURE, projector_of

logger = logging.getLogger(__name__)

Json = dict[str, Any]

_MODEL_TYPES = {"gemma3": "gemma3_text"}
"""The types of text models that towers belong to."""
PREPROCESSOR = "preprocessor_config.json"
_BILINEAR = 2


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

    def token(self, text: str) -> int:
        """The id of a token of the text model."""
        if not isinstance(self._tokens, list) or text not in self._tokens:
            raise self._text.error(f"no token {text}, which stands for an image")
        return self._tokens.index(text)


def projector_files(path: Path, text: GgufHeader, config: Json) -> dict[str, Json]:
    """The contents of config.json and preprocessor_config.json; empty, with a warning, if the file
    cannot be used with the model that it lies beside.

    Args:
        path: the file with the tower.
        text: the header of the text model.
        config: the content of config.json of the text model.
    """
    try:
        return _files(read_header(path), text, config)
    except EngineStartError as problem:
        logger.warning("%s sees no images: %s", text.path.name, problem)
        return {}


def _files(header: GgufHeader, text: GgufHeader, config: Json) -> dict[str, Json]:
    if header.architecture != ARCHITECTURE:
        raise header.error(f"architecture {shown(header.architecture)} is no tower of images")
    family, tower = projector_of(header), Tower(header, text)
    if config["model_type"] != _MODEL_TYPES[family.model_type]:
        raise header.error(f"{family.title} does not belong to a {config['model_type']}")
    width, found = config["hidden_size"], tower.whole("projection_dim")
    if found != width:
        raise header.error(
            f"the tower makes embeddings of {found:,} numbers, those of the model have {width:,}"
        )
    outer, processor = OF_TOWER[family.model_type](tower)
    kept = {name: config[name] for name in _KEPT if name in config}
    whole = {"architectures": [family.architecture], "model_type": family.model_type}
    inner = {name: value for name, value in config.items() if name != "architectures"}
    return {
        "config.json": {**kept, **whole, "text_config": inner, **outer},
        PREPROCESSOR: processor,
    }


_KEPT = "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"
"""The fields that the whole model has, too."""


def _encoder(tower: Tower, kind: str) -> Json:
    """The fields of an encoder of squares."""
    return {
        "model_type": kind,
        "hidden_size": tower.whole("embedding_length"),
        "intermediate_size": tower.whole("feed_forward_length"),
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


OF_TOWER: dict[str, Callable[[Tower], tuple[Json, Json]]] = {"gemma3": _gemma3}
"""By the type of the whole model."""
