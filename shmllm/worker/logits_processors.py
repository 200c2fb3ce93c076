"""What changes a row's logits before temperature: masks, bans, biases and penalties.

Owns their state per row, kept only for rows that need one, and applies them to a step's
logits in vLLM's order. Biases and penalties touch single entries, so those of all rows go
together as flat indices; no array of the vocabulary's size exists per row.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from shmllm.core.plan import NewRequest
from shmllm.params.sampling import SamplingParams, TokenSequences
from shmllm.worker.arrays import FloatArray, IntArray, LongArray

_NO_IDS = np.zeros(0, np.int64)


class BadWords:
    """Sequences that the output may not contain: their last token is banned where the rest
    stands."""

    def __init__(self, sequences: TokenSequences) -> None:
        single = {sequence[0] for sequence in sequences if len(sequence) == 1}
        self._always = np.array(sorted(single), np.int64)
        self._by_last: dict[int, list[tuple[list[int], int]]] = {}
        for sequence in sequences:
            if len(sequence) > 1:
                prefix = list(sequence[:-1])
                self._by_last.setdefault(prefix[-1], []).append((prefix, sequence[-1]))

    @property
    def needs_output(self) -> bool:
        """Whether any has more than one token."""
        return bool(self._by_last)

    def banned(self, output_ids: IntArray) -> LongArray:
        """What may not follow `output_ids`."""
        candidates = self._by_last.get(int(output_ids[-1]), ()) if len(output_ids) else ()
        completing = [
            last
            for prefix, last in candidates
            if len(prefix) <= len(output_ids) and output_ids[-len(prefix) :].tolist() == prefix
        ]
        if not completing:
            return self._always
        return np.concatenate([self._always, np.array(completing, np.int64)])


class RequestTokenCounts:
    """The different tokens of a request, and how often its output has each."""

    def __init__(self, prompt_ids: Sequence[int] | IntArray) -> None:
        known = np.unique(np.asarray(prompt_ids, np.int64))
        self._places = {token: place for place, token in enumerate(known.tolist())}
        self._ids = np.zeros(len(known) + 32, np.int64)
        self._ids[: len(known)] = known
        self._counts = np.zeros(len(self._ids), np.float32)
        self.num_output_tokens = 0

    @property
    def ids(self) -> LongArray:
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> FloatArray:
        """How often the output has each of `ids`; 0 for those that only the prompt has."""
        return self._counts[: len(self._places)]

    def add(self, output_ids: Iterable[int]) -> None:
        for token in output_ids:
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._ids):
                self._ids = np.resize(self._ids, 2 * place)
                self._counts = np.concatenate([self._counts, np.zeros(place, np.float32)])
            self._ids[place] = token
            self._counts[place] += 1
            self.num_output_tokens += 1


class LogitsState:
    """
    Args:
        admission: the request that enters the row.
        vocab_size: entries of its logits; ids beyond it are ignored.
    """

    def __init__(self, admission: NewRequest, vocab_size: int) -> None:
        params = admission.params
        self._num_prompt_tokens = admission.num_prompt_tokens
        self._min_position = admission.min_position
        self._forbidden = _inside(admission.forbidden_ids, vocab_size)
        known = tuple(word for word in admission.bad_words if word[-1] < vocab_size)
        self._bad_words = BadWords(known) if known else None
        self.allowed = _inside(params.allowed_token_ids or (), vocab_size)
        bias = params.logit_bias or {}
        self.biased = _inside(bias, vocab_size)
        self.biases = np.array([bias[token] for token in self.biased.tolist()], np.float32)
        self.has_penalties = params.has_penalties
        self.penalties = (
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
        self.counts: RequestTokenCounts | None = None

    @property
    def bans(self) -> bool:
        """Whether anything may be banned, now or later."""
        return self._bad_words is not None or self._forbidden.size > 0

    @property
    def needs_output(self) -> bool:
        """Whether what is banned depends on the tokens of the output, not on their number alone."""
        return self._bad_words is not None and self._bad_words.needs_output

    def banned_until(self, position: int) -> int:
        """The next position at which something else may be banned than at this one."""
        if self.needs_output:
            return position + 1
        if self._forbidden.size and position < self._min_position:
            return self._min_position
        return sys.maxsize

    def banned(self, token_ids: IntArray) -> LongArray:
        """What may not follow `token_ids`, the request's prompt and output. Unless `needs_output`,
        only their number matters."""
        banned = self._forbidden if len(token_ids) < self._min_position else _NO_IDS
        if self._bad_words is None:
            return banned
        output = token_ids[self._num_prompt_tokens :]
        return np.concatenate([banned, self._bad_words.banned(output)])

    def count(self, token_ids: IntArray) -> None:
        """Take in what `token_ids` has more than when this was last called."""
        if not self.has_penalties:
            return
        if self.counts is None:
            # The other two look at the output alone.
            of_prompt = token_ids[: self._num_prompt_tokens]
            self.counts = RequestTokenCounts(of_prompt if self.penalties[0] != 1 else ())
        known = self._num_prompt_tokens + self.counts.num_output_tokens
        self.counts.add(token_ids[known:].tolist())


def needs_logits_processors(params: SamplingParams, admission: NewRequest) -> bool:
    """Whether the row's logits go through any of this."""
    return bool(
        params.allowed_token_ids
        or params.logit_bias
        or admission.bad_words
        or admission.forbidden_ids
        or params.has_penalties
    )


