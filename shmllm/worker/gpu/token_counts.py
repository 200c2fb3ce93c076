"""How often each row's request used each token: what penalties go by.

Owns the table, which is on the device and exists from the first request with penalties on. The
tokens that are sampled are counted there, so that no penalty waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shmllm.core.plan import NewRequest
from shmllm.worker.arrays import IntArray, LongArray
from shmllm.worker.gpu.transfers import Transfers
from shmllm_kernels.gpu.logits_processors import count_tokens


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

    def admit(self, new_requests: Sequence[NewRequest]) -> None:
        """Begin to count for requests with penalties. One that was preempted brings output."""
        if not new_requests:
            return
        if self.table is None:
            device = self._transfers.torch_device
            self.table = torch.zeros(self._shape, dtype=torch.int32, device=device)
        rows = np.array([admission.row for admission in new_requests], np.int64)
        ids = [np.array(admission.token_ids, np.int64) for admission in new_requests]
        prompts = [admission.num_prompt_tokens for admission in new_requests]
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
