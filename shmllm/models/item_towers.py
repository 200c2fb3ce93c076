"""What a model computes of the items of prompts: images, videos, sounds, and the texts that an
encoder reads. This module must not import torch: front ends import it too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shmllm.models.audio.keys_specs import KeysOfLayers
from shmllm.models.audio.specs import AudioSpec, KeysTower
from shmllm.models.rope_config import UNTIMED, VideoTimes
from shmllm.models.text.specs import TextSpec, TextTower

if TYPE_CHECKING:
    from shmllm.models.vision.specs import VisionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemTowers:
    """
    Attributes:
        vision: what the model computes of images; None: it sees none, and a tower that its
            checkpoint may have is not loaded.
        audio: the same for sounds.
        text: the same for texts that an encoder reads.
    """

    vision: VisionSpec | None = None
    audio: AudioSpec | None = None
    text: TextSpec | None = None

    @property
    def towers(self) -> dict[str, VisionSpec | AudioSpec | TextSpec]:
        """What the model computes of the items of each modality."""
        video = self.vision if self.vision is not None and self.vision.video is not None else None
        every = {"image": self.vision, "video": video, "audio": self.audio, "text": self.text}
        return {name: spec for name, spec in every.items() if spec is not None}

    @property
    def keys_width(self) -> int:
        """The width of the keys and values that an encoder computes of an item for all layers of
        the decoder; 0: the model is no encoder-decoder."""
        for spec in (self.audio, self.text):
            if spec is not None and isinstance(spec.tower, KeysTower | KeysOfLayers | TextTower):
                return spec.tower.embedding_width
        return 0

    @property
    def pooled_width(self) -> int:
        """The width of the vectors of images that are results; see `VisionSpec.pooled_width`."""
        return 0 if self.vision is None else self.vision.pooled_width

    @property
    def num_levels(self) -> int:
        """How many levels images add to the residual stream; see `VisionSpec.num_levels`."""
        return 0 if self.vision is None else self.vision.num_levels

    @property
    def patches_per_side(self) -> int:
        """How many patches of an image an embedding stands for in each direction, in models that
        rotate by positions on several axes; 0: the model sees no images, or rotates otherwise."""
        return self.vision.merge_size if self.vision and self.vision.has_axes else 0

    @property
    def video_times(self) -> VideoTimes:
        """Where frames of videos are on the axis of time."""
        video = None if self.vision is None else self.vision.video
        return UNTIMED if video is None else video.times
