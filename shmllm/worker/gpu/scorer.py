"""Computes log-probabilities of sampled tokens and of prompts on the device.

This module owns the tables that go to the host: the ranks and scores of the tokens, and their
alternatives. A kernel finds up to MAX_ALTERNATIVES most likely tokens; the logits of rows that ask
for more are sorted, and those of rows that ask for certain tokens are looked up. The logits of a
prompt's tokens are computed piece by piece: those of a whole prompt would not fit into memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shmllm.core.plan import PromptScores
from shmllm.outputs.logprobs import TokenLogprobs
from shmllm.params.token_table import PADDING, TokenTable
from shmllm.worker.arrays import IntArray, LongArray
from shmllm.worker.batch import Alternatives, InputBatch
from shmllm.worker.gpu.transfers import Array, PendingArrays, Transfers
from shmllm.worker.scoring import WORKSPACE_BYTES, joined, num_alternatives, rows_of
from shmllm.worker.step_inputs import StepInputs
from shmllm_kernels.gpu.configs import next_power_of_two
from shmllm_kernels.gpu.sampling import SamplingScratch
from shmllm_kernels.gpu.scoring import MAX_ALTERNATIVES, Scores, score

ROWS_ALIGNED = 16
"""The widths of tables and the numbers of rows in a piece are multiples of this: Triton compiles
another variant of a kernel for addresses and strides that are less aligned."""


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """The A rows of some logits that ask for log-probabilities.

    Attributes:
        indices: (A,) int64, the indices of these rows.
        ks: the number of alternatives of each row.
        found: (A,) int32, how many alternatives the kernel finds: all, or 0 if they are too many.
        width: the width of the kernel's tables of alternatives.
        lists: (index among the A, number of alternatives, their ids) of the rows whose alternatives
            the kernel does not find. The ids are int64 on the device; None: the row is sorted.
        on_device: `indices`, int64, and `found`, int32, on the device.
    """

    indices: LongArray
    ks: list[int]
    found: IntArray
    width: int
    lists: list[tuple[int, int, Tensor | None]]
    on_device: tuple[Tensor, Tensor]


class Scorer:
    """Scores tokens.

    Args:
        scratch: the sampler's scratch memory, which sampling does not need any more.
        transfers: copies the indices of the rows to the device.
        normalises: whether scores are log-probabilities; else they are the logits.

    Attributes:
        rows_at_once: the number of rows that are scored at a time, in a float32 copy.
    """

    def __init__(self, scratch: SamplingScratch, transfers: Transfers, normalises: bool) -> None:
        num_rows, self._vocab_size = scratch.processed_logits.shape
        self._scratch = scratch
        self._transfers = transfers
        self._normalises = normalises
        at_once = WORKSPACE_BYTES // (8 * self._vocab_size) // ROWS_ALIGNED * ROWS_ALIGNED
        self.rows_at_once = min(max(at_once, ROWS_ALIGNED), num_rows)

    def select(self, indices: LongArray, asked: Sequence[Alternatives]) -> ScoredRows:
        """Copy to the device which rows ask for log-probabilities.

        Args:
            indices: (A,) int64, the indices of these rows among the logits.
            asked: the alternatives of each.
        """
        ks = [num_alternatives(each, self._vocab_size) for each in asked]
        is_found = [
            isinstance(each, int) and k <= MAX_ALTERNATIVES
            for each, k in zip(asked, ks, strict=True)
        ]
        found = np.array(ks, np.int32) * np.array(is_found, np.int32)
        width = max(next_power_of_two(int(found.max())), ROWS_ALIGNED)
        lists = [
            (place, k, None if isinstance(each, int) else self._transfers.send(each)[0])
            for place, (each, k) in enumerate(zip(asked, ks, strict=True))
            if not is_found[place]
        ]
        where, on_device = self._transfers.send(indices, found)
        return ScoredRows(indices, ks, found, width, lists, (where, on_device))

    def score(self, logits: Tensor, tokens: Tensor, scored: ScoredRows) -> list[Tensor]:
        """Score the tokens of the selected rows.

        Args:
            logits: (N, V), of any floating dtype.
            tokens: (N,) int64, the token to score in each row.
            scored: the selected rows among the N.

        Returns:
            Tensors on the device, which `unpack` converts when they are on the host.
        """
        indices, found = scored.on_device
        num_rows = len(scored.ks)
        size, device = _num_entries(num_rows, scored.width), self._transfers.torch_device
        flat = torch.empty(size, dtype=torch.int32, device=device)
        for begin in range(0, num_rows, self.rows_at_once):
            part = slice(begin, begin + self.rows_at_once)
            is_whole = num_rows == len(tokens)
            own = logits[part] if is_whole else logits.index_select(0, indices[part])
            own_tokens = tokens[part] if is_whole else tokens.index_select(0, indices[part])
            out = self._tables(flat, scored, part)
            score(out, own.float(), own_tokens, found[part], self._scratch, self._normalises)
        return [flat, *self._look_up(logits, scored)]

    def run_largest(self, logits: Tensor, num_rows: int, k: int) -> None:
        """Score as many rows as a step can ask for, to measure the memory.

        Args:
            logits: (N, V), of the dtype that steps have.
            num_rows: the number of rows that ask, at most N.
            k: the largest number of alternatives; ALL for the whole vocabulary.
        """
        tokens = torch.zeros(len(logits), dtype=torch.int64, device=self._transfers.torch_device)
        self.score(logits, tokens, self.select(np.arange(num_rows), [k] * num_rows))

    def _tables(self, flat: Tensor, scored: ScoredRows, part: slice) -> Scores:
        ranks, scores, ids, top = _cut(flat, len(scored.ks), scored.width)
        own, best = (part_of[part].view(torch.float32) for part_of in (scores, top))
        return Scores(tokens=own, ranks=ranks[part], top=best, top_ids=ids[part])

    def look_up_table(self, logits: Tensor, asked: Tensor) -> Tensor:
        """Return the scores, (N, K) float32, of tokens in each row of logits.

        Args:
            logits: (N, V), of any floating dtype.
            asked: (N, K) int64, the tokens; PADDING has the score -inf.
        """
        scores = logits.float()
        scores = scores.log_softmax(1) if self._normalises else scores
        return scores.gather(1, asked.clamp(min=0)).masked_fill_(asked == PADDING, -math.inf)

    def _look_up(self, logits: Tensor, scored: ScoredRows) -> list[Tensor]:
        """Return the ids and scores of each of `scored.lists`, row after row."""
        found = []
        for place, k, asked in scored.lists:
            row = logits[int(scored.indices[place])].float()
            ids = row.sort(descending=True, stable=True).indices[:k] if asked is None else asked
            scores = row.log_softmax(0) if self._normalises else row
            found += [ids.int(), scores.gather(0, ids)]
        return found


def unpack(scored: ScoredRows, flat: IntArray, *lists: Array) -> TokenLogprobs:
    """Convert the arrays of `Scorer.score`, copied to the host, to log-probabilities."""
    ranks, scores, ids, top = _cut(flat, len(scored.ks), scored.width)
    top = top.view(np.float32)
    is_wanted = np.arange(scored.width) < scored.found[:, None]
    if not lists:
        best = ids[is_wanted], top[is_wanted]
    else:
        parts = [(i[w], t[w]) for i, t, w in zip(ids, top, is_wanted, strict=True)]
        for number, (place, _, _) in enumerate(scored.lists):
            parts[place] = lists[2 * number], lists[2 * number + 1]
        best = np.concatenate([i for i, _ in parts]), np.concatenate([t for _, t in parts])
    return TokenLogprobs(list(scored.ks), scores.view(np.float32), ranks, *best)


class PendingPiece(NamedTuple):
    """Some of a prompt's tokens.

    scored: their rows.
    arrays: what `unpack` takes; with a table the scores of its tokens behind it.
    table: the alternatives of each row; None: the most likely ones.
    """

    scored: ScoredRows
    arrays: PendingArrays
    table: TokenTable | None

    def result(self) -> TokenLogprobs:
        """Wait for the copies. May be called once."""
        flat, *rest = self.arrays.arrays()
        if self.table is None:
            return unpack(self.scored, flat, *rest)
        own, ids = unpack(self.scored, flat), rows_of(self.table).astype(np.int32)
        ks = [self.table.width] * len(ids)
        return TokenLogprobs(ks, own.logprobs, own.ranks, ids.ravel(), rest[0])


class PendingScores:
    """The log-probabilities of a prompt's tokens, which the device copies to the host."""

    def __init__(self, parts: Sequence[PendingPiece]) -> None:
        self._parts = parts

    def result(self) -> TokenLogprobs:
        """Wait for the copies. May be called once."""
        return joined([part.result() for part in self._parts])


