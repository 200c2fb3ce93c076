"""What towers for sounds are that are none of Whisper's kind: those of Granite Speech and
Fun-ASR-Nano.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from dataclasses import dataclass

from shmllm.formats.audio_settings import MOST_SECONDS
from shmllm.models.vision.encoder_spec import VisionActivation


@dataclass(frozen=True, slots=True, kw_only=True)
class QFormer:
    """A transformer whose queries are weights and read windows of what an encoder computes (Li et
    al., "BLIP-2", 2023).

    Attributes:
        hidden_size: the width of the stream.
        num_layers: the number of layers.
        num_heads: the number of heads.
        inner: the width of the activation's output.
        activation: the activation of the MLPs.
        eps: of the norms.
        reads_every: of so many layers the first one reads the encoder.
        window: the frames that queries read together.
        num_queries: how many embeddings a window becomes.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    inner: int
    activation: VisionActivation
    eps: float
    reads_every: int
    window: int
    num_queries: int

    @property
    def num_elements(self) -> int:
        """About the number of its parameters, without what reads the encoder."""
        return self.num_layers * self.hidden_size * (6 * self.hidden_size + 2 * self.inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteSpeechTower:
    """A conformer whose positions attend within blocks, with embeddings of distances (Shaw et al.,
    2018), and a `QFormer`.

    Attributes:
        hidden_size: the width of the stream.
        num_layers: the number of layers.
        num_heads, head_dim: the number and the width of heads.
        inner: the width of the activation's output in MLPs.
        num_mels: the number of features of a frame, which is two of a spectrogram.
        num_classes: what the middle layer's results are classified as; the probabilities are added
            to the stream.
        block: the frames of a block.
        most_distance: the largest distance that has an embedding.
        kernel: the length of the layers' convolutions, in frames.
        expansion: the width of convolutions over that of the stream.
        collected: the layers, from 1, whose results the projector reads before the last one's; 0
            stands for what the first layer reads.
        projector: what reads the results.
        rate: the frames of a second.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    inner: int
    num_mels: int
    num_classes: int
    block: int
    most_distance: int
    kernel: int
    expansion: int
    collected: tuple[int, ...]
    projector: QFormer
    rate: int = 50

    @property
    def read_width(self) -> int:
        """The width of what the projector reads."""
        return self.hidden_size * (len(self.collected) + 1)

    @property
    def num_elements(self) -> int:
        """About the number of its parameters."""
        widths = 4 * self.num_heads * self.head_dim + 4 * self.inner
        of_layer = widths + 3 * self.expansion * self.hidden_size
        of_windows = 2 * self.projector.num_layers * self.read_width * self.projector.hidden_size
        of_layers = self.num_layers * self.hidden_size * of_layer
        return of_layers + of_windows + self.projector.num_elements

    @property
    def most_frames(self) -> int:
        """The most frames of a sound."""
        return MOST_SECONDS * self.rate

    @property
    def most_activations(self) -> int:
        """About the most numbers of a frame that are in memory at a time: four tensors of the
        stream, those that the projector reads, and its keys and values."""
        return 4 * self.hidden_size + self.read_width + 4 * self.projector.hidden_size

    def num_embeddings(self, frames: int) -> int:
        """Returns how many embeddings a sound has."""
        return -(-frames // self.projector.window) * self.projector.num_queries

    def num_inputs(self, frames: int) -> int:
        """Returns how many frames the tower reads of a sound."""
        return frames


@dataclass(frozen=True, slots=True, kw_only=True)
class SanmLayers:
    """Layers of attention and an MLP, each behind a norm.

    Attributes:
        hidden_size: the width of the stream.
        num_layers: the number of layers.
        num_heads: the number of heads.
        inner: the width of the activation's output.
        activation: the activation of the MLPs.
        eps: of the norms.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    inner: int
    activation: VisionActivation
    eps: float

    @property
    def num_elements(self) -> int:
        """About the number of their parameters."""
        return self.num_layers * self.hidden_size * (4 * self.hidden_size + 2 * self.inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunAsrTower:
    """The encoder of SenseVoice (An et al., "FunAudioLLM", 2024), whose attention adds a
    convolution of values (SAN-M; Gao et al., 2020), two projections, and layers without a
    convolution.

    Attributes:
        encoder: the layers of the encoder. The first one reads features of another width.
        kernel: the length of the convolutions, in frames.
        normed: the layers, from 0, with a norm behind them.
        adaptor: the layers behind the projections.
        projector_activation: the activation between the projections.
        projector_width: the width of its output.
        num_mels: the number of features of a frame.
        most_frames: the most frames of a sound.
    """

    encoder: SanmLayers
    kernel: int
    normed: tuple[int, ...]
    adaptor: SanmLayers
    projector_activation: VisionActivation
    projector_width: int
    num_mels: int
    most_frames: int

    @property
    def num_elements(self) -> int:
        """About the number of its parameters."""
        widths = self.encoder.hidden_size + self.adaptor.hidden_size
        of_first = 3 * self.num_mels * self.encoder.hidden_size
        of_layers = self.encoder.num_elements + self.adaptor.num_elements
        return of_layers + of_first + self.projector_width * widths

    @property
    def most_activations(self) -> int:
        """About the most numbers of a frame that are in memory at a time: features, and in a layer
        two activations of the MLP or six tensors of the stream."""
        of_layers = max(
            2 * each.inner + 6 * each.hidden_size for each in (self.encoder, self.adaptor)
        )
        return max(of_layers, 2 * self.projector_width) + 3 * self.num_mels

    def num_embeddings(self, frames: int) -> int:
        """Returns how many embeddings a sound has."""
        return frames

    def num_inputs(self, frames: int) -> int:
        """Returns how many frames the tower reads of a sound."""
        return frames
