"""Puts expansions into prompts, and finds the embeddings' positions in them.

A prompt of text is expanded as text and tokenized then, as transformers does it. A prompt of token
ids has tokens before and behind the mark that were made without the expansion. Their texts are not
joined with it, except newlines: an expansion may begin and end with some, and tokenizers have
tokens for several newlines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shmllm.errors import RequestError
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import Placeholder

Encode = Callable[[str], Sequence[int]]
"""Token ids of a text, without special tokens around it."""
Runs = tuple[tuple[int, int], ...]
"""Half-open intervals of positions, ascending."""

_MOST_NEWLINES = 31
"""The longest run of newlines that is one token: Gemma's."""


def expand_text(
    name: str, placeholder: Placeholder, text: str, items: Sequence[PreparedItem]
) -> str:
    """The text with each mark replaced by the expansion of its item.

    Raises:
        RequestError: the numbers of marks and items differ.
    """
    parts = text.split(placeholder.replaced)
    if len(parts) - 1 != len(items):
        raise RequestError(
            f"{name} has {_counted(placeholder.modality, len(items))}, and its text "
            f"{placeholder.replaced!r} {len(parts) - 1} times; write {placeholder.mark!r} once for "
            f"each {placeholder.modality}"
        )
    expansions = placeholder.expansions(items)
    return "".join(piece for pair in zip(parts, [*expansions, ""], strict=True) for piece in pair)


def expand_ids(
    name: str,
    placeholder: Placeholder,
    ids: Sequence[int],
    items: Sequence[PreparedItem],
    encode: Encode,
) -> list[int]:
    """The ids with each mark replaced by the ids of its item's expansion. Ids that are expanded
    already stay as they are.

    Raises:
        RequestError: the ids are neither, or the tokenizer does not know the expansions' tokens.
    """
    array = placeholder.visible(np.asarray(ids, np.int64))
    num_tokens = sum(item.num_tokens for item in items)
    found = int(np.count_nonzero(array == placeholder.token_id))
    replaced = placeholder.replaced_ids or tuple(encode(placeholder.replaced))
    marks = _places(array, replaced)
    seen = array.tolist()
    if len(marks) == len(items) and _are_marks(placeholder, seen, found, num_tokens, items, encode):
        expanded = _replaced(placeholder, list(ids), marks, len(replaced), items, encode)
        _check_tokens(name, placeholder, expanded, num_tokens)
        return expanded
    if found == num_tokens:
        return list(ids)
    raise RequestError(
        f"{name} has {_counted(placeholder.modality, len(items))}: its ids need "
        f"{_listed(replaced)} ({placeholder.replaced!r}) as often or, if it is "
        f"expanded already, {_counted('token', num_tokens)} "
        f"{placeholder.token_id} ({placeholder.token!r}); its token ids have "
        f"{len(marks)} and {found}"
    )


def find_runs(
    name: str, placeholder: Placeholder, ids: Sequence[int], counts: Sequence[int]
) -> list[Runs]:
    """Of each item the positions of its embeddings.

    Args:
        name: the prompt's name for messages.
        placeholder: the model's.
        ids: the expanded prompt.
        counts: of each item the number of its embeddings.

    Raises:
        RequestError: the prompt has more or fewer of the items' tokens.
    """
    seen = placeholder.visible(np.asarray(ids, np.int64))
    positions = np.flatnonzero(seen == placeholder.token_id)
    if len(positions) != sum(counts):
        raise RequestError(
            f"{name} has the token {placeholder.token_id} ({placeholder.token!r}) "
            f"{len(positions)} times, and {_counted(placeholder.modality, len(counts))}, for which "
            f"it needs {sum(counts)}"
        )
    parts = np.split(positions, np.cumsum(np.asarray(counts, np.int64))[:-1]) if counts else []
    return [_intervals(part) for part in parts]


