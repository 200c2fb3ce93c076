"""Incremental detokenization: the text of a request while its tokens arrive.

IncrementalDetokenizer decodes tokens without partial characters, at a cost per token that does not
depend on the length of the output. OutputText combines it with stop strings. This module must not
know the engine's messages.
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
# A character has at most four bytes. If this many tokens are no valid text, they never will be.
_MAX_PENDING_TOKENS = 8


class _Decoder(Protocol):
    """Decodes tokens incrementally; the methods of IncrementalDetokenizer with the same names."""

    def append(self, token_ids: Sequence[int]) -> str: ...
    def finish(self) -> str: ...


class _ByteDecoder:
    """The decoder for byte-level vocabularies: decodes the bytes of the tokens as UTF-8."""

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
            # The prompt ended inside a character, and its text already contains a U+FFFD for
            # it. Emit the character only if the output tokens completed it.
            self._prompt_is_cut = False
            text = text.removeprefix(REPLACEMENT)
        return text


class _WindowDecoder:
    """The decoder for other vocabularies: decodes the last few tokens and removes known text.

    The decoders of these vocabularies drop a space in front of the first token, or combine
    neighbouring tokens (byte tokens). So the window contains the tokens of the text that was
    returned last, as context, and the pending tokens after them.

    Args:
        decode: decodes tokens at once.
        prompt_token_ids: the tokens before the output.
        skipped_ids: the tokens that `decode` leaves out wherever they are.
    """

    __slots__ = ("_context_text", "_decode", "_ids", "_num_context", "_skipped_ids")

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt_token_ids: Sequence[int],
        skipped_ids: frozenset[int],
    ) -> None:
        self._decode = decode
        self._skipped_ids = skipped_ids
        self._ids, self._context_text = self._prompt_context(prompt_token_ids)
        self._num_context = len(self._ids)

    def append(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._step, token_ids))

    def finish(self) -> str:
        text = self._new_text(self._decode(self._ids))
        del self._ids[self._num_context :]
        return text

    def _prompt_context(self, prompt_token_ids: Sequence[int]) -> tuple[list[int], str]:
        """The last tokens of the prompt, as many as it takes to have a text that does not begin
        inside a character; and this text."""
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
        num_pending = len(self._ids) - self._num_context
        is_overdue = num_pending > _MAX_PENDING_TOKENS
        if num_pending > _MAX_PENDING_TOKENS + 1:
            # Some decoders leave out the spaces and lines that end a text, and write them with the
            # next token. To decode all of a long run for each of them would take quadratic time.
            if token_id in self._skipped_ids:
                self._ids.pop()
                return ""
            if num_pending & (num_pending - 1) and not self._decode([token_id]):
                return ""
        text = self._decode(self._ids)
        if text == self._context_text:
            if is_overdue:
                pending = self._ids[self._num_context :]
                self._ids[self._num_context :] = (i for i in pending if i not in self._skipped_ids)
            return ""
        if text.endswith(REPLACEMENT) and not is_overdue:
            return ""
        new_text = self._new_text(text)
        pending_text = self._decode(self._ids[self._num_context :])
        if pending_text.startswith(REPLACEMENT) and not text.endswith(REPLACEMENT):
            # The pending tokens begin inside a character: keep the tokens of its beginning.
            self._context_text = text
        else:
            del self._ids[: self._num_context]
            self._context_text = pending_text
        self._num_context = len(self._ids)
        return new_text

    def _new_text(self, text: str) -> str:
        """The text that the pending tokens add to that of the context.

        Args:
            text: the text of context and pending tokens together.
        """
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        if self._context_text.endswith(REPLACEMENT):
            # The prompt ended inside a character, which the pending tokens complete.
            return text[common_length(text, self._context_text) :]
        # A run of byte tokens became invalid as a whole, after its valid start was returned.
        return self._decode(self._ids[self._num_context :])


class _CloseDecoder:
    """A decoder of single tokens whose added tokens follow each other without a space, as vLLM
    defines `spaces_between_special_tokens=False`.

    Args:
        decoder: decodes all other tokens.
        tokenizer: has the added tokens.
    """

    __slots__ = ("_added", "_decoder", "_is_behind_added")

    def __init__(self, decoder: _Decoder, tokenizer: Tokenizer) -> None:
        self._decoder = decoder
        self._added = {token_id: text for text, token_id in tokenizer.added_tokens.items()}
        self._is_behind_added = False

    def append(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._step, token_ids))

    def finish(self) -> str:
        return self._decoder.finish()

    def _step(self, token_id: int) -> str:
        text, added = self._decoder.append([token_id]), self._added.get(token_id)
        if added is not None and self._is_behind_added:
            text = added
        self._is_behind_added = added is not None
        return text


def common_length(left: str, right: str) -> int:
    """The length of the common prefix of two texts."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


