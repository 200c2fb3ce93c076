"""What the towers are that begin with SAM's encoder. See `specs.py`; this module must not import
torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shmllm.models.vision.encoder_spec import EncoderSpec, SamSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SamTower:
    """An encoder most of whose layers attend within windows, and two convolutions behind it.

    Attributes:
        encoder: the encoder.
        window: the side of a window, in patches.
        full_layers: the layers that attend to the whole tile.
        qkv_bias: whether the projections to queries, keys and values have biases.
        has_positions: whether patches have a table of positions.
        has_distances: whether scores have terms for distances of rows and of columns.
        neck: the width of the stream behind the layers.
    """

    encoder: SamSpec
    window: int
    full_layers: tuple[int, ...]
    qkv_bias: bool
    has_positions: bool
    has_distances: bool
    neck: int

    @property
    def num_elements(self) -> int:
        return self.encoder.num_elements + self.neck * (self.encoder.hidden_size + 27 * self.neck)


@dataclass(frozen=True, slots=True, kw_only=True)
class GotOcr2Tower(SamTower):
    """Convolutions halve rows and columns twice, and a projection follows."""

    @property
    def out_side(self) -> int:
        """The number of embeddings in a row."""
        half = -(-self.encoder.side // 2)
        return -(-half // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoSizesTower(SamTower):
    """Convolutions halve rows and columns twice, and something reads what results. Tiles have one
    size, and the whole of an image another one.

    The grid of tiles is (tiles, rows, columns), that of the whole (1, 0, 0).

    Attributes:
        inner: the width of the stream between the convolutions.
        TILE_SIDE, WHOLE_SIDE: the number of patches in a row of a tile, and of the whole.
    """

    TILE_SIDE: ClassVar[int]
    WHOLE_SIDE: ClassVar[int] = 64

    inner: int

    def side_of(self, grid: tuple[int, int, int]) -> int:
        """Returns the height and the width of tiles, or of the whole, in pixels."""
        patches = self.WHOLE_SIDE if grid[1:] == (0, 0) else self.TILE_SIDE
        return patches * self.encoder.patch_size

    def num_embeddings(self, grid: tuple[int, int, int]) -> int:
        """Returns how many embeddings tiles have, or the whole, behind which is one more; 0: there
        is no such grid."""
        tiles, rows, columns = grid
        if grid == (1, 0, 0):
            return self._num_embeddings(self.num_rows(self.WHOLE_SIDE), 1, 1) + 1
        is_grid = rows > 0 and tiles == rows * columns
        return self._num_embeddings(self.num_rows(self.TILE_SIDE), rows, columns) * is_grid

    def _num_embeddings(self, side: int, rows: int, columns: int) -> int:
        """Returns how many embeddings tiles have whose own ones have so many rows."""
        return side**2 * rows * columns

    @staticmethod
    def num_rows(side: int) -> int:
        """Returns how many rows of embeddings a square has of so many rows of patches."""
        return side // 4

    @property
    def read_width(self) -> int:
        """The width of the result of the convolutions."""
        raise NotImplementedError

    @property
    def num_elements(self) -> int:
        of_convolutions = 9 * self.inner * (self.neck + self.read_width)
        return super(TwoSizesTower, self).num_elements + of_convolutions


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekOcrTower(TwoSizesTower):
    """CLIP reads what results, in the place of its patches; a projection makes embeddings of both.
    An embedding of its own ends each row of the picture that tiles make up, and of the whole.

    Attributes:
        clip: the encoder, without its patches and its last norm.
    """

    TILE_SIDE: ClassVar[int] = 40

    clip: EncoderSpec

    def _num_embeddings(self, side: int, rows: int, columns: int) -> int:
        return side * rows * (side * columns + 1)

    @property
    def read_width(self) -> int:
        return self.clip.hidden_size

    @property
    def num_elements(self) -> int:
        return super(DeepseekOcrTower, self).num_elements + self.clip.num_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSpec:
    """A decoder of Qwen 2 that reads patches, which all attend to each other, and behind them
    learned queries, whose results are the embeddings.

    Attributes:
        hidden_size: the width of the stream.
        num_layers: the number of layers.
        num_heads: the number of heads.
        num_kv_heads: that of key heads, and of value heads.
        inner: the width of the activation's output.
        eps: of the norms.
        theta: the base of the wavelengths of the rotations.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    inner: int
    eps: float
    theta: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekOcr2Tower(TwoSizesTower):
    """A reader makes as many embeddings of what results.

    Attributes:
        reader: the reader.
    """

    TILE_SIDE: ClassVar[int] = 48

    reader: ReaderSpec

    @property
    def read_width(self) -> int:
        return self.reader.hidden_size

    @property
    def num_elements(self) -> int:
        of_layer = 3 * self.reader.inner + 2 * self.reader.hidden_size
        of_layers = self.reader.num_layers * self.reader.hidden_size * of_layer
        return super(DeepseekOcr2Tower, self).num_elements + of_layers
