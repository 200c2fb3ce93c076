"""Which steps of a GPU's engine are captured as graphs, and at which sizes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from shmllm.errors import EngineStartError


class CudaGraphMode(Enum):
    """How steps are run: decodes, in which every request has one token, and all others.

    The first three are also what a single step is run with:

    NONE: every kernel is launched.
    PIECEWISE: graphs between the attentions, which are launched.
    FULL: one graph from the embedding to the logits.
    """

    NONE = ("NONE", "NONE")
    PIECEWISE = ("PIECEWISE", "PIECEWISE")
    FULL = ("FULL", "FULL")
    FULL_DECODE_ONLY = ("FULL", "NONE")
    FULL_AND_PIECEWISE = ("FULL", "PIECEWISE")

    @property
    def decode_mode(self) -> CudaGraphMode:
        """NONE, PIECEWISE or FULL: for decodes."""
        return CudaGraphMode[self.value[0]]

    @property
    def mixed_mode(self) -> CudaGraphMode:
        """NONE, PIECEWISE or FULL: for all other steps, and for decodes that have no graph."""
        return CudaGraphMode[self.value[1]]

    @classmethod
    def parse(cls, name: str) -> CudaGraphMode:
        """The mode of that name, in letters of any case; EngineStartError if there is none."""
        try:
            return cls[str(name).upper()]
        except KeyError:
            known = ", ".join(mode.name for mode in cls)
            raise EngineStartError(f"cudagraph_mode {name!r} is not one of {known}") from None


@dataclass(frozen=True, slots=True)
class GraphConfig:
    """
    Attributes:
        mode: the name of a CudaGraphMode, as vLLM's `cudagraph_mode`.
        capture_sizes: numbers of tokens, rising; None: as the mode and the scheduler's limits
            suggest.
        max_capture_size: the largest of these sizes; None: as suggested.
        enforce_eager: capture nothing, whatever the others say.
    """

    mode: str = "FULL_AND_PIECEWISE"
    capture_sizes: tuple[int, ...] | None = None
    max_capture_size: int | None = None
    enforce_eager: bool = False

    def __post_init__(self) -> None:
        CudaGraphMode.parse(self.mode)
        if not isinstance(self.enforce_eager, bool):
            raise EngineStartError(
                f"enforce_eager must be True or False, got {self.enforce_eager!r}"
            )
        sizes, largest = self.capture_sizes, self.max_capture_size
        if sizes is not None and (not sizes or not all(map(_is_size, sizes))):
            raise EngineStartError(
                f"cudagraph_capture_sizes must be whole numbers of at least 1, got {list(sizes)!r}"
            )
        if largest is not None and not _is_size(largest):
            raise EngineStartError(
                f"max_cudagraph_capture_size must be a whole number of at least 1, got {largest!r}"
            )
        if sizes is not None and largest is not None and max(sizes) != largest:
            raise EngineStartError(
                f"max_cudagraph_capture_size {largest:,} is not the largest of the "
                f"cudagraph_capture_sizes, {max(sizes):,}; give one of the two"
            )

    @property
    def effective_mode(self) -> CudaGraphMode:
        """The mode, with `enforce_eager` heeded."""
        return CudaGraphMode.NONE if self.enforce_eager else CudaGraphMode.parse(self.mode)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
