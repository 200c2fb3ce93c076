"""Small encoded videos."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO

import av
import numpy as np
import pytest


@pytest.fixture(scope="session")
def encoded() -> Callable[..., bytes]:
    """A function that returns the bytes of a file with gray frames that become lighter."""

    def make(
        count: int = 6, rate: int = 8, form: str = "mp4", codec: str = "mpeg4", step: int = 40
    ) -> bytes:
        file = BytesIO()
        with av.open(file, "w", format=form) as container:
            stream = container.add_stream(codec, rate=rate)
            stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
            for index in range(count):
                pixels = np.full((32, 48, 3), index * step % 256, np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            container.mux(stream.encode())
        return file.getvalue()

    return make