class PromptScorer:
    """Scores the tokens of prompts.

    Args:
        batch: the batch, with the tokens of prompts.
        scorer: scores rows of logits.
        transfers: copies tokens to the device, and scores back.
        compute_logits: [rows, hidden] -> [rows, vocab] float32.
    """

    def __init__(
        self,
        batch: InputBatch,
        scorer: Scorer,
        transfers: Transfers,
        compute_logits: Callable[[Tensor], Tensor],
    ) -> None:
        self._batch = batch
        self._scorer = scorer
        self._transfers = transfers
        self._compute_logits = compute_logits

    def __call__(self, hidden: Tensor, inputs: StepInputs, wanted: PromptScores) -> PendingScores:
        """Launch the scoring of a prompt's tokens, each by the logits of the token before it.

        Args:
            hidden: [T, hidden], the hidden states of the step's tokens.
            inputs: the step's inputs.
            wanted: the tokens to score; the token before each is among the T.
        """
        first = int(inputs.first_tokens[wanted.index])
        row, start = inputs.rows[wanted.index], int(inputs.positions[first])
        token_ids = self._batch.token_ids[row, wanted.first : wanted.end].astype(np.int64)
        begins = range(0, len(token_ids), self._scorer.rows_at_once)
        # Separate arrays, so that each piece begins at an aligned address.
        tokens = self._transfers.send(*(token_ids[b : b + begins.step] for b in begins))
        hidden = hidden[first + wanted.first - 1 - start :]
        return PendingScores(
            [
                self._score(hidden[begin : begin + len(own)], own, wanted, begin)
                for begin, own in zip(begins, tokens, strict=True)
            ]
        )

    def _score(
        self, hidden: Tensor, tokens: Tensor, wanted: PromptScores, begin: int
    ) -> PendingPiece:
        """Launch the scoring of one piece. Its logits are freed before those of the next one."""
        logits, count, table = self._compute_logits(hidden), len(tokens), wanted.token_ids
        k = wanted.k if table is None else 0
        scored = self._scorer.select(np.arange(count), [k] * count)
        scores = self._scorer.score(logits, tokens, scored)
        if table is not None:
            table = table.rows(begin, begin + count)
            asked = self._transfers.send_one(rows_of(table))
            scores.append(self._scorer.look_up_table(logits, asked))
        return PendingPiece(scored, self._transfers.fetch(*scores), table)


def _num_entries(num_rows: int, width: int) -> int:
    return 2 * _padded(num_rows) + 2 * num_rows * width


def _cut(flat: Any, num_rows: int, width: int) -> tuple[Any, Any, Any, Any]:
    """Return views of a flat tensor or array: ranks, scores, and the tables of the alternatives'
    ids and scores. Each view begins at an aligned address."""
    padded = _padded(num_rows)
    ranks, scores = flat[: 2 * padded].reshape(2, padded)[:, :num_rows]
    ids, top = flat[2 * padded :].reshape(2, num_rows, width)
    return ranks, scores, ids, top


def _padded(num_rows: int) -> int:
    return -(-num_rows // 4) * 4
