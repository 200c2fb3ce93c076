"""Translates Python's regular expressions to the dialect of llguidance.

`re.fullmatch` matches everything that the result matches. If a character class has different
members in the two dialects, the result has the smaller class: `\\d`, `\\w` and `\\s` mean ASCII
characters, as in vLLM. llguidance refuses the constructs that it does not support (look-around,
backreferences).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from shmllm.errors import RequestError

_SMALLER = {
    "d": "[0-9]",
    "w": "[0-9A-Za-z_]",
    "s": r"[\x20\t\n\r\f\v]",
    # Python counts all numbers as \w, and the separators of ASCII as \s. llguidance does not.
    "W": r"[^\w\p{N}]",
    "S": r"[^\s\x1c-\x1f]",
}
_LARGER = {  # in a negated set, the larger class matches fewer characters
    "w": r"[\w\p{N}]",
    "s": r"[\s\x1c-\x1f]",
    "D": "[^0-9]",
    "W": "[^0-9A-Za-z_]",
    "S": r"[^\x20\t\n\r\f\v]",
}
_CLASSES = frozenset("dDwWsS")
# In Python, `\Z` is the end of the text, and `\<` and `\>` are plain characters. In llguidance, the
# latter two are the boundaries of a word.
_OTHER_ESCAPES = {"Z": r"\z", "<": "<", ">": ">"}
_ESCAPES_IN_A_SET = {"b": r"\x08", "<": "<", ">": ">"}
# These characters have a meaning in sets of llguidance, some with the flag x, and none in Python's.
_PLAIN_IN_A_SET = {c: "\\" + c for c in "[]&~-^#"} | {c: f"\\x{ord(c):02x}" for c in " \t\n\r\f\v"}

_ESCAPE = r"\\(?:0[0-7]{0,2}|[0-3][0-7]{2}|[pPxuU]\{[^}]*\}|x[^\W_]{2}|u[^\W_]{4}|U[^\W_]{8}|.)"
_PIECE = re.compile(
    rf"(?P<escape>{_ESCAPE})|(?P<set>\[\^?\]?(?:[^\]\\]|\\.)*\])"
    r"|(?P<repeat>(?:[*+?]|\{(?:\d+(?:,\d*)?|,\d*)\})\+?)|(?P<other>.)",
    re.DOTALL,
)
_MEMBER = re.compile(rf"(?P<low>{_ESCAPE}|.)(?:-(?P<high>{_ESCAPE}|.))?", re.DOTALL)


def to_library(pattern: str) -> str:
    """Translate a pattern. An invalid pattern stays invalid.

    Raises:
        RequestError: the pattern has a possessive repetition.
    """
    return _translated(pattern, _SMALLER, _LARGER)


def to_library_classes(pattern: str) -> str:
    """Translate a pattern of a JSON schema, in which `\\d`, `\\w` and `\\s` are llguidance's own:
    it gives them the meaning that they have there."""
    return _translated(pattern, {}, {})


def _translated(pattern: str, smaller: Mapping[str, str], larger: Mapping[str, str]) -> str:
    def piece(match: re.Match[str]) -> str:
        text = match.group()
        match match.lastgroup:
            case "set":
                return _set(text, larger if text.startswith("[^") else smaller)
            case "escape":
                return smaller.get(text[1:]) or _escape(text, _OTHER_ESCAPES)
            case "repeat":
                return _repeat(text)
        return r"\{" if text == "{" else text

    return _PIECE.sub(piece, pattern)


def _repeat(text: str) -> str:
    if len(text) > 1 and text.endswith("+"):
        # llguidance reads it as a repetition of the repetition, which matches more.
        raise RequestError(f"structured_outputs: the possessive repetition {text} is not supported")
    return text.replace("{,", "{0,")


def _set(text: str, classes: Mapping[str, str]) -> str:
    opening = "[^" if text.startswith("[^") else "["

    def spell(match: re.Match[str]) -> str:
        low, high = match.group("low"), match.group("high")
        if high is None:
            return _member(low, classes)
        if low[1:] in _CLASSES or high[1:] in _CLASSES:
            return f"{low}-{high}"  # neither dialect has such a range
        return f"{_member(low, {})}-{_member(high, {})}"

    return f"{opening}{_MEMBER.sub(spell, text[len(opening) : -1])}]"


def _member(text: str, classes: Mapping[str, str]) -> str:
    if len(text) == 1:
        return _PLAIN_IN_A_SET.get(text, text)
    found = classes.get(text[1:], "")
    if found and not found.startswith("[^"):
        found = found[1:-1]
    return found or _escape(text, _ESCAPES_IN_A_SET)


def _escape(text: str, names: Mapping[str, str]) -> str:
    """An escape. llguidance has no octal numbers."""
    if text[1].isdigit() and (len(text) > 2 or text == r"\0"):
        return f"\\x{int(text[1:], 8):02x}"
    return names.get(text[1:], text)
