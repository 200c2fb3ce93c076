"""Makes `import vllm` find shmllm: call `install()` before you import a client of vLLM's API.

This module owns the list of modules and names, and the finder for them. The finder is at the end of
`sys.meta_path`, so that it never shadows an installed package. Each name is resolved when it is
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

from shmllm.errors import ShmLLMError

VERSION = "0.33.0+shmllm"
"""The version of vLLM whose offline API this package provides; clients compare it."""


def _at(home: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), home)


_OUTPUTS = (
    "CompletionOutput RequestOutput PoolingOutput PoolingRequestOutput EmbeddingOutput "
    "EmbeddingRequestOutput ScoringOutput ScoringRequestOutput"
)
_HOMES = {
    **_at("shmllm", f"SamplingParams RequestOutputKind StructuredOutputsParams {_OUTPUTS}"),
    **_at("shmllm", "PoolingParams PoolerConfig TextPrompt TokensPrompt EmbedsPrompt Logprob"),
    **_at("shmllm", "EngineDeadError BeamSearchParams RepetitionDetectionParams"),
    "VLLMClientError": "shmllm:RequestError",
    "VLLMValidationError": "shmllm:RequestError",
    "VLLMError": "shmllm:ShmLLMError",
    **_at("shmllm.compat.vllm_names", "LLM AsyncLLM get_tokenizer"),
    **_at("shmllm.compat.vllm_names", "resolve_chat_template RayPrometheusStatLogger"),
    **_at("shmllm.compat.vllm_engine_args", "EngineArgs AsyncEngineArgs"),
    **_at("shmllm.compat.vllm_absent", "LoRARequest get_ip trainer_init"),
    **_at("shmllm.compat.vllm_absent", "packed_nccl_broadcast_producer"),
    "AsyncLLMEngine": "shmllm.compat.vllm_names:AsyncLLM",
}
"""The module that defines each name, as "module", or "module:name" if the names differ."""

_MODULES = {
    "vllm": "LLM SamplingParams PoolingParams TextPrompt TokensPrompt EngineArgs AsyncEngineArgs "
    f"AsyncLLMEngine {_OUTPUTS}",
    "vllm.config": "PoolerConfig",
    "vllm.distributed.weight_transfer.nccl_common": "trainer_init",
    "vllm.distributed.weight_transfer.packed_tensor": "packed_nccl_broadcast_producer",
    "vllm.engine.arg_utils": "EngineArgs AsyncEngineArgs",
    "vllm.engine.async_llm_engine": "AsyncLLMEngine",
    "vllm.entrypoints.llm": "LLM",
    "vllm.exceptions": "VLLMError VLLMClientError VLLMValidationError",
    "vllm.inputs": "TextPrompt TokensPrompt EmbedsPrompt",
    "vllm.inputs.llm": "TextPrompt TokensPrompt EmbedsPrompt",
    "vllm.logprobs": "Logprob",
    "vllm.lora.request": "LoRARequest",
    "vllm.outputs": _OUTPUTS,
    "vllm.pooling_params": "PoolingParams",
    "vllm.renderers.hf": "resolve_chat_template",
    "vllm.sampling_params": "SamplingParams StructuredOutputsParams RequestOutputKind "
    "BeamSearchParams RepetitionDetectionParams",
    "vllm.tokenizers": "get_tokenizer",
    "vllm.utils.network_utils": "get_ip",
    "vllm.v1.engine.async_llm": "AsyncLLM",
    "vllm.v1.engine.exceptions": "EngineDeadError",
    "vllm.v1.metrics.ray_wrappers": "RayPrometheusStatLogger",
}


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
    for name, module in list(sys.modules.items()):
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
        if f"{self.__name__}.{name}" in _PACKAGES_AND_MODULES:
            return importlib.import_module(f"{self.__name__}.{name}")
        if name not in _MODULES.get(self.__name__, "").split():
            raise AttributeError(
                f"shmllm's replacement for {self.__name__!r} has no {name!r}: see "
                "shmllm.compat.vllm for the names that exist"
            )
        home, _, other_name = _HOMES[name].partition(":")
        value = getattr(importlib.import_module(home), other_name or name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _PACKAGES_AND_MODULES:
            return None
        is_package = any(name.startswith(f"{fullname}.") for name in _MODULES)
        return importlib.machinery.ModuleSpec(
            fullname, self, origin="shmllm.compat.vllm", is_package=is_package
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        names = _MODULES.get(module.__name__, "").split()
        module.__dict__["__all__"] = names
        if module.__name__ == "vllm":
            module.__dict__["__version__"] = VERSION

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


def _with_parents(names: Sequence[str]) -> set[str]:
    parts = (name.split(".") for name in names)
    return {".".join(p[: i + 1]) for p in parts for i in range(len(p))}


_PACKAGES_AND_MODULES = _with_parents(list(_MODULES))
