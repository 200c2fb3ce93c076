"""Images of one model: what becomes of their pixels.

`ImageProcessor` joins the rules of the model's image processor with the placeholder of its
architecture. It must not know where images come from (sources.py) and how they reach the engine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from shmllm.errors import RequestError
from shmllm.formats.image_settings import ImageSettings, read_image_settings
from shmllm.formats.processor_files import missing_settings
from shmllm.frontend.images.opening import open_image
from shmllm.frontend.images.picture import Picture
from shmllm.frontend.images.rules.family import Rules, Tiles
from shmllm.frontend.images.rules.registry import rules_of_model, rules_of_request
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.items.processor import NO_OVERRIDES, ItemProcessor
from shmllm.frontend.placeholders.family import ImagePlaceholder

_MOST_KNOWN_RULES = 64


class ImageProcessor(ItemProcessor[Picture]):
    """
    Args:
        settings: those of the model's image processor.
        placeholder: what stands for an image in a prompt.

    Attributes:
        settings: those of the model's image processor.

    Raises:
        EngineStartError: the settings are not supported, or do not suit the model.
    """

    def __init__(self, settings: ImageSettings, placeholder: ImagePlaceholder) -> None:
        super().__init__(placeholder)
        self.settings = settings = placeholder.adapted(settings)
        self._sides = placeholder
        self._rules = rules_of_model(settings)
        placeholder.check_rules(self._rules)
        self._changed_rules: dict[str, Rules] = {}

    @classmethod
    def of_model(cls, directory: Path, placeholder: ImagePlaceholder) -> Self:
        settings = read_image_settings(directory)
        if settings is None:
            raise missing_settings("images", directory)
        return cls(settings, placeholder)

    @property
    def known_overrides(self) -> frozenset[str]:
        return self._rules.OVERRIDES

    def among(self, count: int) -> Mapping[str, Any]:
        return self._rules.among(count)

    def check(self, overrides: Mapping[str, Any]) -> None:
        self._sides.check_fixed_sides(self._rules_for(overrides, "the engine"))

    def open(self, name: str, value: Any) -> Picture:
        return open_image(name, value)

    def size(self, opened: Picture) -> tuple[int, ...]:
        return opened.size

    def identity(
        self, opened: Picture, overrides: Mapping[str, Any] = NO_OVERRIDES, name: str = "the image"
    ) -> bytes:
        """pillow's version is part of it, as other versions may resize to other bits."""
        import PIL

        rules = self._rules_for(overrides, name)
        settings = self.settings
        table = (settings.do_rescale, settings.rescale_factor, settings.do_normalize)
        kind = repr((rules, table, settings.mean, settings.std, PIL.__version__)).encode()
        digest = hashlib.sha256(hashlib.sha256(kind).digest())
        digest.update(repr((opened.mode, opened.size)).encode() + b"\0")
        digest.update(opened.tobytes())
        return digest.digest()

    def prepare(
        self, opened: Picture, overrides: Mapping[str, Any] = NO_OVERRIDES, name: str = "the image"
    ) -> PreparedItem:
        rules = self._rules_for(overrides, name)
        try:
            return self._prepared(rules.tiles(opened))
        except RequestError as error:
            raise RequestError(f"{name}: {error}", parameter=error.parameter) from None

    def _prepared(self, tiles: Tiles) -> PreparedItem:
        if tiles.parts:
            return PreparedItem.of_parts(map(self._prepared, tiles.parts), tiles.grid)
        self._sides.check_sides(*tiles.pixels.shape[1:3])
        tiles.pixels.flags.writeable = False
        return PreparedItem(tiles.pixels, tiles.grid, self._sides.count(tiles.grid))

    def _rules_for(self, overrides: Mapping[str, Any], name: str) -> Rules:
        """The model's rules with a request's changes. Requests repeat them, so some are kept."""
        if not overrides:
            return self._rules
        try:
            key = json.dumps(overrides, sort_keys=True)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"{name}: mm_processor_kwargs must be JSON: {error}") from None
        rules = self._changed_rules.get(key)
        if rules is None:
            try:
                rules = rules_of_request(self.settings, overrides)
            except RequestError as error:
                raise RequestError(f"{name}: {error}", parameter=error.parameter) from None
            if len(self._changed_rules) < _MOST_KNOWN_RULES:
                self._changed_rules[key] = rules
        return rules
