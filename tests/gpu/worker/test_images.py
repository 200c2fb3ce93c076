"""Images in a whole engine on a GPU."""

from __future__ import annotations

from conformance.gpu_images import ImagesConformance, TowersConformance, encoded, subject

__all__ = ["encoded", "subject"]


class TestTowers(TowersConformance):
    pass


class TestImages(ImagesConformance):
    pass
