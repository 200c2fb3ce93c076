"""Checks the structured output of a request, and writes it as a grammar text for the engine.

Front end and engine use llguidance: the front end to find out whether a constraint can be
enforced, the engine to enforce it. This module imports llguidance at the first constraint. It must
not know the tokenizer, nor how the engine masks tokens.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any, TypeVar

from shmllm.errors import RequestError
from shmllm.formats.grammars import new_matcher
from shmllm.frontend.constraints import structural_tag
from shmllm.frontend.constraints.ebnf import to_lark
from shmllm.frontend.constraints.json_limits import (
    ESCAPES_WITHOUT_CODES,
    check_limits,
    has_unlisted_names,
)
from shmllm.frontend.constraints.json_schema import (
    check_schema,
    forbid_additional_properties,
    translate_patterns,
)
from shmllm.frontend.constraints.pattern_properties import remove_covered_patterns
from shmllm.frontend.constraints.regex import to_library, to_library_classes
from shmllm.params.structured_outputs import StructuredOutputsParams

T = TypeVar("T")

MAX_CHECKED = 256
HEADER = '%llguidance {"no_forcing": true}\n'
"""The first line of a grammar. Without the option, llguidance computes forced tokens in advance.
It does not terminate for `/b+/ /b+/`, where the first expression takes all characters, and forced
text that looks like a special token becomes that token."""
TIMEOUT_S = 60.0
"""The time after which the check of a grammar fails, in seconds."""
STACK_BYTES = 128 * 2**20
"""The stack of the thread that checks: llguidance recurses into nested grammars, and the thread
of the caller may have a small stack."""

BLANKS = r"[ \t]?(\r?\n[ \t]{0,40})?"
"""The default for the whitespace between the parts of JSON. It allows indented lines and is
bounded: otherwise, a model could generate only whitespace until `max_tokens`."""


def grammar_of(
    params: StructuredOutputsParams,
    tokens: Mapping[str, int] = MappingProxyType({}),
    free_tokens: Sequence[int] = (),
) -> str:
    """The grammar text of a structured output, for the engine.

    Args:
        params: the constraint.
        tokens, free_tokens: the tokens that structural tags may name, see
            `structural_tag.to_lark`.

    Raises:
        RequestError: the constraint is invalid, contradicts itself, or cannot be enforced.
    """
    is_json = params.json is not None or params.json_object is not None
    if params.whitespace_pattern is not None or params.disable_any_whitespace:
        _check_blanks(params, is_json)
    if is_json:
        return _checked("json", f"start: %json {_schema_text(params)}")
    if params.regex is not None:
        return _checked("regex", _regex_lark(_text("regex", params.regex, may_be_empty=True)))
    if params.choice is not None:
        return _checked("choice", _choice_lark(params.choice))
    if params.structural_tag is not None:
        lark = structural_tag.to_lark(params.structural_tag, tokens, free_tokens, _leaf(params))
        return _checked("structural_tag", lark)
    return _checked("grammar", to_lark(_text("grammar", params.grammar)))


def _leaf(params: StructuredOutputsParams) -> structural_tag.Leaf:
    """Translates the parts of a structural tag that are other constraints, each checked alone."""

    def translate(kind: str, value: Any) -> str:
        if kind == "json":
            schema = {} if value is True else value
            alone = replace(params, json=schema, structural_tag=None)
            found = f"%json {_schema_text(alone)}"
            _checked("json", f"start: {found}")
            return found
        if kind == "regex":
            alone_lark = _regex_lark(_text("regex", value, may_be_empty=True))
            _checked("regex", alone_lark)
            return alone_lark.removeprefix("start: ")
        grammar = to_lark(_text("grammar", value))
        _checked("grammar", grammar)
        return f"%lark {{\n{grammar}}}"

    return translate


def _blanks(params: StructuredOutputsParams) -> dict[str, Any]:
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": params.whitespace_pattern or BLANKS}


def _check_blanks(params: StructuredOutputsParams, is_json: bool) -> None:
    if not is_json:
        raise RequestError(
            "structured_outputs: whitespace_pattern and disable_any_whitespace are for json and "
            "json_object"
        )
    if params.whitespace_pattern is None:
        return
    if params.disable_any_whitespace:
        raise RequestError(
            "structured_outputs: give whitespace_pattern or disable_any_whitespace, not both"
        )
    pattern = _text("whitespace_pattern", params.whitespace_pattern)
    _checked("whitespace_pattern", _regex_lark(pattern))


def _text(name: str, value: object, *, may_be_empty: bool = False) -> str:
    if not isinstance(value, str) or not (value or may_be_empty):
        kind = "str" if may_be_empty else "non-empty str"
        raise RequestError(f"structured_outputs.{name} must be a {kind}, got {value!r:.80}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"structured_outputs.{name} is not valid Unicode: lone surrogate at character "
            f"{error.start}"
        ) from error
    return value


def _regex_lark(pattern: str) -> str:
    return f"start: /{_library().regex_to_lark(to_library(pattern), use_ascii='')}/"


def _choice_lark(choice: object) -> str:
    if not isinstance(choice, list | tuple) or not choice:
        raise RequestError(
            f"structured_outputs.choice must be a non-empty list of str, got {choice!r:.80}"
        )
    texts = [json.dumps(_text(f"choice[{i}]", item)) for i, item in enumerate(choice)]
    return f"start: {' | '.join(dict.fromkeys(texts))}"


def _schema_text(params: StructuredOutputsParams) -> str:
    """The JSON schema as text, with checked keywords and llguidance's option for whitespace."""
    if params.json is None and params.json_object is not True:
        raise RequestError(
            f"structured_outputs.json_object must be True or left out, got "
            f"{params.json_object!r:.80}"
        )
    schema: dict[str, Any] = {"type": "object"}
    if params.json is not None:
        schema = _schema_object(params.json)
    check_schema(schema)
    check_limits(schema, _can_write)
    if params.disable_additional_properties:
        forbid_additional_properties(schema)
    translate_patterns(schema, to_library_classes)
    remove_covered_patterns(schema, _can_begin, json.dumps)
    options = _blanks(params)
    if has_unlisted_names(schema):
        options["json_allowed_escapes"] = ESCAPES_WITHOUT_CODES
    schema["x-guidance"] = options
    return json.dumps(schema)