def apply_logits_processors(
    logits: torch.Tensor, edits: list[tuple[int, LogitsState]], token_ids: list[IntArray]
) -> None:
    """Change the logits of some rows.

    Args:
        logits: (N, V) float32, contiguous; changed in place.
        edits: index into the logits, and what to do there.
        token_ids: for each of `edits`, the request's tokens so far.
    """
    flat, size = logits.view(-1), logits.shape[1]
    for index, edit in edits:
        if edit.allowed.size:
            allowed = torch.from_numpy(edit.allowed)
            kept = logits[index, allowed]
            logits[index] = -torch.inf
            logits[index, allowed] = kept
    banned = [edit.banned(ids) for (_, edit), ids in zip(edits, token_ids, strict=True)]
    entries = _flatten([index for index, _ in edits], banned, size)
    if entries.numel():
        flat[entries] = -torch.inf
    biased = [(index, edit) for index, edit in edits if edit.biased.size]
    if biased:
        entries = _flatten([index for index, _ in biased], [e.biased for _, e in biased], size)
        flat[entries] += torch.from_numpy(np.concatenate([e.biases for _, e in biased]))
    for (_, edit), ids in zip(edits, token_ids, strict=True):
        edit.count(ids)
    _penalise(flat, [(index, e) for index, e in edits if e.counts is not None], size)


def _penalise(flat: torch.Tensor, edits: list[tuple[int, LogitsState]], size: int) -> None:
    """Repetition, then frequency, then presence, as OpenAI's API and CTRL define them."""
    counts = [edit.counts for _, edit in edits if edit.counts is not None]
    if not counts:
        return
    lengths = [len(each.ids) for each in counts]
    entries = _flatten([index for index, _ in edits], [each.ids for each in counts], size)
    table = np.array([edit.penalties for _, edit in edits], np.float32)
    repetition, frequency, presence = torch.from_numpy(np.repeat(table, lengths, axis=0).T)
    times = torch.from_numpy(np.concatenate([each.counts for each in counts]))
    values = flat[entries]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * times
    values -= presence * (times > 0)
    flat[entries] = values


def _flatten(indices: list[int], ids: Sequence[LongArray], size: int) -> torch.Tensor:
    """Entries of rows as entries of the flat logits."""
    parts = [index * size + each for index, each in zip(indices, ids, strict=True)]
    return torch.from_numpy(np.concatenate([_NO_IDS, *parts]))


def _inside(ids: Iterable[int], vocab_size: int) -> LongArray:
    return np.array([token for token in ids if 0 <= token < vocab_size], np.int64)
