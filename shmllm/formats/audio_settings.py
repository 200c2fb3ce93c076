"""The settings of feature extractors, by which sounds become features."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

FRAMES_BEHIND = 2
"""How many frames behind a sound the convolutions of Whisper's encoder read."""
_GEMMA4_MOST_SAMPLES = 480_000
"""Where transformers' extractor for Gemma 4 cuts a sound unless a caller says otherwise."""
MOST_SAMPLED_FRAMES = 60_000
"""The frames of the longest sound of Gemma 4 12B, which knows none: 40 minutes."""
MOST_PARAKEET_FRAMES = 4000
"""The frames of the longest sound of Canary, by its authors, as its files name none: 40 seconds."""
MOST_OMNI_FRAMES = 12_000
"""Those of Nemotron 3 Omni, whose files name none and which attends to all at once: two minutes."""
MOST_OMNIASR_SECONDS = 40
"""The longest sound of Omnilingual ASR, by its authors' program, as its files name none."""
MOST_WAVE_SECONDS = 64
"""The longest sound of Moonshine, by its authors' program, as its files name none."""
MOST_SECONDS = 600
"""The longest sound of models whose files name none, and that need memory for all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioSettings(ABC):
    """The settings of a feature extractor.

    Attributes:
        rate: the samples of a second.
        num_mels: the features of a frame.
        hop: the samples from one frame to the next.
        window: the samples of a frame.
    """

    rate: int
    num_mels: int
    hop: int
    window: int

    @property
    @abstractmethod
    def most_samples(self) -> int:
        """The samples of the longest sound."""

    @abstractmethod
    def count_frames(self, num_samples: int) -> int:
        """The number of frames of a sound."""

    @property
    def most_seconds(self) -> int:
        """The seconds of the longest sound."""
        return self.most_samples // self.rate

    @property
    def most_frames(self) -> int:
        """The frames of the longest sound."""
        return self.count_frames(self.most_samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperSettings(AudioSettings):
    """Those of transformers' `WhisperFeatureExtractor`, whose frames begin inside a sound.

    Attributes:
        seconds: the longest sound.
    """

    seconds: int

    @property
    def most_samples(self) -> int:
        return self.rate * self.seconds

    @property
    def most_frames(self) -> int:
        return self.most_samples // self.hop

    def count_frames(self, num_samples: int) -> int:
        return -(-num_samples // self.hop)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpaddedSettings(WhisperSettings):
    """Those of transformers' `WhisperFeatureExtractor` for one sound without anything behind it: at
    its end frames read its last samples mirrored, and a rest that is shorter than `hop` has no
    frame.

    Attributes:
        fewest: the samples of the shortest sound; silence fills others.
    """

    fewest: int = 0

    def count_frames(self, num_samples: int) -> int:
        return max(num_samples, self.fewest) // self.hop


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4AudioSettings(AudioSettings):
    """Those of transformers' `Gemma4AudioFeatureExtractor`. The first frame has its middle at the
    begin of a sound, and the last one ends a sample before its end.

    Attributes:
        lowest, highest: the frequencies that the filters cover, in Hertz.
        floor: added to the power of a filter before its logarithm.
    """

    lowest: float
    highest: float
    floor: float

    @property
    def most_samples(self) -> int:
        return _GEMMA4_MOST_SAMPLES

    @property
    def num_before(self) -> int:
        """The number of zeros in front of a sound."""
        return self.window // 2

    def count_frames(self, num_samples: int) -> int:
        return max(0, (num_samples + self.num_before - self.window - 1) // self.hop + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteSpeechSettings(AudioSettings):
    """Those of transformers' `GraniteSpeechFeatureExtractor`. A frame has two of a spectrogram, one
    behind the other. The middle of the first one is at the begin of a sound, which is mirrored at
    both ends.

    Attributes:
        num_filters: the features of a frame of the spectrogram.
        fft: the length of Fourier transforms; zeros surround a window.
        group: how many frames the projector reads together, and
        rate_of_group: by what this number is divided to get that of embeddings.
    """

    num_filters: int
    fft: int
    group: int
    rate_of_group: int

    @property
    def most_samples(self) -> int:
        return MOST_SECONDS * self.rate

    def count_frames(self, num_samples: int) -> int:
        if num_samples <= self.fft // 2:  # which cannot be mirrored
            return 0
        return (num_samples // self.hop + 1) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FunAsrSettings(AudioSettings):
    """Those of transformers' `FunAsrNanoFeatureExtractor`: a frame has several of Kaldi's, and some
    of these are in two. Kaldi's begin inside a sound, and the last one ends there.

    Attributes:
        num_filters: the features of a frame of Kaldi's.
        together: how many of these a frame has.
        stride: by how many the next one begins later.
        longest: the frames of the longest sound.
    """

    num_filters: int
    together: int
    stride: int
    longest: int = 2048

    @property
    def most_samples(self) -> int:
        return self.window + self.longest * self.stride * self.hop - 1

    def count_of_kaldi(self, num_samples: int) -> int:
        """The number of Kaldi's frames."""
        return max(0, num_samples - self.window + self.hop) // self.hop

    def count_frames(self, num_samples: int) -> int:
        return -(-self.count_of_kaldi(num_samples) // self.stride)


class SamplesSettings(AudioSettings):
    """Those of transformers' `Gemma4UnifiedAudioFeatureExtractor`: the features of a frame are its
    samples. Silence fills the last one."""

    @property
    def most_samples(self) -> int:
        return MOST_SAMPLED_FRAMES * self.hop

    def count_frames(self, num_samples: int) -> int:
        return -(-num_samples // self.hop)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveSettings(AudioSettings):
    """Those of transformers' `Wav2Vec2FeatureExtractor` and `OmniASRFeatureExtractor`: a frame is
    a sample.

    Attributes:
        normalizes: whether the samples of a sound get the mean 0 and the variance 1.
        least_variance: added to the variance.
        longest: the seconds of the longest sound.
    """

    normalizes: bool
    least_variance: float = 1e-7
    longest: int = MOST_WAVE_SECONDS

    @property
    def most_samples(self) -> int:
        return self.longest * self.rate

    def count_frames(self, num_samples: int) -> int:
        return num_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class ParakeetSettings(AudioSettings):
    """Those of transformers' `ParakeetFeatureExtractor` and `CohereAsrFeatureExtractor`. The middle
    of the first frame is at the begin of a sound, which is silent at both ends.

    Attributes:
        fft: the length of Fourier transforms; zeros surround a window.
        emphasis: the part of the sample before that is subtracted from each one.
        dither: the factor of noise that is added to the samples.
        longest: the samples of the longest sound.
    """

    fft: int
    emphasis: float
    dither: float
    longest: int

    @property
    def most_samples(self) -> int:
        return self.longest

    def count_frames(self, num_samples: int) -> int:
        count = num_samples // self.hop
        return count if count > 1 else 0  # one frame has no variance
