"""`--image FILE`, and items that rows name: what is checked, and the prompts that they make."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from PIL import Image

from shmllm.batch.sources import SourceKind
from shmllm.cli.item_prompts import items_of_row, prompt_with_items
from shmllm.cli.items import CommandItems, modalities_of
from shmllm.cli.session import CommandSession
from shmllm.errors import RequestError
from shmllm.frontend.items.ready import ReadyItem
from shmllm.frontend.model_files import bundled_model

ENGINE = {"model": "tiny", "revision": None, "hf_overrides": None, "language_model_only": False}


class FrontEnd:
    """Has the mark "<i>"; chats become the text of their messages."""

    def __init__(
        self, folder: str = "", template: str | None = None, *, generates: bool = True
    ) -> None:
        self.info = SimpleNamespace(pooling=SimpleNamespace(generates=generates))
        self.items = SimpleNamespace(
            mark=lambda modality: "<i>",
            options=SimpleNamespace(folder=folder),
            ready=lambda name, given: [item.value.size for item in given.items],
        )
        self.tokenizer = self
        self._template = template

    def chat_template(self) -> str:
        if self._template is None:
            raise RequestError("the model has no chat template")
        return self._template

    def chat_prompt(self, messages: Any, **template: Any) -> dict[str, Any]:
        return {"chat": messages, **template}


def prompt(given: Any, items: list[Any], template: str | None = None, **options: Any) -> Any:
    front_end: Any = FrontEnd(template=template)
    return prompt_with_items(front_end, given, items, **options)


def ready(number: int) -> ReadyItem:
    prepared: Any = None
    return ReadyItem("image", bytes([number]) * 32, prepared)


def taken(*paths: str) -> CommandItems:
    return CommandItems.take({"image": paths, "audio": (), "video": ()})


def user(text: str, *images: Any) -> dict[str, Any]:
    parts = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


@pytest.mark.parametrize(
    ("given", "template", "made"),
    [
        ("a", None, {"prompt": "<i>\n<i>\na"}),
        ("a <i> b <i>", None, {"prompt": "a <i> b <i>"}),
        ("a <i> b <i>", "x", {"prompt": "a <i> b <i>"}),
        ({"prompt": "a", "cache_salt": "s"}, None, {"prompt": "<i>\n<i>\na", "cache_salt": "s"}),
        ({"prompt_token_ids": [1]}, "x", {"prompt_token_ids": [1]}),
        (
            {"prompt": "a", "prompt_token_ids": [1]},
            None,
            {"prompt": "a", "prompt_token_ids": [1]},
        ),
    ],
)
def test_a_prompt_without_marks_gets_them_in_front(given: Any, template: Any, made: Any) -> None:
    items = [ready(1), ready(2)]
    assert prompt(given, items, template) == {**made, "multi_modal_data": {"image": items}}


def test_a_prompt_becomes_a_message_if_the_model_has_a_template() -> None:
    items = [ready(1), ready(2)]
    assert prompt("a", items, "x", chat_template=None) == {
        "chat": [user("a", *items)],
        "chat_template": None,
        "prompt": "a",
    }
    salted = prompt({"prompt": "a", "cache_salt": "s"}, items[:1], "x")
    assert (salted["chat"], salted["cache_salt"]) == ([user("a", items[0])], "s")


def test_a_model_that_only_makes_vectors_gets_marks_although_it_has_a_template() -> None:
    front_end: Any = FrontEnd(template="x", generates=False)
    found = prompt_with_items(front_end, "a", [ready(1)])
    assert found["prompt"] == "<i>\na"


def test_the_last_message_gets_the_images() -> None:
    system = {"role": "system", "content": "Be brief."}
    found = prompt([system, {"role": "user", "content": "a <i>"}], [ready(1)])
    assert found == {"chat": [system, user("a <i>", ready(1))]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an image of 8x4 pixels under several names, and one beside it."""
    inner = tmp_path / "inner"
    (inner / "sub").mkdir(parents=True)
    for path in (inner / "a.png", inner / "sub" / "b #1%.png", tmp_path / "outside.png"):
        Image.new("RGB", (8, 4)).save(path)
    (inner / "link.png").symlink_to(tmp_path / "outside.png")
    (inner / "bad.png").write_bytes((inner / "a.png").read_bytes()[:45])
    return inner


def test_a_row_names_paths_below_the_folder_and_urls(folder: Path) -> None:
    front_end: Any = FrontEnd(str(folder))
    names = ["a.png", "sub/b #1%.png", "sub/../a.png", str(folder / "a.png")]
    names.append((folder / "a.png").as_uri())
    assert items_of_row(front_end, {"image": names}) == [(8, 4)] * 5


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("none.png", "image 1 'none.png': cannot read "),
        ("bad.png", "bad.png' cannot be decoded"),
        ("sub", "no regular file"),
        ("../outside.png", "not below the folder"),
        ("link.png", "not below the folder"),
        ("/etc/passwd", "not below the folder"),
        ("file:///etc/passwd", "not below the folder"),
        ("https://example.com/a.png", "nothing is fetched from a network"),
        ("data:text/plain,a", "a data URL must begin with 'data:image/"),
        ("\ud800", "is no valid path"),
        ("a\0b", "no valid URL of a file"),
    ],
)
def test_a_file_that_a_row_may_not_name_is_an_error_with_its_name(
    name: str, words: str, folder: Path
) -> None:
    front_end: Any = FrontEnd(str(folder))
    with pytest.raises(RequestError) as error:
        items_of_row(front_end, {"image": [name]})
    assert words in str(error.value)
    assert "image 1" in str(error.value)


def test_without_a_folder_a_path_is_an_error_with_the_option() -> None:
    front_end: Any = FrontEnd()
    with pytest.raises(RequestError, match=r"'a.png' is a file: --allowed-local-media-path DIR"):
        items_of_row(front_end, {"image": ["a.png"]})


@pytest.mark.parametrize("name", ["none.png", "sub", "bad.png"])
def test_files_that_cannot_be_read_are_errors_with_their_names(name: str, folder: Path) -> None:
    path = str(folder / name)
    with pytest.raises(RequestError, match=f"--image {path}"):
        taken(str(folder / "a.png"), path)


@pytest.mark.parametrize(
    ("kind", "is_openai"),
    [(SourceKind.JSON_LINES, False), (SourceKind.PARQUET, False), (SourceKind.TEXT, True)],
)
def test_rows_in_json_name_their_images_themselves(
    kind: SourceKind, is_openai: bool, folder: Path
) -> None:
    taken().check_input(kind, is_openai)
    images = taken(str(folder / "a.png"))
    images.check_input(None, False)
    images.check_input(SourceKind.TEXT, False)
    with pytest.raises(click.UsageError, match="a row names its items itself"):
        images.check_input(kind, is_openai)


def test_a_model_without_images_is_known_before_it_starts(folder: Path) -> None:
    images = taken(str(folder / "a.png"))
    with pytest.raises(RequestError, match="tiny takes no images"):
        images.check_model(CommandSession(None, ENGINE))
    with pytest.raises(click.UsageError, match="--language-model-only exclude each other"):
        images.check_model(CommandSession(None, ENGINE | {"language_model_only": True}))
    images.check_model(CommandSession("main", ENGINE))
    taken().check_model(CommandSession(None, ENGINE))


def test_a_directory_says_whether_its_model_takes_images(tmp_path: Path) -> None:
    config = json.loads((bundled_model("tiny") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    assert modalities_of(tmp_path) == ()
