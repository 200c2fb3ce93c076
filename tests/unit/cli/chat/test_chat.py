"""What each line of a chat does to the conversation and to the screen, with answers that a test
makes up."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shmllm.cli.chat.answer import STOPPED, Answer, Show
from shmllm.cli.chat.chat import Chat
from shmllm.cli.chat.conversation import Conversation
from shmllm.cli.chat.pipe import plain_lines
from shmllm.cli.chat.screen import Screen
from shmllm.errors import EngineDeadError, RequestError


class Table:
    """Answers from a list, an answer or an error for each call; and what they were asked."""

    def __init__(self, *answers: Answer | Exception) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[list[str], int]] = []

    def __call__(self, conversation: Conversation, show: Show, attempt: int = 0) -> Answer:
        self.asked.append(([m["content"] for m in conversation.messages], attempt))
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        show(answer.reasoning, True)
        show(answer.text, False)
        return answer


def done(text: str) -> Answer:
    return Answer(text, "stop", 2, 20, 16, 0.5, 10.0, 100)


class Talk:
    """A chat and its two streams."""

    def __init__(self, *answers: Answer | Exception, system: str | None = None) -> None:
        self.table = Table(*answers)
        self.out, self.notes = io.StringIO(), io.StringIO()
        screen = Screen(self.out, self.notes)
        self.chat = Chat(Conversation.with_system(system), self.table, screen)

    def enter(self, *lines: str) -> None:
        self.chat.run(lines)

    @property
    def texts(self) -> list[str]:
        return [message["content"] for message in self.chat.conversation.messages]

    def remarks(self) -> str:
        return self.notes.getvalue()


def test_each_answer_sees_what_was_said_before() -> None:
    talk = Talk(done("1"), done("2\n"), system="Be brief.")
    talk.enter("one", "  ", "two")
    assert talk.table.asked == [
        (["Be brief.", "one"], 0),
        (["Be brief.", "one", "1", "two"], 0),
    ]
    assert talk.out.getvalue() == "1\n2\n"
    assert talk.chat.num_failed == 0


def test_a_line_after_each_answer_has_its_figures() -> None:
    talk = Talk(done("1"), Answer("x", "stop", 1, num_steps=1))
    talk.enter("one", "two")
    assert talk.remarks().splitlines() == [
        "[2 tokens, 10.0 tokens/s, first after 0.50 s, 16 of 20 prompt tokens cached]",
        "[1 token]",
    ]


@pytest.mark.parametrize(
    ("num_steps", "counts", "line"),
    [
        (4, (44, 27), "[9 tokens, 2.2 tokens a step, 61 % of 44 drafted tokens accepted]"),
        (9, (1234, 0), "[9 tokens, 0 % of 1,234 drafted tokens accepted]"),
        (8, (1, 1), "[9 tokens, 1.1 tokens a step, 100 % of 1 drafted token accepted]"),
        (9, (0, 0), "[9 tokens]"),
        (4, (None, None), "[9 tokens, 2.2 tokens a step]"),
    ],
)
def test_the_line_shows_how_many_drafts_were_accepted_if_it_is_known(
    num_steps: int, counts: tuple[int | None, int | None], line: str
) -> None:
    num_drafted, num_accepted = counts
    talk = Talk(
        Answer(
            *("x", "stop", 9),
            num_steps=num_steps,
            num_draft_tokens=num_drafted,
            num_accepted_tokens=num_accepted,
        )
    )
    talk.enter("one")
    assert talk.remarks().splitlines() == [line]


@pytest.mark.parametrize(
    ("answer", "remark"),
    [
        (Answer("x", "length", 7, limit=7), "cut off after 7 tokens: --max-tokens"),
        (Answer("x", "length", 7, 93, limit=9), "the 100 tokens of context are full; /reset"),
        (Answer("x", "abort", 7), "the engine was paused, put to sleep or stopped"),
        (Answer("x", STOPPED, 7), "the answer so far stays"),
    ],
)
def test_what_ended_an_answer_early_is_said_and_the_answer_kept(
    answer: Answer, remark: str
) -> None:
    talk = Talk(answer)
    talk.enter("one")
    assert remark in talk.remarks()
    assert talk.texts == ["one", "x"]


@pytest.mark.parametrize("end", [STOPPED, "abort"])
def test_what_ended_before_an_answer_began_leaves_no_message(end: str) -> None:
    talk = Talk(done("1"), Answer("", end))
    talk.enter("one", "two")
    assert talk.texts == ["one", "1"]
    assert talk.chat.num_failed + talk.chat.num_aborted == 1


def test_an_error_is_one_line_and_loses_nothing() -> None:
    talk = Talk(done("1"), RequestError("too\nlong"), done("3"))
    talk.enter("one", "two", "three")
    assert "shmllm: too long\n" in talk.remarks()
    assert talk.texts == ["one", "1", "three", "3"]
    assert talk.chat.num_failed == 1


def test_an_engine_that_dies_ends_the_chat_on_a_line_of_its_own() -> None:
    class Dying(Table):
        def __call__(
            self, conversation: Conversation, show: Callable[[str], object], attempt: int = 0
        ) -> Answer:
            show("half a")
            raise EngineDeadError("gone")

    talk = Talk()
    chat = Chat(Conversation(), Dying(), Screen(talk.out, talk.notes))
    with pytest.raises(EngineDeadError):
        chat.run(["one"])
    assert talk.out.getvalue() == "half a\n"


def test_the_last_message_is_answered_again_with_another_seed() -> None:
    talk = Talk(done("1"), done("2"), done("3"), done("4"))
    talk.enter("one", "two", "/regenerate", "/regenerate")
    assert talk.table.asked[2:] == [(["one", "1", "two"], 1), (["one", "1", "two"], 2)]
    assert talk.texts == ["one", "1", "two", "4"]


def test_another_answer_that_does_not_come_leaves_the_first_one() -> None:
    talk = Talk(done("1"), Answer("", STOPPED), RequestError("no"))
    talk.enter("one", "/regenerate", "/regenerate")
    assert talk.texts == ["one", "1"]


def test_the_same_answer_again_says_why() -> None:
    talk = Talk(done("1"), done("1"))
    talk.enter("one", "/regenerate")
    assert "--temperature above 0" in talk.remarks()


def test_nothing_to_answer_again_is_one_line() -> None:
    talk = Talk()
    talk.enter("/regenerate")
    assert talk.remarks() == "shmllm: no message to answer again\n"


def test_system_and_reset() -> None:
    talk = Talk(done("1"), done("2"))
    talk.enter("one", "/system Be brief.", "/reset", "two")
    assert talk.texts == ["Be brief.", "two", "2"]
    talk.enter("/system", "/reset")
    assert talk.texts == []


def test_exit_ends_the_lines() -> None:
    talk = Talk()
    talk.enter("/exit", "one")
    assert talk.table.asked == []


def test_messages_are_saved_and_no_file_is_lost(tmp_path: Path) -> None:
    talk = Talk(done("1"), done("2"))
    file = tmp_path / "my chat.json"
    talk.enter("one", f"/save {file}", "two", f"/save {file}")
    assert len(json.loads(file.read_text())["messages"]) == 2
    assert f"exists; /save! {file} replaces it" in talk.remarks()
    talk.enter(f"/save! {file}")
    assert len(json.loads(file.read_text())["messages"]) == 4


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    talk = Talk()
    talk.enter(f"/save {tmp_path}/no/where")
    assert (
        talk.remarks() == f"shmllm: cannot write {tmp_path}/no/where: No such file or directory\n"
    )


def test_a_pipe_is_read_line_by_line() -> None:
    source = io.BytesIO(b"\xef\xbb\xbfone\r\n\xff two\nthree")
    assert list(plain_lines(source, None)) == ["one", "\ufffd two", "three"]


def test_a_reader_without_editing_is_prompted() -> None:
    prompts = io.StringIO()
    assert list(plain_lines(io.BytesIO(b"one\n"), prompts)) == ["one"]
    assert prompts.getvalue() == "> > "


def call(name: str, number: int) -> dict[str, Any]:
    function = {"name": name, "arguments": '{"x": 1}'}
    return {"id": f"call{number:05}", "type": "function", "function": function}


def calling(*calls: dict[str, Any], text: str = "") -> Answer:
    return Answer(text, "stop", 2, reasoning="Hm.", calls=calls)


def test_a_tool_call_takes_its_result_from_the_next_line() -> None:
    talk = Talk(calling(call("f", 1), text="I look."), done("It is 2."), done("ok"))
    talk.enter("one", "2", "two")
    assert talk.out.getvalue() == "I look.\nIt is 2.\nok\n"
    assert 'f({"x": 1})\n[enter the result of f]' in talk.remarks()
    messages = talk.chat.conversation.messages
    assert messages[1] == {
        "role": "assistant",
        "content": "I look.",
        "reasoning": "Hm.",
        "tool_calls": [call("f", 1)],
    }
    assert messages[2] == {
        "role": "tool",
        "tool_call_id": "call00001",
        "name": "f",
        "content": "2",
    }
    assert [message["role"] for message in messages[3:]] == ["assistant", "user", "assistant"]


def test_the_model_goes_on_when_all_calls_have_results() -> None:
    talk = Talk(calling(call("f", 1), call("g", 2)), done("3"))
    talk.enter("one", "/result 1", "/result  a b ")
    assert talk.table.asked[1][0] == ["one", "", "1", "a b"]
    assert "[enter the result of g]" in talk.remarks()
    assert talk.texts[-1] == "3"
    talk.enter("/result 5")
    assert "no tool call waits for a result" in talk.remarks()


def test_a_result_whose_answer_fails_can_be_given_again() -> None:
    talk = Talk(calling(call("f", 1)), RequestError("no"), done("3"))
    talk.enter("one", "1", "2")
    assert talk.texts == ["one", "", "2", "3"]


def test_the_answer_to_results_can_be_had_again_but_not_before_all_of_them() -> None:
    talk = Talk(calling(call("f", 1)), done("3"), done("4"))
    talk.enter("one", "2", "/regenerate")
    assert talk.texts == ["one", "", "2", "4"]
    two = Talk(calling(call("f", 1), call("g", 2)))
    two.enter("one", "2", "/regenerate")
    assert "no message to answer again" in two.remarks()


def test_reasoning_is_a_remark() -> None:
    talk = Talk(Answer("2", "stop", 2, reasoning="Hm."))
    talk.enter("one")
    assert talk.out.getvalue() == "2\n"
    assert talk.remarks().startswith("Hm.\n[2 tokens]")
