"""The inputs of towers that hear: features of frames of a sound."""

from __future__ import annotations

from torch import Tensor


def check_frames(inputs: Tensor, frames: int, shape: tuple[int, int]) -> None:
    """Raises ValueError unless the inputs of a sound of some frames have the shape that they must
    have, [frames, num_mels]."""
    if inputs.shape != shape:
        raise ValueError(f"{frames} frames are {list(shape)}, not {list(inputs.shape)}")
