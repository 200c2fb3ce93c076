"""Runs steps under torch's profiler.

Owns one session: from when it records, for how many steps, and the trace file. Stands in
front of the runner while it lasts, so that steps cost nothing when nobody profiles.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from shmllm.core.plan import StepPlan, StepResult


class ProfiledRunner:
    """A runner whose steps are recorded. On a CPU they do not overlap meanwhile: what is recorded
    of a step is what happens on the thread that asks for its result.

    Args:
        runner: executes the steps.
        path: of the trace, a Chrome trace as JSON, compressed if it ends in .gz.
        delay: steps to let pass first.
        most: steps to record; 0 for all until `finish`.

    Attributes:
        runner: the one in front of which this stands.
        path: see above.
    """

    def __init__(self, runner: Any, path: Path, delay: int, most: int) -> None:
        self.runner = runner
        self.path = path
        self.info = runner.info
        self.overlaps = runner.overlaps and runner.info.device != "cpu"
        self._delay = delay
        self._most = most
        self._num_recorded = 0
        self._profile: Any = None
        self._is_over = False
        if not delay:
            self._begin()

    def submit(self, plan: StepPlan) -> Any:
        if self._delay:
            self._delay -= 1
        elif not self._is_over:
            if self._profile is None:
                self._begin()
            return _ProfiledStep(self, plan)
        return self.runner.submit(plan)

    def compile_grammar(self, text: str) -> Any:
        return self.runner.compile_grammar(text)

    def check_embeds(self, embeds: Any, length: int) -> Any:
        return self.runner.check_embeds(embeds, length)

    def finish(self) -> bool:
        """Stop recording and write the file; False if there is nothing to write."""
        if self._profile is None:
            return False
        self._end()
        self._profile.export_chrome_trace(str(self.path))
        return True

    def recorded(self) -> None:
        """A step was recorded."""
        self._num_recorded += 1
        if self._num_recorded == self._most:
            self._end()

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()
        self.runner.observe(record_function)

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self.runner.observe(None)
            self._profile.stop()


class _ProfiledStep:
    """A step whose submission and whose result are recorded."""

    def __init__(self, profiled: ProfiledRunner, plan: StepPlan) -> None:
        self._profiled = profiled
        self._name = f"step {plan.step}: {plan.num_tokens} tokens"
        with record_function(f"submit {self._name}"):
            self._step = profiled.runner.submit(plan)

    def release(self) -> None:
        self._step.release()

    def result(self) -> StepResult:
        with record_function(self._name):
            result: StepResult = self._step.result()
        self._profiled.recorded()
        return result
