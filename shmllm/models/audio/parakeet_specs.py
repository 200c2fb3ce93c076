"""What the towers with Parakeet's encoder are.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from dataclasses import dataclass

from shmllm.formats.audio_counts import num_halved
from shmllm.models.audio.keys_specs import KeysOfLayers
from shmllm.models.vision.encoder_spec import VisionActivation


@dataclass(frozen=True, slots=True, kw_only=True)
class ParakeetEncoder:
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
        most_frames: the most frames of a sound.
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
    most_frames: int

    @property
    def read_width(self) -> int:
        """The width of what reads the results."""
        return self.hidden_size

    @property
    def num_elements(self) -> int:
        """About the number of its parameters."""
        of_layers = self.num_layers * (8 * self.hidden_size + 4 * self.inner + self.kernel)
        of_frames = self.channels * (self.num_mels >> self.num_halvings)
        of_convolutions = self.num_halvings * self.channels * (self.channels + 9)
        return self.hidden_size * (of_layers + of_frames + self.read_width) + of_convolutions

    @property
    def most_activations(self) -> int:
        """About the most numbers of a frame that are in memory at a time: four tensors of the first
        convolution's results, or in a layer, of scores and distances."""
        positions = self.num_embeddings(self.most_frames)
        of_layer = 4 * self.inner + 6 * self.hidden_size + 6 * self.num_heads * positions
        of_layer = (of_layer + 2 * self.read_width) >> self.num_halvings
        return max(self.channels * self.num_mels, of_layer)

    def num_embeddings(self, frames: int) -> int:
        """Returns how many embeddings a sound has."""
        return num_halved(frames, self.num_halvings)

    def num_inputs(self, frames: int) -> int:
        """Returns how many frames the tower reads of a sound."""
        return frames


@dataclass(frozen=True, slots=True, kw_only=True)
class ParakeetTower(ParakeetEncoder, KeysOfLayers):
    """The encoder, and what each layer of a decoder reads of it.

    Attributes:
        projected: the width of a projection of the results; None: there is none.
        key_bias: whether the projections to the decoder's keys and values have biases.
        in_nemo: whether checkpoints have NeMo's names.
    """

    num_decoder_layers: int
    kv_width: int
    projected: int | None = None
    key_bias: bool = True
    in_nemo: bool = False

    @property
    def read_width(self) -> int:
        return (self.projected or 0) + self.embedding_width


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronOmniAudioTower(ParakeetEncoder):
    """The encoder, a norm, and two projections with a squared ReLU between them. A sound has an
    embedding of the silence behind it if its last frame fills a position.

    Attributes:
        projector_width: the width of the activation's output.
        projector_bias: whether the projections have biases.
    """

    projector_width: int
    projector_bias: bool

    @property
    def read_width(self) -> int:
        return 2 * self.projector_width

    def num_embeddings(self, frames: int) -> int:
        return num_halved(frames + 1, self.num_halvings)
