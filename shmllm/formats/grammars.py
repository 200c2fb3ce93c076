"""Compiles grammars for the tokens of a model, by llguidance: for engines, which enforce them, and
for front ends that choose tokens themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shmllm.errors import RequestError

STEP_ITEMS = 5_000
"""The limit of the grammar parser's work for one token, in parser items: about 50 ms. JSON schemas
need a few hundred items; an ambiguous grammar, such as `root ::= root root | "a"`, needs any
number."""


def load_grammar_tokenizer(directory: Path, eos_token_ids: Sequence[int]) -> Any:
    """Loads a directory's tokenizer as an `llguidance.LLTokenizer`.

    llguidance holds the GIL meanwhile, so that no other thread runs.

    Args:
        directory: the directory of the tokenizer's files.
        eos_token_ids: the tokens that are allowed where an output may end.

    Raises:
        RequestError: the tokenizer cannot be used for grammars.
    """
    from llguidance import LLTokenizer

    from shmllm.formats.tokenizer_files import file_or_text

    try:
        return LLTokenizer(file_or_text(directory), eos_token=list(eos_token_ids) or None)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # its Rust code may panic, which is no Exception
        raise RequestError(
            f"structured_outputs cannot use the tokenizer of {directory}: {first_line(str(error))}"
        ) from error


def new_matcher(tokenizer: Any, grammar: str) -> Any:
    """Returns an `llguidance.LLMatcher` for a grammar's text, which may be in error."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False, step_max_items=STEP_ITEMS)
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


def compile_grammar(tokenizer: Any, grammar: str) -> Any:
    """Returns an `llguidance.LLMatcher` for a grammar's text. It recurses as deep as the grammar is
    nested.

    Raises:
        RequestError: the grammar cannot be compiled for this tokenizer.
    """
    matcher = new_matcher(tokenizer, grammar)
    if matcher.is_error():
        problem = first_line(matcher.get_error())
        raise RequestError(f"structured_outputs cannot be compiled: {problem}")
    return matcher


def first_line(message: str) -> str:
    """The first line of a message of llguidance; the others show the grammar."""
    return message.split("\n", 1)[0]
