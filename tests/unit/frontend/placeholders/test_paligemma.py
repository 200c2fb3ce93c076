"""The text of a prompt of PaliGemma, compared with what transformers' processor makes of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers.models.paligemma.processing_paligemma import PaliGemmaProcessor

from shmllm.errors import EngineStartError
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
