"""What the towers for sounds of Qwen's Omni models are, which attend within chunks of a sound."""

from __future__ import annotations

from dataclasses import dataclass

from shmllm.models.audio.specs import WhisperTower, num_convolved


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2_5OmniAudioTower(WhisperTower):
    """The layers of Whisper's encoder, which attend within chunks of a sound; positions begin anew
    in each. Means of pairs of the results, a norm and a projection follow.

    Attributes:
        window: the positions of a chunk, of two frames each.
    """

    window: int = 100

    @property
    def most_frames(self) -> int:
        """The frames of 300 seconds, of which chunks know nothing: the longest sound of published
        feature extractors."""
        return 30_000

    @property
    def chunks_at_once(self) -> int:
        """How many chunks are computed at a time: about those of 30 seconds, as Whisper does."""
        return max(1, 1500 // self.window)

    @property
    def most_activations(self) -> int:
        """See `WhisperTower.most_activations`: a tensor of the stream, and those of the chunks that
        are computed at a time or, behind all chunks, another one of the stream."""
        at_once = 2 * self.window * self.chunks_at_once
        of_chunks = at_once * super(Qwen2_5OmniAudioTower, self).most_activations
        of_stream = self.hidden_size // 2
        return of_stream + max(of_chunks // self.most_frames, of_stream)

    def num_inputs(self, frames: int) -> int:
        return frames


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3OmniAudioTower(WhisperTower):
    """Convolutions over frames and features of a chunk of a sound, the layers of Whisper's encoder,
    which attend within several chunks, a norm and two projections. Positions begin anew in each
    chunk.

    Attributes:
        window: half the frames of a chunk.
        chunks_together: how many chunks attend to one another.
        channels: the width of the results of convolutions.
        fills: whether a sound that is shorter than a chunk is filled with zeros; otherwise only the
            last one of several chunks is.
        has_projector: whether checkpoints have the projections beside the encoder.
    """

    window: int = 50
    chunks_together: int = 8
    channels: int = 480
    fills: bool = False
    has_projector: bool = False

    @property
    def chunk(self) -> int:
        """The frames of a chunk."""
        return 2 * self.window

    @property
    def most_frames(self) -> int:
        """The frames of 40 minutes: chunks know nothing of one another, or of a longest sound."""
        return 240_000

    @property
    def most_activations(self) -> int:
        """See `WhisperTower.most_activations`, but a position has eight frames: windows of nine of
        the first convolution's results, of chunks that attend to one another, and three tensors of
        the stream."""
        at_once = min(self.chunk * self.chunks_together, self.most_frames)
        of_windows = 9 * self.channels * self.num_mels // 8
        return of_windows * at_once // self.most_frames + 3 * self.hidden_size // 8

    @property
    def num_elements(self) -> int:
        """About the number of its parameters."""
        of_layers = self.num_layers * (4 * self.hidden_size + 2 * self.inner)
        of_frames = self.channels * num_convolved(self.num_mels) + 2 * self.hidden_size
        return self.hidden_size * (of_layers + of_frames) + 18 * self.channels**2

    def num_embeddings(self, frames: int) -> int:
        """Returns how many embeddings a sound has."""
        whole, rest = divmod(frames, self.chunk)
        return whole * num_convolved(self.chunk) + num_convolved(rest)

    def num_inputs(self, frames: int) -> int:
        return frames
