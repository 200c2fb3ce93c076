"""What all placeholders have in common: the class of the registry's entries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from shmllm.errors import EngineStartError, RequestError
from shmllm.formats.audio_settings import FRAMES_BEHIND, AudioSettings
from shmllm.formats.image_settings import ImageSettings
from shmllm.frontend.images.rules.family import Rules
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.videos.rules.family import VideoRules
from shmllm.params.items import Grid, Modality

Beside = Literal["nothing", "grid"]
"""What users give beside the embeddings of an item."""


@dataclass(frozen=True, kw_only=True)
class Placeholder(ABC):
    """How a model's prompts contain the items of a modality.

    A prompt has a mark for each item. It is replaced by the item's expansion, in which a token of
    its own stands for each embedding of the item, perhaps among other text.

    Attributes:
        modality: what the items are.
        EMBEDS: what users give beside the embeddings of an item, which need no tower; None: they
            cannot give embeddings, as an expansion depends on more.
        mark: what users and chat templates write for an item.
        replaced: the part of `mark` that the expansion replaces.
        replaced_ids: the ids of its tokens; empty: those that the tokenizer makes of it.
        token: the text of the token that stands for an embedding; it may be the same as `replaced`.
        token_id: its id.
        is_alone: whether a prompt with an item consists of that item, for which one token stands.
    """

    modality: ClassVar[Modality]
    is_alone: ClassVar[bool] = False
    EMBEDS: ClassVar[Beside | None] = None

    mark: str
    replaced: str
    replaced_ids: tuple[int, ...]
    token: str
    token_id: int

    @classmethod
    @abstractmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        """Reads a model's configuration.

        Args:
            config: its config.json.
            texts: the texts of special tokens, by the names that its tokenizer gives them.

        Raises:
            EngineStartError: a field is missing, wrong or not supported.
        """

    def visible(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The token ids of a prompt with -1 in the place of what other modalities' expansions have
        in common with this one."""
        return ids

    @classmethod
    def is_taken(cls, config: Config) -> bool:
        """Whether a model of the architecture takes such items, by its config.json."""
        return True

    def complete(self, text: str, count: int) -> str | None:
        """The text of a prompt with so many items as the tokenizer has to get it, marks included,
        without special tokens around it; None: as users write it, with special tokens."""
        return None

    @abstractmethod
    def count(self, grid: Grid) -> int:
        """The number of embeddings of an item."""

    @abstractmethod
    def expansion(self, item: PreparedItem) -> str:
        """The text that replaces a mark, as transformers' processor writes it."""

    def expansions(self, items: Sequence[PreparedItem]) -> list[str]:
        """The texts of all items of a prompt, which may have numbers."""
        return [self.expansion(item) for item in items]


class TokenIds(NamedTuple):
    """The ids of tokens for which config.json has none: of an image, a video, and those around
    videos, or around images, too; -1: nothing asks for them."""

    image: int
    video: int
    begin: int = -1
    end: int = -1


def one_token(text: str, token: int, mark: str | None = None) -> dict[str, Any]:
    """Returns the attributes of a placeholder whose expansion replaces one token, which stands for
    embeddings in it.

    Args:
        text, token: the text of that token, and its id.
        mark: see `Placeholder`; None: the token itself.
    """
    return {
        "mark": text if mark is None else mark,
        "replaced": text,
        "replaced_ids": (token,),
        "token": text,
        "token_id": token,
    }


@dataclass(frozen=True, kw_only=True)
class ImagePlaceholder(Placeholder):
    """How a model's prompts contain images.

    Attributes:
        side: height and width of the tiles that the model's tower takes, in pixels; None if it
            takes images of several sizes.
        RULES: the class of the rules for images that the model needs.
        AUTHOR: whose image processor they are, for messages.
    """

    modality: ClassVar[Modality] = "image"
    RULES: ClassVar[type[Any]] = Rules
    AUTHOR: ClassVar[str] = ""

    side: int | None

    def adapted(self, settings: ImageSettings) -> ImageSettings:
        """The image processor's settings as the model's processor calls it."""
        return settings

    def check_rules(self, rules: Rules) -> None:
        """Checks that the rules for images suit the model's tower.

        Raises:
            EngineStartError: they do not.
        """
        if not isinstance(rules, self.RULES):
            raise Config({}).error(
                f"the model needs {self.AUTHOR}'s image processor, not {rules!r}"
            )

    def check_fixed_sides(self, rules: Rules) -> None:
        """Checks that the tower takes the tiles of all images.

        Raises:
            EngineStartError: it takes none of them.
        """
        found = rules.sides()
        if self.side is not None and found not in (None, (self.side, self.side)):
            height, width = found
            raise Config({}).error(
                f"the vision tower takes tiles of {self.side}x{self.side} pixels, and the image "
                f"processor makes tiles of {width}x{height}: change its settings, or pass "
                "mm_processor_kwargs"
            )

    def check_sides(self, height: int, width: int) -> None:
        """Raises RequestError if the tower does not take tiles of these sides, in pixels."""
        if self.side is not None and (height, width) != (self.side, self.side):
            raise RequestError(
                f"the image becomes {width}x{height} pixels, but the model takes {self.side}x"
                f"{self.side}; change the settings of the image processor, or mm_processor_kwargs"
            )


