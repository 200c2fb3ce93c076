"""Translates context-free grammars from EBNF to the Lark dialect of llguidance.

    root ::= "x = " number (" + " number)*      # alternatives: |   groups: ( )
    number ::= [0-9]+ | "0x" [0-9a-f]{1,8}      # repetitions: * + ? {n} {n,} {n,m}

Rules that are not recursive become terminals, which llguidance matches as regular expressions. That
is faster than matching rules, and exact. This module must not know requests or tokenizers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from shmllm.errors import RequestError

ROOT = "root"
MAX_RULES = 2_000
"""llguidance recurses once per rule in a chain of references; a few thousand crash the process."""
MAX_DEPTH = 100

_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r\n]+|\#[^\n]*)
      | (?P<head>[A-Za-z_][A-Za-z0-9_-]*)[ \t\r\n]*::=
      | (?P<name>[A-Za-z_][A-Za-z0-9_-]*)
      | (?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<set>\[\^?(?:[^\]\\\n]|\\.)+\])
      | (?P<repeat>[*+?]|\{[ ]*\d+[ ]*(?:,[ ]*\d*[ ]*)?\})
      | (?P<any>\.)
      | (?P<open>\()
      | (?P<close>\))
      | (?P<bar>\|)""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_REPEAT = re.compile(r"[*+?]|\{(\d+)")
_NEVER = re.compile(r"\{(0+,)?0+\}")
_NAMED_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_IS_LARK = re.compile(r"(?m)^\s*[?!]?start\b[^:\n]*:(?!:=)")
_LARK_TEMPERATURE = re.compile(r"(?m)^\s*[?!]?\w+\[[^\]\n]*\btemperature\s*=[^\]\n]*\]\s*:")
_LARK_RULE = re.compile(r"(?m)^\s*[?!]?[A-Za-z_]\w*\b[^:\n]*:")


def to_lark(source: str) -> str:
    """Translate a grammar to Lark. A grammar that is Lark already (with a rule `start:`) is
    returned unchanged.

    Raises:
        RequestError: the grammar is invalid. The message contains the line.
    """
    if "::=" not in source and _IS_LARK.search(source):
        return _checked_lark(source)
    rules = _parse(source)
    if ROOT not in rules:
        raise _error(f'has no rule {ROOT!r}; it begins with one, as in {ROOT} ::= "a" | "b"')
    if len(rules) > MAX_RULES:
        raise _error(f"has {len(rules):,} rules; at most {MAX_RULES:,} are possible")
    for rule in rules.values():
        for name, line in rule.references:
            if name not in rules:
                raise _error(f"line {line}: there is no rule {name!r}")
    _check_ends(rules)
    names = _lark_names(rules)
    lines = [f"start: {names[ROOT]}"]
    for name, rule in rules.items():
        parts = [names[part.name] if isinstance(part, _Reference) else part for part in rule.parts]
        lines.append(f"{names[name]}: {' '.join(parts)}")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class _Reference:
    name: str


@dataclass(slots=True)
class _Rule:
    """A rule while it is parsed.

    Attributes:
        parts: the Lark text in pieces, with references in place of the names of other rules.
        references: the names of other rules, each with the line where it occurs.
        groups: where in `parts` the open parentheses are.
        last: where in `parts` the piece begins that a repetition repeats.
        is_empty: whether the current alternative is empty.
        may_repeat: whether a repetition may follow.
    """

    parts: list[str | _Reference] = field(default_factory=list)
    references: list[tuple[str, int]] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    last: int = 0
    is_empty: bool = True
    may_repeat: bool = False

    def add(self, part: str | _Reference) -> None:
        self.last = len(self.parts)
        self.parts.append(part)
        self.is_empty, self.may_repeat = False, True

    def open(self) -> None:
        self.groups.append(len(self.parts))
        self.parts.append("(")
        self.is_empty, self.may_repeat = True, False

    def end_alternative(self) -> None:
        """Write `""` for an empty alternative (`a |`, `()`): Lark has no other form for it."""
        if self.is_empty:
            self.add('""')

    def close(self) -> None:
        self.end_alternative()
        self.add(")")
        self.last = self.groups.pop()

    def bar(self) -> None:
        self.end_alternative()
        self.parts.append("|")
        self.is_empty, self.may_repeat = True, False

    def repeat(self, count: str) -> None:
        if _NEVER.fullmatch(count):
            self.parts[self.last :] = ['""']  # llguidance refuses these counts
        else:
            self.parts.append(count)
        self.may_repeat = False


def _check_ends(rules: dict[str, _Rule]) -> None:
    """Raise RequestError for a rule of which no text can have an end, such as `a ::= "x" a`. An
    output that begins such a text can neither go on nor end."""
    referrers: dict[str, set[str]] = {name: set() for name in rules}
    for name, rule in rules.items():
        for other, _ in rule.references:
            referrers[other].add(name)
    ending: set[str] = set()
    waiting = list(rules)
    while waiting:
        name = waiting.pop()
        if name not in ending and _can_end(rules[name].parts, ending):
            ending.add(name)
            waiting += referrers[name]
    for rule in rules.values():
        for name, line in rule.references:
            if name not in ending:
                raise _error(
                    f"line {line}: no text of rule {name!r} has an end; give it an alternative "
                    "without recursion"
                )


def _can_end(parts: list[str | _Reference], ending: set[str]) -> bool:
    """Whether a rule has a text that ends.

    Args:
        parts: see `_Rule`.
        ending: the rules that are known to have one.
    """
    groups: list[tuple[bool, bool]] = []  # of each open group: an alternative ends, this one does
    one_ends, this_ends, last = False, True, True
    for part in parts:
        if part == "(":
            groups.append((one_ends, this_ends and last))
            one_ends, this_ends, last = False, True, True
        elif part == ")":
            last = one_ends or (this_ends and last)
            one_ends, this_ends = groups.pop()
        elif part == "|":
            one_ends, this_ends, last = one_ends or (this_ends and last), True, True
        elif isinstance(part, str) and (repeat := _REPEAT.match(part)):
            last = last or part in ("*", "?") or int(repeat[1] or 1) == 0
        else:
            this_ends, last = this_ends and last, isinstance(part, str) or part.name in ending
    return one_ends or (this_ends and last)


def _error(message: str) -> RequestError:
    return RequestError(f"structured_outputs.grammar {message}")


def _checked_lark(source: str) -> str:
    source = re.sub(r"^\s*%llguidance\s*\{\s*\}", "", source)  # an obsolete header, without effect
    if re.search(r"%llguidance\b", source):
        raise _error("holds %llguidance options, which are not supported")
    if re.search(r"%json\b", source):
        raise _error("holds %json; ask for JSON with structured_outputs.json, which is checked")
    if _LARK_TEMPERATURE.search(source):
        raise _error("sets the temperature of a rule, which a request has as a whole")
    if len(_LARK_RULE.findall(source)) > MAX_RULES:
        raise _error(f"has more than {MAX_RULES:,} rules")
    return source


def _parse(source: str) -> dict[str, _Rule]:
    rules: dict[str, _Rule] = {}
    rule: _Rule | None = None
    line = 1
    position = 0
    while position < len(source):
        match = _TOKEN.match(source, position)
        if match is None:
            raise _error(f"line {line}: cannot read {source[position : position + 20]!r}")
        position = match.end()
        kind, text = match.lastgroup or "", match.group()
        if kind == "head":
            name = match.group("head")
            if rule is not None:
                _finish(rule, line)
            if name in rules:
                raise _error(f"line {line}: rule {name!r} is defined twice")
            rule = rules[name] = _Rule()
        elif kind != "blank":
            if rule is None:
                raise _error(f"line {line}: expected a rule like {ROOT} ::= ..., got {text!r}")
            _take(rule, kind, text, line)
        line += text.count("\n")
    if rule is not None:
        _finish(rule, line)
    return rules


def _finish(rule: _Rule, line: int) -> None:
    if rule.groups:
        raise _error(f"line {line}: {len(rule.groups)} '(' without ')'")
    rule.end_alternative()


def _take(rule: _Rule, kind: str, text: str, line: int) -> None:
    match kind:
        case "open":
            if len(rule.groups) == MAX_DEPTH:
                raise _error(f"line {line}: more than {MAX_DEPTH} '(' inside each other")
            rule.open()
        case "close":
            if not rule.groups:
                raise _error(f"line {line}: ')' without '('")
            rule.close()
        case "bar":
            rule.bar()
        case "repeat":
            if not rule.may_repeat:
                raise _error(f"line {line}: {text!r} repeats nothing")
            rule.repeat(_count(text, line))
        case "name":
            rule.add(_Reference(text))
            rule.references.append((text, line))
        case _:
            rule.add(_SPELLINGS[kind](text, line))


def _count(text: str, line: int) -> str:
    low, _, high = text.strip("{}").replace(" ", "").partition(",")
    if high and int(high) < int(low):
        raise _error(f"line {line}: {text} asks for at least {low} and at most {high}")
    return text.replace(" ", "")


def _literal(text: str, line: int) -> str:
    return json.dumps("".join(character for character, _ in _characters(text[1:-1], line)))


def _characters(text: str, line: int) -> list[tuple[str, bool]]:
    """Each character, and whether it was escaped."""
    found = []
    position = 0
    while position < len(text):
        if text[position] != "\\":
            found.append((text[position], False))
            position += 1
            continue
        match = _ESCAPE.match(text, position)
        assert match is not None  # _TOKEN matches no text that ends with a single backslash
        found.append((_escaped(match, line), True))
        position = match.end()
    return found


def _escaped(match: re.Match[str], line: int) -> str:
    digits = match.group(1) or match.group(2) or match.group(3)
    if digits is None:
        character = match.group(4)
        if character.isalnum() and character not in _NAMED_ESCAPES:
            raise _error(f"line {line}: unknown escape \\{character}")
        return _NAMED_ESCAPES.get(character, character)
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise _error(f"line {line}: {match.group()} is no character")
    return chr(code)


def _set(text: str, line: int) -> str:
    inner = text[1:-1]
    negated = inner[0] == "^"
    characters = _characters(inner[negated:], line)
    if not characters:
        raise _error(f"line {line}: {text} is an empty set")
    spelled, position = "", 0
    while position < len(characters):
        low = high = characters[position][0]
        if characters[position + 1 : position + 2] == [("-", False)] and position + 2 < len(
            characters
        ):
            high = characters[position + 2][0]
            position += 2
        position += 1
        if high < low:
            raise _error(f"line {line}: {text} has a range that runs backwards")
        spelled += rf"\x{{{ord(low):X}}}-\x{{{ord(high):X}}}"
    return f"/[{'^' * negated}{spelled}]/"


_SPELLINGS: dict[str, Callable[[str, int], str]] = {
    "text": _literal,
    "set": _set,
    "any": lambda text, line: r"/[\x{0}-\x{10FFFF}]/",
}


def _lark_names(rules: dict[str, _Rule]) -> dict[str, str]:
    """The Lark name of each rule: upper case for terminals, lower case for other rules.

    A rule is a terminal if it refers only to terminals, without recursion. The search begins with
    the rules without references.
    """
    referrers: dict[str, list[str]] = {name: [] for name in rules}
    missing = {name: len(rule.references) for name, rule in rules.items()}
    for name, rule in rules.items():
        for other, _ in rule.references:
            referrers[other].append(name)
    terminals = [name for name, count in missing.items() if not count]
    for name in terminals:  # the loop extends the list
        for referrer in referrers[name]:
            missing[referrer] -= 1
            if not missing[referrer]:
                terminals.append(referrer)
    return {name: f"r{i}" if missing[name] else f"T{i}" for i, name in enumerate(rules)}
