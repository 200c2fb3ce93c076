"""A model's forward pass through the Triton kernels, interpreted."""

from __future__ import annotations

from gpu_steps import GpuSteps
from program_conformance import ProgramConformance, _few_processors, add_prompts, models

from shmllm.worker.gpu import ops

__all__ = ["_few_processors", "models"]


class TestProgram(ProgramConformance):
    pass


def test_a_full_replay_launches_nothing_else(gpu_device, models) -> None:
    """And no step makes the host wait."""
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


def test_only_decodes_are_split_and_warming_up_has_all_their_variants(
    gpu_device, models, monkeypatch
) -> None:
    """A number of splits is a kernel of its own, which a request should not wait for."""
    found: list[int] = []
    monkeypatch.setattr(
        ops, "paged_attention", lambda *_, num_splits, **__: found.append(num_splits)
    )
    steps = GpuSteps(gpu_device, models("llama")[1])
    steps.program.warm_up()
    warm = set(found)
    add_prompts(steps, {0: 2, 1: 1, 2: 1})
    used = []
    for work in ({0: 2}, {0: 1}, {1: 1, 0: 1}, {1: 1, 0: 1, 2: 1}):
        steps.run(steps.prepare(work))
        used.append(found[-1])
    assert used[0] == used[3] == 1
    assert used[1] > used[2] > 1
    assert warm == set(used)
