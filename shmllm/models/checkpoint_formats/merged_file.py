"""Reads the files of a checkpoint with a low-rank adapter, which lies beside it in the format of
PEFT, added to its weights: W + scale * B A, computed in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shmllm.errors import EngineStartError
from shmllm.models.checkpoint import CheckpointFile
from shmllm.models.checkpoint_formats.adapted_file import WrappedFile
from shmllm.models.lora import by_module, read_files
from shmllm.models.peft_config import CONFIG_FILE, PeftConfig
from shmllm.models.quantized import one_thread
from shmllm.models.weight_names import model_name


class Change(NamedTuple):
    """What an adapter adds to a weight [out, in].

    Attributes:
        a, b: [rank, in] and [out, rank].
        scale: the factor of b a.
    """

    a: Tensor
    b: Tensor
    scale: float


class MergedFile(WrappedFile):
    """One file. Its weights are those with the adapter.

    Args:
        file: the file.
        changes: what the adapter adds, by the default names of weights.
    """

    def __init__(self, file: CheckpointFile, changes: Mapping[str, Change]) -> None:
        super().__init__(file)
        self._changes = changes

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def check(self, name: str) -> None:
        self._file.check(name)

    @contextmanager
    def tensor(self, name: str) -> Iterator[Tensor]:
        change = self._changes.get(_default_name(name))
        with self._file.tensor(name) as tensor:
            if change is None:
                yield tensor
                return
            values = tensor.to(torch.float32, copy=True)
        with one_thread():
            values.addmm_(change.b, change.a, alpha=change.scale)
        yield values


def merged_files(files: Sequence[CheckpointFile], adapter: Path) -> list[CheckpointFile]:
    """Returns the files of a checkpoint with an adapter's changes of their weights.

    Args:
        files: all of the checkpoint; none is quantized.
        adapter: the adapter's directory. Its matrices are in memory as long as the files are used.

    Raises:
        EngineStartError: the adapter is missing, damaged, or of another kind than PEFT's low-rank
            ones, or it changes a weight that the checkpoint lacks or that has another shape.
    """
    if not (adapter / CONFIG_FILE).is_file():
        raise EngineStartError(
            f"{adapter} has no {CONFIG_FILE}: put the adapter of the task there; for a checkpoint "
            'into which one is merged, pass hf_overrides={"task_names": []}'
        )
    config, tensors = read_files(adapter)
    own, changes = PeftConfig.from_fields(config), {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with file:
            shapes |= {_default_name(name): shape for name, shape in file.shapes().items()}
    for module, matrices in by_module(tensors).items():
        name = _default_name(f"{module}.weight")
        rank, scale = own.of_module(module)
        a, b = (matrices[each] for each in "AB")
        if name not in shapes:
            raise tensors.error(f"the checkpoint has no weight that {module!r} changes")
        rows, *columns = shapes[name]
        for matrix, found, wanted in (("A", a, [rank, *columns]), ("B", b, [rows, rank])):
            if [*found.shape] != wanted:
                shape = [*found.shape]
                raise tensors.error(f"{module}.lora_{matrix} has shape {shape}, not {wanted}")
            if not found.isfinite().all():
                raise tensors.error(f"{module}.lora_{matrix} has values that are not finite")
        changes[name] = Change(a.float(), b.float(), scale)
    return [MergedFile(file, changes) for file in files]


def _default_name(name: str) -> str:
    """The name that a tensor of the checkpoint and its module in the adapter have in common."""
    return model_name(name, tied=False) or name
