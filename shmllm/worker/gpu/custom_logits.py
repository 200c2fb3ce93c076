"""Logits that custom processors change on the device, before the sampling kernel.

The kernel applies masks, penalties, temperature and min_p in one launch. The processors belong
between these, so torch applies what comes before them, in the order of the CPU's sampler. A step
that no processor changes does not come here. This module must not know the processors.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from shmllm.worker.custom_processors import ProcessorStep
from shmllm.worker.grammar_masks import WORD_BITS
from shmllm_kernels.gpu.sampling import TokenMasks
from shmllm_kernels.reference.sampling import SamplingColumns, penalise

NEUTRAL = {"temperature": 1.0, "min_p": 0.0, "repetition": 1.0, "frequency": 0.0, "presence": 0.0}
"""The parameters that change nothing, of rows to which they were applied already."""


class ChangedLogits:
    """
    Args:
        logits: (N, V) float32, memory for the changed logits of a step.
    """

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def apply(
        self,
        custom: ProcessorStep,
        logits: Tensor,
        masks: TokenMasks | None,
        rows: Tensor,
        token_counts: Tensor | None,
        columns: SamplingColumns,
    ) -> SamplingColumns:
        """Change the logits.

        Args:
            custom: the processors; their tokens are known.
            logits: (N, V), with the biases; may be the memory of the changed ones.
            masks: the allowed tokens; None: all.
            rows: (N,) int32, the row of each sample in `columns` and `token_counts`.
            token_counts: (R, V) int32, for penalties; None if no row has any.
            columns: the sampling parameters of all R rows.

        Returns:
            The parameters that are left for the kernel to apply.
        """
        if self.logits.data_ptr() != logits.data_ptr():
            self.logits.copy_(logits)
        if masks is not None:
            self.logits.masked_fill_(~_allowed(masks, self.logits.shape[1]), -torch.inf)
        custom.start()
        custom.apply(self.logits)
        users = torch.from_numpy(custom.users()).to(rows.device)
        users = users[columns.temperature[rows[users].long()] > 0]
        if not users.numel():
            return columns
        of_users = rows[users].long()
        values = self._before_draws(users, of_users, token_counts, columns)
        custom.apply_to_draws(values, users.cpu().numpy())
        self.logits[users] = values
        left = {name: getattr(columns, name).clone() for name in NEUTRAL}
        for name, value in NEUTRAL.items():
            left[name][of_users] = value
        return replace(columns, **left)

    def _before_draws(
        self, users: Tensor, rows: Tensor, token_counts: Tensor | None, columns: SamplingColumns
    ) -> Tensor:
        """Return the logits of some samples after penalties, temperature and min_p."""
        names = SamplingColumns.__slots__
        own = SamplingColumns(*(getattr(columns, name)[rows] for name in names))
        values = self.logits[users]
        if token_counts is not None:
            has_penalty = (own.repetition != 1) | (own.frequency != 0) | (own.presence != 0)
            penalised = penalise(values, token_counts[rows], own)
            # Rows without penalties have undefined counts.
            values = torch.where(has_penalty[:, None], penalised, values)
        values = values / own.temperature[:, None]
        floor = values.amax(dim=1, keepdim=True) + own.min_p.clamp(min=1e-37).log()[:, None]
        return values.masked_fill((values < floor) & (own.min_p > 0)[:, None], -torch.inf)


def _allowed(masks: TokenMasks, vocab_size: int) -> Tensor:
    """Return (N, V) booleans, whether each token is allowed."""
    bits = torch.arange(WORD_BITS, dtype=torch.int32, device=masks.words.device)
    words = masks.words[masks.rows.clamp(min=0).long()]
    allowed = (words[:, :, None] >> bits & 1).bool().flatten(1)[:, :vocab_size]
    return allowed | (masks.rows < 0)[:, None]
