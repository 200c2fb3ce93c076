"""The alphabet of byte-level vocabularies."""

from __future__ import annotations


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary represents.

    Printable Latin-1 characters represent their own byte. The characters 256, 257, ... represent
    the other bytes in order. This is GPT-2's table, which all byte-level BPE vocabularies use.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + position): byte for position, byte in enumerate(shifted)}


BYTE_ALPHABET = _byte_alphabet()
"""The byte that each character represents."""
CHARACTERS = {byte: character for character, byte in BYTE_ALPHABET.items()}
"""The character that represents each byte."""
