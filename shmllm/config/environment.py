"""The environment variables of the processes that compute."""

from __future__ import annotations

import os
import site
import sysconfig
from collections.abc import Mapping
from pathlib import Path

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
WAITING_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
# How often an OpenMP thread checks for work before it sleeps. By default it spins for
# milliseconds. If another process then needs the core, every operator of a step waits for a thread
# that has lost its core (measured: docs/benchmarks.md).
SPIN_COUNT = "4000"
# glibc allocates large blocks in huge pages: page faults then take 8 instead of 56 ms when the
# weights of a model with 135 M parameters are packed again.
MALLOC_TUNABLES = "glibc.malloc.hugetlb=1"


def _import_paths() -> list[str]:
    """The directories from which this process imports shmllm and which a new interpreter would
    not search."""
    found = {sysconfig.get_paths()["purelib"], *site.getsitepackages(), site.getusersitepackages()}
    package = Path(__file__).resolve().parents[1]
    roots = [str(package.parent)]
    if (package.parent / "kernels" / "shmllm_kernels").is_dir():
        roots.append(str(package.parent / "kernels"))
    return [root for root in roots if root not in found]


def engine_environment() -> dict[str, str]:
    """The environment for an engine process.

    It is the caller's environment without the thread counts, which are meant for other programs.
    Idle OpenMP threads spin for a short time only, unless the caller's environment sets how they
    wait.
    """
    environment = {k: v for k, v in os.environ.items() if k not in THREAD_VARIABLES}
    if not environment.keys() & set(WAITING_VARIABLES):
        environment["GOMP_SPINCOUNT"] = SPIN_COUNT
    environment.setdefault("GLIBC_TUNABLES", MALLOC_TUNABLES)
    return import_environment(environment)


def import_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which a Python program imports shmllm from the same place as this one."""
    paths = [*_import_paths(), *filter(None, [environment.get("PYTHONPATH")])]
    found = {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
    return {**environment, **found}
