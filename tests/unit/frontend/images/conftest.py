"""Random images, and tokenizers with the tokens that stand for images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tokenizers
from PIL import Image
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@pytest.fixture
def random_image() -> Callable[..., Image.Image]:
    """Makes an RGB image of random pixels, the same for the same sides."""

    def make(width: int, height: int, seed: int = 0) -> Image.Image:
        random = np.random.default_rng([seed, width, height])
        return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))

    return make


@pytest.fixture
def make_tokenizer() -> Callable[..., Any]:
    """Makes a tokenizer of transformers with one token a byte, and tokens of several newlines."""

    def make(special: list[str], newlines: int = 0, **names: str) -> Any:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {character: index for index, character in enumerate(alphabet)}
        tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        runs = [AddedToken("\n" * n, normalized=False) for n in range(1, newlines + 1)]
        tokenizer.add_tokens(runs)
        tokenizer.add_special_tokens(special)
        named = {"extra_special_tokens": names} if names else {}
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)

    return make
