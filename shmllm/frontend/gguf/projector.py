"""The files of a model that sees images, from the metadata of its text model and of the GGUF file
with its tower: config.json and preprocessor_config.json.

A text model with a tower is a line in WHOLE; `tower_fields` has the towers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from shmllm.errors import EngineStartError
from shmllm.formats.gguf import GgufHeader, read_header, shown
from shmllm.formats.gguf_projectors import ARCHITECTURE, projector_of
from shmllm.frontend.gguf.metadata import Metadata
from shmllm.frontend.gguf.tower_fields import OF_TOWER, Json, Tower

logger = logging.getLogger(__name__)


class Whole(NamedTuple):
    """transformers' names of a model of a text model and a tower.

    Attributes:
        architecture: the class.
        model_type: the type of the whole.
        text_type: that of the text model.
    """

    architecture: str
    model_type: str
    text_type: str


def _whole(stem: str, model_type: str, text_type: str = "") -> Whole:
    name = f"{stem}ForConditionalGeneration"
    return Whole(name, model_type, text_type or f"{model_type}_text")


WHOLE: dict[tuple[str, str], Whole] = {
    ("gemma3", "gemma3"): _whole("Gemma3", "gemma3"),
    ("smolvlm", "llama"): _whole("SmolVLM", "smolvlm", "llama"),
    ("mistral3", "llama"): _whole("Mistral3", "mistral3", "mistral"),
    ("mistral3", "mistral3"): _whole("Mistral3", "mistral3", "ministral3"),
    ("qwen2_vl", "qwen2vl"): _whole("Qwen2VL", "qwen2_vl"),
    ("qwen2_5_vl", "qwen2vl"): _whole("Qwen2_5_VL", "qwen2_5_vl"),
    ("qwen3_vl", "qwen3vl"): _whole("Qwen3VL", "qwen3_vl"),
    ("qwen3_vl", "qwen3vlmoe"): _whole("Qwen3VLMoe", "qwen3_vl_moe"),
    ("qwen3_vl", "qwen35"): _whole("Qwen3_5", "qwen3_5"),
    ("qwen3_vl", "qwen35moe"): _whole("Qwen3_5Moe", "qwen3_5_moe"),
}
"""By the types of towers and llama.cpp's architectures of text models."""


def find_projector(
    paths: Sequence[Path], text: GgufHeader, config: Json
) -> tuple[Path | None, dict[str, Json]]:
    """The first file with a tower of this model, and the contents of config.json and
    preprocessor_config.json. None of several files is one: a warning says why the first is not.

    Args:
        paths: the files with towers.
        text: the header of the text model.
        config: the content of config.json of the text model.
    """
    problems = []
    for path in paths:
        try:
            return path, _files(read_header(path), text, config)
        except EngineStartError as problem:
            problems.append(problem)
    if problems:
        logger.warning("%s sees no images: %s", text.path.name, problems[0])
    return None, {}


def _files(header: GgufHeader, text: GgufHeader, config: Json) -> dict[str, Json]:
    if header.architecture != ARCHITECTURE:
        raise header.error(f"architecture {shown(header.architecture)} is no tower of images")
    family, tower = projector_of(header), Tower(header, text)
    found = WHOLE.get((family.model_type, text.architecture))
    if found is None:
        raise header.error(f"{family.title} does not belong to a model {shown(text.architecture)}")
    width, own = config["hidden_size"], tower.whole("projection_dim")
    if own != width:
        raise header.error(
            f"the tower makes embeddings of {own:,} numbers, those of the model have {width:,}"
        )
    outer, processor = OF_TOWER[family.model_type](tower)
    kept = {name: config[name] for name in _KEPT if name in config}
    whole = {"architectures": [found.architecture], "model_type": found.model_type}
    inner = {name: value for name, value in config.items() if name != "architectures"}
    inner |= {"model_type": found.text_type, **_axes(text, inner)}
    return {
        "config.json": {**kept, **whole, "text_config": inner, **outer},
        "preprocessor_config.json": processor,
    }


_KEPT = "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"
"""The fields that the whole model has, too."""


def _axes(text: GgufHeader, config: Json) -> Json:
    """The fields of a rotation by the axes of images, which text does not need."""
    sections = Metadata(text).find("rope.dimension_sections")
    if sections is None:
        return {}
    if config.get("rope_scaling"):
        raise text.error("a lengthened context beside images is not supported")
    if not isinstance(sections, list) or not all(type(each) is int for each in sections):
        raise text.error(f"rope.dimension_sections must be whole numbers, found {shown(sections)}")
    return {"rope_scaling": {"rope_type": "default", "mrope_section": sections[:3]}}
