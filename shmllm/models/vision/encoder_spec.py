"""What the encoders are that towers for images of one size have.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

VisionActivation = Literal["quick_gelu", "gelu", "gelu_tanh", "silu", "relu"]


class LayerSizes(Protocol):
    """What layers need of the spec of a tower; see `EncoderSpec`."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def inner(self) -> int: ...

    @property
    def activation(self) -> VisionActivation: ...


class LayerSpec(LayerSizes, Protocol):
    """What a layer of CLIP and SigLIP needs of it."""

    @property
    def eps(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """The encoder of CLIP, SigLIP, InternVL, Llama 4, SAM or AIMv2 for images of one size.

    Attributes:
        kind: "clip": a class token, a norm before the layers and patches without a bias; "siglip":
            patches with a bias; "internvl" and "blip": a class token, and patches with a bias;
            "llama4": see `Llama4Tower`; "sam": see `SamTower`; "aimv2": see `Ovis2Tower`.
        hidden_size: the width of the stream.
        num_layers: how many layers are computed.
        num_heads: the number of heads.
        inner: the width of the activation's output.
        image_size: the height and the width of an image, in pixels.
        patch_size: the same of a patch.
        activation: the activation of the MLPs.
        eps: of the norms.
        final_norm: whether the result of the last layer has a norm.
        nearest_rows: whether the position of a patch is its row's and its column's fraction of the
            image, rounded down in float32, as in Idefics3.
    """

    kind: Literal["clip", "siglip", "blip", "internvl", "llama4", "sam", "aimv2"]
    hidden_size: int
    num_layers: int
    num_heads: int
    inner: int
    image_size: int
    patch_size: int
    activation: VisionActivation
    eps: float
    final_norm: bool = True
    nearest_rows: bool = False

    @property
    def side(self) -> int:
        """The number of patches in a row."""
        return self.image_size // self.patch_size

    @property
    def num_elements(self) -> int:
        """About the number of its parameters."""
        of_layer = 4 * self.hidden_size + 2 * self.inner
        of_patches = 3 * self.patch_size**2 + self.side**2
        return self.hidden_size * (self.num_layers * of_layer + of_patches)

    @property
    def most_activations(self) -> int:
        """About the most numbers of a patch that are in memory at a time: an activation of the MLP
        has up to four tensors, and a layer three of the stream."""
        return 4 * self.inner + 3 * self.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class SamSpec(EncoderSpec):
    """The encoder of SAM, which computes the scores of a head apart from its products."""

    @property
    def most_activations(self) -> int:
        """See `EncoderSpec.most_activations`: all scores of a head, twice, beside the queries, keys
        and values of all."""
        of_scores = 6 * self.hidden_size + 2 * self.side**2
        return max(of_scores, 4 * self.inner)
