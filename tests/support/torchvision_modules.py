"""Modules of transformers that import torchvision, for what they compute without it."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import transformers.image_processing_backends  # finds out that there is no torchvision  # noqa: F401

_NAMES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")


def import_without_torchvision(name: str) -> Any:
    """Import a module of transformers while empty ones stand for torchvision's.

    Args:
        name: its name below "transformers.models".
    """
    names = [each for each in (*_NAMES, f"{_NAMES[-1]}.functional") if each not in sys.modules]
    sys.modules.update({each: ModuleType(each) for each in names})
    try:
        return import_module(f"transformers.models.{name}")
    finally:
        for each in names:
            del sys.modules[each]
