"""Where a trainer's engine gets weights from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ParamMeta:
    """
    Attributes:
        name: the name in the Hugging Face checkpoint.
        dtype: the torch.dtype in which it is sent.
        shape: the whole shape.
    """

    name: str
    dtype: Any
    shape: tuple[int, ...]


class WeightSource(ABC):
    """The weights of a trainer. Each iteration is a fresh pass over all of them."""

    @abstractmethod
    def metadata(self) -> list[ParamMeta]:
        """What an iteration yields, in its order, without collecting any tensor."""

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, whole tensor) pairs. A pair may use the memory of the one before."""


class ModuleSource(WeightSource):
    """The parameters of a module. Those that FSDP has divided (DTensor) are gathered one by one,
    so all ranks of the trainer must iterate.

    Args:
        module: a torch.nn.Module with the names of the checkpoint.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def metadata(self) -> list[ParamMeta]:
        named = self._module.named_parameters()
        return [ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in named]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for name, parameter in self._module.named_parameters():
            gather = getattr(parameter, "full_tensor", None)
            tensor = parameter if gather is None else gather()
            yield name, tensor.detach()
