"""The text of a request that the model's encoder reads, as an item."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import numpy as np

from shmllm.params.items import Item
from shmllm.params.request import EngineCoreRequest


def take_encoder_text(request: EngineCoreRequest) -> None:
    """Make an item of the text that a request has for the encoder, if it has one."""
    if request.encoder_token_ids:
        request.items = (item_of_text(request.encoder_token_ids),)


def item_of_text(token_ids: Sequence[int]) -> Item:
    """Return the item that an encoder computes of a text, which takes the first positions.

    Args:
        token_ids: at least one.
    """
    data = np.array(token_ids, np.int64)
    identity = sha256(b"text" + data.tobytes()).digest()
    return Item(identity, ((0, len(data)),), (len(data), 1, 1), data, "text")