@dataclass(frozen=True, kw_only=True)
class VideoPlaceholder(Placeholder):
    """How a model's prompts contain videos.

    Attributes:
        processors: the names of transformers' classes that may prepare them, the default first.
        own_settings: what takes the place of fields of the image processor where a model has no
            file for videos.
        image: how they contain images, of which frames have the rules.
        frames_at_once: how many frames the model's tower makes one of.
    """

    modality: ClassVar[Modality] = "video"
    processors: ClassVar[tuple[str, ...]]
    own_settings: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    image: ImagePlaceholder
    frames_at_once: int

    def count(self, grid: Grid) -> int:
        return self.image.count(grid)

    def check_rules(self, rules: VideoRules) -> None:
        """Raises EngineStartError if the rules for videos do not suit the model's tower."""
        self.image.check_rules(rules.of_frames)
        if rules.frames_at_once != self.frames_at_once:
            raise Config({}).error(
                f"the vision tower makes one of {self.frames_at_once} frames, the video "
                f"processor's temporal_patch_size is {rules.frames_at_once}"
            )


@dataclass(frozen=True, kw_only=True)
class AudioPlaceholder(Placeholder):
    """How a model's prompts contain sounds.

    Attributes:
        num_mels: the features of a frame that the model's tower takes.
        most_frames: the frames of the longest sound, or of each part of one.
        divides: whether a sound may be longer, and is divided into parts of so many frames, of
            which those behind its end are silent.
        divides_samples: whether it is divided before features are made, so that each part is
            prepared as a sound of its own.
        counts_parts: whether the grid of a part has its number, from 1.
        fills: whether a sound has so many, of which those behind its end are silent.
        is_optional: whether the model works without sounds.
        frames_behind: how many frames behind its end the tower reads; None: all of the longest
            sound.
    """

    modality: ClassVar[Modality] = "audio"
    divides: ClassVar[bool] = False
    divides_samples: ClassVar[bool] = False
    counts_parts: ClassVar[bool] = False
    fills: ClassVar[bool] = False
    is_optional: ClassVar[bool] = True
    frames_behind: ClassVar[int | None] = FRAMES_BEHIND

    num_mels: int
    most_frames: int

    def adapted(self, settings: AudioSettings) -> AudioSettings:
        """The feature extractor's settings as the model's processor calls it."""
        return settings

    def check_settings(self, settings: AudioSettings) -> None:
        """Raises EngineStartError if the feature extractor's settings do not suit the tower."""
        found = settings.num_mels, settings.most_frames
        if found != (self.num_mels, self.most_frames):
            raise Config({}).error(
                f"the audio tower takes {self.num_mels} features of up to {self.most_frames} "
                f"frames, the feature extractor makes {found[0]} of {found[1]}"
            )


class Config:
    """Checked access to the integers and names of a config.json.

    Attributes:
        values: the object.
        where: its name in messages.
        processor: the content of processor_config.json, for those that read it.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str = "config.json",
        processor: Mapping[str, Any] | None = None,
    ) -> None:
        self.values = values
        self.where = where
        self.processor = processor or {}

    def error(self, message: str) -> EngineStartError:
        """An error about this object; the caller raises it."""
        return EngineStartError(f"{self.where}: {message}")

    def table(self, name: str) -> Config:
        """A nested object, empty if the field is absent."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(f"{name!r} must be an object, not {value!r}")
        return Config(value or {}, f"{self.where}: {name}")

    def integer(self, *names: str, default: int | None = None, minimum: int = 1) -> int:
        """The integer in the first of several fields that is there; transformers has renamed some.
        Without a default one of them is required."""
        value = next((self.values[n] for n in names if self.values.get(n) is not None), default)
        if type(value) is not int or not minimum <= value < 2**31:
            raise self.error(
                f"{names[0]!r} must be an integer of at least {minimum}, not {value!r}"
            )
        return value

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """One of several names; absent means the first."""
        value = self.values.get(name)
        if value is None:
            return choices[0]
        if value not in choices:
            raise self.error(f"{name!r} must be one of {', '.join(choices)}, not {value!r}")
        return str(value)
