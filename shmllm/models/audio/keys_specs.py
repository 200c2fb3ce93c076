"""What the towers for sounds of encoder-decoders are, besides Whisper's.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from dataclasses import dataclass

from shmllm.formats.audio_counts import RATE, num_convolved_samples, num_halved
from shmllm.formats.audio_settings import MOST_WAVE_SECONDS
from shmllm.models.vision.encoder_spec import VisionActivation


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysOfLayers:
    """What each layer of a decoder reads of an encoder's results: keys and values, which are the
    embeddings of a sound.

    Attributes:
        num_decoder_layers: the number of the decoder's layers.
        kv_width: the width of the keys of a layer, and of the values.
    """

    num_decoder_layers: int
    kv_width: int

    @property
    def embedding_width(self) -> int:
        """The width of an embedding: of the keys and values of all layers."""
        return 2 * self.num_decoder_layers * self.kv_width


@dataclass(frozen=True, slots=True, kw_only=True)
class MoonshineTower(KeysOfLayers):
    """Convolutions over samples, and layers of rotated attention and an MLP (Jeffries et al.,
    2024).

    Attributes:
        hidden_size: the width of the stream.
        num_layers: the number of layers.
        num_heads: the number of heads.
        inner: the width of the activation's output.
        activation: the activation of the MLPs.
        bias: whether the projections to queries, keys and values have biases, in the decoder, too.
        rotary_dim: the elements of a head that are rotated.
        theta: the base of the wavelengths of rotations.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    inner: int
    activation: VisionActivation
    bias: bool
    rotary_dim: int
    theta: float

    @property
    def num_mels(self) -> int:
        """The features of a frame, which is a sample."""
        return 1

    @property
    def most_frames(self) -> int:
        """The most samples of a sound."""
        return MOST_WAVE_SECONDS * RATE

    @property
    def num_elements(self) -> int:
        """About the number of its parameters."""
        of_layers = self.num_layers * (4 * self.hidden_size + 2 * self.inner)
        of_convolutions = 2 * (7 + 3) * self.hidden_size + 127
        return self.hidden_size * (of_layers + of_convolutions + self.embedding_width)

    @property
    def most_activations(self) -> int:
        """About the most numbers of a sample that are in memory at a time: the windows of the first
        convolution and four tensors of its results, which are windows of the second one, too; a
        position of the layers has 384 samples."""
        of_convolutions = 4 + 8 * self.hidden_size // 64
        of_layer = 4 * self.inner + 3 * self.hidden_size + 2 * self.embedding_width
        return max(of_convolutions, of_layer // 384 + 1)

    def num_embeddings(self, frames: int) -> int:
        """Returns how many embeddings a sound has."""
        return num_convolved_samples(frames)

    def num_inputs(self, frames: int) -> int:
        """Returns how many samples the tower reads of a sound."""
        return frames


@dataclass(frozen=True, slots=True, kw_only=True)
class ParakeetTower(KeysOfLayers):
    """Convolutions over frames and features, and layers of a conformer whose scores have a part for
    the distance of a key (Rekesh et al., "Fast Conformer", 2023; Dai et al., 2019).

    Attributes:
        hidden_size: the width of the stream.
        num_layers: the number of layers.
        num_heads: the number of heads.
        inner: the width of the activation's output in MLPs.
        activation: the activation of MLPs and of the layers' convolutions.
        num_mels: the number of features of a frame.
        num_halvings: how many convolutions read every other frame and feature.
        channels: the width of their results.
        kernel: the length of the layers' convolutions, in positions; odd.
        bias: whether the projections of attention and MLPs have biases.
        convolution_bias: whether the layers' convolutions have.
        scale: the factor of what the first layer reads.
        projected: the width of a projection of the results; None: there is none.
        key_bias: whether the projections to the decoder's keys and values have biases.
        most_frames: the most frames of a sound.
        in_nemo: whether checkpoints have NeMo's names.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    inner: int
    activation: VisionActivation
    num_mels: int
    num_halvings: int
    channels: int
    kernel: int
    bias: bool
    convolution_bias: bool
    scale: float
    projected: int | None
    key_bias: bool
    most_frames: int
    in_nemo: bool = False

    @property
    def num_elements(self) -> int:
        """About the number of its parameters."""
        of_layers = self.num_layers * (8 * self.hidden_size + 4 * self.inner + self.kernel)
        of_frames = self.channels * (self.num_mels >> self.num_halvings)
        of_keys = (self.projected or 0) + self.embedding_width
        of_convolutions = self.num_halvings * self.channels * (self.channels + 9)
        return self.hidden_size * (of_layers + of_frames + of_keys) + of_convolutions

    @property
    def most_activations(self) -> int:
        """About the most numbers of a frame that are in memory at a time: four tensors of the first
        convolution's results, or in a layer, of scores and distances."""
        positions = self.num_embeddings(self.most_frames)
        of_layer = 4 * self.inner + 6 * self.hidden_size + 6 * self.num_heads * positions
        of_layer = (of_layer + 2 * self.embedding_width) >> self.num_halvings
        return max(self.channels * self.num_mels, of_layer)

    def num_embeddings(self, frames: int) -> int:
        """Returns how many embeddings a sound has."""
        return num_halved(frames, self.num_halvings)

    def num_inputs(self, frames: int) -> int:
        """Returns how many frames the tower reads of a sound."""
        return frames
