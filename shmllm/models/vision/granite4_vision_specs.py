"""What the tower of Granite 4 Vision is.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from dataclasses import dataclass

from shmllm.models.vision.encoder_spec import VisionActivation
from shmllm.models.vision.llava_specs import LlavaNextTower


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowsSpec:
    """A transformer whose queries are means, or some, of the features of a window of patches, and
    read these (Li et al., "BLIP-2", 2023).

    Attributes:
        side: that of a window, in patches.
        queries: that of the square of queries of a window.
        hidden_size: the width of the stream, which is that of the encoder.
        num_layers: the number of layers.
        num_heads: the number of heads.
        inner: the width of the activation's output.
        activation: the activation of the MLPs.
        eps: of the norms.
        reads_every: of so many layers the first one reads the features.
    """

    side: int
    queries: int
    hidden_size: int
    num_layers: int
    num_heads: int
    inner: int
    activation: VisionActivation
    eps: float
    reads_every: int

    @property
    def num_elements(self) -> int:
        """About the number of its parameters."""
        return self.num_layers * self.hidden_size * (8 * self.hidden_size + 2 * self.inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class Granite4VisionTower(LlavaNextTower):
    """The features behind several layers become embeddings, and levels of these.

    Attributes:
        windows: how features become fewer.
        means: of each projection whose queries are means the layer that it reads, from 1.
        corners: how many further projections there are, the queries of each of which are one corner
            of the squares of four features behind `corners_of`.
        corners_of: the layer that these read.
        order: the numbers of the projections that become the embedding and its levels, those of
            means first; -1: the embedding is zero.
        scale: the factor of the embedding.
    """

    windows: WindowsSpec
    means: tuple[int, ...]
    corners: int
    corners_of: int
    order: tuple[int, ...]
    scale: float

    @property
    def side(self) -> int:
        """See `LlavaNextTower.side`."""
        return self.encoder.side // self.windows.side * self.windows.queries

    @property
    def num_elements(self) -> int:
        count = len(self.means) + self.corners
        return self.encoder.num_elements + count * self.windows.num_elements