def _schema_object(given: Any) -> dict[str, Any]:
    """A copy of the schema, converted to JSON and back."""
    try:
        if isinstance(given, type) and hasattr(given, "model_json_schema"):
            given = given.model_json_schema()
        text = given if isinstance(given, str) else json.dumps(given, allow_nan=False)
        schema = json.loads(_text("json", text))
    except RequestError:
        raise
    except RecursionError as error:
        raise RequestError("structured_outputs.json is nested too deeply") from error
    except Exception as error:  # pydantic and custom schema hooks raise any exception
        raise RequestError(f"structured_outputs.json is no JSON schema: {error}") from error
    if not isinstance(schema, dict):
        raise RequestError(
            "structured_outputs.json must be a JSON schema (a dict, its JSON text, or a pydantic "
            f"model class), got {given!r:.80}"
        )
    return schema


@lru_cache(maxsize=MAX_CHECKED)
def _can_begin(pattern: str, excluded: tuple[str, ...], text: str) -> bool:
    """See `pattern_properties.CanBegin`. True if the pattern is invalid, which `_checked` finds."""
    matcher = _matcher(
        {
            "type": "object",
            "properties": dict.fromkeys(excluded, False),
            "patternProperties": {pattern: {}},
            "additionalProperties": False,
        }
    )
    return bool(matcher.is_error()) or _follows(matcher, text)


@lru_cache(maxsize=MAX_CHECKED)
def _can_write(number: int | float, text: str) -> bool:
    """See `json_limits.CanWrite`."""
    matcher = _matcher({"const": number})
    return not matcher.is_error() and _follows(matcher, text)


def _follows(matcher: Any, text: str) -> bool:
    """Whether an output can begin with the text."""
    given = list(text.encode())
    return bool(matcher.try_consume_tokens(given) == len(given))


def _matcher(schema: dict[str, Any]) -> Any:
    """Follows the grammar of a schema byte by byte."""
    _library()
    from llguidance import LLMatcher

    schema["x-guidance"] = {"whitespace_flexible": False}
    grammar = f"{HEADER}start: %json {json.dumps(schema)}"
    return LLMatcher(_byte_tokenizer(), grammar, log_level=0)


@lru_cache(maxsize=MAX_CHECKED)
def _checked(kind: str, lark: str) -> str:
    """The grammar with its header, if llguidance can enforce it."""
    _library()
    grammar = HEADER + lark
    try:
        problem = on_a_large_stack(lambda: _compile_for_bytes(grammar))
    except TimeoutError as error:
        problem = str(error)
    if problem:
        raise RequestError(f"structured_outputs.{kind}: {_reason(problem)}")
    return grammar


def _library() -> Any:
    try:
        import llguidance._lib
    except ImportError as error:
        raise RequestError(f"structured_outputs: pip install llguidance ({error})") from error
    return llguidance._lib


def on_a_large_stack(function: Callable[[], T]) -> T:
    """Calls `function` in a thread with STACK_BYTES of stack, and returns its result.

    The thread is a daemon, so that the program can exit even if llguidance does not terminate.

    Raises:
        TimeoutError: the function has not ended within TIMEOUT_S.
    """
    outcome: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="shmllm-grammar-check", daemon=True)
    with _stack_size_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join(TIMEOUT_S)
    if errors:
        raise errors[0]
    if not outcome:
        raise TimeoutError(f"its check did not end within {TIMEOUT_S:.0f} s: it is too large")
    return outcome[0]


_stack_size_lock = threading.Lock()


def _compile_for_bytes(grammar: str) -> str:
    """Compile a grammar for a vocabulary of single bytes, and compute the first mask.

    llguidance finds some errors only with the first mask: that no text matches, or that the
    grammar is too large.

    Returns:
        The error message; empty if the grammar is valid.
    """
    from llguidance import LLMatcher

    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_wrong or messages:
        # Warnings are about names of tokens, which only the engine can check.
        return messages[0] if is_wrong else ""
    matcher = new_matcher(_byte_tokenizer(), grammar)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return str(matcher.get_error())


_PREFIX = re.compile(
    r"^(at \d+\(\d+\): )?(invalid regex .* \(in regex\): |failed to compile JSON schema: )?"
)


def _reason(problem: str) -> str:
    """The one line of llguidance's error message that contains the error itself."""
    if problem.startswith("NoExtension"):
        return "no text matches it"
    if "oneOf constraints" in problem:
        return "the alternatives of a oneOf may overlap, which cannot be enforced; use anyOf"
    lines = [line.strip() for line in problem.splitlines()]
    for line in lines:
        if line.startswith("error: "):
            return line.removeprefix("error: ")
    return _PREFIX.sub("", lines[0])


@cache
def _byte_tokenizer() -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(
        TokenizerWrapper(_Bytes()), n_vocab=257, eos_token=[_Bytes.eos_token_id], slices=[]
    )


class _Bytes:
    """A tokenizer whose tokens are the 256 bytes and an end-of-sequence token."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"\xff<end>")

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)
