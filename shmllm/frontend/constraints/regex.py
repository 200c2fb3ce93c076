"""Translates Python's regular expressions to the dialect of llguidance.

`re.fullmatch` matches everything that the result matches. If a character class has different
members in the two dialects, the result has the smaller class: `\\d`, `\\w` and `\\s` mean ASCII
characters, as in vLLM. llguidance refuses the constructs that it does not support (look-around,
backreferences).
"""

from __future__ import annotations

import re

_ASCII = {"d": "0-9", "w": "0-9A-Za-z_", "s": r"\x20\t\n\r\f\v"}
# In Python, `\Z` is the end of the text, and `\<` and `\>` are plain characters. In llguidance, the
# latter two are the boundaries of a word.
_OTHER_ESCAPES = {"Z": r"\z", "<": "<", ">": ">"}
# These characters are set operators in llguidance and plain characters in Python.
_PLAIN_IN_A_SET = "[&~"

_PIECE = re.compile(r"(?P<escape>\\.)|(?P<set>\[\^?\]?(?:[^\]\\]|\\.)*\])|(?P<other>.)", re.DOTALL)
_IN_SET = re.compile(r"(?P<escape>\\.)|(?P<other>.)", re.DOTALL)


def to_library(pattern: str) -> str:
    """Translate a pattern. An invalid pattern stays invalid."""
    return _PIECE.sub(_piece, pattern)


def _piece(match: re.Match[str]) -> str:
    text = match.group()
    if match.lastgroup == "set":
        return _set(text)
    if match.lastgroup == "other":
        return text
    character = text[1]
    if character in _ASCII:
        return f"[{_ASCII[character]}]"
    return _OTHER_ESCAPES.get(character, text)


def _set(text: str) -> str:
    opening = "[^" if text.startswith("[^") else "["
    inner = text[len(opening) : -1]
    is_negated = opening == "[^"

    def spell(match: re.Match[str]) -> str:
        piece = match.group()
        if match.lastgroup == "other":
            return "\\" + piece if piece in _PLAIN_IN_A_SET else piece
        character = piece[1]
        # In a negated set, the larger class matches fewer characters, so it stays.
        if character in _ASCII and not is_negated:
            return _ASCII[character]
        return character if character in "<>" else piece

    return f"{opening}{_IN_SET.sub(spell, inner)}]"
