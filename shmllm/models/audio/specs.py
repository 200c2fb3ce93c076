"""What the towers are that make embeddings of sounds: the values that decide what they compute.

A family's module makes them from config.json, `models/towers.py` makes towers of them. This module
must not import torch: front ends import it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shmllm.formats.audio_settings import FRAMES_BEHIND, MOST_SAMPLED_FRAMES
from shmllm.models.vision.encoder_spec import VisionActivation
from shmllm.models.vision.grids import Grid


class AudioTower(Protocol):
    """What others need of any tower; see `WhisperTower` for what the names mean."""

    @property
    def num_mels(self) -> int: ...

    @property
    def num_elements(self) -> int: ...

    @property
    def most_frames(self) -> int: ...

    @property
    def most_activations(self) -> int: ...

    def num_embeddings(self, frames: int) -> int: ...

    def num_inputs(self, frames: int) -> int: ...


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
    def most_frames(self) -> int:
        """The most frames of a sound."""
        return 2 * self.num_positions

    @property
    def most_activations(self) -> int:
        """About the most numbers of a frame that are in memory at a time, and a position has two:
        an activation of the MLP has up to four tensors, a layer three of the stream; the
        convolutions have windows of three frames."""
        of_layer = 4 * self.inner + 3 * self.hidden_size
        return max(of_layer, 2 * 3 * self.num_mels + 8 * self.hidden_size) // 2

    def num_embeddings(self, frames: int) -> int:
        """Returns how many embeddings a sound has."""
        return num_positions(frames) // 2

    def num_inputs(self, frames: int) -> int:
        """Returns how many frames the tower reads of a sound: perhaps some behind its end."""
        return min(frames + FRAMES_BEHIND, self.most_frames)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4AudioTower:
    """Convolutions, layers of a conformer (Gulati et al., 2020), two projections, and a norm
    between them.

    Attributes:
        hidden_size: the width of the stream.
        num_layers: the number of layers.
        num_heads: the number of heads.
        activation: the activation of MLPs and of the layers' convolutions.
        channels: the widths of the results of the two convolutions in front.
        kernel: the length of the layers' convolutions, in positions.
        chunk: half of the number of distances that have an embedding is that of the positions of a
            chunk and of what its positions attend to.
        before: a position attends to its own and those before it, together one less.
        behind: it attends to one less than these behind it; 0: to none.
        cap: scores become ``cap * tanh(score / cap)``.
        residual_scale: the factor of what MLPs add to the stream.
        bound: the bound of the stream's numbers on both sides.
        eps: of the norms of convolutions, and of that between the last projections.
        clips: whether projections have bounds of their inputs and outputs.
        adapted: the width of the first projection's outputs.
        most_frames: the most frames of a sound.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    activation: VisionActivation
    channels: tuple[int, int]
    kernel: int
    chunk: int
    before: int
    behind: int
    cap: float
    residual_scale: float
    bound: float
    eps: float
    clips: bool
    adapted: int
    most_frames: int

    @property
    def num_mels(self) -> int:
        """The number of features of a frame."""
        return 4 * (self.channels[0] // 4)

    @property
    def num_elements(self) -> int:
        """About the number of its parameters."""
        of_layers = self.num_layers * (24 * self.hidden_size + self.kernel)
        of_frames = self.num_mels // 4 * self.channels[1] + self.adapted
        return self.hidden_size * (of_layers + of_frames) + 9 * self.channels[0] * self.channels[1]

    @property
    def most_activations(self) -> int:
        """About the most numbers of a frame that are in memory at a time, and a position has four:
        the second convolution has windows of nine results of the first one for each four features,
        and two copies of these, a layer keys and values for each position that another one attends
        to, of two numbers."""
        of_convolutions = self.channels[0] * self.num_mels * (9 / 16 + 5 / 8)
        window = self.before + max(self.behind - 1, 0)
        of_layer = max(2 * 2 * window, 16) + 12
        return max(int(of_convolutions), of_layer * self.hidden_size // 4)

    def num_embeddings(self, frames: int) -> int:
        """Returns how many embeddings a sound has."""
        return num_positions(num_positions(frames))

    def num_inputs(self, frames: int) -> int:
        """Returns how many frames the tower reads of a sound."""
        return frames


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesTower:
    """A norm and a projection of the samples of a frame.

    Attributes:
        num_mels: the samples of a frame, which are its features.
        eps: of the norm.
    """

    num_mels: int
    eps: float

    @property
    def most_frames(self) -> int:
        """The most frames of a sound: the longest one that a front end takes."""
        return MOST_SAMPLED_FRAMES

    @property
    def num_elements(self) -> int:
        """About the number of its parameters, without the projection: none."""
        return 0

    @property
    def most_activations(self) -> int:
        """About the most numbers of a frame that are in memory at a time."""
        return 4 * self.num_mels

    def num_embeddings(self, frames: int) -> int:
        """Returns how many embeddings a sound has."""
        return frames

    def num_inputs(self, frames: int) -> int:
        """Returns how many frames the tower reads of a sound."""
        return frames


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
class AudioFlamingoTower(WhisperTower):
    """The encoder of Whisper, means of pairs of its results, a norm and two projections.

    Attributes:
        projector_activation: the activation between the projections.
        projector_bias: whether the projections have biases.
    """

    projector_activation: VisionActivation = "gelu"
    projector_bias: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MusicFlamingoTower(AudioFlamingoTower):
    """The tower of Audio Flamingo 3, which rotates what the projections read: by the number of a
    part of a sound, by places in it, and by times.

    Attributes:
        rotary_dim: the numbers of a result that turn with the number of the part, and those behind
            them that turn with places.
        theta: the base of the wavelengths of rotations, and the largest place.
        seconds: the time of a result.
    """

    rotary_dim: int
    theta: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GlmAsrTower(WhisperTower):
    """The encoder of Whisper with rotations in place of its table of positions, a norm, and two
    projections of several of its results together. It reads the silence behind a sound, too.

    Attributes:
        rotary_dim: the elements of a head that are rotated.
        theta: the base of the wavelengths of rotations.
        projector_activation: the activation between the projections.
    """

    rotary_dim: int
    theta: float
    projector_activation: VisionActivation = "gelu"

    @property
    def factor(self) -> int:
        """How many results become an embedding."""
        return self.inner // self.hidden_size

    def num_embeddings(self, frames: int) -> int:
        return num_positions(frames) // self.factor

    def num_inputs(self, frames: int) -> int:
        return self.most_frames


@dataclass(frozen=True, slots=True, kw_only=True)
class MossTower(WhisperTower):
    """The encoder of Whisper, two projections of several of its results together, and a norm. It
    reads the silence behind a sound, too.

    Attributes:
        factor: how many results become an embedding; those behind a sound fill the last one.
        projector_activation: the activation between the projections.
        projector_bias: whether the projections have biases.
        eps: of the norm.
    """

    factor: int = 4
    projector_activation: VisionActivation = "silu"
    projector_bias: bool = True
    eps: float = 1e-6

    def num_embeddings(self, frames: int) -> int:
        return -(-num_positions(frames) // self.factor)

    def num_inputs(self, frames: int) -> int:
        return self.most_frames


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioSpec:
    """What a model computes of sounds.

    A sound is one item of a prompt, whose grid is (frames, 1, 1). Its embeddings take the place of
    those of as many audio tokens.

    Attributes:
        token: the token of whose embeddings a sound's take the place; None: none, as a decoder
            attends to the sound.
        tower: what computes the embeddings.
        has_adapter: whether an adapter in the model's directory, if there is one, is for prompts
            with sounds.
        has_start: whether an empty prompt stands for what a decoder begins with by itself.
        decoder_start: the token that it begins with then, unless a file of the model names another
            one; None: there is none.
        counts_parts: whether the grid of a part of a sound is (frames, number, 1), where the first
            one has the number 1.
    """

    token: int | None
    tower: AudioTower
    has_adapter: bool = False
    has_start: bool = False
    decoder_start: int | None = None
    counts_parts: bool = False

    def num_embeddings(self, grid: Grid) -> int:
        """Returns how many embeddings a sound has."""
        return self.tower.num_embeddings(grid[0])


def num_positions(frames: int) -> int:
    """Returns the number of positions behind a convolution that reads every other frame."""
    return (frames + 1) // 2


def num_convolved(count: int) -> int:
    """Returns the number of positions behind three convolutions that read every other one."""
    return num_positions(num_positions(num_positions(count)))
