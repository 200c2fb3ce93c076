"""Chooses the next token of each row on the device.

What it chooses is defined by the CPU's sampler (`worker.sampler`) and its edits; only the noise
differs. Owns the tokens sampled last, which the next step embeds without asking the host, and the
order of a step's launches. A step of rows that have nothing but temperature and filters costs the
host the same however many they are.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shmllm.config.engine import LogprobsMode
from shmllm.core.plan import StepPlan
from shmllm.worker.arrays import LongArray
from shmllm.worker.batch import InputBatch, SamplerOutput, StepInputs
from shmllm.worker.gpu.device import Device
from shmllm.worker.gpu.logits_processors import (
    Biases,
    GpuTokenMasks,
    LogitBiases,
    TokenCounts,
)
from shmllm.worker.gpu.sampling_metadata import SamplingMetadata
from shmllm.worker.gpu.scorer import Asked, Scorer, unpack
from shmllm.worker.gpu.transfers import Fetched, Transfers
from shmllm.worker.grammar_masks import WORD_BITS, PendingMasks
from shmllm.worker.logits_processors import LogitsState
from shmllm_kernels.gpu.logits_processors import add_biases, count_tokens
from shmllm_kernels.gpu.sampling import SamplingScratch, TokenMasks, sample

PENALISED, MASKED, BIASED, SCORED, FILTERED = 1, 2, 4, 8, 16
"""What a row's request has besides a temperature; they add up."""


class SampledRows(Protocol):
    """Attributes:
    sample_rows: int32, whose logits they are; what is behind the step's N is padding.
    sample_positions: int64, the position that each sampled token will have.
    """

    sample_rows: Tensor
    sample_positions: Tensor


class SampledOnDevice:
    """A step's tokens on their way to the host."""

    def __init__(self, fetched: Fetched, asked: Asked | None) -> None:
        self._fetched = fetched
        self._asked = asked

    def result(self) -> SamplerOutput:
        """Waits for them. To be called once."""
        tokens, *scores = self._fetched.arrays()
        logprobs = None if self._asked is None else unpack(self._asked, *scores)
        return SamplerOutput(tokens, logprobs)


