"""All layers of a model in one launch, on the fake GPU."""

from __future__ import annotations

import pytest
from conformance.gpu_persistent import PersistentConformance
from conformance.gpu_program import _inference_mode, add_prompts, models
from support.gpu_steps import GpuSteps

__all__ = ["_inference_mode", "models"]


class TestPersistent(PersistentConformance):
    pass


@pytest.mark.usefixtures("launches_only")
def test_a_step_is_one_launch_for_all_layers(gpu_device, models) -> None:
    steps = GpuSteps(gpu_device, models("llama")[1], decode_kernel="persistent")
    steps.program.warm_up()
    add_prompts(steps, {0: 1, 1: 1, 2: 1})
    step = steps.prepare({0: 1, 1: 1, 2: 1})
    gpu_device.launched.clear()
    steps.run(step)
    launched = [name for name in gpu_device.launched if name.startswith(("_", "dec", "mul"))]
    assert launched == [
        "_copy_rows", "_rope_tables", "decode_layers", "_rms_norm", "_copy_rows",
        "multiply_few_rows",
    ]  # fmt: skip
