"""The requests of `init_weight_transfer_engine` and `update_weights` as objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class WeightTransferInitRequest:
    """
    Attributes:
        init_info: how to connect with the trainer; the backend says what it contains.
    """

    init_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class WeightTransferUpdateRequest:
    """
    Attributes:
        update_info: what the trainer sends, or a list with an entry for each worker.
    """

    update_info: dict[str, Any] | list[dict[str, Any]] = field(default_factory=dict)
