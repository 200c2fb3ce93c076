"""What the encoders are that towers for images of any size have.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from dataclasses import dataclass

from shmllm.models.vision.encoder_spec import VisionActivation

ROTATING = 12
"""About how many tensors of the stream's width are in memory while queries and keys are rotated in
float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SquaresTower:
    """An encoder for images of any size, and projections of squares of its results.

    Attributes:
        hidden_size: the width of the stream.
        num_layers: the number of layers.
        num_heads: the number of heads.
        inner: the width of the activation's output.
        patch_size: the height and the width of a patch, in pixels.
        merge_size: the side of a square, in patches.
        activation: the activation of the MLPs.
        num_frames: how often a patch of an image is repeated: that many frames make one.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    inner: int
    patch_size: int
    merge_size: int
    activation: VisionActivation
    num_frames: int = 1

    @property
    def num_elements(self) -> int:
        """About the number of its parameters."""
        of_patches = 3 * self.num_frames * self.patch_size**2
        of_layers = self.num_layers * (4 * self.hidden_size + 3 * self.inner)
        return self.hidden_size * (of_patches + of_layers + self.merge_size**4 * self.hidden_size)

    @property
    def most_activations(self) -> int:
        """See `EncoderSpec.most_activations`."""
        return 4 * self.inner + 3 * self.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class RotatedTower(SquaresTower):
    """An encoder that rotates queries and keys by the rows and columns of patches.

    Attributes:
        theta: the base of the wavelengths of the rotations.
    """

    theta: float

    @property
    def most_activations(self) -> int:
        """See `EncoderSpec.most_activations`."""
        return max(4 * self.inner, ROTATING * self.hidden_size) + 3 * self.hidden_size
