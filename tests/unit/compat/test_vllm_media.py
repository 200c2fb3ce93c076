"""`vllm.multimodal.utils`: items become URLs, and URLs of this machine items."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shmllm.compat import vllm_media as media
from shmllm.errors import RequestError


def pattern(mode: str = "RGB") -> Image.Image:
    values = np.arange(5 * 7 * len(mode)).reshape(5, 7, len(mode)) % 251
    return Image.fromarray(values.astype(np.uint8), mode)


def test_images_become_urls_and_back(tmp_path: Path) -> None:
    image = pattern()
    url = media.encode_image_url(image)
    assert url.startswith("data:image/png;base64,")
    image.save(tmp_path / "x.png")
    for given in (url, (tmp_path / "x.png").as_uri()):
        assert np.array_equal(np.asarray(media.fetch_image(given)), np.asarray(image))
    assert media.encode_image_url(image, format="JPEG").startswith("data:image/jpeg;base64,")


def test_what_is_transparent_becomes_white_in_a_file() -> None:
    image = Image.new("RGBA", (2, 2), (200, 0, 0, 0))
    image.putpixel((1, 1), (0, 0, 200, 255))
    for encoded in (
        media.encode_image_url(image),
        "data:image/png;base64," + media.encode_image_base64(image),
    ):
        found = media.fetch_image(encoded)
        assert found.getpixel((0, 0)) == (255, 255, 255)
        assert found.getpixel((1, 1)) == (0, 0, 200)


def test_sounds_become_urls_and_back() -> None:
    sound = np.linspace(-1, 1, 480, dtype=np.float32)
    samples, rate = media.fetch_audio(media.encode_audio_url(sound, 16000))
    assert rate == 16000
    np.testing.assert_allclose(samples, sound, atol=1e-4)
    with pytest.raises(ValueError, match="format must be 'WAV', got 'MP3'"):
        media.encode_audio_base64(sound, 16000, format="MP3")


def test_nothing_is_fetched() -> None:
    with pytest.raises(RequestError, match="nothing is fetched from a network"):
        media.fetch_image("https://example.com/x.png")
    with pytest.raises(TypeError, match="image_io_kwargs are not supported"):
        media.fetch_image("data:image/png;base64,", {"image_mode": "L"})


def test_what_is_transparent_becomes_white() -> None:
    image = Image.new("RGBA", (2, 2), (200, 0, 0, 0))
    assert media.convert_image_mode(image, "RGB").getpixel((0, 0)) == (255, 255, 255)
    assert media.convert_image_mode(image, "L").mode == "L"
    same = pattern()
    assert media.convert_image_mode(same, "RGB") is same
