"""Samples the next token of each row from its logits, on a CPU.

The order is: the mask of a grammar; the logits processors, which are allowed ids, bad words and
min_tokens, biases, custom processors, and penalties; then, for rows that are not greedy,
temperature, min_p, those custom processors that leave the largest logit the largest, top_k, top_p
and the draw. The draw is the Gumbel-max trick: it adds noise to every logit and takes the
largest sum. The noise is a hash, so that a request's tokens do not depend on the other requests,
and rounding differences of a logit change the draw only where the two largest sums are equally
close.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from shmllm.config.engine import LogprobsMode
from shmllm.outputs.logprobs import TokenLogprobs
from shmllm.outputs.sampling_masks import SamplingMasks
from shmllm.worker.arrays import LongArray
from shmllm.worker.batch import Alternatives, InputBatch, SamplerOutput
from shmllm.worker.cpu.filters import keep_top_k_top_p
from shmllm.worker.cpu.noise import gumbel_noise, gumbel_noise_at
from shmllm.worker.custom_processors import CustomProcessors, ProcessorStep
from shmllm.worker.logits_processors import apply_logits_processors
from shmllm.worker.scoring import score_tokens

SPARSE_FRACTION = 4
"""If fewer than one entry in this many is left, noise is computed for these entries alone."""

LogitsMask = Callable[[torch.Tensor], None]
"""Sets the logits of tokens that may not be sampled to -inf, in place."""


class CpuSampler:
    """Samples tokens.

    Args:
        batch: the batch, with each row's sampling parameters.
        mode: whether reported log-probabilities are raw or processed, and normalised or logits.
        returns_masks: whether outputs have the tokens among which each token was drawn; they are
            those of processed logits, so `mode` says so, too.

    Attributes:
        processors: the custom logits processors; None if there are none.
    """

    def __init__(
        self,
        batch: InputBatch,
        mode: LogprobsMode = "raw_logprobs",
        *,
        returns_masks: bool = False,
    ) -> None:
        self._batch = batch
        self._returns_masks = returns_masks
        self.processors: CustomProcessors | None = None
        self._reports_raw = mode.startswith("raw")
        self._normalises = mode.endswith("logprobs")

    def __call__(
        self,
        logits: torch.Tensor,
        rows: LongArray,
        positions: LongArray,
        mask: LogitsMask | None = None,
    ) -> SamplerOutput:
        """Sample one token for each row of logits.

        Args:
            logits: (N, V) float32; overwritten.
            rows: (N,) int64, the batch row of each row of logits. Those of a request with drafted
                tokens follow each other.
            positions: (N,) int64, the position that each sampled token will have.
            mask: applied before everything else.
        """
        scored = self._rows_to_score(rows)
        states = [
            (index, state)
            for index, row in enumerate(rows.tolist() if self._batch.logits_states else ())
            if (state := self._batch.logits_states.get(row)) is not None
        ]
        custom = None
        if self.processors is not None:
            custom = self.processors.begin(rows, positions)
        reported = logits
        if scored and self._reports_raw and (mask is not None or states or custom):
            reported = logits.clone()
        if mask is not None:
            mask(logits)
        if custom:
            custom.start()
        if states or custom:
            for index, state in states:
                if not index or rows[index - 1] != rows[index]:
                    state.rewind()
            ids = [self._batch.token_ids[rows[index], : positions[index]] for index, _ in states]
            apply_logits_processors(logits, states, ids, custom.apply if custom else None)
        tokens, masks = self._choose(logits, rows, positions, custom, keeps=bool(scored))
        return SamplerOutput(
            tokens,
            self._score(reported, tokens, scored) if scored else None,
            custom.failures if custom else {},
            masks,
        )

    def choose(self, logits: torch.Tensor, rows: LongArray, positions: LongArray) -> LongArray:
        """Choose the tokens of rows whose logits need no masks, biases or penalties any more.

        Args:
            logits: (N, V) float32.
            rows: (N,) int64, the batch row of each row of logits.
            positions: (N,) int64, the position that each token will have.

        Returns:
            (N,) int64 token ids.
        """
        return self._choose(logits, rows, positions, None, keeps=False)[0]

    def _choose(
        self,
        logits: torch.Tensor,
        rows: LongArray,
        positions: LongArray,
        custom: ProcessorStep | None,
        *,
        keeps: bool,
    ) -> tuple[LongArray, SamplingMasks | None]:
        """As `choose`, with the custom processors in this step, and the sampling masks if somebody
        asks for them. `keeps`: write the processed logits of drawn rows to `logits` if those are
        reported."""
        # numpy's argmax takes a tenth of the time of torch's.
        tokens: LongArray = logits.numpy().argmax(axis=1)
        drawn = np.flatnonzero(self._batch.temperature[rows])
        samples = entries = np.zeros(0, np.int64)
        if drawn.size:
            processed = self._process(logits[torch.from_numpy(drawn)], rows[drawn], drawn, custom)
            samples, entries = np.nonzero(processed.numpy() > -np.inf)
            drawn_at = positions[drawn]
            tokens[drawn] = self._draw(processed, rows[drawn], drawn_at, samples, entries)
            if keeps and not self._reports_raw:
                logits[torch.from_numpy(drawn)] = processed
        masks = None
        if self._returns_masks:
            masks = SamplingMasks.of_entries(len(rows), drawn[samples], entries)
        return tokens, masks

    def _rows_to_score(self, rows: LongArray) -> list[tuple[int, Alternatives]]:
        """Return (index, alternatives) of the rows that ask for log-probabilities."""
        wanted = self._batch.logprobs
        if not wanted:
            return []
        return [(index, wanted[row]) for index, row in enumerate(rows.tolist()) if row in wanted]

    def _score(
        self, logits: torch.Tensor, tokens: LongArray, scored: list[tuple[int, Alternatives]]
    ) -> TokenLogprobs:
        token_ids = torch.from_numpy(tokens)
        if len(scored) < len(tokens):
            indices = torch.tensor([index for index, _ in scored])
            logits, token_ids = logits[indices], token_ids[indices]
        return score_tokens(logits, token_ids, [asked for _, asked in scored], self._normalises)

    def _process(
        self,
        logits: torch.Tensor,
        rows: LongArray,
        samples: LongArray,
        custom: ProcessorStep | None,
    ) -> torch.Tensor:
        """Apply temperature, min_p, custom processors, top_k and top_p; overwrites `logits`."""
        batch = self._batch
        logits /= torch.from_numpy(batch.temperature[rows])[:, None]
        min_p, top_k, top_p = batch.min_p[rows], batch.top_k[rows], batch.top_p[rows]
        if min_p.any():
            best = logits.max(dim=1, keepdim=True).values
            floor = best + torch.from_numpy(np.log(np.maximum(min_p, 1e-38)))[:, None]
            bounded = torch.from_numpy(min_p > 0)[:, None]
            logits.masked_fill_((logits < floor) & bounded, -torch.inf)
        if custom:
            custom.apply_to_draws(logits, samples)
        cut = np.flatnonzero((top_k > 0) | (top_p < 1))
        if cut.size:
            chosen = torch.from_numpy(cut)
            logits[chosen] = keep_top_k_top_p(
                logits[chosen],
                torch.from_numpy(top_k[cut].astype(np.int64)),
                torch.from_numpy(top_p[cut]),
            )
        return logits

    def _draw(
        self,
        logits: torch.Tensor,
        rows: LongArray,
        positions: LongArray,
        remaining_rows: LongArray,
        entries: LongArray,
    ) -> LongArray:
        """Draw a token for each row, among the entries that remain in it."""
        values, seeds = logits.numpy(), self._batch.seeds[rows]
        if SPARSE_FRACTION * len(entries) < values.size:
            noisy = np.full_like(values, -np.inf)
            noise = gumbel_noise_at(seeds, positions, remaining_rows, entries)
            noisy[remaining_rows, entries] = values[remaining_rows, entries] + noise
        else:
            noisy = values + gumbel_noise(seeds, positions, values.shape[1])
        drawn: LongArray = noisy.argmax(axis=1)
        return drawn
