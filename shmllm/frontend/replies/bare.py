"""Tool calls without a mark: a reply that begins with a brace or a bracket is calls."""

from __future__ import annotations

from typing import ClassVar

from shmllm.frontend.replies.parser import ToolParser
from shmllm.outputs.reply import Reply


class BareParser(ToolParser):
    """A reply that begins neither so nor with the mark is content up to the mark.

    Attributes:
        opening: what calls without a mark begin with.
    """

    opening: ClassVar[str]
    _is_decided = False
    _is_bare = False

    def feed(self, text: str) -> Reply:
        if not self._is_decided:
            self._rest += text
            begun = self._rest.lstrip()
            if self.begin.startswith(begun):  # all of it so far
                return Reply()
            self._is_decided, text = True, ""
            if begun.startswith(self.opening):
                self._body, self._is_bare = "", True
        return super().feed(text)

    def _take_calls(self, body: str, end: str, reply: Reply) -> None:
        super()._take_calls(body, end, reply)
        self._is_bare = False

    def _spell(self, body: str, end: str) -> str:
        return body + end if self._is_bare else super()._spell(body, end)
