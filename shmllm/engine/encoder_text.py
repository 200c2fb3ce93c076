"""The text of a request that the model's encoder reads, as an item."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import numpy as np

from shmllm.params.items import Item


def item_of_text(token_ids: Sequence[int]) -> Item:
    """Return the item that an encoder computes of a text, which takes the first positions.

    Args:
        token_ids: at least one.
    """
    data = np.array(token_ids, np.int64)
    identity = sha256(b"text" + data.tobytes()).digest()
    return Item(identity, ((0, len(data)),), (len(data), 1, 1), data, "text")
