"""The state of the logits processors on the device: token masks, biases and token counts.

This module owns these arrays, which the sampling kernels read. It must not know when the kernels
run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shmllm.core.plan import NewRequest
from shmllm.worker.arrays import IntArray, LongArray
from shmllm.worker.batch import InputBatch
from shmllm.worker.gpu.transfers import Transfers
from shmllm.worker.grammar_masks import WORD_BITS, PendingMasks
from shmllm.worker.logits_processors import LogitsState
from shmllm.worker.step_inputs import StepInputs
from shmllm_kernels.gpu.logits_processors import count_tokens
from shmllm_kernels.gpu.sampling import DraftedTokens, TokenMasks

Biases = tuple[Tensor, Tensor, Tensor]
"""(count,) each: the row of the logits, int32; the token, int64; the number to add, float32."""


class GpuTokenMasks:
    """The bitmasks of the tokens that rows may sample, by allowed_token_ids and by grammar.

    The masks of allowed_token_ids are stored by row, and behind them those of a step's grammars.

    Args:
        mask_rows: (num_rows,) int32 on the device, see `SamplingMetadata`.
        max_samples: the largest number of samples in a step.
        vocab_size: entries in a row of logits.
        transfers: copies masks to the device.
    """

    def __init__(
        self, mask_rows: Tensor, max_samples: int, vocab_size: int, transfers: Transfers
    ) -> None:
        self._mask_rows = mask_rows
        self._num_words = -(-vocab_size // WORD_BITS)
        self._transfers = transfers
        self._allowed: dict[int, IntArray] = {}
        shape = (len(mask_rows) + max_samples, self._num_words)
        self._words = torch.empty(shape, dtype=torch.int32, device=transfers.torch_device)

    def add_requests(self, rows: LongArray, states: list[LogitsState | None]) -> None:
        """Store the allowed token ids of new requests.

        Args:
            rows: (N,) int64, the rows of the new requests.
            states: the states of their logits processors.
        """
        added = {}
        for row, state in zip(rows.tolist(), states, strict=True):
            self._allowed.pop(row, None)
            if state is not None and state.allowed.size:
                added[row] = self._pack(state.allowed)
        if added:
            self._allowed |= added
            words = np.stack(list(added.values()))
            where, sent = self._transfers.send(np.array(list(added), np.int64), words)
            self._words.index_copy_(0, where, sent)

    def for_step(
        self, rows: LongArray, device_rows: Tensor, grammars: PendingMasks | None
    ) -> TokenMasks:
        """Return the masks of a step. Waits for the masks of grammars.

        Args:
            rows: (N,) int64, the rows of the step's samples.
            device_rows: (N,) int32, the same on the device.
            grammars: the masks of some of the samples; None if no sample has a grammar.
        """
        mask_rows = self._mask_rows.index_select(0, device_rows)
        if grammars is not None:
            indices = np.array(grammars.rows, np.int64)
            begin = len(self._mask_rows)
            mask_indices = np.arange(begin, begin + len(indices), dtype=np.int32)
            words = self._restrict(rows[indices], grammars.words)
            where, sent_indices, sent = self._transfers.send(indices, mask_indices, words)
            self._words[begin : begin + len(indices)] = sent
            mask_rows.index_copy_(0, where, sent_indices)
        return TokenMasks(self._words, mask_rows)

    def _restrict(self, rows: LongArray, words: IntArray) -> IntArray:
        """Return the grammars' masks, resized to the logits and restricted to the allowed token ids
        of their rows."""
        words = words[:, : self._num_words]
        if missing := self._num_words - words.shape[1]:
            words = np.pad(words, ((0, 0), (0, missing)))
        if restricted := [i for i, row in enumerate(rows.tolist()) if row in self._allowed]:
            words = words.copy()
            words[restricted] &= np.stack([self._allowed[row] for row in rows[restricted].tolist()])
        return words

    def _pack(self, allowed: LongArray) -> IntArray:
        bits = np.zeros(self._num_words * WORD_BITS, np.bool_)
        bits[allowed] = True
        return np.packbits(bits, bitorder="little").view(np.int32)


class LogitBiases:
    """The numbers that are added to single logits: biases, also those that force the tokens of a
    trace or the end of reasoning, and minus infinity for tokens that bad words and min_tokens ban.

    The list on the device is rebuilt only when it differs from that of the step before.

    Args:
        batch: the batch, with the states of the logits processors.
        transfers: copies the list to the device.
    """

    def __init__(self, batch: InputBatch, transfers: Transfers) -> None:
        self._batch = batch
        self._transfers = transfers
        self._last: Biases | None = None
        self._num_unchanged = 0

    def for_step(self, inputs: StepInputs, chosen: LongArray, is_repeat: bool) -> Biases | None:
        """Return the biases of a step; None if there are none.

        Args:
            inputs: the step's inputs.
            chosen: the indices of the samples that may have biases.
            is_repeat: whether the step's requests are those of the step before, each one position
                further.
        """
        if is_repeat and self._num_unchanged:
            self._num_unchanged -= 1
            return self._last
        rows, positions = inputs.sample_rows[chosen].tolist(), inputs.sample_positions[chosen]
        states = [self._batch.logits_states[row] for row in rows]
        banned, biases, num_unchanged = [], [], sys.maxsize
        for place, (row, position) in enumerate(zip(rows, positions.tolist(), strict=True)):
            state, token_ids = states[place], self._batch.token_ids[row, :position]
            if not place or rows[place - 1] != row:
                state.rewind()
            banned.append(state.banned(token_ids))
            biases.append(state.biases(token_ids))
            num_unchanged = min(num_unchanged, state.unchanged_until(position) - position - 1)
        ids = banned + [biased for biased, _ in biases]
        lengths = [len(own) for own in ids]
        indices = np.repeat(np.tile(chosen, 2), lengths).astype(np.int32)
        minus_inf = np.full(sum(lengths[: len(states)]), -np.inf, np.float32)
        values = np.concatenate([minus_inf, *(added for _, added in biases)])
        self._num_unchanged = num_unchanged
        self._last = None
        if len(indices):
            sent = self._transfers.send(indices, np.concatenate(ids), values)
            self._last = sent[0], sent[1], sent[2]
        return self._last


class TokenCounts:
    """How often each row's request has used each token, which penalties depend on.

    The device counts the sampled tokens, so that penalties do not wait for the host; those of a
    step with drafts are counted when the host knows which are accepted. The table is allocated at
    the start: the KV cache leaves no memory for it.

    Args:
        num_rows: the largest number of requests that run at once.
        vocab_size: entries in a row of logits.
        transfers: copies the tokens of new requests to the device.

    Attributes:
        table: (num_rows, vocab_size) int32, see `count_tokens`; the rows of requests without
            penalties are undefined.
        tokens_at_once: the number of tokens of new requests that are sent to the device at a time.
    """

    tokens_at_once = 2**18

    def __init__(self, num_rows: int, vocab_size: int, transfers: Transfers) -> None:
        self._transfers = transfers
        shape, device = (num_rows, vocab_size), transfers.torch_device
        self.table = torch.empty(shape, dtype=torch.int32, device=device)

    def add_requests(self, new_requests: Sequence[NewRequest]) -> None:
        """Count the tokens of new requests with penalties. A request that was preempted has output
        tokens, too."""
        if not new_requests:
            return
        rows = np.array([request.row for request in new_requests], np.int64)
        of_prompts = [np.array(each.prompt_token_ids, np.int64) for each in new_requests]
        of_outputs = [
            np.array(each.token_ids[each.num_prompt_tokens :], np.int64) for each in new_requests
        ]
        (where,) = self._transfers.send(rows)
        self.table.index_fill_(0, where, 0)
        self.count_on_host(*_by_row(rows, of_prompts), is_prompt=True)
        self.count_on_host(*_by_row(rows, of_outputs), is_prompt=False)

    def count_on_host(self, rows: IntArray, tokens: LongArray, is_prompt: bool) -> None:
        """Count tokens of the host, piece by piece: long prompts would not fit into the memory.

        Args:
            rows: (N,) int32, the row of each token.
            tokens: (N,) int64, the tokens.
            is_prompt: whether they are a prompt's.
        """
        for begin in range(0, len(tokens), self.tokens_at_once):
            part = slice(begin, begin + self.tokens_at_once)
            sent_rows, sent_tokens = self._transfers.send(rows[part], tokens[part])
            count_tokens(self.table, sent_rows, sent_tokens, is_prompt)

    def count(self, rows: Tensor, tokens: Tensor) -> None:
        """Count sampled tokens.

        Args:
            rows: (N,) int32 on the device, the rows of the samples.
            tokens: (N,) int64 on the device, the sampled tokens.
        """
        count_tokens(self.table, rows, tokens)

    def drafted(self, inputs: StepInputs, sample_counts: Sequence[int]) -> DraftedTokens:
        """Copy to the device the drafted tokens that the penalties of each sample count besides
        the table.

        Args:
            inputs: the step's inputs, with N samples.
            sample_counts: how many of these each request has.
        """
        counts = np.array(sample_counts, np.int64)
        firsts = np.repeat(np.cumsum(counts) - counts, counts)
        num_drafted = (np.arange(len(firsts)) - firsts).astype(np.int32)
        return DraftedTokens(
            *self._transfers.send(inputs.token_ids[inputs.sample_tokens], num_drafted)
        )


def _by_row(rows: LongArray, ids: list[LongArray]) -> tuple[IntArray, LongArray]:
    """Return the row of each token, and all tokens, both flat."""
    lengths = [len(own) for own in ids]
    return np.repeat(rows, lengths).astype(np.int32), np.concatenate(ids)
