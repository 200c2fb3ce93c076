"""The texts of prompts of PaliGemma and BLIP-2, compared with what transformers' processors make of
them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from tokenizers.processors import TemplateProcessing
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil
from transformers.models.blip_2.processing_blip_2 import Blip2Processor
from transformers.models.paligemma.processing_paligemma import PaliGemmaProcessor

from shmllm.errors import EngineStartError
from shmllm.frontend.items.registry import processors_of_model
from shmllm.frontend.placeholders.family import Config
from shmllm.frontend.placeholders.paligemma import PaliGemmaPlaceholder

PLACEHOLDER = PaliGemmaPlaceholder.of(Config({"vision_config": {"patch_size": 14}}), {})


def of_transformers(text: str, count: int) -> str:
    processor: Any = object.__new__(PaliGemmaProcessor)
    processor.tokenizer = SimpleNamespace(bos_token="<bos>")
    processor.fetch_images = lambda images: images
    image = __import__("PIL.Image").Image.new("RGB", (2, 2))
    _, texts, *_ = processor.prepare_inputs_layout([[image] * count], [text])
    return str(texts[0])


@pytest.mark.parametrize(
    ("text", "count"),
    [("caption en", 1), ("", 1), ("both?", 2), ("<image>caption en", 1), ("a<image><image> b", 2)],
)
def test_the_text_is_that_of_transformers(text: str, count: int) -> None:
    assert PLACEHOLDER.complete(text, count) == of_transformers(text, count)


def test_a_newline_at_the_end_is_not_doubled() -> None:
    assert PLACEHOLDER.complete("caption en\n", 1) == "<image><bos>caption en\n"


def test_the_number_of_tokens_is_that_of_patches() -> None:
    assert PLACEHOLDER.tokens == 256
    with pytest.raises(EngineStartError, match="'image_size' must be an integer"):
        PaliGemmaPlaceholder.of(Config({"vision_config": {"image_size": "x"}}), {})


@pytest.mark.parametrize("text", ["Question: which one? Answer:", ""])
def test_queries_of_blip_2_are_before_the_beginning_of_the_text(
    text: str, make_tokenizer: Callable[..., Any], tmp_path: Path
) -> None:
    tokenizer = make_tokenizer(["</s>", "<image>"])
    begin = ("</s>", tokenizer.convert_tokens_to_ids("</s>"))
    template = TemplateProcessing(single="</s> $A", special_tokens=[begin])
    tokenizer.backend_tokenizer.post_processor = template
    images = BlipImageProcessorPil(size={"height": 64, "width": 64})
    image = Image.new("RGB", (50, 70), "teal")
    theirs = Blip2Processor(images, tokenizer, num_query_tokens=5)(images=image, text=text)
    images.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = {
        "architectures": ["Blip2ForConditionalGeneration"],
        "image_token_index": tokenizer.convert_tokens_to_ids("<image>"),
        "num_query_tokens": 5,
        "vision_config": {"image_size": 64},
    }
    ours = processors_of_model(tmp_path, config)["image"]
    completed = ours.complete(text, 1)
    assert completed is not None
    expanded = ours.expand_text("prompt", completed, [ours.prepare(image)])
    found = tokenizer.encode(expanded, add_special_tokens=False)
    assert found == list(map(int, theirs["input_ids"][0]))
