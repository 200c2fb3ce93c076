"""Images of a conversation: the files that messages name, and what the engine gets of them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from shmllm.cli.chat.answer import STOPPED, Answer, Show
from shmllm.cli.chat.attachments import Attachment, ChatItems, attach_file, check_files, item_names
from shmllm.cli.chat.chat import Chat
from shmllm.cli.chat.conversation import Conversation
from shmllm.cli.chat.screen import Screen
from shmllm.errors import RequestError
from shmllm.params.items import Modality


class Prepared:
    """In place of PromptItems: the size of an image stands for it."""

    def mark(self, modality: str) -> str:
        return "<image>"

    def overrides_among(self, modality: str, count: int) -> dict[str, Any]:
        return {"several": True} if count > 2 else {}

    def ready(self, name: str, given: Any) -> list[tuple[int, int]]:
        return [(*item.value.size, *given.overrides) for item in given.items]


class Answers:
    """Answers from a list; what they were asked."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)
        self.asked: list[Any] = []

    def __call__(self, conversation: Conversation, show: Show, attempt: int = 0) -> Answer:
        self.asked.append(conversation.messages[-1]["content"])
        return self._answers.pop(0)

    def attach(self, modality: Modality, name: str) -> Attachment:
        return attach_file(modality, name)


def done(text: str = "yes") -> Answer:
    return Answer(text, "stop")


def picture(path: Path, width: int = 8) -> Path:
    Image.new("RGB", (width, 4)).save(path)
    return path


@pytest.fixture
def cat(tmp_path: Path) -> Path:
    return picture(tmp_path / "a cat#1.png")


def talk(answers: Answers, *lines: str) -> tuple[Chat, str]:
    notes = io.StringIO()
    chat = Chat(Conversation(), answers, Screen(io.StringIO(), notes))
    chat.run(lines)
    return chat, notes.getvalue()


def test_an_image_is_a_part_in_front_of_the_next_message_only(cat: Path) -> None:
    answers = Answers(done(), done())
    _, notes = talk(answers, f"/image {cat}", "What is this?", "And now?")
    assert answers.asked == [
        [attach_file("image", str(cat)).part, {"type": "text", "text": "What is this?"}],
        "And now?",
    ]
    assert f"[for the next message: {cat}]\n[image: a cat#1.png]\n" in notes


def test_attached_images_are_listed_and_dropped(cat: Path) -> None:
    answers = Answers(done())
    lines = ("/image", f"/image {cat}", f"/image {cat}", "/image", "/detach", "hello")
    _, notes = talk(answers, *lines)
    assert answers.asked == ["hello"]
    assert notes.splitlines()[:5] == [
        "[nothing is attached]",
        f"[for the next message: {cat}]",
        *[f"[for the next message: {cat}, {cat}]"] * 2,
        "[nothing is attached]",
    ]


def test_images_of_a_message_without_an_answer_stay_attached(cat: Path) -> None:
    answers = Answers(Answer("", STOPPED), done())
    chat, notes = talk(answers, f"/image {cat}", "one", "/reset", "two")
    assert [content[-1]["text"] for content in answers.asked] == ["one", "two"]
    assert answers.asked[0][0] == answers.asked[1][0]
    assert f"[new conversation]\n[for the next message: {cat}]" in notes
    assert len(chat.conversation.messages) == 2


def test_an_answer_is_repeated_with_the_images(cat: Path) -> None:
    answers = Answers(done("1"), done("2"))
    talk(answers, f"/image {cat}", "one", "/regenerate")
    assert answers.asked[0] == answers.asked[1]


@pytest.mark.parametrize("name", ["none.png", ".", "empty.png", "text.png"])
def test_what_is_no_image_is_an_error_and_is_not_attached(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.png").touch()
    Path("text.png").write_text("no image")
    chat, notes = talk(Answers(), f"/image {name}", "/image")
    assert notes.startswith("shmllm: ")
    assert notes.endswith("\n[nothing is attached]\n")
    assert chat.num_failed == 1


def test_a_home_directory_is_found(cat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(cat.parent))
    assert attach_file("image", "~/a cat#1.png").part == attach_file("image", str(cat)).part


def test_saved_messages_have_the_images_and_are_read_again(cat: Path, tmp_path: Path) -> None:
    chat, _ = talk(Answers(done()), f"/image {cat}", "one", f"/save {tmp_path / 'saved.json'}")
    text = (tmp_path / "saved.json").read_text()
    assert json.loads(text)["messages"][0]["content"][0]["image_url"]["url"] == cat.as_uri()
    found = Conversation.from_json(text, "saved.json")
    assert found == chat.conversation
    assert check_files(found.messages, "saved.json") == []
    assert item_names(found.messages[0]) == [f"image: {cat.name}"]


def test_files_that_are_gone_or_have_changed(cat: Path) -> None:
    messages = Conversation().asked("one", [attach_file("image", str(cat)).part]).messages
    picture(cat, width=9)
    assert check_files(messages, "s.json") == [
        f"{cat} has changed since it was attached; the model gets the new one"
    ]
    cat.unlink()
    with pytest.raises(RequestError, match=r"^s.json: messages\[0\].content\[0\]: cannot read"):
        check_files(messages, "s.json")


def test_a_file_is_read_once_and_a_changed_one_is_another_image(cat: Path) -> None:
    images = ChatItems(Prepared())  # type: ignore[arg-type]
    first = images.attach("image", str(cat)).part
    picture(cat, width=9)
    second = images.attach("image", str(cat)).part
    cat.unlink()
    messages = Conversation().asked("one", [first]).asked("two", [second]).messages
    contents = [message["content"] for message in images.with_items(messages)]
    assert [content[0] for content in contents] == [
        {"type": "image", "image": (8, 4)},
        {"type": "image", "image": (9, 4)},
    ]
    assert messages[0]["content"][0] == first


def test_images_may_be_prepared_otherwise_among_several(cat: Path) -> None:
    images = ChatItems(Prepared())  # type: ignore[arg-type]
    part = images.attach("image", str(cat)).part
    messages = Conversation().asked("one", [part, part]).messages
    found = images.with_items(messages)[0]["content"]
    assert [each["image"] for each in found[:2]] == [(8, 4)] * 2
    messages = Conversation().asked("one", [part, part, part]).messages
    found = images.with_items(messages)[0]["content"]
    assert [each["image"] for each in found[:3]] == [(8, 4, "several")] * 3


def test_a_model_without_images_refuses_them(cat: Path) -> None:
    class NoImages:
        def mark(self, modality: str) -> str:
            raise RequestError("the model takes no images")

    with pytest.raises(RequestError, match="the model takes no images"):
        ChatItems(NoImages()).attach("image", str(cat))  # type: ignore[arg-type]


@pytest.mark.parametrize("content", [[{"text": "no type"}], [3], {"type": "text"}, None, 3])
def test_contents_that_are_no_parts_are_no_messages(content: object) -> None:
    text = json.dumps({"messages": [{"role": "user", "content": content}]})
    with pytest.raises(RequestError, match="each a dict with role and content"):
        Conversation.from_json(text, "x")
