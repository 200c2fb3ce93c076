"""Steps that were submitted to a GPU, and what the host does when they have run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from shmllm.core.plan import StepPlan, StepResult
from shmllm.models.model import Model
from shmllm.outputs.columns import Piece
from shmllm.worker.batch import InputBatch
from shmllm.worker.gpu.inputs import GpuInputs
from shmllm.worker.gpu.sampler import GpuSampler, PendingSamplerOutput
from shmllm.worker.gpu.scorer import PendingScores
from shmllm.worker.gpu.step_timer import StepTimer
from shmllm.worker.gpu.transfers import PendingArrays
from shmllm.worker.grammar_masks import GrammarMasks
from shmllm.worker.pooler import Pooler
from shmllm.worker.routed_experts import ExpectedExperts, RoutedExperts
from shmllm.worker.step_inputs import StepInputs
from shmllm.worker.verification import accept


class StepOwner(Protocol):
    """The runner, as its steps see it."""

    batch: InputBatch
    inputs: GpuInputs
    sampler: GpuSampler
    masks: GrammarMasks
    pooler: Pooler
    routed: RoutedExperts | None

    @property
    def model(self) -> Model: ...

    def check(self) -> None: ...

    def follow(
        self, plan: StepPlan, inputs: StepInputs, hidden: Tensor, counts: Sequence[int] | None
    ) -> None: ...

    def saves_late(self, plan: StepPlan) -> bool: ...


class PendingExperts(NamedTuple):
    """The experts of a step's tokens, which the device copies to the host.

    expected: what the step adds.
    fetched: the choices, as bytes.
    """

    expected: ExpectedExperts
    fetched: PendingArrays


class GpuStep:
    """A step whose forward pass was launched. Its sampling was launched as well, unless that needs
    the tokens of the step before.

    Args:
        runner: the runner that launched the step.
        timer: the step's timer, which has begun.
        plan: the step's plan.
        inputs: the step's inputs.
        hidden: [T or more, hidden] on the device, the hidden states of all tokens.
        logits: (N or more, V) on the device, the logits of the step's N samples.
        prompt_scores: the pending log-probabilities of prompts.
        pooled: the pending hidden states of all tokens, (T * hidden,) float32, and the results of
            `StepInputs.item_results`; None if the step has no pooling requests.
        experts: the pending choices of experts; None: nobody asks for them.
    """

    def __init__(
        self,
        runner: StepOwner,
        timer: StepTimer,
        plan: StepPlan,
        inputs: StepInputs,
        hidden: Tensor,
        logits: Tensor,
        prompt_scores: list[PendingScores],
        pooled: PendingArrays | None,
        experts: PendingExperts | None,
    ) -> None:
        self._runner = runner
        self._timer = timer
        self._plan = plan
        self._inputs = inputs
        self._hidden = hidden
        self._logits = logits
        self._prompt_scores = prompt_scores
        self._pooled = pooled
        self._experts = experts
        self._expected = runner.batch.expect(inputs)
        self._sampled: PendingSamplerOutput | None = None
        if not plan.samples:
            timer.end()
        elif not runner.sampler.needs_tokens(plan, inputs):
            self._sample()

    def release(self) -> None:
        """Launch the sampling if it waits: the batch and the constraints have the tokens of the
        step before."""
        if self._plan.samples and self._sampled is None:
            self._sample()

    @torch.inference_mode()
    def result(self) -> StepResult:
        """Wait for the step, and store its tokens in the batch."""
        device_ns = self._timer.wait_ns()
        self._runner.check()
        scores = [pending.result() for pending in self._prompt_scores]
        result, vectors = StepResult([]), self._pool()
        if self._sampled is not None:
            sampled = self._sampled.result()
            self._runner.batch.fill(self._expected, sampled.token_ids)
            result = accept(self._plan, sampled)
            if result.counts is not None:
                rows = np.array(self._plan.rows, np.int32)[self._plan.samples]
                tokens = np.array(result.token_ids, np.int64)
                self._runner.sampler.count_accepted(np.repeat(rows, result.counts), tokens)
        self._runner.follow(self._plan, self._inputs, self._hidden, result.counts)
        if self._runner.saves_late(self._plan):
            self._timer.end()
            self._timer.wait_ns()
        result.prompt_logprobs, result.vectors, result.device_ns = scores, vectors, device_ns
        if self._experts is not None and self._runner.routed is not None:
            (chosen,) = self._experts.fetched.arrays()
            result.routed_experts = self._runner.routed.add(
                self._experts.expected, chosen, result.counts
            )
        return result

    def _pool(self) -> list[Piece]:
        if self._pooled is None:
            return []
        states, *results = map(torch.from_numpy, self._pooled.arrays())
        hidden = states.view(len(self._inputs.token_ids), -1)
        rows = (each[None] for each in results)
        self._inputs.item_results = dict(zip(self._inputs.item_results, rows, strict=True))
        return self._runner.pooler(hidden, self._inputs, self._plan)

    @torch.inference_mode()
    def _sample(self) -> None:
        runner = self._runner
        masks = runner.masks.begin(self._plan.constraints, self._plan.drafts)
        logits = runner.model.compute_logits(self._logits)
        self._sampled = runner.sampler(logits, self._inputs, runner.inputs, self._plan, masks)
        self._timer.end()


class CopyingStep:
    """A step that only copies blocks to where other engines find them.

    Args:
        timer: the step's timer, which has ended.
    """

    def __init__(self, timer: StepTimer) -> None:
        self._timer = timer

    def release(self) -> None:
        """Do nothing: all has been launched."""

    def result(self) -> StepResult:
        """Wait for the copies."""
        return StepResult([], device_ns=self._timer.wait_ns())
