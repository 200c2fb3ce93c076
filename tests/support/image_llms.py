"""What an `LLM` makes of images, for tests that compare it with transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shmllm import LLM
from shmllm.frontend.prompt_images import GivenImages


def tiles_of(llm: LLM, images: Sequence[Any]) -> list[npt.NDArray[np.uint8]]:
    """The pixels of each image, [tiles, height, width, 3], as the engine gets them."""
    given = GivenImages(images, [None] * len(images), {})
    return [each.prepared.pixels for each in llm.front_end.images.ready("a prompt", given)]
