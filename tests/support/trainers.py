"""Trainers for tests: sources of weights, and a checkpoint with other weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shmllm import LLM
from shmllm.errors import CallOrderError
from shmllm.trainer import ParamMeta, WeightSource


class DictSource(WeightSource):
    """Named tensors.

    Args:
        weights: the tensors.
        before: called before each tensor, with its index.
    """

    def __init__(
        self, weights: Mapping[str, Any], before: Callable[[int], None] = lambda index: None
    ) -> None:
        self.weights = dict(weights)
        self._before = before

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in self.items()]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for index, (name, tensor) in enumerate(self.items()):
            self._before(index)
            yield name, tensor

    def items(self) -> list[tuple[str, Any]]:
        """The names and tensors."""
        return list(self.weights.items())


def other_checkpoint(directory: Path) -> dict[str, Any]:
    """Write a checkpoint of the bundled model with other weights. Returns the weights.

    Args:
        directory: it must not exist.
    """
    from safetensors.torch import load_file, save_file

    from shmllm.frontend.model_files import resolve_model

    tiny = resolve_model("tiny")
    shutil.copytree(tiny, directory)
    (file,) = directory.glob("*.safetensors")
    weights = {name: tensor * 0.5 for name, tensor in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    return weights


def checksums_of(model: str, **options: Any) -> dict[str, str]:
    """The checksums of an engine that starts with a checkpoint."""
    given = {"kv_cache_memory_bytes": 2**24, "num_threads": 1} | options
    with LLM(model, multiprocess=False, **given) as llm:
        return llm.compute_weight_checksums()


def can_update(llm: LLM) -> bool:
    """Whether no other front end has an update in progress."""
    try:
        llm.start_weight_update()
    except CallOrderError:
        return False
    llm.abandon_weight_update()
    return True
