"""Compiles grammars, and tracks how far an output has followed its grammar.

A grammar arrives as text that the front end has checked. A background thread compiles each grammar
once; each request gets a copy of the compiled matcher and keeps it until it ends, preempted or
not. This module must not know requests or logits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from shmllm.core.constraint import Constraint
from shmllm.formats.grammars import compile_grammar, first_line, load_grammar_tokenizer
from shmllm.outputs.columns import FinishReason
from shmllm.worker.background import BackgroundThread

MAX_COMPILED = 128
DOES_NOT_FIT = "doesn't satisfy the grammar"
STACK_BYTES = 128 * 2**20
"""The compiler's recursion is as deep as the grammar's nesting."""


class GrammarMatcher:
    """The state of one request's output in its grammar.

    Attributes:
        matcher: llguidance's matcher.
        error: why the output cannot go on; empty if it can.
    """

    __slots__ = ("error", "matcher")

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        self.error = ""

    def take(self, token_id: int) -> FinishReason:
        """Advance by one sampled token.

        Returns:
            STOP if no token but the end may follow, ERROR if the output cannot go on (see `error`),
            else NONE.
        """
        matcher = self.matcher
        is_consumed = matcher.consume_token(token_id)
        if is_consumed and not matcher.is_stopped():
            return FinishReason.NONE
        if is_consumed and not matcher.is_error():  # a matcher in error accepts the end token, too
            return FinishReason.STOP
        problem = first_line(matcher.get_error())
        if DOES_NOT_FIT in problem:
            problem = (
                "the other parameters (allowed_token_ids, bad_words, logit_bias, min_tokens) "
                "leave no token that the grammar allows"
            )
        self.error = f"the structured output cannot go on: {problem}"
        return FinishReason.ERROR


class GrammarCompiler:
    """Compiles grammars in a background thread, and caches the MAX_COMPILED used last.

    Args:
        directory: the tokenizer's directory; the tokenizer is read for the first grammar.
        eos_token_ids: the model's end-of-sequence tokens, allowed where an output may end.

    Attributes:
        vocab_size: the number of the tokenizer's tokens; 0 until it is read.
        num_compiled: the number of grammars compiled so far.
    """

    def __init__(self, directory: Path, eos_token_ids: Sequence[int]) -> None:
        self._directory = directory
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: Any = None
        self._thread = BackgroundThread("shmllm-grammars", STACK_BYTES)
        self._compiled: OrderedDict[str, Future[Callable[[], Constraint]]] = OrderedDict()
        self.vocab_size = 0
        self.num_compiled = 0

    def compile(self, text: str) -> Future[Callable[[], Constraint]]:
        """Compile a grammar, or find it in the cache.

        Returns:
            A future of a function that makes the constraint of a new output. The future's
            exception is a RequestError if the grammar cannot be compiled.
        """
        future = self._compiled.get(text)
        if future is None:
            future = self._compiled[text] = self._thread.submit(lambda: self._compile(text))
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(text)
        return future

    def _compile(self, text: str) -> Callable[[], Constraint]:
        if self._tokenizer is None:
            self._tokenizer = load_grammar_tokenizer(self._directory, self._eos_token_ids)
            self.vocab_size = self._tokenizer.vocab_size
        matcher = compile_grammar(self._tokenizer, text)
        self.num_compiled += 1
        return lambda: GrammarMatcher(matcher.deep_copy())
