"""Decodes sounds with soundfile: WAV, FLAC, Ogg (Vorbis, Opus) and MP3.

libsndfile reads many more formats; only these are offered to it, by their first bytes. Blocks are
decoded one after another and their channels averaged at once, so a sound takes little more memory
than its samples. soundfile is imported with the first sound.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmllm.errors import RequestError
from shmllm.frontend.audio.sound import MOST_SAMPLES, Sound, check_length, whole_rate

FORMATS = ("WAV", "FLAC", "Ogg Vorbis", "Ogg Opus", "MP3")
_DECODED = ("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3")
"""libsndfile's names of these formats."""
_BEGINNINGS = (b"RIFF", b"RIFX", b"RF64", b"fLaC", b"OggS", b"ID3")
_BLOCK = 2**16
_WITHOUT_LENGTH = 2**31 - 2**16
"""Programs that write a WAV file into a pipe give it a size above this."""
_TOLERATED_BYTES = 64
"""Some programs count a WAV file's header or its padding wrongly."""


def open_bytes(name: str, data: bytes) -> Sound:
    """Decodes an encoded sound and averages its channels.

    Raises:
        RequestError: the data are empty, damaged, cut off or of an unknown format, or the sound has
            no samples, samples that are not finite, or more than MOST_SAMPLES in a channel.
    """
    if not data:
        raise RequestError(f"{name} is empty (0 bytes)")
    if not _is_known(data):
        raise _unknown(name)
    _check_riff_size(name, data)
    import soundfile

    try:
        with soundfile.SoundFile(_Bytes(data)) as file:
            if file.format not in _DECODED:
                raise _unknown(name)
            rate = whole_rate(name, file.samplerate)
            _check_promised(name, file.frames, rate)
            samples = _decoded(name, file, rate)
            _check_complete(name, len(samples), file.frames)
    except RequestError:
        raise
    except Exception as error:  # libsndfile has an error of its own for every kind of damage.
        reason = str(error).removeprefix("Error opening <").strip() or type(error).__name__
        if isinstance(error, soundfile.LibsndfileError):
            reason = error.error_string
        raise RequestError(
            f"{name} cannot be decoded: {reason.rstrip('.')}; is it damaged or cut off?"
        ) from None
    if not np.isfinite(samples).all():
        raise RequestError(f"{name} has samples that are not finite; write it again without them")
    return Sound(samples, rate)


class _Bytes(io.BytesIO):
    """Encoded bytes. Damaged headers make libsndfile seek to places before the beginning, where
    BytesIO raises, and an error in a callback would be printed."""

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = (0, self.tell(), len(self.getbuffer()))[whence]
        return super().seek(max(0, start + offset))


def _is_known(data: bytes) -> bool:
    """Whether the first bytes are those of a known format; MP3 without a tag begins with 11 bits
    that are 1."""
    return data.startswith(_BEGINNINGS) or (data[0] == 0xFF and data[1:2] >= b"\xe0")


def _unknown(name: str) -> RequestError:
    return RequestError(
        f"{name} has an unknown format or a damaged header; known are {', '.join(FORMATS)}"
    )


def _check_riff_size(name: str, data: bytes) -> None:
    """libsndfile takes a WAV file that is cut off for a shorter one."""
    if data.startswith(b"RIFF") and len(data) >= 8:
        promised = int.from_bytes(data[4:8], "little") + 8
        if len(data) + _TOLERATED_BYTES < promised < _WITHOUT_LENGTH:
            raise RequestError(
                f"{name} is cut off: it has {len(data):,} of the {promised:,} bytes in its header"
            )


def _check_promised(name: str, num_frames: int, rate: int) -> None:
    """Refuses a sound that is too long before it is decoded. FLAC files may keep their length to
    themselves; then `num_frames` is above every real length."""
    if num_frames < 2**40:
        check_length(name, num_frames, rate)


def _decoded(name: str, file: Any, rate: int) -> NDArray[np.float32]:
    """All samples of a soundfile.SoundFile with the channels averaged, float32 [n]."""
    blocks: list[NDArray[np.float32]] = []
    num_samples = 0
    while True:
        block = file.read(_BLOCK, dtype="float32", always_2d=True)
        if not len(block):
            break
        num_samples += len(block)
        if num_samples > MOST_SAMPLES:
            check_length(name, num_samples, rate)
        with np.errstate(over="ignore", invalid="ignore"):
            mono = block[:, 0].copy() if block.shape[1] == 1 else block.mean(1, dtype=np.float32)
        blocks.append(mono)
    check_length(name, num_samples, rate)
    return np.concatenate(blocks)


def _check_complete(name: str, num_decoded: int, num_promised: int) -> None:
    """An MP3 file that is cut off ends early, without an error."""
    if num_decoded < num_promised < 2**40:
        raise RequestError(
            f"{name} is cut off or damaged: it has {num_decoded:,} of the {num_promised:,} samples "
            "in its header"
        )
