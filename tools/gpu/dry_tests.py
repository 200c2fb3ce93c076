"""Runs tests of a GPU without one, in a dry run, which compiles what they launch.

Their tensors lie on the CPU, launches compute nothing, and no comparison of tensors fails. A test
that reads a result in another way may end there: what it would launch behind that is not compiled.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu.dry_run import DryDevice
from shmllm.worker.gpu import device as gpu_device

ROOT = Path(__file__).resolve().parents[2]


class Chosen:
    """A plugin of pytest that leaves out tests.

    Args:
        is_chosen: called with the number of a test; whether it runs.
    """

    def __init__(self, is_chosen: Callable[[int], bool]) -> None:
        self._is_chosen = is_chosen

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for number, item in enumerate(items) if self._is_chosen(number)]


def launch_tests(
    arguments: Sequence[str], device: DryDevice, is_chosen: Callable[[int], bool]
) -> None:
    """Launches what tests launch. It changes the process for good.

    Args:
        arguments: the arguments of pytest that choose the tests.
        device: the device of the dry run, whose tensors are on the CPU.
        is_chosen: called with the number of a test; whether it runs.

    Raises:
        RuntimeError: pytest could not run them.
    """
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.synchronize = lambda device=None: None
    compared: Any = torch
    compared.equal = lambda *_: True
    compared.testing.assert_close = lambda *_, **__: None
    module: Any = gpu_device
    module.CudaDevice = type("CudaDevice", (), {"__new__": lambda *_: device})
    os.chdir(ROOT)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = ["-m", "gpu", "-p", "no:cacheprovider", "--tb=no"]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        code = pytest.main([*command, *arguments], plugins=[Chosen(is_chosen)])
    ran = pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED
    if code not in (*ran, pytest.ExitCode.NO_TESTS_COLLECTED):  # none, if none is chosen
        raise RuntimeError(f"pytest ended with {code!r}")
