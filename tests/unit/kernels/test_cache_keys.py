"""The keys of compiled kernels do not depend on what a process launches first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[3] / "kernels"
PROGRAM = """
import json, sys
from importlib import import_module
from pkgutil import iter_modules
from shmllm_kernels import gpu
from shmllm_kernels.gpu.cache_keys import fix_cache_keys, functions_of

names = sorted(module.name for module in iter_modules(gpu.__path__))
if sys.argv[1] == "fixed":
    fix_cache_keys()
modules = [import_module(f"{gpu.__name__}.{name}") for name in names]
functions = [each for module in modules for each in functions_of(module)]
if sys.argv[1] == "fixed":
    assert all(function.hash for function in functions), "a function has no key"
if sys.argv[2] == "backwards":
    functions.reverse()
print(json.dumps({f"{each.__module__}.{each.__name__}": each.cache_key for each in functions}))
"""


def keys(*how: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    search = os.pathsep.join([str(KERNELS), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *how],
        env=kept | {"PYTHONPATH": search},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_every_function_has_one_key_in_any_order() -> None:
    found = keys("fixed", "forwards")
    assert len(found) > 200
    assert keys("fixed", "backwards") == found
