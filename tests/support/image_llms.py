"""What an `LLM` makes of images, for tests that compare it with transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shmllm import LLM
from shmllm.frontend.given_items import GivenItem, GivenItems
from shmllm.frontend.items.prepared import PreparedItem


def prepared_of(llm: LLM, images: Sequence[Any]) -> list[PreparedItem]:
    """Images as the engine gets them; their parts, if they have some."""
    given = GivenItems([GivenItem("image", each) for each in images])
    ready = llm.front_end.items.ready("a prompt", given)
    return [part for each in ready for part in each.prepared.parts]
