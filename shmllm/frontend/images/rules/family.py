"""What all rules have in common: the class of the registry's entries, and tiles."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from shmllm.frontend.images.picture import Picture
from shmllm.frontend.images.rules.options import Options

Grid = tuple[int, int, int]
"""How the tiles of an image lie; each family says what the numbers are."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """What the model's tower reads of an image.

    Attributes:
        pixels: uint8 [tiles, height, width, 3], contiguous.
        grid: see `Grid`.
        parts: the tiles of an image whose tiles have several sizes, each with a grid of its own;
            such an image has no `pixels`, and its grid is (parts, rows, columns).
    """

    pixels: NDArray[np.uint8]
    grid: Grid
    parts: tuple[Tiles, ...] = ()


class Rules(ABC):
    """The rules of a family with the values of a model and a request. Subclasses are frozen
    dataclasses: equal rules make equal tiles of equal images, and their `repr` is part of an
    image's identity.

    Attributes:
        OVERRIDES: the fields that a request may change.
    """

    OVERRIDES: ClassVar[frozenset[str]]

    @classmethod
    def merged(cls, values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
        """The fields of a model with those that a request changes."""
        return values | changes

    @classmethod
    @abstractmethod
    def of(cls, options: Options) -> Self:
        """Reads the fields of the family.

        Raises:
            RequestError: a field has a wrong type or value.
        """

    @classmethod
    def among(cls, count: int) -> Mapping[str, Any]:
        """What changes if a prompt has so many images, unless a request says otherwise."""
        return {}

    @abstractmethod
    def tiles(self, picture: Picture) -> Tiles:
        """Makes tiles of an RGB image, with the bits of transformers' class.

        Raises:
            RequestError: the image's size does not suit the settings.
        """

    def sides(self) -> tuple[int, int] | None:
        """Height and width of all tiles, in pixels; None if they depend on the image."""
        return None
