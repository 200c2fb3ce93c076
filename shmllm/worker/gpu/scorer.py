"""Log-probabilities of tokens, found on the device for the rows that ask.

Owns what comes of them to the host: ranks and scores of the tokens, and the best few beside each.
Rows that want more of those than the kernel finds have their logits sorted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shmllm.core.plan import PromptScores
from shmllm.outputs.logprobs import TokenLogprobs
from shmllm.worker.arrays import IntArray, LongArray
from shmllm.worker.batch import InputBatch, StepInputs
from shmllm.worker.gpu.transfers import Array, Fetched, Transfers
from shmllm.worker.scoring import ALL, WORKSPACE_BYTES, joined
from shmllm_kernels.gpu.configs import next_power_of_two
from shmllm_kernels.gpu.sampling import SamplingScratch
from shmllm_kernels.gpu.scoring import MAX_ALTERNATIVES, Scores, score

ROWS_ALIGNED = 16
"""Tables as wide as a multiple of this, and pieces of as many rows: Triton compiles a kernel once
more for addresses and strides that are less aligned."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A rows of a step's logits that ask for log-probabilities.

    Attributes:
        indices: (A,) which rows these are.
        ks: alternatives of each.
        found: (A,) how many of them the kernel finds: all, or none where they are too many.
        width: of the table of what it finds.
        sorts: (place among the A, alternatives) of the rows for which it finds none.
        on_device: `indices` int64 and `found` int32.
    """

    indices: LongArray
    ks: list[int]
    found: IntArray
    width: int
    sorts: list[tuple[int, int]]
    on_device: tuple[Tensor, Tensor]


class Scorer:
    """
    Args:
        scratch: the sampler's, which has done with it.
        transfers: tell the device which rows ask.
        normalises: log-probabilities; False takes the logits as they are.

    Attributes:
        rows_at_once: of which there is a copy in float32.
    """

    def __init__(self, scratch: SamplingScratch, transfers: Transfers, normalises: bool) -> None:
        num_rows, self._vocab_size = scratch.processed_logits.shape
        self._scratch = scratch
        self._transfers = transfers
        self._normalises = normalises
        at_once = WORKSPACE_BYTES // (8 * self._vocab_size) // ROWS_ALIGNED * ROWS_ALIGNED
        self.rows_at_once = min(max(at_once, ROWS_ALIGNED), num_rows)
        self._parts = Scores.allocate(num_rows, 0, transfers.torch_device)

    def ask(self, indices: LongArray, ks: Sequence[int]) -> Asked:
        """
        Args:
            indices: which rows of some logits ask.
            ks: alternatives that they want, ALL for the whole vocabulary.
        """
        size = self._vocab_size
        ks = [size if k == ALL else min(k, size) for k in ks]
        found = np.array([k if k <= MAX_ALTERNATIVES else 0 for k in ks], np.int32)
        width = max(next_power_of_two(int(found.max())), ROWS_ALIGNED)
        sorts = [(place, k) for place, k in enumerate(ks) if k > MAX_ALTERNATIVES]
        where, on_device = self._transfers.send(indices, found)
        return Asked(indices, ks, found, width, sorts, (where, on_device))

    def score(self, logits: Tensor, tokens: Tensor, asked: Asked) -> list[Tensor]:
        """What `unpack` makes log-probabilities of, on the device.

        Args:
            logits: (N, V), what is reported, of any floating type.
            tokens: (N,) int64, to be scored.
            asked: of which of the N rows.
        """
        indices, found = asked.on_device
        num_rows = len(asked.ks)
        size, device = _num_entries(num_rows, asked.width), self._transfers.torch_device
        flat = torch.empty(size, dtype=torch.int32, device=device)
        for begin in range(0, num_rows, self.rows_at_once):
            part = slice(begin, begin + self.rows_at_once)
            is_whole = num_rows == len(tokens)
            own = logits[part] if is_whole else logits.index_select(0, indices[part])
            own_tokens = tokens[part] if is_whole else tokens.index_select(0, indices[part])
            out = self._out(flat, asked, part)
            score(out, own.float(), own_tokens, found[part], self._scratch, self._normalises)
        return [flat, *self._sort(logits, asked)]

    def _out(self, flat: Tensor, asked: Asked, part: slice) -> Scores:
        ranks, scores, ids, top = _cut(flat, len(asked.ks), asked.width)
        return replace(
            self._parts,
            tokens=scores[part].view(torch.float32),
            ranks=ranks[part],
            top=top[part].view(torch.float32),
            top_ids=ids[part],
        )

    def _sort(self, logits: Tensor, asked: Asked) -> list[Tensor]:
        """Ids and scores of each row that wants so many; one row after the other."""
        sorted_rows = []
        for place, k in asked.sorts:
            row = logits[int(asked.indices[place])].float()
            ids = row.sort(descending=True, stable=True).indices[:k]
            scores = row.log_softmax(0) if self._normalises else row
            sorted_rows += [ids.int(), scores.gather(0, ids)]
        return sorted_rows


def unpack(asked: Asked, flat: IntArray, *sorted_rows: Array) -> TokenLogprobs:
    """What `Scorer.score` left on the device, once it is on the host."""
    ranks, scores, ids, top = _cut(flat, len(asked.ks), asked.width)
    top = top.view(np.float32)
    is_wanted = np.arange(asked.width) < asked.found[:, None]
    if not sorted_rows:
        best = ids[is_wanted], top[is_wanted]
    else:
        parts = [(i[w], t[w]) for i, t, w in zip(ids, top, is_wanted, strict=True)]
        for number, (place, _) in enumerate(asked.sorts):
            parts[place] = sorted_rows[2 * number], sorted_rows[2 * number + 1]
        best = np.concatenate([i for i, _ in parts]), np.concatenate([t for _, t in parts])
    return TokenLogprobs(list(asked.ks), scores.view(np.float32), ranks, *best)


class PendingScores:
    """On their way to the host."""

    def __init__(self, parts: Sequence[tuple[Asked, Fetched]]) -> None:
        self._parts = parts

    def result(self) -> TokenLogprobs:
        """Waits for them. To be called once."""
        return joined([unpack(asked, *fetched.arrays()) for asked, fetched in self._parts])


class PromptScorer:
    """
    Args:
        batch: has the tokens of prompts.
        scorer: of single rows.
        transfers: for tokens and what comes of them.
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
        """A token is scored by the logits that follow the token before it.

        Args:
            hidden: [T, hidden], of the step's tokens.
            inputs: of the step.
            wanted: tokens of a prompt; the token before each is among the T.
        """
        first = int(inputs.first_tokens[wanted.index])
        row, start = inputs.rows[wanted.index], int(inputs.positions[first])
        token_ids = self._batch.token_ids[row, wanted.first : wanted.end].astype(np.int64)
        begins = range(0, len(token_ids), self._scorer.rows_at_once)
        # Each piece begins at an aligned address of its own.
        tokens = self._transfers.send(*(token_ids[b : b + begins.step] for b in begins))
        hidden = hidden[first + wanted.first - 1 - start :]
        parts = []
        for begin, own in zip(begins, tokens, strict=True):
            logits = self._compute_logits(hidden[begin : begin + len(own)])
            asked = self._scorer.ask(np.arange(len(own)), [wanted.k] * len(own))
            scores = self._scorer.score(logits, own, asked)
            parts.append((asked, self._transfers.fetch(*scores)))
        return PendingScores(parts)


def _num_entries(num_rows: int, width: int) -> int:
    return 2 * _padded(num_rows) + 2 * num_rows * width


def _cut(flat: Any, num_rows: int, width: int) -> tuple[Any, Any, Any, Any]:
    """Ranks and scores, and the tables of ids and scores, of a flat tensor or array. Each begins
    at an aligned address."""
    padded = _padded(num_rows)
    ranks, scores = flat[: 2 * padded].reshape(2, padded)[:, :num_rows]
    ids, top = flat[2 * padded :].reshape(2, num_rows, width)
    return ranks, scores, ids, top


def _padded(num_rows: int) -> int:
    return -(-num_rows // 4) * 4
