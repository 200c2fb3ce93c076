"""What the towers are that make embeddings of images: the values that decide what they compute.

A family's module makes them from config.json, `towers.py` makes towers of them. This module must
not import torch: front ends import it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shmllm.models.rope_config import UNTIMED, VideoTimes
from shmllm.models.vision.blip_2_specs import Blip2Tower
from shmllm.models.vision.canvas import CanvasMarks
from shmllm.models.vision.deepseek_vl2_specs import DeepseekVL2Tower
from shmllm.models.vision.dots_ocr_specs import DotsOcrTower
from shmllm.models.vision.ernie4_5_vl_specs import Ernie45VLTower
from shmllm.models.vision.granite4_vision_specs import Granite4VisionTower
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.hunyuan_vl_specs import HunYuanVLTower
from shmllm.models.vision.llava_specs import (
    LlavaNextTower,
    LlavaNextVideoTower,
    LlavaOnevisionTower,
    LlavaTower,
    VipLlavaTower,
)
from shmllm.models.vision.minimax_m3_specs import MiniMaxM3Tower
from shmllm.models.vision.ovis2_specs import Ovis2Tower
from shmllm.models.vision.pooled_specs import PooledTower
from shmllm.models.vision.projected_specs import (
    AyaVisionTower,
    DeepseekVLTower,
    Gemma3Tower,
    GraniteDoclingTower,
    Idefics3Tower,
    InternVLTower,
    JanusTower,
    Llama4Tower,
    PaliGemmaTower,
)
from shmllm.models.vision.sam_specs import (
    DeepseekOcr2Tower,
    DeepseekOcrTower,
    GotOcr2Tower,
    TwoSizesTower,
)
from shmllm.models.vision.siglip2_specs import Lfm2VlTower, PooledSiglip2Tower
from shmllm.models.vision.squares_specs import (
    Gemma4Tower,
    Glm4vTower,
    GlmOcrTower,
    KimiTower,
    Lfm3VlTower,
    MiniCPMVTower,
    MuseGlimmerTower,
    PaddleOcrVlTower,
    PixelsTower,
    PixtralTower,
    Qwen2_5Tower,
    Qwen2Tower,
    Qwen3Tower,
    SquaresTower,
)
from shmllm.models.vision.video_llama_3_specs import VideoLlama3Tower

TowerSpec = (
    LlavaTower
    | LlavaNextTower
    | LlavaNextVideoTower
    | LlavaOnevisionTower
    | VipLlavaTower
    | Granite4VisionTower
    | Idefics3Tower
    | Ovis2Tower
    | GraniteDoclingTower
    | JanusTower
    | DeepseekVLTower
    | DeepseekVL2Tower
    | InternVLTower
    | Llama4Tower
    | AyaVisionTower
    | Gemma3Tower
    | PaliGemmaTower
    | PooledTower
    | PooledSiglip2Tower
    | Blip2Tower
    | GotOcr2Tower
    | DeepseekOcrTower
    | DeepseekOcr2Tower
    | Qwen2Tower
    | Qwen2_5Tower
    | Qwen3Tower
    | PaddleOcrVlTower
    | PixelsTower
    | PixtralTower
    | Glm4vTower
    | GlmOcrTower
    | DotsOcrTower
    | Ernie45VLTower
    | HunYuanVLTower
    | KimiTower
    | Lfm2VlTower
    | Lfm3VlTower
    | MiniCPMVTower
    | MiniMaxM3Tower
    | MuseGlimmerTower
    | VideoLlama3Tower
    | Gemma4Tower
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoSpec:
    """How a model takes videos: frames of images for the same tower, several of which become one.

    Attributes:
        token: the token of whose embeddings a video's take the place.
        processors: the names of transformers' classes that may prepare them; the defaults of the
            first one hold where files are silent.
        in_one_piece: whether its embeddings follow one another in a prompt; otherwise each frame is
            an image of its own, behind a text that says its time.
        times: where its frames are on the axis of time.
        frame_embeddings: how many embeddings a frame has by itself; 0: as many as an image.
        num_behind: how many follow the last frame.
    """

    token: int
    processors: tuple[str, ...]
    in_one_piece: bool
    times: VideoTimes = UNTIMED
    frame_embeddings: int = 0
    num_behind: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """What a model computes of images.

    An image is one item of a prompt. Its embeddings take the place of those of as many image
    tokens, which may lie apart.

    Attributes:
        image_token: the token of whose embeddings an image's take the place.
        tower: what computes the embeddings.
        tile_embeddings: how many embeddings a tile has by itself; 0: it depends on the size of the
            image.
        num_levels: how many further levels an embedding has, which are added to the residual stream
            behind layers. A row of the tower's result is ``(1 + num_levels) * hidden_size`` wide,
            the embedding first.
        level_layers: the layers behind which levels are added, in ascending order; (): the first
            ones.
        both_ways: whether the tokens of an image attend to all of it, in some layers at least.
        merge_size: the number of patches that an embedding stands for in each direction, of
            images of any size; 0: tiles have one size.
        has_axes: whether positions have several axes; otherwise those of images count on like those
            of text.
        grid_axes: the number of axes of positions whose last three are the column and the row
            within an image and the number of the image, and on which text counts on; 0: text goes
            on behind the longest side of an image.
        canvas: the tokens around images and slices, which have places on the axes, too; None: they
            have those of text.
        video: how it takes videos; None: it takes none.
    """

    image_token: int
    tower: TowerSpec
    tile_embeddings: int = 0
    num_levels: int = 0
    level_layers: tuple[int, ...] = ()
    both_ways: bool = False
    merge_size: int = 0
    has_axes: bool = False
    grid_axes: int = 0
    canvas: CanvasMarks | None = None
    video: VideoSpec | None = None

    def num_embeddings(self, grid: Grid) -> int:
        """Returns how many embeddings an image has; 0: there is no such image."""
        if isinstance(self.tower, SquaresTower):
            return grid[0] * self.tower.num_squares(*grid[1:])
        if isinstance(self.tower, LlavaNextTower | TwoSizesTower | DeepseekVL2Tower | Ovis2Tower):
            return self.tower.num_embeddings(grid)
        return grid[0] * self.tile_embeddings

    def side_of(self, grid: Grid) -> int:
        """Returns the height and the width of the tiles of an image, in pixels; 0: images have any
        size, see `tile_size`."""
        tower = self.tower
        return tower.side_of(grid) if isinstance(tower, TwoSizesTower) else self.tile_size

    def num_video_embeddings(self, grid: Grid) -> int:
        """Returns how many embeddings a video has; 0: there is no such video."""
        assert self.video is not None, "it takes videos"
        if not self.video.frame_embeddings:
            return self.num_embeddings(grid)
        return grid[0] * self.video.frame_embeddings + self.video.num_behind if grid[0] else 0

    def layers_of_levels(self) -> Sequence[int]:
        """Returns the layer behind which each level is added."""
        return self.level_layers or range(self.num_levels)

    @property
    def num_joined(self) -> int:
        """The number of frames that become one."""
        return self.tower.num_frames if isinstance(self.tower, SquaresTower) else 1

    @property
    def patch_size(self) -> int:
        """The height and the width of a patch, in pixels."""
        tower = self.tower
        return tower.patch_size if isinstance(tower, SquaresTower) else tower.encoder.patch_size

    @property
    def most_activations(self) -> int:
        """About the most numbers of a patch that the tower has in memory at a time."""
        tower = self.tower
        if isinstance(tower, SquaresTower):
            return tower.most_activations
        return tower.encoder.most_activations

    @property
    def pooled_width(self) -> int:
        """The width of an image's only embedding, which no layer reads: it is the result of its
        prompt, behind the head; 0: embeddings take the place of those of tokens."""
        tower = self.tower
        return tower.width if isinstance(tower, PooledTower | PooledSiglip2Tower) else 0

    @property
    def most_joined(self) -> int:
        """The most embeddings of an image that are in memory before they are shrunk."""
        return self.tower.most_joined if isinstance(self.tower, LlavaNextTower) else 0

    @property
    def most_patches(self) -> int:
        """The most patches of a tile, or of an image of any size; 0: there is no bound."""
        if isinstance(self.tower, SquaresTower):
            return self.tower.most_patches
        return (self.tile_size // self.patch_size) ** 2

    @property
    def longest_span(self) -> int:
        """The most embeddings in a row that one step has to compute, because each is attended to by
        those before it; 0: none are."""
        if not self.both_ways:
            return 0
        return self.tile_embeddings or self.most_patches // self.merge_size**2

    @property
    def tile_size(self) -> int:
        """The height and the width of a tile, in pixels, of the largest one if there are several
        sizes; 0: images have any size that is a multiple of ``patch_size * merge_size``."""
        return 0 if isinstance(self.tower, SquaresTower) else self.tower.encoder.image_size
