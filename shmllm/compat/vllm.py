"""Makes `import vllm` find shmllm: call `install()` before you import a client of vLLM's API.

This module owns the finder, which is at the end of `sys.meta_path`, so that it never shadows an
installed package. `vllm_modules` lists the modules and names; each name is resolved when it is
first used. The module must not know what the names do.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from shmllm.compat.vllm_modules import (
    ALL_MODULES,
    VERSION,
    describe_absent,
    find_name,
    names_of,
)
from shmllm.errors import ShmLLMError


def install() -> None:
    """Makes `import vllm` and imports of its submodules find shmllm, in this process.

    A second call has no effect. A client that starts further processes needs this call in each of
    them.

    Raises:
        ShmLLMError: `import vllm` already finds the real vLLM or another package of this name.
    """
    if _installed() is None:
        _refuse_to_shadow()
        sys.meta_path.append(_Finder())


def uninstall() -> None:
    """Undoes `install`. Clients that were already imported keep the names that they imported."""
    finder = _installed()
    if finder is None:
        return
    sys.meta_path.remove(finder)
    for name, module in sys.modules.copy().items():  # other threads may import meanwhile
        spec = getattr(module, "__spec__", None)
        if spec is not None and spec.loader is finder:
            del sys.modules[name]


def _installed() -> _Finder | None:
    return next((finder for finder in sys.meta_path if isinstance(finder, _Finder)), None)


def _refuse_to_shadow() -> None:
    if "vllm" in sys.modules:
        raise ShmLLMError("a module named vllm is already imported; shmllm does not replace it")
    found = importlib.util.find_spec("vllm")
    if found is not None:
        where = found.origin or ", ".join(found.submodule_search_locations or ())
        raise ShmLLMError(
            f"import vllm already finds {where}; shmllm does not shadow it. Uninstall it, use "
            "another environment, or import shmllm instead"
        )


class _Module(ModuleType):
    """A module that resolves each name when it is first used."""

    def __getattr__(self, name: str) -> Any:
        full_name = f"{self.__name__}.{name}"
        if name.startswith("__") and find_name(self.__name__, name) is None:
            raise AttributeError(f"{self.__name__} has no {name}")  # Python itself asks for them
        if full_name in ALL_MODULES:
            return importlib.import_module(full_name)
        found = find_name(self.__name__, name)
        if found is None:
            raise AttributeError(describe_absent(full_name), name=name, obj=self)
        value = getattr(importlib.import_module(found.home), found.name)
        setattr(self, name, value)
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by name, as programs for Ray pickle functions with the modules that they use."""
        return importlib.import_module, (self.__name__,)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in ALL_MODULES:
            # Each module is a package, so that the import of a name that it lacks comes here, too.
            return importlib.machinery.ModuleSpec(
                fullname, self, origin="shmllm.compat.vllm", is_package=True
            )
        if fullname.startswith("vllm."):
            # With a `name`, Python would replace the message if the import is a `from` import.
            raise ModuleNotFoundError(describe_absent(fullname))
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        names = names_of(module.__name__)
        module.__dict__["__all__"] = [name for name in names if not name.startswith("_")]

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context
    ) -> Iterator[importlib.metadata.Distribution]:
        """Yields a distribution for `importlib.metadata.version("vllm")` only.

        Lists of all installed packages do not contain it.
        """
        if context.name == "vllm":
            yield _Distribution()


class _Distribution(importlib.metadata.Distribution):
    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n"

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return Path(path)
