"""What the towers of LLaVA, LLaVA-NeXT and LLaVA-OneVision are."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from shmllm.formats.joined_tiles import JoinedTiles, Size, join_tiles
from shmllm.models.vision.encoder_spec import EncoderSpec, VisionActivation
from shmllm.models.vision.grids import Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaTower:
    """An encoder, and two projections with an activation between them.

    Attributes:
        encoder: the encoder, with the layers that are computed.
        num_stored: how many layers a checkpoint has of it.
        drops_first: whether the class token is left out.
        activation: the activation.
        bias: whether the projections have a bias.
    """

    encoder: EncoderSpec
    num_stored: int
    drops_first: bool
    activation: VisionActivation
    bias: bool

    @property
    def num_elements(self) -> int:
        return self.encoder.num_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class VipLlavaTower(LlavaTower):
    """The projections read the results of several layers, one behind the other, behind a norm.

    Attributes:
        layers: these layers in their order, from 1.
        eps: of the norm.
    """

    layers: tuple[int, ...]
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaNextTower(LlavaTower):
    """All tiles but the first make up a picture, each row of whose patches ends with an embedding.

    The grid of an image is (tiles, height, width), the latter of the image itself, in pixels.

    Attributes:
        sizes: the possible sizes of the picture, multiples of a tile's.
        most_tiles: see `join_tiles`.
    """

    sizes: tuple[Size, ...]
    most_tiles: int = 0

    @property
    def side(self) -> int:
        """The number of embeddings in a row of a tile."""
        return self.encoder.side

    def joined(self, grid: Grid) -> JoinedTiles | None:
        """Returns how the tiles of an image lie; None: there is no such image."""
        tiles, height, width = grid
        if not height or not width:
            return None
        tile = self.encoder.image_size
        found = join_tiles(height, width, self.sizes, tile, self.side, self.most_tiles)
        return found if found.num_tiles == tiles else None

    def num_embeddings(self, grid: Grid) -> int:
        """Returns how many embeddings an image has; 0: there is no such image."""
        joined = self.joined(grid)
        return self.side**2 + joined.num_embeddings if joined else 0

    @property
    def most_joined(self) -> int:
        """The most patches of a picture whose embeddings are shrunk."""
        if not self.most_tiles:
            return 0
        return max(map(prod, self.sizes)) // self.encoder.patch_size**2


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaNextVideoTower(LlavaNextTower):
    """
    Attributes:
        stride: the side of the squares of patches of a frame of a video that become one, without
            those that the edge cuts.
        takes_largest: whether a square becomes the largest of each of its numbers; otherwise it
            becomes the mean.
    """

    stride: int
    takes_largest: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaOnevisionTower(LlavaNextTower):
    """An image may have one tile, too, behind whose embeddings is the one that ends rows."""

    def num_embeddings(self, grid: Grid) -> int:
        """See `LlavaNextTower.num_embeddings`."""
        if grid[0] == 1:
            return self.encoder.side**2 + 1
        return super(LlavaOnevisionTower, self).num_embeddings(grid)
