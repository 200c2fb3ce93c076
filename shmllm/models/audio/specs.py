"""What the towers are that make embeddings of sounds: the values that decide what they compute.

A family's module makes them from config.json, `models/towers.py` makes towers of them. This module
must not import torch: front ends import it too.
"""

from __future__ import annotations

from dataclasses import dataclass

from shmllm.models.vision.encoder_spec import VisionActivation
from shmllm.models.vision.specs import Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperTower:
    """The encoder of Whisper, means of pairs of its results, a norm and a projection.

    Attributes:
        hidden_size: the width of the stream.
        num_layers: the number of layers.
        num_heads: the number of heads.
        inner: the width of the activation's output.
        activation: the activation of the MLPs.
        num_mels: the number of features of a frame.
        num_positions: the length of the table of positions; there are two frames for each.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    inner: int
    activation: VisionActivation
    num_mels: int
    num_positions: int

    @property
    def num_elements(self) -> int:
        """About the number of its parameters."""
        of_layers = self.num_layers * (4 * self.hidden_size + 2 * self.inner)
        of_frames = 3 * (self.num_mels + self.hidden_size) + self.num_positions
        return self.hidden_size * (of_layers + of_frames)

    @property
    def most_activations(self) -> int:
        """About the most numbers of a position that are in memory at a time: an activation of the
        MLP has up to four tensors, a layer three of the stream; the convolutions have windows of
        three frames, and two frames for each position."""
        of_layer = 4 * self.inner + 3 * self.hidden_size
        return max(of_layer, 2 * 3 * self.num_mels + 8 * self.hidden_size)

    def num_embeddings(self, frames: int) -> int:
        """Returns how many embeddings a sound has."""
        return num_positions(frames) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysTower(WhisperTower):
    """The encoder of Whisper, and what each layer of a decoder reads of it: keys and values, which
    are the embeddings of a sound. A sound fills all positions.

    Attributes:
        num_decoder_layers: the number of the decoder's layers.
        kv_width: the width of the keys of a layer, and of the values.
    """

    num_decoder_layers: int = 1
    kv_width: int = 1

    @property
    def embedding_width(self) -> int:
        """The width of an embedding: of the keys and values of all layers."""
        return 2 * self.num_decoder_layers * self.kv_width

    @property
    def num_elements(self) -> int:
        return super(KeysTower, self).num_elements + self.hidden_size * self.embedding_width

    def num_embeddings(self, frames: int) -> int:
        """Returns how many embeddings a sound has: of one that leaves positions empty none, as a
        decoder attends to all of them."""
        return self.num_positions if num_positions(frames) == self.num_positions else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VoxtralTower(WhisperTower):
    """The encoder of Whisper, a norm, and two projections of several of its results together.

    Attributes:
        factor: how many results become an embedding.
        projector_activation: the activation between the projections.
    """

    factor: int = 4
    projector_activation: VisionActivation = "gelu"

    def num_embeddings(self, frames: int) -> int:
        return num_positions(frames) // self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioSpec:
    """What a model computes of sounds.

    A sound is one item of a prompt, whose grid is (frames, 1, 1). Its embeddings take the place of
    those of as many audio tokens.

    Attributes:
        token: the token of whose embeddings a sound's take the place; None: none, as a decoder
            attends to the sound.
        tower: what computes the embeddings.
    """

    token: int | None
    tower: WhisperTower

    def num_embeddings(self, grid: Grid) -> int:
        """Returns how many embeddings a sound has."""
        return self.tower.num_embeddings(grid[0])

    @property
    def most_frames(self) -> int:
        """The most frames of a sound."""
        return 2 * self.tower.num_positions

    @property
    def num_mels(self) -> int:
        """The number of features of a frame."""
        return self.tower.num_mels


def num_positions(frames: int) -> int:
    """Returns the number of positions of a sound in the encoder."""
    return (frames + 1) // 2
