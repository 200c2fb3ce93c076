"""Images of one model: what becomes of their pixels, and of prompts with them.

`ImageProcessor` joins the rules of the model's image processor with the placeholder of its
architecture. It must not know where images come from (opening.py, sources.py) and how they reach
the engine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shmllm.errors import EngineStartError, RequestError
from shmllm.formats.image_settings import (
    PREPROCESSOR,
    PROCESSOR,
    ImageSettings,
    read_image_settings,
)
from shmllm.frontend.images.picture import Picture
from shmllm.frontend.images.placeholders import expansion
from shmllm.frontend.images.placeholders.expansion import Encode, Runs
from shmllm.frontend.images.placeholders.family import Placeholder
from shmllm.frontend.images.placeholders.registry import placeholder_of_model
from shmllm.frontend.images.prepared import PreparedImage, PreparedImages
from shmllm.frontend.images.rules.family import Rules
from shmllm.frontend.images.rules.registry import rules_of_model, rules_of_request

_MOST_KNOWN_RULES = 64


class ImageProcessor:
    """Prepares images and prompts for one model. Threads may share it.

    Attributes:
        settings: those of the model's image processor.
        mark: what users and chat templates write for an image.
        image_token_id: the id of the token at whose positions the embeddings are.
        most_tokens: the largest number of embeddings of an image without overrides, perhaps a
            little more; None without a bound.
    """

    def __init__(self, settings: ImageSettings, placeholder: Placeholder) -> None:
        """Raises EngineStartError if the settings are not supported, or do not suit the model."""
        self.settings = settings
        self.mark = placeholder.mark
        self.image_token_id = placeholder.image_token_id
        self._placeholder = placeholder
        self._rules = rules_of_model(settings)
        placeholder.check_rules(self._rules)
        largest = self._rules.largest()
        self.most_tokens = None if largest is None else placeholder.count(largest)
        self._changed_rules: dict[str, Rules] = {}

    @classmethod
    def of_model(cls, directory: Path, config: Mapping[str, Any]) -> ImageProcessor | None:
        """The image processor of a model.

        Args:
            directory: the model's directory.
            config: the content of its config.json.

        Returns:
            None if the architecture takes no images.

        Raises:
            EngineStartError: a file is missing or wrong, or its settings are not supported.
        """
        placeholder = placeholder_of_model(directory, config)
        if placeholder is None:
            return None
        settings = read_image_settings(directory)
        if settings is None:
            raise EngineStartError(
                f"{directory} has no settings for images; copy {PROCESSOR} or {PREPROCESSOR} of "
                "the model into it"
            )
        return cls(settings, placeholder)

    def prepare(
        self,
        image: Picture,
        overrides: Mapping[str, Any] | None = None,
        name: str = "the image",
        cache: PreparedImages | None = None,
        identity: bytes | None = None,
    ) -> PreparedImage:
        """Makes the tower's tiles of an image.

        Args:
            image: an RGB image of pillow, as `open_image` returns it.
            overrides: vLLM's `mm_processor_kwargs`.
            name: the image's name for messages.
            cache: images that are prepared already; this one is added.
            identity: what `identity` returns for the same arguments, if the caller has it; it costs
                a hash of all pixels.

        Raises:
            RequestError: an override is unknown or wrong, or the image does not suit the rules.
        """
        if cache is None or not cache.most_bytes:
            return self._prepare(image, overrides, name)
        known = identity or self.identity(image, overrides, name)
        return cache.get(known, lambda: self._prepare(image, overrides, name))

    def identity(
        self,
        image: Picture,
        overrides: Mapping[str, Any] | None = None,
        name: str = "the image",
    ) -> bytes:
        """32 bytes: equal ones mean equal pixels, grid and table of pixels.

        Overrides that have no effect make no difference. pillow's version is part of it, as other
        versions may resize to other bits.

        Raises:
            RequestError: an override is unknown or wrong.
        """
        import PIL

        rules = self._rules_for(overrides, name)
        settings = self.settings
        table = (settings.do_rescale, settings.rescale_factor, settings.do_normalize)
        kind = repr((rules, table, settings.mean, settings.std, PIL.__version__)).encode()
        digest = hashlib.sha256(hashlib.sha256(kind).digest())
        digest.update(repr((image.mode, image.size)).encode() + b"\0")
        digest.update(image.tobytes())
        return digest.digest()

    def expand_text(self, name: str, text: str, images: Sequence[PreparedImage]) -> str:
        """The text of a prompt with each mark replaced by what stands for its image.

        Raises:
            RequestError: the numbers of marks and images differ.
        """
        return expansion.expand_text(name, self._placeholder, text, [each.grid for each in images])

    def expand_ids(
        self, name: str, ids: Sequence[int], images: Sequence[PreparedImage], encode: Encode
    ) -> list[int]:
        """The token ids of a prompt with each mark replaced by the ids of its image's expansion.
        Ids that contain all image tokens already stay as they are.

        Args:
            name: the prompt's name for messages.
            ids: the token ids.
            images: in the order of their marks.
            encode: makes token ids of a text, without special tokens around it.

        Raises:
            RequestError: the ids have neither a mark for each image nor all image tokens.
        """
        grids = [each.grid for each in images]
        return expansion.expand_ids(name, self._placeholder, ids, grids, encode)

    def runs(self, name: str, ids: Sequence[int], images: Sequence[PreparedImage]) -> list[Runs]:
        """Of each image the positions of its embeddings in the expanded prompt: ascending half-open
        intervals, together as long as its `num_tokens`.

        Raises:
            RequestError: the prompt has more or fewer image tokens than its images have embeddings.
        """
        counts = [each.num_tokens for each in images]
        return expansion.find_runs(name, self._placeholder, ids, counts)

    def _prepare(
        self, image: Picture, overrides: Mapping[str, Any] | None, name: str
    ) -> PreparedImage:
        rules = self._rules_for(overrides, name)
        try:
            tiles = rules.tiles(image)
            self._placeholder.check_sides(*tiles.pixels.shape[1:3])
        except RequestError as error:
            raise RequestError(f"{name}: {error}", parameter=error.parameter) from None
        tiles.pixels.flags.writeable = False
        return PreparedImage(tiles.pixels, tiles.grid, self._placeholder.count(tiles.grid))

    def _rules_for(self, overrides: Mapping[str, Any] | None, name: str) -> Rules:
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
