"""`vllm.multimodal.utils`: items as URLs, for the messages of `LLM.chat`, and URLs as items."""

from __future__ import annotations

import io
import mimetypes
import wave
from base64 import b64encode
from typing import Any

import numpy as np

from shmllm.frontend.items.files import item_of_url
from shmllm.params.items import Modality

_EVERYWHERE = "/"
_LOUDEST = 2**15 - 1


def encode_image_base64(image: Any, *, image_mode: str | None = "RGB", format: str = "PNG") -> str:
    """The file of an image in base64; `image_mode` None keeps the image's mode, and another one
    converts the image as `convert_image_mode` does."""
    file = io.BytesIO()
    converted = image if image_mode is None else convert_image_mode(image, image_mode)
    converted.save(file, format)
    return b64encode(file.getvalue()).decode()


def encode_image_url(image: Any, *, image_mode: str | None = "RGB", format: str = "PNG") -> str:
    """The data URL of an image, as a part `image_url` of a message takes it."""
    content = encode_image_base64(image, image_mode=image_mode, format=format)
    return f"data:{_type_of(format, 'image')};base64,{content}"


def encode_audio_base64(audio: Any, sampling_rate: int, *, format: str = "WAV") -> str:
    """A WAV file of 16-bit samples in base64.

    Args:
        audio: float samples between -1 and 1, of shape [samples].
        sampling_rate: samples per second.
        format: "WAV".

    Raises:
        ValueError: another format.
    """
    if format.upper() != "WAV":
        raise ValueError(f"format must be 'WAV', got {format!r}")
    samples = np.clip(np.asarray(audio, np.float64), -1, 1) * _LOUDEST
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, sampling_rate, 0, "NONE", ""))
        writer.writeframes(np.rint(samples).astype("<i2").tobytes())
    return b64encode(file.getvalue()).decode()


def encode_audio_url(audio: Any, sampling_rate: int, *, format: str = "WAV") -> str:
    """The data URL of a sound; see `encode_audio_base64`."""
    content = encode_audio_base64(audio, sampling_rate, format=format)
    return f"data:{_type_of(format, 'audio')};base64,{content}"


def fetch_image(image_url: str, image_io_kwargs: Any = None) -> Any:
    """The image of a data URL, or of the URL of any local file; see `_fetch`."""
    return _fetch("image", image_url, image_io_kwargs)


def fetch_audio(audio_url: str, audio_io_kwargs: Any = None) -> tuple[Any, int]:
    """The samples and their rate, as `fetch_image` reads an image."""
    sound = _fetch("audio", audio_url, audio_io_kwargs)
    return sound.samples, sound.rate


def convert_image_mode(image: Any, to_mode: str) -> Any:
    """The image in another mode; what is transparent becomes white without an alpha channel."""
    if image.mode == to_mode:
        return image
    if to_mode == "RGB" and image.mode == "RGBA":
        from PIL import Image as images

        white = images.new("RGBA", image.size, "white")
        return images.alpha_composite(white, image).convert("RGB")
    return image.convert(to_mode)


def _fetch(modality: Modality, url: str, io_kwargs: Any) -> Any:
    """Reads an item.

    Raises:
        RequestError: the URL is of another kind, since nothing is fetched; or the item cannot be
            decoded.
        TypeError: there are arguments for the reader.
    """
    if io_kwargs:
        raise TypeError(f"{modality}_io_kwargs are not supported, got {io_kwargs!r}")
    return item_of_url(modality, f"the {modality}", url, _EVERYWHERE)


def _type_of(format: str, modality: Modality) -> str:
    name = format.lower()
    return mimetypes.types_map.get(f".{name}", f"{modality}/{name}")
