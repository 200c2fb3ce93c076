"""Reads the window of attention from the function that transformers makes masks with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shmllm.models.transformers_impl.interface import UnsupportedCallError


def find_window(function: Callable[..., Any], length: int) -> int | None:
    """Returns the number of positions that a token attends to, its own included; None: all.

    Args:
        function: (batch, head, query position, key position) -> whether the token attends.
        length: the number of positions.

    Raises:
        UnsupportedCallError: a token does not attend to exactly the last positions up to its own.
    """
    keys = torch.arange(length)[None, None, None, :]
    zero = torch.zeros((1, 1, 1, 1), dtype=torch.int64)

    def attended(query: int) -> Tensor:
        try:
            row = function(zero, zero, torch.full((1, 1, 1, 1), query), keys)
        except (IndexError, RuntimeError) as error:
            raise UnsupportedCallError("its mask depends on more than positions") from error
        return torch.as_tensor(row).expand(1, 1, 1, length).flatten()

    window = int(attended(length - 1).sum())
    queries = {0, 1, window - 1, window, window + 1, length // 2, length - 2, length - 1}
    for query in queries & set(range(length)):
        positions = torch.arange(length)
        expected = (positions <= query) & (positions > query - window)
        if not bool((attended(query) == expected).all()):
            raise UnsupportedCallError("its mask is neither causal nor a causal sliding window")
    return None if window == length else window
