"""Runs steps under torch's profiler.

This module owns one profiling session: the first recorded step, the number of steps, and the trace
files: each process that computes has one. The profiled runner replaces the engine's runner during a
session only, so that steps outside of sessions cost nothing more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from shmllm.core.plan import StepPlan, StepResult

SUFFIX = ".pt.trace.json.gz"
"""The end of the name of a trace."""


class Recording:
    """Torch's profile of this process. It begins at once.

    It records the calling thread and what it calls.
    """

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    def end(self) -> None:
        """Stop recording."""
        self._profile.stop()

    def write(self, path: Path) -> None:
        """Write the trace, a Chrome trace as JSON, compressed if its name ends in .gz."""
        self._profile.export_chrome_trace(str(path))


def path_of_rank(path: Path, rank: int) -> Path:
    """Return where another rank writes its trace.

    Args:
        path: where rank 0 writes its own, which ends in `SUFFIX`.
        rank: the number of the rank.
    """
    return path.with_name(f"{path.name.removesuffix(SUFFIX)}-rank{rank}{SUFFIX}")


class ProfiledRunner:
    """A runner that records its steps. On a CPU the steps of a session do not overlap: the
    profiler records the thread that waits for a step's result, and the step runs there.

    Args:
        runner: the runner that executes the steps.
        path: the file for the trace, which ends in `SUFFIX`. Other ranks write theirs beside it;
            see `path_of_rank`.
        delay: the number of steps to skip first.
        most: the number of steps to record; 0 for all until `finish`.

    Attributes:
        runner: as given.
        path: as given.
    """

    def __init__(self, runner: Any, path: Path, delay: int, most: int) -> None:
        self.runner = runner
        self.path = path
        self.info = runner.info
        self.kv_groups = runner.kv_groups
        self.max_in_flight = 1 if runner.info.device == "cpu" else runner.max_in_flight
        self._delay = delay
        self._most = most
        self._num_recorded = 0
        self._recording: Recording | None = None
        self._has_ended = False
        if not delay:
            self._begin()

    def submit(self, plan: StepPlan) -> Any:
        if self._delay:
            self._delay -= 1
        elif not self._has_ended:
            if self._recording is None:
                self._begin()
            return _ProfiledStep(self, plan)
        return self.runner.submit(plan)

    def compile_grammar(self, text: str) -> Any:
        return self.runner.compile_grammar(text)

    def check_params(self, params: Any) -> None:
        self.runner.check_params(params)

    def keeps_state_of(self, row: int) -> bool:
        return bool(self.runner.keeps_state_of(row))

    def read_lora(self, directory: str) -> Any:
        return self.runner.read_lora(directory)

    def make_lora(self, config: Any, tensors: Any) -> Any:
        return self.runner.make_lora(config, tensors)

    def check_embeds(self, embeds: Any, length: int) -> Any:
        return self.runner.check_embeds(embeds, length)

    def check_item(self, item: Any) -> None:
        self.runner.check_item(item)

    def check(self) -> None:
        self.runner.check()

    def watch(self, report: Any) -> None:
        self.runner.watch(report)

    def trace(self, directory: Path) -> None:
        self.runner.trace(directory)

    def everywhere(self, own: Any, pickled: Any) -> Any:
        return self.runner.everywhere(own, pickled)

    def read_weight(self, name: str) -> Any:
        return self.runner.read_weight(name)

    def close(self) -> None:
        self.runner.close()

    def finish(self) -> bool:
        """Stop recording and write the traces. Returns False if recording never began, because
        fewer steps ran than the delay."""
        if self._recording is None:
            return False
        self._end()
        self._recording.write(self.path)
        self.runner.write_recording(self.path)
        return True

    def count_step(self) -> None:
        """Count a recorded step, and stop after the last one."""
        self._num_recorded += 1
        if self._num_recorded == self._most:
            self._end()

    def _begin(self) -> None:
        self._recording = Recording()
        self.runner.begin_recording()
        self.runner.observe(record_function)

    def _end(self) -> None:
        if self._recording is not None and not self._has_ended:
            self._has_ended = True
            self.runner.observe(None)
            self.runner.end_recording()
            self._recording.end()


class _ProfiledStep:
    """A step of which the profiler records the submission and the wait for the result."""

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
        self._profiled.count_step()
        return result
