"""The tower of Nemotron 3 Omni for sounds: Parakeet's encoder and two projections."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from shmllm.models.audio.parakeet import EncoderOfSounds
from shmllm.models.audio.parakeet_specs import NemotronOmniAudioTower
from shmllm.models.audio.whisper import ENCODER
from shmllm.models.layers import Storage
from shmllm.models.tower import Tower
from shmllm.models.vision.grids import Grid

_EPS = 1e-5
_PROJECTOR = "embed_audio."
_IN_FILES = {
    ENCODER: "sound_encoder.encoder.",
    f"{_PROJECTOR}layer_norm.": "sound_projection.norm.",
    f"{_PROJECTOR}linear_": "sound_projection.linear",
}
"""What checkpoints have in place of parts of the names of transformers' modules."""


class NemotronOmniAudio(Tower):
    """See `parakeet_specs.NemotronOmniAudioTower`."""

    prefixes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {name: name for name in ("sound_encoder.", "sound_projection.")}
    )

    unused = ("sound_encoder.encoder.feature_extractor.",)

    def __init__(self, spec: NemotronOmniAudioTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        width, inner, bias = spec.hidden_size, spec.projector_width, spec.projector_bias
        self._encode = EncoderOfSounds(spec, self)
        self._norm = self.make_rms_norm(f"{_PROJECTOR}layer_norm", width, _EPS)
        self._up = self.make_dense(f"{_PROJECTOR}linear_1", inner, width, bias=bias)
        self._down = self.make_dense(f"{_PROJECTOR}linear_2", hidden_size, inner, bias=bias)
        self.name_in_files(_IN_FILES)

    def __call__(self, inputs: Tensor, grid: Grid) -> Tensor:
        """Computes the embeddings of a sound.

        Args:
            inputs: [frames, num_mels].
            grid: (frames, 1, 1).
        """
        x = self._norm(self._encode(inputs, grid[0]))
        return self._down(F.relu(self._up(x)).square())
