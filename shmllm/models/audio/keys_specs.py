"""What the towers for sounds of encoder-decoders are, besides Whisper's.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from dataclasses import dataclass

from shmllm.formats.audio_counts import RATE, num_convolved_samples
from shmllm.formats.audio_settings import MOST_WAVE_SECONDS
from shmllm.models.vision.encoder_spec import VisionActivation


class KeysOfLayers:
    """What each layer of a decoder reads of an encoder's results: keys and values, which are the
    embeddings of a sound.

    Attributes:
        num_decoder_layers: the number of the decoder's layers.
        kv_width: the width of the keys of a layer, and of the values.
    """

    __slots__ = ()
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

    num_decoder_layers: int
    kv_width: int
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
