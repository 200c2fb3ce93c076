"""What the tower of Omnilingual ASR is.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from dataclasses import dataclass

from shmllm.formats.audio_counts import RATE, num_convolved_samples
from shmllm.formats.audio_settings import MOST_OMNIASR_SECONDS
from shmllm.models.vision.encoder_spec import VisionActivation


@dataclass(frozen=True, slots=True, kw_only=True)
class OmniAsrTower:
    """The encoder of wav2vec 2.0 (Baevski et al., 2020) with norms before attention and MLPs:
    convolutions over samples, a convolution whose results are added as positions, layers, a norm
    and a projection.

    Attributes:
        hidden_size: the width of the stream.
        num_layers: the number of layers.
        num_heads: the number of heads.
        inner: the width of the activation's output.
        activation: the activation of MLPs and convolutions.
        channels: the widths of the results of the convolutions over samples.
        convolutions: their lengths and strides.
        convolution_bias: whether they have biases.
        kernel: the length of the convolution over positions; even.
        groups: the number of its groups of columns.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    inner: int
    activation: VisionActivation
    channels: tuple[int, ...]
    convolutions: tuple[tuple[int, int], ...]
    convolution_bias: bool
    kernel: int
    groups: int

    @property
    def num_mels(self) -> int:
        """The features of a frame, which is a sample."""
        return 1

    @property
    def most_frames(self) -> int:
        """The most samples of a sound."""
        return MOST_OMNIASR_SECONDS * RATE

    @property
    def num_elements(self) -> int:
        """About the number of its parameters."""
        widths = zip((1, *self.channels), self.channels, self.convolutions, strict=False)
        of_samples = sum(inputs * outputs * length for inputs, outputs, (length, _) in widths)
        of_layers = self.num_layers * (4 * self.hidden_size + 2 * self.inner)
        of_positions = self.hidden_size // self.groups * self.kernel + 2 * self.hidden_size
        return self.hidden_size * (of_layers + of_positions + self.channels[-1]) + of_samples

    @property
    def most_activations(self) -> int:
        """About the most numbers of a sample that are in memory at a time: of a convolution its
        windows and four tensors of its results, or of a layer four of its activations."""
        found, apart, inputs = 1, 1, 1
        for outputs, (length, stride) in zip(self.channels, self.convolutions, strict=True):
            apart *= stride
            found = max(found, (inputs * length + 4 * outputs) // apart + 1)
            inputs = outputs
        of_layer = 4 * self.inner + 6 * self.hidden_size
        return max(found, of_layer // apart + 1)

    def num_embeddings(self, frames: int) -> int:
        """Returns how many embeddings a sound has."""
        return num_convolved_samples(frames, self.convolutions)

    def num_inputs(self, frames: int) -> int:
        """Returns how many samples the tower reads of a sound."""
        return frames
