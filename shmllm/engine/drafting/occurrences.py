"""Finds where the last tokens of a text occurred before.

The structure is that of Deflate (RFC 1951, 4): for stretches of a few lengths, a table leads from
the hash of a stretch to the place behind its last occurrence, and a chain from each place to the
one before. It takes 20 bytes for each token and 16 to 32 bytes for each token that is expected,
where a suffix trie of depth d has up to d nodes for each token. What it finds is exact, because
each occurrence is compared.

This module must not know what the occurrences are for.
"""

from __future__ import annotations

from array import array

SIZES = (8, 4, 2, 1)
"""The lengths of the stretches that have chains, the longest first."""
MOST_FOUND = 32
"""The largest number of occurrences that count: the last ones."""
MOST_VISITED = 2 * MOST_FOUND
"""The largest number of places that are compared, also of stretches with the same hash."""
END = -1
"""In a text, stands between two texts that do not follow each other."""
_NOWHERE = -1


class Occurrences:
    """
    Args:
        text: the tokens, int32. The caller may append to it between two calls.
        num_expected: about how many tokens it will have; with more, calls take longer.
    """

    __slots__ = ("_chains", "_mask", "_num_indexed", "text")

    def __init__(self, text: array[int], num_expected: int) -> None:
        self.text = text
        num_slots = 1 << max(num_expected - 1, 1).bit_length()
        self._mask = num_slots - 1
        self._chains = {size: (array("i", [_NOWHERE]) * num_slots, array("i")) for size in SIZES}
        self._num_indexed = 0

    def index(self) -> None:
        """Take note of the tokens that were appended."""
        view = memoryview(self.text)
        text, width, end = view.cast("B"), view.itemsize, len(view)
        for size, (heads, before) in self._chains.items():
            mask, add = self._mask, before.append
            for place in range(self._num_indexed, end):
                if place < size:
                    add(_NOWHERE)
                    continue
                slot = hash(bytes(text[(place - size) * width : place * width])) & mask
                add(heads[slot])
                heads[slot] = place
        self._num_indexed = end

    def find(self, tail: array[int], size: int) -> dict[int, list[int]]:
        """The last occurrences of the last tokens.

        Args:
            tail: the last tokens, in order; no more of them are compared.
            size: how many of them must have been there, one of SIZES.

        Returns:
            By the number of last tokens that were there, the places of the tokens that followed,
            the latest first.
        """
        text, stretch = self.text, tail[-size:]
        heads, before = self._chains[size]
        place = heads[hash(stretch.tobytes()) & self._mask]
        found: dict[int, list[int]] = {}
        num_found = 0
        for _ in range(MOST_VISITED):
            if place == _NOWHERE or num_found == MOST_FOUND:
                break
            if text[place - size : place] == stretch:
                num_found += 1
                found.setdefault(self._length(place, tail, size), []).append(place)
            place = before[place]
        return found

    def _length(self, place: int, tail: array[int], known: int) -> int:
        """How many of the last tokens were before a place, of which some are known to be."""
        text, most = self.text, min(len(tail), place)
        if most == known or text[place - most : place] == tail[-most:]:
            return most
        length = known
        while text[place - length - 1] == tail[-length - 1]:
            length += 1
        return length