class IncrementalDetokenizer:
    """Decodes the output tokens of one request while they arrive.

    The text is the difference between the text of prompt and output, decoded together, and the
    text of the prompt. So it contains the space in front of the first word. Unknown ids add
    nothing.

    One exception keeps text that was returned valid: if a run of byte tokens becomes invalid,
    decoding it as a whole would also replace the valid characters at its beginning by U+FFFD.
    This class keeps these characters.

    Args:
        tokenizer: the model's tokenizer.
        prompt_token_ids: the token ids of the prompt. Only the last few are read.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: False leaves out what the tokenizer writes between two
            added tokens that follow each other, unless special tokens are skipped.
    """

    __slots__ = ("_decoder", "_pieces")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._pieces: list[str] = []
        table = tokenizer.byte_table(skip_special_tokens=skip_special_tokens)
        self._decoder: _Decoder
        if table is not None:
            self._decoder = _ByteDecoder(table, prompt_token_ids)
        else:
            self._decoder = _WindowDecoder(
                lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens),
                prompt_token_ids,
                tokenizer.special_ids if skip_special_tokens else frozenset(),
            )
            if not (skip_special_tokens or spaces_between_special_tokens):
                self._decoder = _CloseDecoder(self._decoder, tokenizer)

    def append(self, token_ids: Sequence[int]) -> str:
        """Add tokens. Returns the text that became certain with them."""
        return self._keep(self._decoder.append(token_ids))

    def finish(self) -> str:
        """End the output. Returns the remaining text, with U+FFFD for an incomplete character."""
        return self._keep(self._decoder.finish())

    @property
    def text(self) -> str:
        """All text so far. Reading it joins the pieces: do not read it for each token."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def _keep(self, delta: str) -> str:
        if delta:
            self._pieces.append(delta)
        return delta


class OutputText:
    """The text of one request up to the first stop string.

    Args:
        detokenizer: decodes the output tokens.
        stop: the stop strings.
        include_stop: whether the text includes the stop string.

    Attributes:
        match: the stop string that ended the text; None if none was found yet. Tokens after it
            are ignored.
    """

    __slots__ = ("_checker", "_detokenizer", "_finished", "_num_emitted", "_pending", "match")

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._checker = StopStringChecker(stop, include_stop) if stop else None
        self._pending: list[str] = []
        self._num_emitted = 0
        self._finished = False
        self.match: StopMatch | None = None

    def append(self, token_ids: Sequence[int], *, check_stop: bool = True) -> StopMatch | None:
        """Add tokens.

        Args:
            token_ids: output tokens, without a token that ended the request and whose text is
                not part of the output.
            check_stop: False if stop strings may not end the request yet (`min_tokens`).

        Returns:
            The match if a stop string is complete, else None. The caller must abort the
            request then.
        """
        if self.match is None:
            self._feed(self._detokenizer.append(token_ids), check_stop)
        return self.match

    def finish(self, *, check_stop: bool = True) -> StopMatch | None:
        """Decode the remaining text, because the request has ended. Returns the match, or None."""
        if self.match is None and not self._finished:
            self._feed(self._detokenizer.finish(), check_stop)
        self._finished = True
        return self.match

    @property
    def text(self) -> str:
        """The text so far, up to the stop string. It includes text that `take_delta` still holds
        back."""
        text = self._detokenizer.text
        return text if self.match is None else text[: self.match.text_length]

    @property
    def emitted(self) -> str:
        """All text that `take_delta` has returned."""
        return self._detokenizer.text[: self._num_emitted]

    def take_delta(self) -> str:
        """The new text for a stream: text that is certain and was not returned before."""
        text = "".join(self._pending)
        if self.match is not None:
            size = self.match.text_length - self._num_emitted
        elif self._checker is None or self._finished:
            size = len(text)
        else:
            size = len(text) - self._checker.num_held
        self._pending = [text[size:]] if size < len(text) and self.match is None else []
        self._num_emitted += min(size, len(text))
        return text[:size]

    def _feed(self, delta: str, check_stop: bool) -> None:
        if delta:
            self._pending.append(delta)
            if self._checker is not None:
                self.match = self._checker.feed(delta, check=check_stop)
