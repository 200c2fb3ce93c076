"""The kinds of towers: which class has the weights of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shmllm.models.audio.specs import AudioSpec, WhisperTower
from shmllm.models.audio.whisper import Whisper
from shmllm.models.layers import Storage
from shmllm.models.tower import Tower
from shmllm.models.vision.gemma3 import Gemma3
from shmllm.models.vision.idefics3 import Idefics3
from shmllm.models.vision.llava import Llava
from shmllm.models.vision.qwen2_5_vl import Qwen2_5
from shmllm.models.vision.qwen3_vl import Qwen3
from shmllm.models.vision.specs import (
    Gemma3Tower,
    Idefics3Tower,
    LlavaTower,
    Qwen2_5Tower,
    Qwen3Tower,
    VisionSpec,
)

TOWERS: dict[type[Any], Callable[[Any, int, Storage], Tower]] = {
    LlavaTower: Llava,
    Idefics3Tower: Idefics3,
    Gemma3Tower: Gemma3,
    Qwen2_5Tower: Qwen2_5,
    Qwen3Tower: Qwen3,
    WhisperTower: Whisper,
}
"""By the type of a tower's spec: (the spec, the width of embeddings, storage) -> the tower."""


def make_tower(spec: VisionSpec | AudioSpec, hidden_size: int, storage: Storage) -> Tower:
    """Allocates a tower, whose weights are not set."""
    return TOWERS[type(spec.tower)](spec.tower, hidden_size, storage)
