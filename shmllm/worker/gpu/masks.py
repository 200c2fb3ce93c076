"""Which tokens a row may have at all, by allowed_token_ids and by grammar, on the device.

Owns the words that say so: those of the allowed ids by row, and behind them those of a step's
grammars. They exist from the first request that needs them on.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shmllm.worker.arrays import IntArray, LongArray
from shmllm.worker.gpu.transfers import Transfers
from shmllm.worker.logits_processors import LogitsState
from shmllm.worker.token_masks import WORD_BITS, PendingMasks
from shmllm_kernels.gpu.sampling import TokenMasks


class RowMasks:
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

    def admit(self, rows: LongArray, edits: list[LogitsState | None]) -> None:
        """Take in the allowed ids of the requests that enter these rows."""
        entering = {}
        for row, edit in zip(rows.tolist(), edits, strict=True):
            self._allowed.pop(row, None)
            if edit is not None and edit.allowed.size:
                entering[row] = self._words_of(edit.allowed)
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
