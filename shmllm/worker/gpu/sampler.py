"""Samples the next token of each row on the device, or several tokens behind drafted ones.

The CPU's sampler and the logits processors define the result; only the random noise differs. This
module owns the tokens sampled last, which the next step embeds without the host, and the order of
a step's launches. If the rows of a step have nothing but a temperature and filters, the host's
time does not depend on their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shmllm.config.engine import LogprobsMode
from shmllm.core.plan import StepPlan
from shmllm.worker.arrays import IntArray, LongArray
from shmllm.worker.batch import InputBatch, SamplerOutput
from shmllm.worker.custom_processors import CustomProcessors, ProcessorStep
from shmllm.worker.gpu.capture import CaptureReport, Captures
from shmllm.worker.gpu.custom_logits import ChangedLogits
from shmllm.worker.gpu.device import Device
from shmllm.worker.gpu.logits_processors import (
    Biases,
    GpuTokenMasks,
    LogitBiases,
    TokenCounts,
)
from shmllm.worker.gpu.sampling_graphs import SamplingGraphs
from shmllm.worker.gpu.sampling_masks import PendingSamplingMasks, fetch_sampling_masks
from shmllm.worker.gpu.sampling_metadata import SamplingMetadata
from shmllm.worker.gpu.scorer import ScoredRows, Scorer, unpack
from shmllm.worker.gpu.transfers import PendingArrays, Transfers
from shmllm.worker.grammar_masks import WORD_BITS, PendingMasks
from shmllm.worker.logits_processors import LogitsState
from shmllm.worker.step_inputs import StepInputs
from shmllm_kernels.gpu.logits_processors import add_biases, count_tokens
from shmllm_kernels.gpu.sampling import DraftedTokens, SamplingScratch, TokenMasks, sample

PENALISED, MASKED, BIASED, SCORED = 1, 2, 4, 8
"""Bit flags of what the sampling of a row needs besides a temperature and filters."""
NO_FILTERS = -1


class SampledRows(Protocol):
    """The rows of a step's samples on the device, as in `GpuInputs`.

    Attributes:
        sample_rows: (N or more,) int32, the rows of the step's N samples, then padding.
        sample_positions: (N or more,) int64, the position that each sampled token will have.
        num_padded: N with the padding that the step has.
    """

    sample_rows: Tensor
    sample_positions: Tensor
    num_padded: int


class PendingSamplerOutput:
    """The sampled tokens of a step, which the device copies to the host."""

    def __init__(
        self,
        pending: PendingArrays,
        scored: ScoredRows | None,
        failures: Mapping[int, str],
        masks: PendingSamplingMasks | None = None,
    ) -> None:
        self._pending = pending
        self._scored = scored
        self._failures = failures
        self._masks = masks

    def result(self) -> SamplerOutput:
        """Wait for the copy. May be called once."""
        tokens, *scores = self._pending.arrays()
        logprobs = None if self._scored is None else unpack(self._scored, *scores)
        masks = None if self._masks is None else self._masks.result()
        return SamplerOutput(tokens, logprobs, self._failures, masks)


class GpuSampler:
    """Samples tokens on a device.

    Args:
        batch: the state of the running requests on the host, updated before the sampler's.
        num_rows: the largest number of requests that run at once.
        vocab_size: entries in a row of logits.
        device: the device.
        mode: whether reported log-probabilities are raw or processed, and normalised or logits.
        returns_masks: whether outputs have the tokens among which each token was drawn; they are
            those of processed logits, so `mode` says so, too.

    Attributes:
        last_tokens: (num_rows,) int64 on the device, the token sampled last for each row, or
            drafted last by a model; behind drafted tokens any of those sampled, which no step
            reads.
        transfers: copies small arrays to the device and back.
        scorer: computes log-probabilities.
        processors: the custom logits processors; None if there are none.
    """

    def __init__(
        self,
        batch: InputBatch,
        num_rows: int,
        vocab_size: int,
        device: Device,
        mode: LogprobsMode = "raw_logprobs",
        *,
        returns_masks: bool = False,
    ) -> None:
        self._returns_masks = returns_masks
        on = device.torch_device
        self.last_tokens = torch.zeros(num_rows, dtype=torch.int64, device=on)
        self._tokens = torch.zeros(batch.max_samples, dtype=torch.int64, device=on)
        self._scratch = SamplingScratch.allocate(batch.max_samples, vocab_size, on)
        self._batch = batch
        self._features: npt.NDArray[np.uint8] = np.zeros(num_rows, np.uint8)
        self._searches: npt.NDArray[np.int8] = np.full(num_rows, NO_FILTERS, np.int8)
        self._reports_raw = mode.startswith("raw")
        self.transfers = Transfers(device)
        self._sampling_metadata = SamplingMetadata(num_rows, self.transfers)
        self._token_counts = TokenCounts(num_rows, vocab_size, self.transfers)
        self._token_masks = GpuTokenMasks(
            self._sampling_metadata.mask_rows, batch.max_samples, vocab_size, self.transfers
        )
        self._biases = LogitBiases(batch, self.transfers)
        self.scorer = Scorer(self._scratch, self.transfers, mode.endswith("logprobs"))
        self._scored: ScoredRows | None = None
        self.processors: CustomProcessors | None = None
        self._custom: ProcessorStep | None = None
        self._graphs = SamplingGraphs()

    def warm_up(self, logits: Tensor) -> None:
        """Launch every kernel once before there are requests, since Triton compiles a kernel at
        its first launch, which takes seconds.

        Args:
            logits: (1 or more, V), of the dtype that steps have; not changed.
        """
        on, copy = self.transfers.torch_device, self._scratch.processed_logits[:1]
        vocab_size = copy.shape[1]
        copy.copy_(logits[:1])
        row = torch.zeros(1, dtype=torch.int32, device=on)
        token = torch.zeros(1, dtype=torch.int64, device=on)
        counts = torch.zeros((1, vocab_size), dtype=torch.int32, device=on)
        words = torch.zeros((1, -(-vocab_size // WORD_BITS)), dtype=torch.int32, device=on)
        position, metadata = torch.zeros_like(token), self._sampling_metadata.sampling
        tables: list[tuple[Tensor | None, DraftedTokens | None]] = [(None, None), (counts, None)]
        if self._batch.max_samples > len(self.last_tokens):
            tables.append((counts, DraftedTokens(token, row)))
        for values in (logits[:1], copy):
            for keeps in {False, not self._reports_raw}:
                for table, drafted in tables:
                    for masks in (None, TokenMasks(words, row)):
                        sample(
                            token,
                            values,
                            row,
                            position,
                            metadata,
                            self._scratch,
                            table,
                            masks,
                            keeps,
                            last_tokens=self.last_tokens,
                            drafted=drafted,
                        )
        count_tokens(counts, row, token)
        count_tokens(counts, row, token, is_prompt=True)
        add_biases(copy, row, token, copy[0, :1].clone())
        self.scorer.score(logits[:1], token, self.scorer.select(np.zeros(1, np.int64), [0]))

    def capture(
        self, device: Device, captures: Captures, logits: Tensor, step: SampledRows
    ) -> CaptureReport:
        """Warm up, and capture the sampling of rows that have nothing but a temperature.

        Args:
            device: the device that captures.
            captures: graphs that compute logits, one for each number of rows, with padding.
            logits: (1 or more, V), where those graphs leave the logits.
            step: the rows of each step.

        Raises:
            EngineStartError: a graph cannot be captured.
        """

        def launch(rows: Tensor) -> None:
            count = len(rows)
            of_rows = step.sample_rows[:count], step.sample_positions[:count]
            self._sample_plain(self._tokens[:count], rows, *of_rows, NO_FILTERS)

        return self._graphs.capture(device, captures, lambda: self.warm_up(logits), logits, launch)

    def _sample_plain(
        self, tokens: Tensor, logits: Tensor, rows: Tensor, positions: Tensor, searches: int
    ) -> None:
        """Launch the sampling of rows that have nothing but a temperature and filters; see
        `sample`."""
        sample(
            tokens,
            logits,
            rows,
            positions,
            self._sampling_metadata.sampling,
            self._scratch,
            num_searches=None if searches == NO_FILTERS else searches,
            last_tokens=self.last_tokens,
        )

    def update(self, plan: StepPlan) -> None:
        """Copy the sampling state of a step's new requests to the device."""
        if self.processors is not None:
            self.processors.update(plan)
        if not plan.new_requests:
            return
        rows = np.array([request.row for request in plan.new_requests], np.int64)
        states = [self._batch.logits_states.get(row) for row in rows.tolist()]
        self._features[rows] = [
            _features_of(state, row in self._batch.logprobs)
            for row, state in zip(rows.tolist(), states, strict=True)
        ]
        self._searches[rows] = _num_searches(self._batch, rows)
        self._sampling_metadata.add_requests(self._batch, rows, states)
        self._token_masks.add_requests(rows, states)
        self._token_counts.add_requests(
            [request for request in plan.new_requests if self._features[request.row] & PENALISED]
        )

    def needs_tokens(self, plan: StepPlan, inputs: StepInputs) -> bool:
        """Return whether the host needs the tokens of the step before, in the batch and in the
        constraints, to sample this plan. Called after `update`, once for each plan that samples."""
        if self.processors is not None:
            self._custom = self.processors.begin(inputs.sample_rows, inputs.sample_positions)
        return bool(plan.constraints or self._custom) or any(
            state.needs_output
            for index in (plan.samples if self._batch.logits_states else ())
            if (state := self._batch.logits_states.get(plan.rows[index])) is not None
        )

    def __call__(
        self,
        logits: Tensor,
        inputs: StepInputs,
        device_inputs: SampledRows,
        plan: StepPlan,
        masks: PendingMasks | None = None,
    ) -> PendingSamplerOutput:
        """Launch the sampling of a step, and the copy of its tokens to the host.

        Args:
            logits: (N or more, V), of any floating dtype; not changed.
            inputs: the step's inputs, with N samples.
            device_inputs: the rows of the samples on the device.
            plan: the step's plan.
            masks: the masks of the plan's constraints.
        """
        rows = inputs.sample_rows
        num_rows = len(rows)
        features = self._features[rows]
        is_plain = (
            masks is None
            and self._custom is None
            and not features.any()
            and not self._returns_masks
        )
        if (
            is_plain
            and self._searches[rows].max(initial=NO_FILTERS) == NO_FILTERS
            and self._graphs.replay(logits, device_inputs.num_padded)
        ):
            return PendingSamplerOutput(self.transfers.fetch(self._tokens[:num_rows]), None, {})
        device_rows = device_inputs.sample_rows[:num_rows]
        logits, tokens = logits[:num_rows], self._tokens[:num_rows]
        is_masked = masks is not None or (features & MASKED).any()
        counts = self._token_counts if (features & PENALISED).any() else None
        searches = int(self._searches[rows].max(initial=NO_FILTERS))
        scored_indices = np.flatnonzero(features & SCORED)
        is_scored = scored_indices.size > 0
        keeps_processed = (is_scored and not self._reports_raw) or self._returns_masks
        biased = np.flatnonzero(features & BIASED)
        biases = self._biases.for_step(inputs, biased, plan.is_repeat) if biased.size else None
        token_masks = self._token_masks.for_step(rows, device_rows, masks) if is_masked else None
        drafted = None
        if counts is not None and plan.drafts:
            drafted = counts.drafted(inputs, plan.sample_counts)
        values = logits if biases is None else self._biased(logits, biases)
        columns = self._sampling_metadata.sampling
        custom, self._custom = self._custom, None
        if custom is not None:
            changed = ChangedLogits(self._scratch.processed_logits[:num_rows])
            table = None if counts is None else counts.table
            columns = changed.apply(custom, values, token_masks, device_rows, table, columns)
            values, token_masks = changed.logits, None
        sample(
            tokens,
            values,
            device_rows,
            device_inputs.sample_positions[:num_rows],
            columns,
            self._scratch,
            None if counts is None else counts.table,
            token_masks,
            keeps_processed,
            None if searches == NO_FILTERS else searches,
            self.last_tokens,
            drafted,
        )
        if counts is not None and not plan.drafts:
            counts.count(device_rows, tokens)
        failures = {} if custom is None else custom.failures
        sampling_masks = None
        if self._returns_masks:
            processed = self._scratch.processed_logits[:num_rows]
            sampling_masks = fetch_sampling_masks(
                processed, self._batch.temperature[rows], self.transfers
            )
        if not is_scored:
            return PendingSamplerOutput(
                self.transfers.fetch(tokens), None, failures, sampling_masks
            )
        scored = self._select_scored(rows, scored_indices, plan.is_repeat)
        reported = self._scratch.processed_logits[:num_rows] if keeps_processed else logits
        scores = self.scorer.score(reported, tokens, scored)
        return PendingSamplerOutput(
            self.transfers.fetch(tokens, *scores), scored, failures, sampling_masks
        )

    def choose(
        self, logits: Tensor, rows: LongArray, device_rows: Tensor, positions: Tensor
    ) -> Tensor:
        """Launch the sampling of tokens whose logits get no masks, biases or penalties.

        Args:
            logits: (N, V), of the dtype that steps have; not changed.
            rows: (N,) int64, the row of each row of logits.
            device_rows: (N,) int32 on the device, the same.
            positions: (N,) int64 on the device, the position that each token will have.

        Returns:
            (N,) int64 on the device, the tokens, which the next call of the sampler overwrites;
            `last_tokens` has them, too.
        """
        tokens = self._tokens[: len(rows)]
        searches = int(self._searches[rows].max(initial=NO_FILTERS))
        self._sample_plain(tokens, logits, device_rows, positions, searches)
        return tokens

    def count_accepted(self, rows: IntArray, tokens: LongArray) -> None:
        """Count the accepted tokens of a step with drafts, before the next step samples.

        Args:
            rows: (N,) int32, the row of each token.
            tokens: (N,) int64, the tokens.
        """
        is_counted = (self._features[rows] & PENALISED) > 0
        if is_counted.any():
            self._token_counts.count_on_host(rows[is_counted], tokens[is_counted], is_prompt=False)

    def _select_scored(self, rows: LongArray, indices: LongArray, is_repeat: bool) -> ScoredRows:
        if not is_repeat or self._scored is None:
            asked = [self._batch.logprobs[row] for row in rows[indices].tolist()]
            self._scored = self.scorer.select(indices, asked)
        return self._scored

    def _biased(self, logits: Tensor, biases: Biases) -> Tensor:
        """Return a float32 copy of the logits with the biases. The logits themselves are reported,
        and their dtype may be too coarse for a bias. The copy is in the scratch memory where the
        sampling kernels leave the processed logits: they read each entry before they write it."""
        edited = self._scratch.processed_logits[: len(logits)]
        edited.copy_(logits)
        add_biases(edited, *biases)
        return edited


def _num_searches(batch: InputBatch, rows: LongArray) -> npt.NDArray[np.int8]:
    """Return (N,) the number of thresholds that these rows may have to search, see `sample`;
    NO_FILTERS for rows that are greedy or have none."""
    searches = (batch.top_k[rows] > 0).astype(np.int8) + (batch.top_p[rows] < 1.0)
    return np.where(batch.is_filtered(rows), searches, np.int8(NO_FILTERS))


def _features_of(state: LogitsState | None, is_scored: bool) -> int:
    features = SCORED if is_scored else 0
    if state is not None:
        features |= PENALISED if state.has_penalties else 0
        features |= MASKED if state.allowed.size else 0
        features |= BIASED if state.may_change_entries else 0
    return features
