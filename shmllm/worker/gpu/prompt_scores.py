"""Log-probabilities of prompts, found on the device.

Owns the pieces in which the logits of a prompt's tokens are made: those of a whole prompt would
not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from shmllm.core.plan import PromptScores
from shmllm.outputs.logprobs import TokenLogprobs
from shmllm.worker.batch import InputBatch, StepInputs
from shmllm.worker.gpu.scorer import Asked, Scorer, unpack
from shmllm.worker.gpu.transfers import Fetched, Transfers
from shmllm.worker.scoring import joined


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
