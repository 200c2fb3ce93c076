"""Items on the command line: `--image FILE`, `--audio FILE`, `--video FILE`, and the folder of the
files that prompts may name.

This module opens files and checks options before an engine starts. What becomes of items in a
prompt is in `item_prompts`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import click

from shmllm.errors import RequestError
from shmllm.params.items import COUNTED, Modality

if TYPE_CHECKING:
    from shmllm.batch.sources import SourceKind
    from shmllm.cli.session import CommandSession
    from shmllm.frontend.given_items import GivenItem
    from shmllm.frontend.items.ready import ReadyItem
    from shmllm.frontend.llm import LLM

Command = TypeVar("Command", bound=Callable[..., Any])

FOLDER = "allowed_local_media_path"
FOLDER_FLAG = "--allowed-local-media-path"
FLAGS: dict[Modality, str] = {"image": "--image", "audio": "--audio", "video": "--video"}


def item_options(command: Command) -> Command:
    """Add the options that name items."""
    for modality, flag in reversed(FLAGS.items()):
        command = click.option(
            flag,
            modality,
            multiple=True,
            metavar="FILE",
            help=f"{modality.capitalize()} in front of each prompt. May be given several times. "
            "Implies --chat if the model has a chat template, unless a prompt has the model's mark "
            f"for each {modality}.",
        )(command)
    return command


folder_option = click.option(
    FOLDER_FLAG,
    FOLDER,
    metavar="DIR",
    help="Folder of files that rows may name: `images`, `audio`, `videos`, and image_url, "
    "audio_url and video_url with file:///.  "
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
class CommandItems:
    """The items that a command names.

    Attributes:
        items: what is in their files.
    """

    items: tuple[GivenItem, ...] = ()

    @classmethod
    def take(cls, options: dict[str, Any]) -> Self:
        """Read the files that a command's options name, and remove these.

        Raises:
            RequestError: one of them cannot be read, or contains something else.
        """
        paths = [(modality, path) for modality in FLAGS for path in options.pop(modality)]
        return cls(tuple(read_item(modality, path) for modality, path in paths))

    def __bool__(self) -> bool:
        return bool(self.items)

    @property
    def _modalities(self) -> list[Modality]:
        return list(dict.fromkeys(item.modality for item in self.items))

    def check_input(self, kind: SourceKind | None, is_openai: bool) -> None:
        """Check that prompts are texts.

        Args:
            kind: what --input contains; None without it.
            is_openai: whether it is one of OpenAI's batch files.

        Raises:
            click.UsageError: they are objects, which name items themselves.
        """
        from shmllm.batch.sources import SourceKind

        if self and (is_openai or kind not in (None, SourceKind.TEXT)):
            raise click.UsageError(
                f"{FLAGS[self._modalities[0]]} is for prompts as text: a row names its items "
                "itself, in `images`, `audio`, `videos` or in its messages"
            )

    def check_model(self, session: CommandSession) -> None:
        """See `check_takes`."""
        check_takes(session, self._modalities)

    def ready(self, llm: LLM) -> list[ReadyItem]:
        """Prepare the items for a model, once for all prompts.

        Raises:
            RequestError: it takes none, or not these.
        """
        if not self:
            return []
        from shmllm.frontend.given_items import GivenItems

        first = FLAGS[self._modalities[0]]
        try:
            return llm.front_end.items.ready(first, GivenItems(self.items))
        except RequestError as error:
            raise RequestError(str(error).removeprefix(f"{first}: ")) from error


def read_item(modality: Modality, path: str) -> GivenItem:
    """Read the file that a command's option names.

    Raises:
        RequestError: it cannot be read, or contains something else.
    """
    from shmllm.frontend.given_items import GivenItem
    from shmllm.frontend.items.files import item_of_path

    return GivenItem(modality, item_of_path(modality, f"{FLAGS[modality]} {path}", path))


def check_takes(session: CommandSession, modalities: Sequence[Modality]) -> None:
    """Check that the model of the engine that will be started takes the items of a command.

    Args:
        session: starts the engine.
        modalities: those of the items.

    Raises:
        RequestError: it does not.
        EngineStartError: there is no such model, or its settings for them are wrong.
    """
    engine = session.engine
    if not modalities or session.attach is not None or engine["hf_overrides"]:
        return
    if engine["language_model_only"]:
        raise click.UsageError(
            f"{FLAGS[modalities[0]]} and --language-model-only exclude each other"
        )
    from shmllm.frontend.model_files import Hub, resolve_model

    taken = modalities_of(resolve_model(engine["model"], Hub(engine["revision"])))
    for modality in modalities:
        if modality not in taken:
            raise RequestError(
                f"{engine['model']} takes no {COUNTED[modality]}: {FLAGS[modality]} needs a "
                "model that does"
            )


def modalities_of(directory: Path) -> tuple[Modality, ...]:
    """The kinds of items that the model in a directory takes; none if there is no model.

    Raises:
        EngineStartError: its settings for them are wrong.
    """
    from shmllm.frontend.items.registry import processors_of_model

    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ()
    return tuple(processors_of_model(directory, config)) if isinstance(config, dict) else ()
