"""Translates structural tags to the Lark dialect of llguidance.

A structural tag describes an output in parts: free text, and tags with a begin, a content and an
end. Both of vLLM's forms are read, {"structures": [...], "triggers": [...]} and {"type":
"structural_tag", "format": {...}}; the fields and their meaning are those of xgrammar.

A mark, such as the begin of a tag, may contain tokens that the tokenizer has as a whole
("<tool_call>"). llguidance distinguishes such a token from tokens that spell the same text. Where
the output must have the mark, it has the token; free text ends at either. This module must not know
the tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shmllm.errors import RequestError
from shmllm.frontend.constraints.structural_tag_fields import (
    at,
    count_of,
    flag_of,
    formats_of,
    has_free_end,
    kind_of,
    list_of,
    read,
    tag_error,
    text_of,
    texts_of,
)

Leaf = Callable[[str, Any], str]
"""`leaf(kind, value)`: a JSON schema ("json"), regular expression ("regex") or
grammar ("grammar") as a Lark expression. It raises RequestError if the value is invalid."""

MAX_DEPTH = 50
MAX_REPEATS = 1_000


def to_lark(given: Any, tokens: Mapping[str, int], free_tokens: Sequence[int], leaf: Leaf) -> str:
    """Translate a structural tag.

    Args:
        given: the structural tag, a dict or its JSON text.
        tokens: the ids of the tokenizer's added tokens by their texts.
        free_tokens: the ids of those that free text may contain.
        leaf: translates what is no structural tag.

    Raises:
        RequestError: the structural tag is invalid or cannot be expressed. The message names the
            place in it.
    """
    form, where = read(given)
    translator = _Translator(tokens, free_tokens, leaf)
    start = translator.expression(form, where)
    return "\n".join([f"start: {start}", *translator.lines]) + "\n"


class _Translator:
    """
    Args:
        tokens, free_tokens, leaf: see `to_lark`.

    Attributes:
        lines: the rules besides the first one.
    """

    def __init__(self, tokens: Mapping[str, int], free_tokens: Sequence[int], leaf: Leaf) -> None:
        self.lines: list[str] = []
        self._tokens = tokens
        self._texts = {token_id: text for text, token_id in tokens.items()}
        self._free_tokens = frozenset(free_tokens)
        self._leaf = leaf
        longest_first = sorted(map(re.escape, tokens), key=len, reverse=True)
        self._token_pattern = re.compile(f"({'|'.join(longest_first)})") if tokens else None
        self._depth = 0

    def expression(self, form: Any, where: str) -> str:
        """The Lark expression of a format."""
        return self._visit(form, where, None)

    def _until(self, form: Any, where: str, ends: Sequence[str]) -> str:
        """The expression of a format and one of the ends that follow it."""
        return self._visit(form, where, ends)

    def _visit(self, form: Any, where: str, ends: Sequence[str] | None) -> str:
        kind = kind_of(form, where)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise tag_error(where, f"is nested more than {MAX_DEPTH} deep")
        match kind:
            case "any_text":
                found = self._any_text(form, where, ends)
            case "triggered_tags":
                found = self._triggered_tags(form, where, ends)
            case "sequence":
                found = self._sequence(formats_of(form, where), where, ends)
            case "or":
                elements = enumerate(formats_of(form, where))
                found = _group(self._visit(e, at(where, "elements", i), ends) for i, e in elements)
            case _:
                found = self._closed(kind, form, where)
                if ends is not None:
                    _refuse_free_text(form, where)
                    found = f"{found} {self._one_of(ends)}"
        self._depth -= 1
        return found

    def _closed(self, kind: str, form: Mapping[str, Any], where: str) -> str:
        """The expression of a format that ends by itself."""
        match kind:
            case "const_string":
                return self._literal(text_of(form, "value", where))
            case "token":
                return self._literal(self._mark(form, where))
            case "json_schema":
                return self._called("json", form, "json_schema", where)
            case "regex":
                return self._called("regex", form, "pattern", where)
            case "grammar":
                return self._called("grammar", form, "grammar", where)
            case "tag":
                return self._tag(form, where)
            case "tags_with_separator":
                return self._tags_with_separator(form, where)
        return self._repeated(kind, form, where)

    def _repeated(self, kind: str, form: Mapping[str, Any], where: str) -> str:
        inner = self._rule(self.expression(form.get("content"), f"{where}.content"))
        if kind != "repeat":
            return inner + {"optional": "?", "plus": "+", "star": "*"}[kind]
        low, high = form.get("min"), form.get("max")
        if not (type(low) is type(high) is int and 0 <= low <= MAX_REPEATS):
            raise tag_error(
                where, f"needs min and max up to {MAX_REPEATS:,}, got {low!r}, {high!r}"
            )
        if high != -1 and not low <= high <= MAX_REPEATS:
            raise tag_error(f"{where}.max", f"must be -1, or from {low} to {MAX_REPEATS:,}")
        if high == 0:
            return '""'
        return f"{inner}{{{low},{'' if high == -1 else high}}}"

    def _called(self, kind: str, form: Mapping[str, Any], key: str, where: str) -> str:
        if key not in form:
            raise tag_error(where, f"has no {key!r}")
        try:
            return self._rule(self._leaf(kind, form[key]))
        except RequestError as error:
            # The message begins with the name of a field of StructuredOutputsParams.
            reason = re.sub(r"^structured_outputs(\.\w+)?:? ", "", str(error))
            raise tag_error(f"{where}.{key}", reason) from error

    def _tag(self, form: Mapping[str, Any], where: str, num_written: int = 0) -> str:
        """A tag without the first `num_written` characters of its begin."""
        begin = self._mark(form.get("begin"), f"{where}.begin")
        given = form.get("end")
        ends = given if isinstance(given, list) and given else [given]
        marks = [self._mark(end, f"{where}.end") for end in ends]
        inner = self._until(form.get("content"), f"{where}.content", marks)
        return f"{self._literal(begin[num_written:])} {inner}"

    def _any_text(self, form: Mapping[str, Any], where: str, ends: Sequence[str] | None) -> str:
        most = count_of(form, "max_chars", where)
        text = self._free_terminal(texts_of(form, "excludes", where), most)
        max_tokens = count_of(form, "max_tokens", where)
        if max_tokens is not None:
            if ends is not None:
                raise tag_error(f"{where}.max_tokens", "is possible at the end of the output only")
            return self._rule(text, f"[max_tokens={max_tokens}]")
        is_bounded = most is not None
        return self._free(text, "" if ends is None else self._stop(text, ends), ends, is_bounded)

    def _free(
        self, text: str, stop: str, marks: Sequence[str] | None, is_bounded: bool = False
    ) -> str:
        """Free text, and what ends it. Besides text it has the free tokens, but not those of the
        marks."""
        own = {self._tokens[part] for mark in marks or () for part in self._parts(mark)[1::2]}
        allowed = sorted(self._free_tokens - own)
        if not allowed or is_bounded:
            return stop or text
        pieces = self._rule(f"({text} <[{','.join(map(str, allowed))}]>)*")
        return f"{pieces} {stop or text}"

    def _stop(self, text: str, marks: Sequence[str]) -> str:
        """Text up to the first of the marks, with the mark, however that is written.

        Args:
            text: the terminal of the text.
            marks: the marks; an empty one ends the text anywhere.
        """
        found = []
        for mark in marks:
            if not mark:
                found.append(text)
                continue
            found.append(self._rule(f"{text} {json.dumps(mark)}", "[lazy]"))
            parts = self._parts(mark)
            if len(parts) > 1:
                before = self._terminal(f"{text} {json.dumps(parts[0])}") if parts[0] else text
                rest = "".join(parts[2:])
                found.append(f"{before} <[{self._tokens[parts[1]]}]> {self._literal(rest)}")
        return _group(found)

    def _triggered_tags(
        self, form: Mapping[str, Any], where: str, ends: Sequence[str] | None
    ) -> str:
        text = self._free_terminal(texts_of(form, "excludes", where), None)
        tags = self._by_trigger(form, where)
        marks = [*tags, *(ends or ())]
        each = [f"{self._stop(text, [mark])} {_group(rests)}" for mark, rests in tags.items()]
        tag = self._rule(_group(each))
        tag = self._rule(self._free(text, tag, marks))
        last = self._free(text, "" if ends is None else self._stop(text, ends), marks)
        closing = "" if ends is None else self._one_of(ends)
        if flag_of(form, "at_least_one", where):
            first = _group(f"{self._literal(mark)} {_group(rests)}" for mark, rests in tags.items())
            if flag_of(form, "stop_after_first", where):
                return f"{first} {closing}".strip()
            return f"{first} {tag}* {last}"
        if flag_of(form, "stop_after_first", where):
            return _group([f"{tag} {closing}".strip(), last])
        return f"{tag}* {last}"

    def _by_trigger(self, form: Mapping[str, Any], where: str) -> dict[str, list[str]]:
        """What follows each trigger, which becomes longer where it ends inside of a token."""
        triggers = texts_of(form, "triggers", where)
        if not triggers or "" in triggers:
            raise tag_error(f"{where}.triggers".lstrip("."), "must be a list of non-empty strings")
        found: dict[str, list[str]] = {}
        for index, tag in enumerate(list_of(form, "tags", where)):
            place = at(where, "tags", index)
            if kind_of(tag, place) != "tag":
                raise tag_error(place, "must be a tag")
            begin = self._mark(tag.get("begin"), f"{place}.begin")
            own = [trigger for trigger in triggers if begin.startswith(trigger)]
            if len(own) != 1:
                raise tag_error(f"{place}.begin", f"begins with {len(own)} of the triggers, not 1")
            size = len(own[0])
            boundary = 0
            for part in self._parts(begin)[1::2]:
                boundary = begin.index(part, boundary) + len(part)
                if boundary - len(part) < size < boundary:
                    size = boundary
            found.setdefault(begin[:size], []).append(self._tag(tag, place, size))
        if not found:
            raise tag_error(f"{where}.tags".lstrip("."), "must not be empty")
        return found

    def _tags_with_separator(self, form: Mapping[str, Any], where: str) -> str:
        tags = list_of(form, "tags", where)
        if not tags:
            raise tag_error(f"{where}.tags", "must not be empty")
        for index, tag in enumerate(tags):
            if kind_of(tag, at(where, "tags", index)) != "tag":
                raise tag_error(at(where, "tags", index), "must be a tag")
        each = (self._tag(tag, at(where, "tags", index)) for index, tag in enumerate(tags))
        one = self._rule(_group(each))
        separator = self._literal(text_of(form, "separator", where))
        has_one = flag_of(form, "stop_after_first", where)
        found = one if has_one else f"{one} ({separator} {one})*"
        return found if flag_of(form, "at_least_one", where) else f"({found})?"

    def _sequence(self, elements: Sequence[Any], where: str, ends: Sequence[str] | None) -> str:
        """The elements in their order. Free text reads the mark of the element after it."""
        written: list[str] = []
        num_read = 0
        for index, element in enumerate(elements):
            place = at(where, "elements", index)
            if num_read:
                if element["type"] == "tag":
                    written.append(self._tag(element, place, num_read))
                num_read = 0
            elif index == len(elements) - 1:
                written.append(self._visit(element, place, ends))
                return " ".join(written)
            elif has_free_end(element):
                mark = self._mark_after(elements, index, where)
                num_read = len(mark)
                written.append(self._until(element, place, [mark]))
            else:
                written.append(self.expression(element, place))
        return " ".join(written if ends is None else [*written, self._one_of(ends)])

    def _mark_after(self, elements: Sequence[Any], index: int, where: str) -> str:
        following, place = elements[index + 1], at(where, "elements", index + 1)
        kind = kind_of(following, place)
        key = {"const_string": "value", "tag": "begin"}.get(kind)
        mark = self._mark(following.get(key), f"{place}.{key}") if key else ""
        if not mark:
            raise tag_error(
                at(where, "elements", index),
                f"is free text before a {kind}, which cannot be expressed: free text is last, or "
                "a const_string or a tag with a begin follows it",
            )
        return mark

    def _mark(self, given: Any, where: str) -> str:
        """The text of a mark, which is a string or a token."""
        if isinstance(given, Mapping) and kind_of(given, where) == "token":
            token = given.get("token")
            text = self._texts.get(token) if type(token) is int else token
            if not isinstance(text, str) or text not in self._tokens:
                raise tag_error(f"{where}.token", f"is no added token of the tokenizer: {token!r}")
            return text
        if not isinstance(given, str):
            raise tag_error(where, f"must be a str, got {given!r:.80}")
        return given

    def _parts(self, text: str) -> list[str]:
        """Text and whole tokens in alternation, text first and last."""
        return self._token_pattern.split(text) if self._token_pattern else [text]

    def _literal(self, text: str) -> str:
        found = [
            f"<[{self._tokens[part]}]>" if index % 2 else json.dumps(part)
            for index, part in enumerate(self._parts(text))
            if part
        ]
        return " ".join(found) or '""'

    def _one_of(self, marks: Sequence[str]) -> str:
        return _group(map(self._literal, marks))

    def _free_terminal(self, excludes: Sequence[str], most: int | None) -> str:
        every = "/(?s:.*)/" if most is None else f"/(?s:.{{0,{most}}})/"
        for excluded in excludes:
            middle = self._terminal(json.dumps(excluded))
            every += f" & ~(/(?s:.*)/ {middle} /(?s:.*)/)"
        return self._terminal(every)

    def _terminal(self, body: str) -> str:
        return self._define("T", body, "")

    def _rule(self, body: str, attributes: str = "") -> str:
        return self._define("r", body, attributes)

    def _define(self, letter: str, body: str, attributes: str) -> str:
        name = f"{letter}{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {body}")
        return name


def _refuse_free_text(form: Any, where: str) -> None:
    if has_free_end(form):
        raise tag_error(where, "repeats free text, and an end follows, which cannot be expressed")


def _group(alternatives: Any) -> str:
    return f"({' | '.join(dict.fromkeys(alternatives))})"
