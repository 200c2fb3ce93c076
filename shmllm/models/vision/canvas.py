"""The tokens around images and their slices in prompts. This module must not import torch."""

from __future__ import annotations

from typing import NamedTuple


class CanvasMarks(NamedTuple):
    """The ids of tokens that have places on the canvas of an image; see
    `worker.canvas_positions`."""

    image_begin: int
    image_end: int
    slice_begin: int
    slice_end: int
    newline: int
