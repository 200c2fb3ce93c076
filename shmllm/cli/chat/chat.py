"""Chat: what each line that a user enters does.

This module must not know where lines come from, nor what an engine is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Protocol

from shmllm.cli.chat.answer import STOPPED, Answer, Show
from shmllm.cli.chat.attachments import Attachment, item_names
from shmllm.cli.chat.commands import MARK, Command, help_lines, parse
from shmllm.cli.chat.conversation import Conversation
from shmllm.cli.chat.screen import Screen
from shmllm.cli.outcome import ABORTED
from shmllm.errors import RequestError
from shmllm.params.items import Modality


class Answers(Protocol):
    """What answers conversations: Answerer, and its fakes."""

    def __call__(self, conversation: Conversation, show: Show, attempt: int = 0) -> Answer: ...

    def attach(self, modality: Modality, name: str) -> Attachment:
        """Reads an item for a message. Raises RequestError."""
        ...


class Chat:
    """
    Args:
        conversation: where the chat begins.
        answers: answers a conversation.
        screen: shows answers and remarks.

    Attributes:
        conversation: all messages so far. What fails leaves it as it was.
        num_failed: how many lines had no effect, or an answer that was stopped.
        num_aborted: how many answers the engine ended.
    """

    def __init__(self, conversation: Conversation, answers: Answers, screen: Screen) -> None:
        self.conversation = conversation
        self.num_failed = 0
        self.num_aborted = 0
        self._answers = answers
        self._screen = screen
        self._num_attempts = 0
        self._attached: list[Attachment] = []
        self._actions: dict[Command, Callable[[str], None]] = {
            Command.SYSTEM: self._set_system,
            Command.RESET: self._reset,
            Command.REGENERATE: self._regenerate,
            Command.IMAGE: partial(self._attach, "image"),
            Command.AUDIO: partial(self._attach, "audio"),
            Command.VIDEO: partial(self._attach, "video"),
            Command.DETACH: self._detach,
            Command.RESULT: self._take_result,
            Command.SAVE: lambda name: self._save(name, "x"),
            Command.REPLACE: lambda name: self._save(name, "w"),
            Command.HELP: self._help,
        }

    def run(self, lines: Iterable[str]) -> None:
        """Take lines until they end or one of them ends the chat.

        Raises:
            EngineDeadError: the engine died.
        """
        for line in lines:
            if not self.take(line):
                return

    def take(self, text: str) -> bool:
        """Do what a line says. Returns whether the chat goes on."""
        if not text.strip():
            return True
        try:
            line = parse(text)
            if line.command is Command.EXIT:
                return False
            if line.command is None and self.conversation.open_calls:
                self._take_result(line.text)
            elif line.command is None:
                self._ask(line.text)
            else:
                self._actions[line.command](line.text)
        except RequestError as error:
            self.num_failed += 1
            self._screen.complain(str(error))
        return True

    def _ask(self, text: str) -> None:
        """Send a message with the items that are attached; they stay so if it has no answer."""
        before = self.conversation
        asked = before.asked(text, [each.part for each in self._attached])
        for name in item_names(asked.messages[-1]):
            self._screen.note(f"[{name}]")
        self._answer(asked, 0)
        if self.conversation is not before:
            self._attached.clear()

    def _answer(self, conversation: Conversation, attempt: int) -> None:
        try:
            answer = self._answers(conversation, self._screen.write, attempt)
        finally:
            self._screen.end_line()
        if answer.is_one:
            self.conversation = conversation.answered(answer.text, answer.reasoning, answer.calls)
            self._num_attempts = attempt + 1
            self._screen.note(f"[{answer.figures()}]")
        self.num_failed += answer.end == STOPPED
        self.num_aborted += answer.end == ABORTED
        if remark := answer.remark():
            self._screen.note(f"[{remark}]")
        self._show_calls()

    def _show_calls(self) -> None:
        """Show the tool calls whose results are missing, and ask for the first one."""
        calls = [each["function"] for each in self.conversation.open_calls]
        for call in calls:
            self._screen.note(f"{call['name']}({call['arguments']})")
        if calls:
            self._screen.note(f"[enter the result of {calls[0]['name']}]")

    def _take_result(self, text: str) -> None:
        """Add the result of a tool; the model goes on when it has all of them."""
        conversation = self.conversation.resulted(text)
        if not conversation.open_calls:
            self._answer(conversation, 0)
            return
        self.conversation = conversation
        self._show_calls()

    def _regenerate(self, _: str) -> None:
        before = self.conversation
        self._answer(before.unanswered(), self._num_attempts)
        if self.conversation is not before and self.conversation == before:
            self._screen.note("[the same answer: --temperature above 0 gives others]")

    def _set_system(self, text: str) -> None:
        self.conversation = self.conversation.under(text)
        self._screen.note("[system message set]" if text else "[no system message]")

    def _reset(self, _: str) -> None:
        self.conversation = self.conversation.begun_again()
        kept = "; the system message stays" if self.conversation.messages else ""
        self._screen.note(f"[new conversation{kept}]")
        if self._attached:
            self._list_attached()

    def _attach(self, modality: Modality, name: str) -> None:
        if name:
            self._attached.append(self._answers.attach(modality, name))
        self._list_attached()

    def _detach(self, _: str) -> None:
        self._attached.clear()
        self._list_attached()

    def _list_attached(self) -> None:
        names = ", ".join(each.name for each in self._attached)
        self._screen.note(f"[for the next message: {names}]" if names else "[nothing is attached]")

    def _save(self, name: str, mode: str) -> None:
        path = Path(name).expanduser()
        text = self.conversation.to_json()
        try:
            with path.open(mode, encoding="utf-8") as file:
                file.write(text)
        except FileExistsError as error:
            raise RequestError(
                f"{name} exists; {MARK}{Command.REPLACE.word} {name} replaces it"
            ) from error
        except OSError as error:
            raise RequestError(f"cannot write {name}: {error.strerror}") from error
        self._screen.note(f"[{self.conversation.num_messages} messages written to {name}]")

    def _help(self, _: str) -> None:
        for line in help_lines():
            self._screen.note(line)
