"""The state of the logits processors on the device: token masks, biases and token counts.

This module owns the arrays that the sampler's kernels take. It must not know when they run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shmllm.core.plan import NewRequest
from shmllm.worker.arrays import IntArray, LongArray
from shmllm.worker.batch import InputBatch, StepInputs
from shmllm.worker.gpu.transfers import Transfers
from shmllm.worker.grammar_masks import WORD_BITS, PendingMasks
from shmllm.worker.logits_processors import LogitsState
from shmllm_kernels.gpu.logits_processors import count_tokens
from shmllm_kernels.gpu.sampling import TokenMasks

Biases = tuple[Tensor, Tensor, Tensor]
"""(count,) each: row of the logits int32, token int64, what to add float32."""


class GpuTokenMasks:
    """
    Args:
        mask_rows: (num_rows,) int32 on the device: a row's own number if it has allowed ids.
        vocab_size: entries of a row's logits.
        transfers: bring the words to the device.
    """

    def __init__(self, mask_rows: Tensor, vocab_size: int, transfers: Transfers) -> None:
        self._mask_rows = mask_rows
        self._num_words = -(-vocab_size // WORD_BITS)
        self._transfers = transfers
        self._allowed: dict[int, IntArray] = {}
        self._on_device: Tensor | None = None

    def add_requests(self, rows: LongArray, states: list[LogitsState | None]) -> None:
        """Take in the allowed ids of the requests that enter these rows."""
        entering = {}
        for row, state in zip(rows.tolist(), states, strict=True):
            self._allowed.pop(row, None)
            if state is not None and state.allowed.size:
                entering[row] = self._words_of(state.allowed)
        if entering:
            self._allowed |= entering
            words = np.stack(list(entering.values()))
            where, sent = self._transfers.send(np.array(list(entering), np.int64), words)
            self._words.index_copy_(0, where, sent)

    def of_step(
        self, rows: LongArray, device_rows: Tensor, grammars: PendingMasks | None
    ) -> TokenMasks:
        """Those of a step; waits for the grammars'.

        Args:
            rows: (N,), whose logits these are.
            device_rows: (N,) int32, the same on the device.
            grammars: of some of them.
        """
        mask_rows = self._mask_rows.index_select(0, device_rows)
        if grammars is not None:
            indices = np.array(grammars.rows, np.int64)
            begin = len(self._mask_rows)
            places = np.arange(begin, begin + len(indices), dtype=np.int32)
            words = self._joined(rows[indices], grammars.words)
            where, sent_places, sent = self._transfers.send(indices, places, words)
            self._words[begin : begin + len(indices)] = sent
            mask_rows.index_copy_(0, where, sent_places)
        return TokenMasks(self._words, mask_rows)

    @property
    def _words(self) -> Tensor:
        if self._on_device is None:
            shape = (2 * len(self._mask_rows), self._num_words)
            device = self._transfers.torch_device
            self._on_device = torch.zeros(shape, dtype=torch.int32, device=device)
        return self._on_device

    def _joined(self, rows: LongArray, words: IntArray) -> IntArray:
        """The grammars' words, as many as the logits need, and only what is allowed besides."""
        words = words[:, : self._num_words]
        if missing := self._num_words - words.shape[1]:
            words = np.pad(words, ((0, 0), (0, missing)))
        if restricted := [i for i, row in enumerate(rows.tolist()) if row in self._allowed]:
            words = words.copy()
            words[restricted] &= np.stack([self._allowed[row] for row in rows[restricted].tolist()])
        return words

    def _words_of(self, allowed: LongArray) -> IntArray:
        bits = np.zeros(self._num_words * WORD_BITS, np.bool_)
        bits[allowed] = True
        return np.packbits(bits, bitorder="little").view(np.int32)


class LogitBiases:
    """
    Args:
        batch: holds the edits of its rows.
        transfers: bring the list to the device.
    """

    def __init__(self, batch: InputBatch, transfers: Transfers) -> None:
        self._batch = batch
        self._transfers = transfers
        self._last: Biases | None = None
        self._num_alike = 0

    def of_step(self, inputs: StepInputs, chosen: LongArray, is_repeat: bool) -> Biases | None:
        """
        Args:
            inputs: the step's.
            chosen: indices of the sampled rows that may have any.
            is_repeat: they are those of the step before, one position further.

        Returns:
            None if there is nothing to add.
        """
        if is_repeat and self._num_alike:
            self._num_alike -= 1
            return self._last
        rows, positions = inputs.sample_rows[chosen].tolist(), inputs.sample_positions[chosen]
        states = [self._batch.logits_states[row] for row in rows]
        banned, num_alike = [], sys.maxsize
        for row, state, position in zip(rows, states, positions.tolist(), strict=True):
            banned.append(state.banned(self._batch.token_ids[row, :position]))
            num_alike = min(num_alike, state.banned_until(position) - position - 1)
        ids = banned + [state.biased for state in states]
        lengths = [len(own) for own in ids]
        indices = np.repeat(np.tile(chosen, 2), lengths).astype(np.int32)
        forbidding = np.full(sum(lengths[: len(states)]), -np.inf, np.float32)
        values = np.concatenate([forbidding, *(state.biases for state in states)])
        self._num_alike = num_alike
        self._last = None
        if len(indices):
            sent = self._transfers.send(indices, np.concatenate(ids), values)
            self._last = sent[0], sent[1], sent[2]
        return self._last


class TokenCounts:
    """
    Args:
        num_rows: requests that can run at once.
        vocab_size: entries of a row's logits.
        transfers: bring the table the tokens of those that enter.

    Attributes:
        table: (num_rows, vocab_size) int32, as `count_uses` has it; of rows without penalties it
            holds nothing of use. None until it is needed.
    """

    def __init__(self, num_rows: int, vocab_size: int, transfers: Transfers) -> None:
        self._shape = (num_rows, vocab_size)
        self._transfers = transfers
        self.table: Tensor | None = None

    def add_requests(self, new_requests: Sequence[NewRequest]) -> None:
        """Begin to count for requests with penalties. One that was preempted brings output."""
        if not new_requests:
            return
        if self.table is None:
            device = self._transfers.torch_device
            self.table = torch.zeros(self._shape, dtype=torch.int32, device=device)
        rows = np.array([request.row for request in new_requests], np.int64)
        ids = [np.array(request.token_ids, np.int64) for request in new_requests]
        prompts = [request.num_prompt_tokens for request in new_requests]
        of_prompts = [own[:end] for own, end in zip(ids, prompts, strict=True)]
        of_outputs = [own[end:] for own, end in zip(ids, prompts, strict=True)]
        where, prompt_rows, prompt, output_rows, output = self._transfers.send(
            rows, *_by_row(rows, of_prompts), *_by_row(rows, of_outputs)
        )
        self.table.index_fill_(0, where, 0)
        count_tokens(self.table, prompt_rows, prompt, is_prompt=True)
        count_tokens(self.table, output_rows, output)

    def count(self, rows: Tensor, tokens: Tensor) -> None:
        """Take in what was sampled.

        Args:
            rows: (N,) int32.
            tokens: (N,) int64.
        """
        assert self.table is not None, "no request has penalties"
        count_tokens(self.table, rows, tokens)


def _by_row(rows: LongArray, ids: list[LongArray]) -> tuple[IntArray, LongArray]:
    """(row of each token, all tokens)."""
    lengths = [len(own) for own in ids]
    return np.repeat(rows, lengths).astype(np.int32), np.concatenate(ids)
