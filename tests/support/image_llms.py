"""What an `LLM` makes of images, for tests that compare it with transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shmllm import LLM
from shmllm.frontend.prompt_items import GivenItem, GivenItems


def tiles_of(llm: LLM, images: Sequence[Any]) -> list[npt.NDArray[np.uint8]]:
    """The pixels of each image, [tiles, height, width, 3], as the engine gets them."""
    given = GivenItems([GivenItem("image", each) for each in images])
    return [each.prepared.data for each in llm.front_end.items.ready("a prompt", given)]
