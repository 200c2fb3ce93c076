"""Numbers in the format e4m3 with scales for blocks, rows or whole matrices; methods share this."""

from __future__ import annotations

from shmllm.models.checkpoint_formats.components import FLOAT8, Components
from shmllm.models.checkpoint_formats.stored import Float8Matrix


def float8_shape(parts: Components) -> tuple[int, int]:
    rows, width = parts.header(".weight", (FLOAT8,), (None, None)).shape
    return rows, width


def float8_matrix(
    parts: Components, scale: str, block: tuple[int, int] | None = None
) -> Float8Matrix:
    """
    Args:
        parts: the components.
        scale: the end of the name of the scales.
        block: the rows and columns of a block; None: there is a scale for each row, or one for all.
    """
    rows, width = float8_shape(parts)
    error = lambda: parts.error(".weight", "has values that are not numbers")  # noqa: E731
    if block is not None:
        shape = -(-rows // block[0]), -(-width // block[1])
        return Float8Matrix((rows, width), block, parts.scales(scale, shape), error)
    scales = parts.scales(scale)
    if scales.numel() == 1:
        return Float8Matrix((rows, width), (rows, width), scales.view(1, 1), error)
    if tuple(scales.shape) not in ((rows,), (rows, 1)):
        raise parts.error(scale, f"has shape {list(scales.shape)}, it must have [{rows}, 1] or [1]")
    return Float8Matrix((rows, width), (1, width), scales.view(rows, 1), error)