class GpuSampler:
    """
    Args:
        batch: the rows on the host, up to date before this is.
        num_rows: requests that can run at once.
        vocab_size: entries of a row's logits.
        device: what samples.
        mode: what is reported as log-probabilities.

    Attributes:
        last_tokens: (num_rows,) int64 on the device, what was sampled last for each row.
        transfers: bring small arrays to the device and back.
        scorer: finds log-probabilities.
    """

    def __init__(
        self,
        batch: InputBatch,
        num_rows: int,
        vocab_size: int,
        device: Device,
        mode: LogprobsMode = "raw_logprobs",
    ) -> None:
        on = device.torch_device
        self.last_tokens = torch.zeros(num_rows, dtype=torch.int64, device=on)
        self._tokens = torch.zeros(num_rows, dtype=torch.int64, device=on)
        self._scratch = SamplingScratch.allocate(num_rows, vocab_size, on)
        self._batch = batch
        self._traits: npt.NDArray[np.uint8] = np.zeros(num_rows, np.uint8)
        self._reports_raw = mode.startswith("raw")
        self.transfers = Transfers(device)
        self._sampling_metadata = SamplingMetadata(num_rows, self.transfers)
        self._token_counts = TokenCounts(num_rows, vocab_size, self.transfers)
        self._token_masks = GpuTokenMasks(
            self._sampling_metadata.mask_rows, vocab_size, self.transfers
        )
        self._biases = LogitBiases(batch, self.transfers)
        self.scorer = Scorer(self._scratch, self.transfers, mode.endswith("logprobs"))
        self._asked: Asked | None = None

    def warm_up(self, logits: Tensor) -> None:
        """Launch every kernel once, before there are requests: a GPU's are compiled then, which
        takes seconds.

        Args:
            logits: (1 or more, V), of the type that those of steps will have; not changed.
        """
        on, copy = self.transfers.torch_device, self._scratch.processed_logits[:1]
        vocab_size = copy.shape[1]
        copy.copy_(logits[:1])
        row = torch.zeros(1, dtype=torch.int32, device=on)
        token = torch.zeros(1, dtype=torch.int64, device=on)
        counts = torch.zeros((1, vocab_size), dtype=torch.int32, device=on)
        words = torch.zeros((1, -(-vocab_size // WORD_BITS)), dtype=torch.int32, device=on)
        position, metadata = torch.zeros_like(token), self._sampling_metadata.sampling
        for values in (logits[:1], copy):
            for keeps in {False, not self._reports_raw}:
                for table in (None, counts):
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
                        )
        count_tokens(counts, row, token)
        count_tokens(counts, row, token, is_prompt=True)
        add_biases(copy, row, token, copy[0, :1].clone())
        self.scorer.score(logits[:1], token, self.scorer.ask(np.zeros(1, np.int64), [0]))

    def update(self, plan: StepPlan) -> None:
        """Take in the step's admissions."""
        if not plan.new_requests:
            return
        rows = np.array([request.row for request in plan.new_requests], np.int64)
        states = [self._batch.logits_states.get(row) for row in rows.tolist()]
        self._traits[rows] = [
            _traits(state, row in self._batch.logprobs)
            for row, state in zip(rows.tolist(), states, strict=True)
        ]
        self._traits[rows[self._batch.is_filtered(rows)]] |= FILTERED
        self._sampling_metadata.add_requests(self._batch, rows, states)
        self._token_masks.add_requests(rows, states)
        self._token_counts.add_requests(
            [request for request in plan.new_requests if self._traits[request.row] & PENALISED]
        )

    def needs_tokens(self, plan: StepPlan) -> bool:
        """Whether this plan, once taken in, can only be sampled when the tokens of the step before
        are in the batch and in the constraints."""
        return bool(plan.constraints) or any(
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
    ) -> SampledOnDevice:
        """Launch the sampling of a step, and send its tokens to the host.

        Args:
            logits: (N or more, V), of any floating type. Not changed.
            inputs: the step's, whose N samples these are.
            device_inputs: the same on the device.
            plan: the step's.
            masks: of its constraints.
        """
        rows = inputs.sample_rows
        num_rows = len(rows)
        traits = self._traits[rows]
        device_rows = device_inputs.sample_rows[:num_rows]
        logits, tokens = logits[:num_rows], self._tokens[:num_rows]
        is_masked = masks is not None or (traits & MASKED).any()
        counts = self._token_counts if (traits & PENALISED).any() else None
        asking = np.flatnonzero(traits & SCORED)
        keeps_processed = asking.size > 0 and not self._reports_raw
        biased = np.flatnonzero(traits & BIASED)
        biases = self._biases.of_step(inputs, biased, plan.is_repeat) if biased.size else None
        sample(
            tokens,
            logits if biases is None else self._biased(logits, biases),
            device_rows,
            device_inputs.sample_positions[:num_rows],
            self._sampling_metadata.sampling,
            self._scratch,
            None if counts is None else counts.table,
            self._token_masks.of_step(rows, device_rows, masks) if is_masked else None,
            keeps_processed,
            bool((traits & FILTERED).any()),
            self.last_tokens,
        )
        if counts is not None:
            counts.count(device_rows, tokens)
        if not asking.size:
            return SampledOnDevice(self.transfers.fetch(tokens), None)
        asked = self._ask(rows, asking, plan.is_repeat)
        reported = self._scratch.processed_logits[:num_rows] if keeps_processed else logits
        scores = self.scorer.score(reported, tokens, asked)
        return SampledOnDevice(self.transfers.fetch(tokens, *scores), asked)

    def _ask(self, rows: LongArray, asking: LongArray, is_repeat: bool) -> Asked:
        if not is_repeat or self._asked is None:
            wanted = [self._batch.logprobs[row] for row in rows[asking].tolist()]
            self._asked = self.scorer.ask(asking, wanted)
        return self._asked

    def _biased(self, logits: Tensor, biases: Biases) -> Tensor:
        """A copy with the biases, where the sampler leaves its own: it reads an entry before it
        writes there. The logits are what is reported, and may be too coarse for a bias."""
        edited = self._scratch.processed_logits[: len(logits)]
        edited.copy_(logits)
        add_biases(edited, *biases)
        return edited


def _traits(state: LogitsState | None, is_scored: bool) -> int:
    traits = SCORED if is_scored else 0
    if state is not None:
        traits |= PENALISED if state.has_penalties else 0
        traits |= MASKED if state.allowed.size else 0
        traits |= BIASED if state.bans or state.biased.size else 0
    return traits
