"""What a forced aligner reads and says: the words of a text, and times that never go back.

The rules are those of Qwen3-ForcedAligner's authors, as transformers' `Qwen3ASRProcessor` has them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shmllm.errors import RequestError

MARK = "<timestamp>"
"""Two stand behind each word, for its begin and its end."""
MOST_SNAPPED = 2
"""So many wrong times in a row take those of a neighbour; more are interpolated."""

_IDEOGRAPH = re.compile(
    "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002ceaf"
    "\U0002f800-\U0002fa1f]"
)
_KANA = re.compile("[\u3041-\u30fa\u30fc-\u30ff\uff66-\uff9d]")


def words_of(text: str | Sequence[str], name: str) -> list[str]:
    """Return the words that are aligned, without punctuation. Chinese characters are one each.

    Args:
        text: a text with blanks between other words; or the words.
        name: what errors call it.

    Raises:
        RequestError: it is neither, or Japanese, which has no blanks.
    """
    if isinstance(text, str):
        if _KANA.search(text):
            raise RequestError(
                f"{name} is Japanese, which has no blanks between words: pass a list of its words"
            )
        apart = _IDEOGRAPH.sub(lambda found: f" {found[0]} ", text)
        return [word for each in apart.split() if (word := _spoken(each))]
    if (
        not isinstance(text, Sequence)
        or isinstance(text, bytes)
        or not all(isinstance(each, str) for each in text)
    ):
        raise RequestError(f"{name} must be a text or a list of words, not {text!r:.100}")
    return [word for each in text if (word := _spoken(each))]


def _spoken(word: str) -> str:
    """The letters, digits and apostrophes of a word."""
    return "".join(
        c
        for c in unicodedata.normalize("NFC", word)
        if c == "'" or unicodedata.category(c)[0] in "LN"
    )


def in_order(times: npt.NDArray[np.float32]) -> list[int]:
    """Return times, of which those outside of the longest sequence that never goes back take values
    between their neighbours within it.

    Args:
        times: (N,), in any unit.
    """
    kept = _longest_rising(times)
    values: list[float] = times.tolist()
    begin = 0
    while begin < len(values):
        end = begin
        while end < len(values) and not kept[end]:
            end += 1
        if end > begin:
            before = values[begin - 1] if begin else values[end]
            behind = values[end] if end < len(values) else before
            values[begin:end] = _between(before, behind, end - begin)
        begin = end + 1
    return [int(value) for value in values]


def _between(before: float, behind: float, count: int) -> list[float]:
    """So many times between two others."""
    if count <= MOST_SNAPPED:
        return [before if 2 * place < count else behind for place in range(count)]
    step = (behind - before) / (count + 1)
    return [before + step * (place + 1) for place in range(count)]


def _longest_rising(times: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """Which times belong to the longest sequence that never goes back, the first of equals."""
    lengths, parents = np.ones(len(times), np.int64), np.full(len(times), -1)
    for place in range(1, len(times)):
        before = np.where(times[:place] <= times[place], lengths[:place], 0)
        best = int(before.argmax())
        if before[best]:
            lengths[place], parents[place] = before[best] + 1, best
    kept = np.zeros(len(times), bool)
    place = int(lengths.argmax()) if len(times) else -1
    while place >= 0:
        kept[place] = True
        place = int(parents[place])
    return kept
