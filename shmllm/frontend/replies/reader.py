"""ReplyReader: the parts of one request's reply while its tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence

from shmllm.frontend.replies.parser import ReplyParser
from shmllm.frontend.text.detokenizer import OutputText
from shmllm.outputs.reply import Reply


class ReplyReader:
    """
    Args:
        text: decodes the tokens, special ones included, up to a stop string.
        parser: reads their text.

    Attributes:
        so_far: the reply so far.
    """

    __slots__ = ("_is_finished", "_new", "_parser", "_text", "so_far")

    def __init__(self, text: OutputText, parser: ReplyParser) -> None:
        self._text = text
        self._parser = parser
        self._new = Reply()
        self._is_finished = False
        self.so_far = Reply()

    def append(self, token_ids: Sequence[int], *, check_stop: bool) -> None:
        """Add tokens of the output; see `OutputText.append`."""
        self._text.append(token_ids, check_stop=check_stop)
        self._add(self._parser.feed(self._text.take_delta()))

    def finish(self, *, check_stop: bool) -> None:
        """The request has ended. A second call has no effect."""
        if self._is_finished:
            return
        self._is_finished = True
        self._text.finish(check_stop=check_stop)
        self._add(self._parser.feed(self._text.take_delta()))
        self._add(self._parser.finish())

    def take_delta(self) -> Reply:
        """What came to the reply since the last call."""
        new, self._new = self._new, Reply()
        return new

    def _add(self, found: Reply) -> None:
        self.so_far.add(found)
        self._new.add(found)
