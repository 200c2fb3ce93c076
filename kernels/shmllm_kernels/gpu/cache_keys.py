"""Makes the keys under which Triton caches compiled kernels the same in every process.

Triton computes the key of a function when it is first compiled, together with those of what it
calls. The key also covers the globals of a called function, but only if that one had its key
before. So a kernel is compiled again by a process that launches others first: an engine with a
draft model, a test, a measurement.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

from triton.runtime.jit import JITFunction

from shmllm_kernels import gpu


def fix_cache_keys() -> None:
    """Computes the keys of all kernel functions of this package, in the order of their names.

    A process has to call it before it launches the first one. It takes 0.2 s. Interpreted functions
    have no keys.
    """
    for name in sorted(module.name for module in iter_modules(gpu.__path__)):
        for function in functions_of(import_module(f"{gpu.__name__}.{name}")):
            assert function.cache_key


def functions_of(module: ModuleType) -> list[JITFunction[object]]:
    """Returns the compiled kernel functions that a module defines, in the order of their names."""
    return [
        function
        for _, function in sorted(vars(module).items())
        if isinstance(function, JITFunction) and function.fn.__module__ == module.__name__
    ]
