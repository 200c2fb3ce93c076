"""What the towers are that make embeddings of squares of patches, of images of any size.

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
        most_patches: the most patches of an image, and of a frame; 0: there is no bound.
        longest_side: the most patches in a row and in a column; 0: there is no bound.
        leaves_rest: whether images may have rows and columns of patches that are in no square, and
            for which no embedding stands.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    inner: int
    patch_size: int
    merge_size: int
    activation: VisionActivation
    num_frames: int = 1
    most_patches: int = 0
    longest_side: int = 0
    leaves_rest: bool = False

    def num_squares(self, rows: int, columns: int) -> int:
        """Returns how many squares an image of so many patches has; 0: there is no such image."""
        size = self.merge_size
        few = not self.most_patches or rows * columns <= self.most_patches
        few = few and (not self.longest_side or max(rows, columns) <= self.longest_side)
        whole = self.leaves_rest or not (rows % size or columns % size)
        return rows // size * (columns // size) if few and whole else 0

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2Tower(RotatedTower):
    """All patches of an image attend to one another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2_5Tower(RotatedTower):
    """
    Attributes:
        window: the side of the windows that patches attend within, in squares.
        full_layers: the layers that attend to the whole image.
        num_kv_heads: the number of key heads, and of value heads; 0: that of heads.
        has_apart: whether checkpoints have the projections to queries, keys and values apart.
        merged_width: the width of the results of the tower's own projections, which one more reads
            under the names of HyperCLOVA X; 0: they are the embeddings.
    """

    window: int
    full_layers: tuple[int, ...]
    num_kv_heads: int = 0
    has_apart: bool = False
    merged_width: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Tower(RotatedTower):
    """
    Attributes:
        num_positions: the length of the table of positions, a square number.
        level_layers: the layers whose results are levels, too, in ascending order.
        is_omni: whether checkpoints have the names of Qwen3-Omni for the projections of squares.
    """

    num_positions: int
    level_layers: tuple[int, ...]
    is_omni: bool = False

    @property
    def most_activations(self) -> int:
        """See `EncoderSpec.most_activations`: its MLPs have two."""
        return max(2 * self.inner, ROTATING * self.hidden_size) + 3 * self.hidden_size

    @property
    def num_elements(self) -> int:
        """About the number of its parameters."""
        of_levels = len(self.level_layers) * (self.merge_size**2 * self.hidden_size) ** 2
        return (
            super(Qwen3Tower, self).num_elements + of_levels + self.num_positions * self.hidden_size
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm4vTower(RotatedTower):
    """
    Attributes:
        num_positions: the length of the table of positions, a square number.
        attention_bias: whether the projections to queries, keys and values have biases.
        eps: of the norms of the encoder.
        merger_inner: the width of the activation's output in the MLP behind it.
    """

    num_positions: int
    attention_bias: bool
    eps: float
    merger_inner: int

    @property
    def num_elements(self) -> int:
        """About the number of its parameters, without those behind the encoder."""
        return super(Glm4vTower, self).num_elements + self.num_positions * self.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiTower(RotatedTower):
    """
    Attributes:
        table_side: the number of rows, and of columns, of the table of positions.
        projector_eps: of the norm behind the encoder.
        is_k25: whether checkpoints have the names of Kimi K2.5 for the projections of squares;
            otherwise those of Kimi-VL.
    """

    table_side: int
    projector_eps: float
    is_k25: bool

    @property
    def num_elements(self) -> int:
        """About the number of its parameters, without the last projection."""
        of_layers = self.num_layers * (4 * self.hidden_size + 2 * self.inner)
        of_patches = 3 * self.patch_size**2 + self.table_side**2
        return self.hidden_size * (of_layers + of_patches + self.merge_size**4 * self.hidden_size)

    @property
    def most_activations(self) -> int:
        """See `EncoderSpec.most_activations`: its MLPs have two."""
        return max(2 * self.inner, ROTATING * self.hidden_size) + 3 * self.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class MuseGlimmerTower(RotatedTower):
    """
    Attributes:
        table_side: the number of rows, and of columns, of the table of positions, and the side of
            the windows that patches attend within, in patches.
        full_layers: the layers that attend to the whole image.
        eps: of the norms before and behind the layers.
        adapted: the width of the outputs of the first two projections of squares.
        adapter_activation: the activation behind each of these.
        last_eps: of the norm of embeddings.
    """

    table_side: int
    full_layers: tuple[int, ...]
    eps: float
    adapted: int
    adapter_activation: VisionActivation
    last_eps: float

    @property
    def num_elements(self) -> int:
        """About the number of its parameters, without the last projection."""
        of_layers = self.num_layers * (4 * self.hidden_size + 2 * self.inner)
        of_patches = 3 * self.num_frames * self.patch_size**2 + self.table_side**2
        of_squares = self.merge_size**2 * self.adapted
        return self.hidden_size * (of_layers + of_patches + of_squares) + self.adapted**2


@dataclass(frozen=True, slots=True, kw_only=True)
class GlmOcrTower(RotatedTower):
    """
    Attributes:
        bias: whether the projections of its layers have biases.
        eps: of the norms of the encoder.
        merger_inner: the width of the activation's output in the MLP behind it.
    """

    bias: bool
    eps: float
    merger_inner: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddleOcrVlTower(RotatedTower):
    """
    Attributes:
        num_positions: the length of the table of positions, a square number.
        eps: of the norms of the encoder.
    """

    num_positions: int
    eps: float

    @property
    def merged(self) -> int:
        """The width of a square."""
        return self.merge_size**2 * self.hidden_size

    @property
    def most_activations(self) -> int:
        """See `EncoderSpec.most_activations`: its MLPs have two."""
        return max(2 * self.inner, ROTATING * self.hidden_size) + 3 * self.hidden_size

    @property
    def num_elements(self) -> int:
        """About the number of its parameters, without the last projection."""
        return super(PaddleOcrVlTower, self).num_elements + self.num_positions * self.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralTower(RotatedTower):
    """
    Attributes:
        num_stored: how many layers a checkpoint has of it.
        eps: of the norm behind the layers.
        projector_activation: the activation between the last two projections.
        bias: whether these have a bias.
        merges: whether they read a projection of squares, behind a norm, and not patches.
    """

    num_stored: int
    eps: float
    projector_activation: VisionActivation
    bias: bool
    merges: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm3VlTower(RotatedTower):
    """
    Attributes:
        num_kv_heads: the number of key heads, and of value heads.
        full_layers: the layers with attention; the others have a convolution.
        taps: the number of rows, and of columns, that a convolution reads.
        eps: of the norms of the encoder.
        projector_inner, projector_activation, projector_bias: see `Lfm2VlTower`.
    """

    num_kv_heads: int
    full_layers: tuple[int, ...]
    taps: int
    eps: float
    projector_inner: int
    projector_activation: VisionActivation
    projector_bias: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniCPMVTower(SquaresTower):
    """Squares of four patches become one in the middle of the encoder, unless that is left out, and
    squares of four of those behind it.

    Attributes:
        table_side: the number of rows, and of columns, of the table of positions.
        merged_behind: the layer behind which patches become fewer; None: none.
        eps: of the norms of the encoder.
    """

    table_side: int
    merged_behind: int | None
    eps: float

    @property
    def num_elements(self) -> int:
        """About the number of its parameters, without the last projection."""
        of_layers = self.num_layers * (4 * self.hidden_size + 2 * self.inner)
        of_patches = 3 * self.patch_size**2 + self.table_side**2
        of_merged = 20 * self.inner + 20 * self.hidden_size
        return self.hidden_size * (of_layers + of_patches + of_merged)


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelsTower(SquaresTower):
    """A projection of the pixels of a square, the embedding of its column and that of its row, and
    a projection, with norms around each. It has no layers.

    Attributes:
        eps: of the last norm.
    """

    eps: float

    @property
    def side(self) -> int:
        """The height and the width of a square, in pixels."""
        return self.patch_size * self.merge_size

    @property
    def num_rows(self) -> int:
        """The number of rows that have an embedding, and of columns."""
        return self.longest_side // self.merge_size

    @property
    def num_elements(self) -> int:
        """About the number of its parameters, without the last projection."""
        return self.hidden_size * (3 * self.side**2 + 2 * self.num_rows)

    @property
    def most_activations(self) -> int:
        """See `EncoderSpec.most_activations`: four tensors of pixels, six of the stream."""
        return 4 * 3 * self.patch_size**2 + 6 * self.hidden_size // self.merge_size**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Tower(RotatedTower):
    """Norms on both sides of attention and MLP, means of squares, a norm and a projection. It has a
    table of positions for columns and one for rows, of `longest_side` each.

    Attributes:
        num_kv_heads: the number of key heads, and of value heads.
        head_dim: the width of a head.
        eps: of all norms.
        clips: whether projections have bounds of their inputs and outputs.
        standardizes: whether means are shifted and scaled by weights.
    """

    num_kv_heads: int
    head_dim: int
    eps: float
    clips: bool
    standardizes: bool

    @property
    def num_elements(self) -> int:
        """About the number of its parameters, without those behind the encoder."""
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        of_layers = self.num_layers * (heads + 3 * self.inner)
        return self.hidden_size * (of_layers + 3 * self.patch_size**2 + 2 * self.longest_side)