def _counted(noun: str, count: int) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _listed(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def _places(ids: NDArray[np.int64], wanted: Sequence[int]) -> list[int]:
    """The places at which ids begin that do not overlap."""
    count = len(ids) - len(wanted) + 1
    if count < 1:
        return []
    matches = np.all([ids[i : count + i] == each for i, each in enumerate(wanted)], 0)
    found: list[int] = []
    for place in np.flatnonzero(matches).tolist():
        if not found or place >= found[-1] + len(wanted):
            found.append(place)
    return found


def _are_marks(
    placeholder: Placeholder,
    ids: Sequence[int],
    found: int,
    num_tokens: int,
    items: Sequence[PreparedItem],
    encode: Encode,
) -> bool:
    """Whether the ids contain marks, and not expansions with as many of the same token.

    Both are possible if the mark is that token and each item has one embedding. Then the ids
    around the first one decide.
    """
    if placeholder.token_id not in placeholder.replaced_ids:
        return found == 0
    if found != num_tokens or not found:
        return True
    token = placeholder.token_id
    expansion = list(encode(placeholder.expansions(items)[0].strip("\n")))
    if token not in expansion:
        return True
    start = list(ids).index(token) - expansion.index(token)
    return start < 0 or list(ids[start : start + len(expansion)]) != expansion


def _intervals(positions: NDArray[np.int64]) -> Runs:
    if not len(positions):
        return ()
    breaks = np.flatnonzero(np.diff(positions) != 1)
    starts = positions[np.r_[0, breaks + 1]]
    ends = positions[np.r_[breaks, len(positions) - 1]] + 1
    return tuple(zip(starts.tolist(), ends.tolist(), strict=True))


def _check_tokens(name: str, placeholder: Placeholder, ids: list[int], num_tokens: int) -> None:
    seen = placeholder.visible(np.asarray(ids, np.int64))
    found = int(np.count_nonzero(seen == placeholder.token_id))
    if found != num_tokens:
        raise RequestError(
            f"{name}: the tokenizer makes {found} tokens {placeholder.token_id} of "
            f"{num_tokens} times {placeholder.token!r}; the tokenizer does not suit the model"
        )


def _replaced(
    placeholder: Placeholder,
    ids: list[int],
    marks: Sequence[int],
    mark_length: int,
    items: Sequence[PreparedItem],
    encode: Encode,
) -> list[int]:
    if not marks:
        return ids
    texts = placeholder.expansions(items)
    repeated = placeholder.token
    joined = any(text.startswith("\n") or text.endswith("\n") for text in texts)
    newlines = _newline_tokens(encode) if joined else {}
    out: list[int] = []
    start = num_open = 0
    for mark, text, item in zip(marks, texts, items, strict=True):
        core = text.strip("\n")
        before = len(text) - len(text.lstrip("\n"))
        out += _between(ids[start:mark], num_open, before, newlines, encode)
        count = item.num_tokens
        whole = core == repeated * count
        out += [placeholder.token_id] * count if whole else encode(core)
        num_open = len(text) - len(text.rstrip("\n"))
        start = mark + mark_length
    return out + _between(ids[start:], num_open, 0, newlines, encode)


def _between(
    ids: list[int], before: int, behind: int, newlines: dict[int, int], encode: Encode
) -> list[int]:
    """Ids between two expansions, of which the first ends with `before` newlines and the second
    begins with `behind`. Newlines that meet become the tokens of all of them."""
    first, last = 0, len(ids)
    while before and first < last and ids[first] in newlines:
        before += newlines[ids[first]]
        first += 1
    while behind and last > first and ids[last - 1] in newlines:
        behind += newlines[ids[last - 1]]
        last -= 1
    if first == last:
        before, behind = before + behind, 0
    return [*_newlines(before, encode), *ids[first:last], *_newlines(behind, encode)]


def _newlines(number: int, encode: Encode) -> Sequence[int]:
    return encode("\n" * number) if number else []


def _newline_tokens(encode: Encode) -> dict[int, int]:
    """The tokens that stand for newlines only, and for how many."""
    encoded = ((number, encode("\n" * number)) for number in range(1, _MOST_NEWLINES + 1))
    return {tokens[0]: number for number, tokens in encoded if len(tokens) == 1}
