"""A model's forward pass through the Triton kernels, interpreted."""

from __future__ import annotations

from gpu_steps import GpuSteps
from program_conformance import ProgramConformance, _few_processors, add_prompts, models

__all__ = ["_few_processors", "models"]


class TestProgram(ProgramConformance):
    pass


def test_a_full_replay_launches_nothing_else_and_no_step_makes_the_host_wait(
    gpu_device, models
) -> None:
    steps = GpuSteps(gpu_device, models("llama")[1], "FULL_AND_PIECEWISE", (2,))
    steps.program.capture()
    add_prompts(steps, {0: 1, 1: 2})
    launched = []
    gpu_device.may_wait = False
    for work in ({0: 1}, {1: 2}):
        step = steps.prepare(work)
        gpu_device.launched.clear()
        steps.program.run(step.mode, step.descriptor, step.max_query_len)
        launched.append(list(gpu_device.launched))
    logits = ["_copy_rows", "aten::mm"]
    assert launched == [["graph"], ["graph", "attend", "graph", "attend", "graph", *logits]]
