"""Images on the command line: `--image FILE`, and the folder of the files that prompts may name.

This module opens files and checks options before an engine starts. What becomes of images in a
prompt is in `image_prompts`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import click

from shmllm.errors import RequestError

if TYPE_CHECKING:
    from shmllm.batch.sources import SourceKind
    from shmllm.cli.session import CommandSession
    from shmllm.frontend.images.picture import Picture
    from shmllm.frontend.llm import LLM
    from shmllm.frontend.prompt_images import ReadyImage

Command = TypeVar("Command", bound=Callable[..., Any])

FOLDER = "allowed_local_media_path"
FOLDER_FLAG = "--allowed-local-media-path"
IMAGE_FLAG = "--image"

image_option = click.option(
    IMAGE_FLAG,
    "images",
    multiple=True,
    metavar="FILE",
    help="Image in front of each prompt. May be given several times. Implies --chat if the model "
    "has a chat template, unless a prompt has the model's mark for each image.",
)
folder_option = click.option(
    FOLDER_FLAG,
    FOLDER,
    metavar="DIR",
    help="Folder of images that rows may name: `images`, and image_url with file:///.  "
    "[default: none]",
)


def take_folder(options: dict[str, Any]) -> dict[str, str]:
    """Move the folder from a command's options to keyword arguments of `LLM` and `LLM.attach`.

    Raises:
        click.UsageError: there is no such folder.
    """
    folder = options.pop(FOLDER)
    if folder is None:
        return {}
    if not os.path.isdir(folder):
        raise click.UsageError(f"{FOLDER_FLAG}: there is no folder {folder!r}")
    return {FOLDER: os.path.abspath(folder)}


@dataclass(frozen=True)
class CommandImages:
    """The images that a command names.

    Attributes:
        paths: their files.
        pictures: what is in them.
    """

    paths: tuple[str, ...]
    pictures: tuple[Picture, ...]

    @classmethod
    def open(cls, paths: tuple[str, ...]) -> Self:
        """Read the files.

        Raises:
            RequestError: one of them cannot be read, or contains no image.
        """
        if not paths:
            return cls((), ())
        from shmllm.frontend.images.sources import image_of_path

        return cls(paths, tuple(image_of_path(f"{IMAGE_FLAG} {path}", path) for path in paths))

    def __bool__(self) -> bool:
        return bool(self.paths)

    def check_input(self, kind: SourceKind | None, is_openai: bool) -> None:
        """Check that prompts are texts.

        Args:
            kind: what --input contains; None without it.
            is_openai: whether it is one of OpenAI's batch files.

        Raises:
            click.UsageError: they are objects, which name images themselves.
        """
        from shmllm.batch.sources import SourceKind

        if self and (is_openai or kind not in (None, SourceKind.TEXT)):
            raise click.UsageError(
                f"{IMAGE_FLAG} is for prompts as text: a row names its images itself, in `images` "
                "or in its messages"
            )

    def check_model(self, session: CommandSession) -> None:
        """Check that the model of the engine that will be started takes images.

        Raises:
            RequestError: it takes none.
            EngineStartError: there is no such model, or its settings for images are wrong.
        """
        engine = session.engine
        if not self or session.attach is not None or engine["hf_overrides"]:
            return
        if engine["language_model_only"]:
            raise click.UsageError(f"{IMAGE_FLAG} and --language-model-only exclude each other")
        if not takes_images(engine["model"], engine["revision"]):
            raise RequestError(
                f"{engine['model']} takes no images: {IMAGE_FLAG} needs one that does"
            )

    def ready(self, llm: LLM) -> list[ReadyImage]:
        """Prepare the images for a model, once for all prompts.

        Raises:
            RequestError: it takes no images, or not these.
        """
        if not self:
            return []
        from shmllm.frontend.prompt_images import GivenImages

        images = llm.front_end.images
        given = GivenImages(self.pictures, [None] * len(self.pictures), {})
        try:
            return images.ready(IMAGE_FLAG, given)
        except RequestError as error:
            raise RequestError(str(error).removeprefix(f"{IMAGE_FLAG}: ")) from error


def takes_images(model: str, revision: str | None = None) -> bool:
    """Whether a model takes images, by its files.

    Raises:
        EngineStartError: there is no such model, or its settings for images are wrong.
    """
    from shmllm.frontend.model_files import resolve_model

    return directory_takes_images(resolve_model(model, revision=revision))


def directory_takes_images(directory: Path) -> bool:
    """The same of the model in a directory; False if there is none.

    Raises:
        EngineStartError: its settings for images are wrong.
    """
    from shmllm.frontend.images.processor import ImageProcessor

    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and ImageProcessor.of_model(directory, config) is not None
