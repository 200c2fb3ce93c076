"""The logits processors: allowed tokens, banned tokens, biases and penalties, before temperature.

This module owns their state per row, kept only for rows that need one, and applies them on a CPU
in vLLM's order. Biases and penalties change single entries, so those of all rows are applied
together by flat indices; no array of the vocabulary's size exists per row.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from shmllm.core.plan import NewRequest
from shmllm.params.sampling import SamplingParams, TokenSequences
from shmllm.worker.arrays import FloatArray, IntArray, LongArray
from shmllm.worker.thinking import ThinkingProgress

FORCING_BIAS = 1e30
"""The number that makes a logit the only one with a probability, and stays finite when it is
divided by the lowest temperature."""
_NO_IDS = np.zeros(0, np.int64)


class BadWords:
    """Token sequences that the output may not contain. The last token of a sequence is banned
    where the output ends with the tokens before it.

    Args:
        sequences: the sequences of token ids.
    """

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
        """Whether any sequence has more than one token."""
        return bool(self._by_last)

    def banned(self, output_ids: IntArray) -> LongArray:
        """Return the token ids that may not follow `output_ids`."""
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
    """The distinct tokens of a request, and how often its output contains each.

    Args:
        prompt_ids: the tokens of the prompt that repetition penalties count.

    Attributes:
        output_ids: the tokens counted so far.
    """

    def __init__(self, prompt_ids: Sequence[int] | IntArray) -> None:
        known = np.unique(np.asarray(prompt_ids, np.int64))
        self._num_of_prompt = len(known)
        self._indices = {token: index for index, token in enumerate(known.tolist())}
        self._ids = np.zeros(len(known) + 32, np.int64)
        self._ids[: len(known)] = known
        self._counts = np.zeros(len(self._ids), np.float32)
        self.output_ids: list[int] = []

    @property
    def ids(self) -> LongArray:
        """(count,) int64, the distinct tokens."""
        return self._ids[: len(self._indices)]

    @property
    def counts(self) -> FloatArray:
        """(count,) float32, how often the output contains each of `ids`; 0 for tokens that only
        the prompt contains."""
        return self._counts[: len(self._indices)]

    def add(self, output_ids: Iterable[int]) -> None:
        """Count further tokens of the output."""
        for token in output_ids:
            index = self._indices.setdefault(token, len(self._indices))
            if index == len(self._ids):
                self._ids = np.resize(self._ids, 2 * index)
                self._counts = np.concatenate([self._counts, np.zeros(index, np.float32)])
            self._ids[index] = token
            self._counts[index] += 1
            self.output_ids.append(token)

    def forget(self, num_kept: int) -> None:
        """Forget the tokens of the output behind the first `num_kept`."""
        while len(self.output_ids) > num_kept:
            token = self.output_ids.pop()
            index = self._indices[token]
            self._counts[index] -= 1
            if not self._counts[index] and index >= self._num_of_prompt:
                del self._indices[token]  # it was the last that was added


class LogitsState:
    """The logits processors' state for one row.

    Args:
        request: the request that is assigned to the row.
        vocab_size: entries in a row of logits; token ids beyond it are ignored.

    Attributes:
        allowed: int64 ids of `allowed_token_ids`; empty if every token is allowed.
        has_penalties: whether the request has a penalty.
        penalties: the repetition, frequency and presence penalty.
        counts: the tokens that penalties count; None before the first call of `count`.

    In a step the methods are called for the known tokens of the request, and then perhaps for these
    and more and more drafted ones behind them. `rewind` comes before the first of these calls.
    """

    def __init__(self, request: NewRequest, vocab_size: int) -> None:
        params, forbidden, bad_words = request.params, request.forbidden_ids, request.bad_words
        self._trace = np.array(params.trace_decode_token_ids or (), np.int64)
        if self._trace.size:  # nothing else chooses the tokens
            params, forbidden, bad_words = SamplingParams(), (), ()
        self._num_prompt_tokens = request.num_prompt_tokens
        self._num_encoded = request.num_encoded
        self._min_position = request.min_position
        self._forbidden = _inside(forbidden, vocab_size)
        known = tuple(word for word in bad_words if word[-1] < vocab_size)
        self._bad_words = BadWords(known) if known else None
        self._thinking = None if request.thinking is None else ThinkingProgress(request.thinking)
        self.allowed = _inside(params.allowed_token_ids or (), vocab_size)
        bias = params.logit_bias or {}
        self._biased = _inside(bias, vocab_size)
        biases = [bias[token] for token in self._biased.tolist()]
        self._biases = np.array([_bounded(each) for each in biases], np.float32)
        self.has_penalties = params.has_penalties
        self.penalties = (
            max(_bounded(params.repetition_penalty), 1 / FORCING_BIAS),
            params.frequency_penalty,
            params.presence_penalty,
        )
        self.counts: RequestTokenCounts | None = None
        self._num_counted = 0
        self._counts_drafts = False

    @property
    def may_change_entries(self) -> bool:
        """Whether tokens may be banned or biased, now or at a later position."""
        sizes = self._forbidden.size + self._biased.size + self._trace.size
        return self._bad_words is not None or self._thinking is not None or sizes > 0

    @property
    def needs_output(self) -> bool:
        """Whether the banned or forced tokens depend on the output's tokens, not only on their
        number."""
        has_sequences = self._bad_words is not None and self._bad_words.needs_output
        return has_sequences or self._thinking is not None

    def unchanged_until(self, position: int) -> int:
        """Return the next position at which other tokens may be banned or biased than at this."""
        if self.needs_output or self._trace.size:
            return position + 1
        if self._forbidden.size and position < self._min_position:
            return self._min_position
        return sys.maxsize

    def banned(self, token_ids: IntArray) -> LongArray:
        """Return the token ids that may not follow `token_ids`, the request's prompt and output.
        Unless `needs_output`, only the number of `token_ids` matters."""
        banned = self._forbidden if len(token_ids) < self._min_position else _NO_IDS
        if self._bad_words is None:
            return banned
        output = token_ids[self._num_prompt_tokens :]
        return np.concatenate([banned, self._bad_words.banned(output)])

    def biases(self, token_ids: IntArray) -> tuple[LongArray, FloatArray]:
        """Return the token ids, int64, and the numbers to add to their logits, float32.

        Args:
            token_ids: the request's prompt and output. Unless `needs_output`, only their number
                matters.
        """
        if self._trace.size:
            # A step that is submitted ahead may sample once more than the trace has tokens.
            at = min(len(token_ids) - self._num_prompt_tokens, len(self._trace) - 1)
            return _forced(self._trace[at])
        if self._thinking is not None:
            forced = self._thinking.forced_token(token_ids)
            if forced is not None:
                return _forced(forced)
        return self._biased, self._biases

    def rewind(self) -> None:
        """Forget the drafted tokens of the step before: some may not have been sampled."""
        self._counts_drafts = False
        if self.counts is not None:
            self.counts.forget(self._num_counted)
        if self._thinking is not None:
            self._thinking.rewind()

    def count(self, token_ids: IntArray) -> None:
        """Count the tokens of `token_ids`, prompt and output, that the last call did not have."""
        if not self.has_penalties:
            return
        if self.counts is None:
            # Only the repetition penalty counts the prompt.
            of_prompt = token_ids[self._num_encoded : self._num_prompt_tokens]
            self.counts = RequestTokenCounts(of_prompt if self.penalties[0] != 1 else ())
        known = self._num_prompt_tokens + len(self.counts.output_ids)
        self.counts.add(token_ids[known:].tolist())
        if not self._counts_drafts:
            self._num_counted, self._counts_drafts = len(self.counts.output_ids), True


def _forced(token: int) -> tuple[LongArray, FloatArray]:
    return np.array([token], np.int64), np.full(1, FORCING_BIAS, np.float32)


def needs_logits_processors(params: SamplingParams, request: NewRequest) -> bool:
    """Return whether the request needs a logits processor."""
    return bool(
        params.allowed_token_ids
        or params.logit_bias
        or params.trace_decode_token_ids
        or request.bad_words
        or request.forbidden_ids
        or request.thinking is not None
        or params.has_penalties
    )


def apply_logits_processors(
    logits: torch.Tensor,
    states: list[tuple[int, LogitsState]],
    token_ids: list[IntArray],
    apply_custom: Callable[[torch.Tensor], None] | None = None,
) -> None:
    """Apply the logits processors to some rows of logits.

    Args:
        logits: (N, V) float32, contiguous; changed in place.
        states: (row of `logits`, state) pairs. Those of a state follow each other, the known tokens
            first; it has been rewound.
        token_ids: for each of `states`, the request's prompt and output so far.
        apply_custom: changes the logits by custom processors, between biases and penalties.
    """
    flat, size = logits.view(-1), logits.shape[1]
    for index, state in states:
        if state.allowed.size:
            allowed = torch.from_numpy(state.allowed)
            kept = logits[index, allowed]
            logits[index] = -torch.inf
            logits[index, allowed] = kept
    banned = [state.banned(ids) for (_, state), ids in zip(states, token_ids, strict=True)]
    entries = _flatten([index for index, _ in states], banned, size)
    if entries.numel():
        flat[entries] = -torch.inf
    biases = [state.biases(ids) for (_, state), ids in zip(states, token_ids, strict=True)]
    entries = _flatten([index for index, _ in states], [biased for biased, _ in biases], size)
    if entries.numel():
        flat[entries] += torch.from_numpy(np.concatenate([added for _, added in biases]))
    if apply_custom is not None:
        apply_custom(logits)
    penalised = []
    for (index, state), ids in zip(states, token_ids, strict=True):
        state.count(ids)
        if (counts := state.counts) is not None:
            penalised.append((index, state.penalties, counts.ids.copy(), counts.counts.copy()))
    _penalise(flat, penalised, size)


def _penalise(
    flat: torch.Tensor,
    rows: list[tuple[int, tuple[float, float, float], LongArray, FloatArray]],
    size: int,
) -> None:
    """Apply repetition penalties as CTRL defines them (arXiv:1909.05858), then frequency and
    presence penalties as OpenAI's API defines them.

    Args:
        flat: the logits, flat; changed in place.
        rows: the row of the logits, the penalties, the tokens and how often the output has each.
        size: entries in a row of logits.
    """
    if not rows:
        return
    indices, penalties, ids, counts = zip(*rows, strict=True)
    entries = _flatten(indices, ids, size)
    lengths = [len(each) for each in ids]
    table = np.repeat(np.array(penalties, np.float32), lengths, axis=0)
    repetition, frequency, presence = torch.from_numpy(table.T)
    times = torch.from_numpy(np.concatenate(counts))
    values = flat[entries]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * times
    values -= presence * (times > 0)
    flat[entries] = values


def _flatten(indices: Sequence[int], ids: Sequence[LongArray], size: int) -> torch.Tensor:
    """Convert token ids of rows to flat indices into the logits."""
    parts = [index * size + each for index, each in zip(indices, ids, strict=True)]
    return torch.from_numpy(np.concatenate([_NO_IDS, *parts]))


def _bounded(number: float) -> float:
    """Return a finite number with which float32 logits stay finite, or the number -infinity."""
    return number if number == -math.inf else max(min(number, FORCING_BIAS), -FORCING_BIAS)


def _inside(ids: Iterable[int], vocab_size: int) -> LongArray:
    return np.array([token for token in ids if 0 <= token < vocab_size], np.int64)
