"""Modules of transformers that import torchvision, for what they compute without it."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.image_processing_backends import TorchvisionBackend

_NAMES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
_FUNCTIONS = f"{_NAMES[-1]}.functional"


def import_without_torchvision(name: str) -> Any:
    """Import a module of transformers while empty ones stand for torchvision's.

    Args:
        name: its name below "transformers.models".
    """
    names = [each for each in (*_NAMES, _FUNCTIONS) if each not in sys.modules]
    sys.modules.update({each: ModuleType(each) for each in names})
    if _FUNCTIONS in names:
        sys.modules[_FUNCTIONS].InterpolationMode = int  # type: ignore[attr-defined]
        sys.modules[_NAMES[-1]].functional = sys.modules[_FUNCTIONS]  # type: ignore[attr-defined]
    try:
        return import_module(f"transformers.models.{name}")
    finally:
        for each in names:
            del sys.modules[each]


def resize_with_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pillow take the place of torchvision in transformers' image processors."""
    monkeypatch.setattr(TorchvisionBackend, "resize", _resized)
    monkeypatch.setattr(TorchvisionBackend, "normalize", _normalised)


def preprocessed(processor: Any, image: Image.Image, **fields: Any) -> Any:
    """What a processor on torchvision makes of an RGB image.

    Args:
        processor: an instance of a class of `import_without_torchvision`.
        image: the image.
        fields: of the processor, in place of its own.
    """
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    given = {"return_tensors": "pt", "disable_grouping": None}
    values = processor.to_dict() | {"size": processor.size} | fields | given
    return processor._preprocess([pixels], **values)


def _resized(own: Any, image: Any, size: Any, resample: Any, **options: Any) -> Any:
    """Of [images, 3, height, width], uint8."""
    pictures = [Image.fromarray(each.permute(1, 2, 0).numpy()) for each in image]
    sides = size.width, size.height
    found = [np.array(each.resize(sides, Image.Resampling(resample))) for each in pictures]
    return torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2)


def _normalised(own: Any, images: Any, mean: Any, std: Any, **options: Any) -> Any:
    """As torchvision's function."""
    return images.sub(mean.view(-1, 1, 1)).div(std.view(-1, 1, 1))


def without_videos(kind: Any) -> Any:
    """A processor class that accepts None in place of its video processor."""

    def check(self: Any, name: str, argument: Any) -> Any:
        if name != "video_processor":
            return kind.check_argument_for_proper_class(self, name, argument)
        return None

    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": check})
