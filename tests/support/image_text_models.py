"""Small random models of images and texts made by transformers, and its vectors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image
from support.pooling_models import draw, write_tokenizer
from tokenizers import Tokenizer, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.models.chinese_clip.image_processing_pil_chinese_clip import (
    ChineseCLIPImageProcessorPil,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

BEGIN, END = 0, 1
TEXT: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 24,
    "bos_token_id": BEGIN,
    "eos_token_id": END,
}
VISION: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 16,
}
TEXTS = ["2 3 4 5", "7", "10 11 12 100 200 250 3 2 2"]


class Kind(NamedTuple):
    """
    Attributes:
        name: the beginning of transformers' classes.
        text, vision, outer: what config.json has beside TEXT and VISION.
        template: what the tokenizer makes of a text.
        fills: whether the processor fills texts.
        images: prepares images.
    """

    name: str
    text: dict[str, Any]
    vision: dict[str, Any]
    outer: dict[str, Any]
    template: str
    fills: bool
    images: Any


_SIDE = {"image_size": 64}
_CUT: dict[str, Any] = {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}}
_WHOLE: dict[str, Any] = {"size": {"height": 64, "width": 64}}
_CLIP = Kind(
    "CLIP",
    {},
    _SIDE,
    {"projection_dim": 40},
    "<bos> $A <eos>",
    False,
    CLIPImageProcessorPil(**_CUT),
)
_SIGLIP = Kind(
    "Siglip",
    {"projection_size": 48},
    _SIDE,
    {},
    "$A <eos>",
    True,
    SiglipImageProcessorPil(**_WHOLE),
)
KINDS = {
    "clip": _CLIP,
    "metaclip_2": _CLIP._replace(name="MetaClip2"),
    "chinese_clip": _CLIP._replace(
        name="ChineseCLIP", images=ChineseCLIPImageProcessorPil(**_WHOLE, do_center_crop=False)
    ),
    "siglip": _SIGLIP,
    "siglip2": _SIGLIP._replace(
        name="Siglip2",
        vision={"num_patches": 16},
        images=Siglip2ImageProcessorPil(max_num_patches=20),
    ),
}


class ImageTextModel(NamedTuple):
    """
    Attributes:
        kind: its name in KINDS.
        directory: where its files are.
        model: transformers' model.
    """

    kind: str
    directory: Path
    model: Any

    def token_ids(self, text: str) -> list[int]:
        """What transformers' processor makes of a text."""
        tokenizer = PreTrainedTokenizerFast.from_pretrained(self.directory)
        most = TEXT["max_position_embeddings"]
        fill = {"padding": "max_length", "max_length": most} if KINDS[self.kind].fills else {}
        ids: list[int] = tokenizer(text, **fill)["input_ids"]
        return ids

    @torch.inference_mode()
    def vector(self, given: str | Image.Image | Sequence[int]) -> Tensor:
        """What transformers computes of a text, of token ids or of an image."""
        if isinstance(given, Image.Image):
            inputs = KINDS[self.kind].images(given, return_tensors="pt")
            found: Tensor = self.model.get_image_features(**inputs).pooler_output[0]
            return found
        ids = self.token_ids(given) if isinstance(given, str) else list(given)
        of_text: Tensor = self.model.get_text_features(torch.tensor([ids])).pooler_output[0]
        return of_text


def make_image_text_model(
    kind: str,
    directory: Path,
    *,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    **outer: Any,
) -> ImageTextModel:
    """A random float32 model of transformers in `directory`.

    Args:
        kind: one of KINDS.
        directory: where its files are written to.
        text, vision: further fields of config.json's ``text_config`` and ``vision_config``.
        outer: further fields of config.json itself.
    """
    recipe = KINDS[kind]
    torch.manual_seed(7)
    config = getattr(transformers, f"{recipe.name}Config")(
        text_config=TEXT | recipe.text | (text or {}),
        vision_config=VISION | recipe.vision | (vision or {}),
        **recipe.outer | outer,
    )
    model = getattr(transformers, f"{recipe.name}Model")(config).eval()
    draw(model)
    model.save_pretrained(directory)
    recipe.images.save_pretrained(directory)
    write_tokenizer(directory, "<bos>", "<eos>")
    path = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=recipe.template, special_tokens=[("<bos>", BEGIN), ("<eos>", END)]
    )
    tokenizer.save(str(path))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<eos>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    return ImageTextModel(kind, directory, model)


def some_images() -> list[Image.Image]:
    """Images of several sizes."""
    rng = np.random.default_rng(1)
    sizes = (64, 64), (100, 70), (50, 130)
    return [Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]


def prompt_of(given: Any) -> Any:
    """A prompt for `LLM.embed`."""
    is_image = isinstance(given, Image.Image)
    return {"prompt": "", "multi_modal_data": {"image": given}} if is_image else given
