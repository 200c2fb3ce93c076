"""Python's regular expressions, turned into the grammar library's.

What the result matches, `re.fullmatch` matches. Where the two dialects give a character
class different members, the smaller one is taken: `\\d`, `\\w` and `\\s` stand for ASCII, as
in vLLM. What neither can express (look-around, backreferences) is the library's to refuse.
"""

from __future__ import annotations

import re

_ASCII = {"d": "0-9", "w": "0-9A-Za-z_", "s": r"\x20\t\n\r\f\v"}
# In Python, `\Z` is the end, and `\<` and `\>` are plain characters; in the other dialect
# the latter two are the edges of a word.
_SPELLED_OTHERWISE = {"Z": r"\z", "<": "<", ">": ">"}
# Set operators of the other dialect.
_PLAIN_IN_A_SET = "[&~"

_PIECE = re.compile(r"(?P<escape>\\.)|(?P<set>\[\^?\]?(?:[^\]\\]|\\.)*\])|(?P<other>.)", re.DOTALL)
_IN_SET = re.compile(r"(?P<escape>\\.)|(?P<other>.)", re.DOTALL)


def to_library(pattern: str) -> str:
    """The same pattern for the library; what is no pattern stays none."""
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
    return _SPELLED_OTHERWISE.get(character, text)


def _set(text: str) -> str:
    opening = "[^" if text.startswith("[^") else "["
    inner = text[len(opening) : -1]
    is_negated = opening == "[^"

    def spell(match: re.Match[str]) -> str:
        piece = match.group()
        if match.lastgroup == "other":
            return "\\" + piece if piece in _PLAIN_IN_A_SET else piece
        character = piece[1]
        # A negated set is smaller if what it leaves out is larger.
        if character in _ASCII and not is_negated:
            return _ASCII[character]
        return character if character in "<>" else piece

    return f"{opening}{_IN_SET.sub(spell, inner)}]"
