"""Text of a request while its tokens arrive.

Owns incremental decoding (no partial characters, cost per token independent of length) and
OutputText, which joins it with stop strings into what a request's user may see. Must not
know about the engine's messages, streams or deadlines.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from shmllm.frontend.text.stop_strings import StopMatch, StopStringChecker
from shmllm.frontend.text.tokenizer import ByteTable, Tokenizer

REPLACEMENT = "\ufffd"
_CONTINUATION_BYTES = bytes(range(0x80, 0xC0))
_FIRST_CONTEXT_TOKENS = 6
# A character has at most four bytes, so what is undecided after this many tokens stays wrong.
_MAX_PENDING_TOKENS = 8


class _Stream(Protocol):
    def append(self, token_ids: Sequence[int]) -> str: ...
    def finish(self) -> str: ...


class _ByteStream:
    """Decoding for byte-level vocabularies: bytes of the tokens, incremental UTF-8."""

    __slots__ = ("_get_bytes", "_pending", "_prompt_is_cut")

    def __init__(self, table: ByteTable, prompt_token_ids: Sequence[int]) -> None:
        self._get_bytes = table.__getitem__
        tail = b""
        for token_id in reversed(prompt_token_ids):
            tail = table[token_id] + tail
            if len(tail) >= 3:
                break
        tail = tail[-3:].lstrip(_CONTINUATION_BYTES)
        self._pending = tail[codecs.utf_8_decode(tail, "replace", False)[1] :]
        self._prompt_is_cut = bool(self._pending)

    def append(self, token_ids: Sequence[int]) -> str:
        return self._decode(self._pending + b"".join(map(self._get_bytes, token_ids)), False)

    def finish(self) -> str:
        if self._prompt_is_cut:
            return ""
        return self._decode(self._pending, True)

    def _decode(self, content: bytes, final: bool) -> str:
        text, num_used = codecs.utf_8_decode(content, "replace", final)
        self._pending = content[num_used:]
        if self._prompt_is_cut and text:
            # The prompt's last character was incomplete, and the prompt's text shows that
            # already: say it again only if the tokens completed the character.
            self._prompt_is_cut = False
            text = text.removeprefix(REPLACEMENT)
        return text


class _WindowStream:
    """Decoding for all other vocabularies: decode a few tokens, drop what was known.

    Such decoders treat the first token in a special way (a leading blank is dropped), or
    look at neighbours (runs of byte tokens). So the tokens of the last piece that was
    released stay in front of the window as context.
    """

    __slots__ = ("_context_text", "_decode", "_ids", "_num_context")

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt_token_ids: Sequence[int]
    ) -> None:
        self._decode = decode
        self._ids, self._context_text = self._prompt_context(prompt_token_ids)
        self._num_context = len(self._ids)

    def append(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._step, token_ids))

    def finish(self) -> str:
        text = self._new_text(self._decode(self._ids))
        del self._ids[self._num_context :]
        return text

    def _prompt_context(self, prompt_token_ids: Sequence[int]) -> tuple[list[int], str]:
        """The shortest tail tried that has text and does not start inside a character."""
        size = _FIRST_CONTEXT_TOKENS
        while True:
            ids = list(prompt_token_ids[-size:])
            text = self._decode(ids)
            usable = text and not text.startswith(REPLACEMENT)
            if usable or size >= len(prompt_token_ids):
                return ids, text
            size *= 2

    def _step(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        is_overdue = len(self._ids) - self._num_context > _MAX_PENDING_TOKENS
        if text == self._context_text:
            if is_overdue:
                del self._ids[self._num_context :]
            return ""
        if text.endswith(REPLACEMENT) and not is_overdue:
            return ""
        new_text = self._new_text(text)
        released = self._decode(self._ids[self._num_context :])
        if released.startswith(REPLACEMENT) and not text.endswith(REPLACEMENT):
            self._context_text = text  # they begin inside a character: its beginning stays, too
        else:
            del self._ids[: self._num_context]
            self._context_text = released
        self._num_context = len(self._ids)
        return new_text

    def _new_text(self, text: str) -> str:
        """What the pending tokens add to the context, given the text of both."""
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        if self._context_text.endswith(REPLACEMENT):
            # The prompt ended inside a character, which is complete now.
            return text[common_length(text, self._context_text) :]
        # A run of byte tokens turned invalid as a whole, after its valid start was released.
        return self._decode(self._ids[self._num_context :])


def common_length(left: str, right: str) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


class IncrementalDetokenizer:
    """The text of one request's output tokens, decoded as they arrive.

    The text is what decoding prompt and output at once adds to the prompt's own text, so the
    blank in front of the first word is kept. Ids that no token has add nothing. One exception
    keeps released text valid: where a run of byte tokens turns invalid, decoding at once would
    also replace the valid characters before it in that run; here they stay.

    Args:
        tokenizer: the model's tokenizer.
        prompt_token_ids: the whole prompt; only its end is read.
        skip_special_tokens: leave special tokens out of the text.
    """

    __slots__ = ("_pieces", "_stream")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._pieces: list[str] = []
        table = tokenizer.byte_table(skip_special_tokens=skip_special_tokens)
        self._stream: _Stream
        if table is not None:
            self._stream = _ByteStream(table, prompt_token_ids)
        else:
            self._stream = _WindowStream(
                lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens),
                prompt_token_ids,
            )

    def append(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; returns the text that is certain now and was not before."""
        return self._keep(self._stream.append(token_ids))

    def finish(self) -> str:
        """End of the tokens; returns what was held back, incomplete characters as U+FFFD."""
        return self._keep(self._stream.finish())

    @property
    def text(self) -> str:
        """All text so far. Joins it: read it when it is wanted, not once per token."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def _keep(self, delta: str) -> str:
        if delta:
            self._pieces.append(delta)
        return delta


class OutputText:
    """What one request has said: tokens in, visible text out, up to the first stop string.

    Attributes:
        match: the stop string that ended the text, None so far. Tokens after it are ignored.
    """

    __slots__ = ("_checker", "_detokenizer", "_finished", "_num_released", "_unreleased", "match")

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._checker = StopStringChecker(stop, include_stop) if stop else None
        self._unreleased: list[str] = []
        self._num_released = 0
        self._finished = False
        self.match: StopMatch | None = None

    def append(self, token_ids: Sequence[int], *, check_stop: bool = True) -> StopMatch | None:
        """Take the next tokens.

        Args:
            token_ids: output tokens, without one that ended the request and shall not be seen.
            check_stop: False while stop strings may not end the request (`min_tokens`).

        Returns:
            The match, once a stop string is complete: the request has to be aborted.
        """
        if self.match is None:
            self._feed(self._detokenizer.append(token_ids), check_stop)
        return self.match

    def finish(self, *, check_stop: bool = True) -> StopMatch | None:
        """The request ended: nothing is held back any more."""
        if self.match is None and not self._finished:
            self._feed(self._detokenizer.finish(), check_stop)
        self._finished = True
        return self.match

    @property
    def text(self) -> str:
        """The text so far, cut at the stop string. Text held back from a stream is in it."""
        text = self._detokenizer.text
        return text if self.match is None else text[: self.match.text_length]

    @property
    def shown(self) -> str:
        """All that `take_delta` has given out."""
        return self._detokenizer.text[: self._num_released]

    def take_delta(self) -> str:
        """Text for a stream: certain to stay, and not taken before."""
        text = "".join(self._unreleased)
        if self.match is not None:
            size = self.match.text_length - self._num_released
        elif self._checker is None or self._finished:
            size = len(text)
        else:
            size = len(text) - self._checker.num_held
        self._unreleased = [text[size:]] if size < len(text) and self.match is None else []
        self._num_released += min(size, len(text))
        return text[:size]

    def _feed(self, delta: str, check_stop: bool) -> None:
        if delta:
            self._unreleased.append(delta)
            if self._checker is not None:
                self.match = self._checker.feed(delta, check=check_stop)
