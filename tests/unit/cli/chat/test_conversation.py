"""A conversation and its files: what each step leaves of it."""

from __future__ import annotations

import json

import pytest

from shmllm.cli.chat.conversation import Conversation
from shmllm.errors import RequestError


def roles(conversation: Conversation) -> list[str]:
    return [message["role"] for message in conversation.messages]


def test_a_step_leaves_the_conversation_before_it_as_it_was() -> None:
    first = Conversation.with_system("Be brief.").asked("one")
    second = first.answered("1").asked("two")
    assert roles(first) == ["system", "user"]
    assert roles(second) == ["system", "user", "assistant", "user"]
    assert second.num_messages == 3


def test_the_system_message_is_set_replaced_and_removed() -> None:
    asked = Conversation.with_system(None).asked("one")
    assert roles(asked) == ["user"]
    under = asked.under("Be brief.").under("Be long.")
    assert under.messages[0] == {"role": "system", "content": "Be long."}
    assert under.under("") == asked


def test_a_new_conversation_keeps_the_system_message() -> None:
    assert roles(Conversation.with_system("x").asked("one").begun_again()) == ["system"]
    assert Conversation().asked("one").begun_again() == Conversation()


def test_an_answer_is_taken_back_up_to_the_question() -> None:
    asked = Conversation.with_system("x").asked("one")
    assert asked.answered("1").unanswered() == asked
    assert asked.unanswered() == asked


@pytest.mark.parametrize("conversation", [Conversation(), Conversation.with_system("x")])
def test_without_a_question_nothing_is_answered_again(conversation: Conversation) -> None:
    with pytest.raises(RequestError, match="no message to answer again"):
        conversation.unanswered()


def test_a_file_holds_one_line_that_gives_the_conversation_again() -> None:
    conversation = Conversation.with_system("é").asked("one\ntwo").answered("\u2028")
    text = conversation.to_json()
    assert text.count("\n") == 1
    assert json.loads(text)["messages"][1] == {"role": "user", "content": "one\ntwo"}
    assert Conversation.from_json(text, "the file") == conversation


def test_a_list_of_messages_is_a_conversation_too() -> None:
    messages = [{"role": "user", "content": "one"}]
    assert Conversation.from_json(json.dumps(messages), "x").messages == tuple(messages)


@pytest.mark.parametrize(
    "text",
    ["", "[1]", "{}", '{"messages": [{"role": "user"}]}', '[{"role": 1, "content": "x"}]', "7"],
)
def test_anything_else_is_refused_by_the_name_of_the_file(text: str) -> None:
    with pytest.raises(RequestError, match=r"^saved\.json "):
        Conversation.from_json(text, "saved.json")
