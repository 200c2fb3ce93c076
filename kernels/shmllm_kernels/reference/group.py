"""The sum of the parts of a result that the ranks of a group have computed."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_parts(parts: Tensor) -> Tensor:
    """Returns ``parts[0] + parts[1] + ...``, added in this order.

    Args:
        parts: [ranks, ...]; floats are added in float32, and the sum is rounded to their dtype.
    """
    kind = parts.dtype if not parts.dtype.is_floating_point else torch.float32
    total = parts[0].to(kind)
    for part in parts[1:]:
        total = total + part.to(kind)
    return total.to(parts.dtype)
