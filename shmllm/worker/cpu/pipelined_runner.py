"""Executes step plans on a CPU as the first stage of a pipeline.

Submitting a step computes this stage's part of it; its result waits for the last stage, and this
process samples. Meanwhile other steps are submitted, of other requests.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from shmllm.config.engine import EngineConfig
from shmllm.core.plan import StepPlan, StepResult
from shmllm.worker.cpu.pipeline import CpuPipeline
from shmllm.worker.cpu.runner import CpuRunner
from shmllm.worker.loading import Progress
from shmllm.worker.ranks import Ranks
from shmllm.worker.step_inputs import StepInputs


class PipelinedStep:
    """A step of which the first stage was computed.

    Args:
        runner: the runner.
        pipeline: its program.
        plan: the step's plan.
        inputs: its inputs.
        slot: the slot of its batch.
    """

    def __init__(
        self,
        runner: PipelinedRunner,
        pipeline: CpuPipeline,
        plan: StepPlan,
        inputs: StepInputs,
        slot: int,
    ) -> None:
        self._runner = runner
        self._pipeline = pipeline
        self._plan = plan
        self._inputs = inputs
        self._slot = slot

    def release(self) -> None:
        """Do nothing: the step needs no token of the steps before."""

    @torch.inference_mode()
    def result(self) -> StepResult:
        """Wait for the last stage, and sample."""
        runner, plan, inputs = self._runner, self._plan, self._inputs
        masks = runner.masks.begin(plan.constraints, plan.drafts)
        hidden, logits = self._pipeline.finish(self._slot, inputs)
        return runner.complete(plan, inputs, masks, hidden, logits, runner.take_prepared_ns())


class PipelinedRunner(CpuRunner):
    """A `CpuRunner` that is the first stage of a pipeline.

    Args:
        config: the engine's configuration.
        on_progress, warnings: as for `CpuRunner`.
        ranks: the other stages.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_progress: Progress | None,
        warnings: Sequence[str],
        ranks: Ranks,
    ) -> None:
        super().__init__(config, on_progress, warnings, ranks)
        program = self._program
        assert isinstance(program, CpuPipeline), "the ranks are stages"
        self._pipeline = program
        self.max_in_flight = program.num_slots
        self._prepared_ns: int | None = None

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> PipelinedStep:  # type: ignore[override]
        """Compute the first stage of a plan's step."""
        inputs = self.prepare(plan)
        self._prepared_ns = time.perf_counter_ns()
        slot = self._pipeline.start(inputs)
        return PipelinedStep(self, self._pipeline, plan, inputs, slot)

    def take_prepared_ns(self) -> int | None:
        """Return since when this process has computed its stage of one step and waited for the
        others' of another; None: no step was submitted meanwhile."""
        began, self._prepared_ns = self._prepared_ns, None
        return began
