"""The options for CUDA graphs: which steps an engine on a GPU captures, and at which sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from shmllm.config.options import Flag, Section, Whole, option
from shmllm.errors import EngineStartError


class CudaGraphMode(Enum):
    """A pair of modes: one for decode steps, in which every request has one token, and one for all
    other steps.

    The first three modes are also the modes of a single step:

    NONE: every kernel is launched.
    PIECEWISE: graphs are replayed, and the attention kernels between them are launched.
    FULL: one graph computes the step from the embedding to the logits.
    """

    NONE = ("NONE", "NONE")
    PIECEWISE = ("PIECEWISE", "PIECEWISE")
    FULL = ("FULL", "FULL")
    FULL_DECODE_ONLY = ("FULL", "NONE")
    FULL_AND_PIECEWISE = ("FULL", "PIECEWISE")

    @property
    def decode_mode(self) -> CudaGraphMode:
        """NONE, PIECEWISE or FULL: the mode of decodes."""
        return CudaGraphMode[self.value[0]]

    @property
    def mixed_mode(self) -> CudaGraphMode:
        """NONE, PIECEWISE or FULL: the mode of all other steps, and of decodes without a graph."""
        return CudaGraphMode[self.value[1]]

    @classmethod
    def parse(cls, name: str) -> CudaGraphMode:
        """The mode of this name, in letters of any case.

        Raises:
            EngineStartError: no mode has this name.
        """
        try:
            return cls[str(name).upper()]
        except KeyError:
            known = ", ".join(mode.name for mode in cls)
            raise EngineStartError(f"cudagraph_mode {name!r} is not one of {known}") from None


@dataclass(frozen=True)
class CaptureSizes:
    """The kind of the option `cudagraph_capture_sizes`: a list of whole numbers, or None."""

    def parse(self, name: str, value: Any) -> Any:
        if value is None:
            return None
        try:
            sizes = sorted({*value})
        except TypeError:
            raise EngineStartError(
                f"{name} must be a list of whole numbers, got {value!r}"
            ) from None
        for size in sizes:
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                sizes = []
        if not sizes:
            raise EngineStartError(
                f"{name} must be whole numbers of at least 1, got {list(value)!r}"
            )
        return tuple(sizes)


@dataclass(frozen=True, slots=True)
class GraphConfig(Section):
    """The CUDA graphs of an engine on a GPU.

    Attributes:
        mode: the name of a CudaGraphMode. The option `compilation_config` sets it.
    """

    mode: str = CudaGraphMode.FULL_AND_PIECEWISE.name
    capture_sizes: Sequence[int] | None = option(
        None,
        "Numbers of tokens for which CUDA graphs are captured.",
        CaptureSizes(),
        name="cudagraph_capture_sizes",
        default_text="follow from the mode and max_num_seqs",
        flag="",
    )
    max_capture_size: int | None = option(
        None,
        "The largest of these sizes.",
        Whole(optional=True),
        name="max_cudagraph_capture_size",
        flag="",
    )
    enforce_eager: bool = option(False, "Capture no CUDA graphs.", Flag())

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        CudaGraphMode.parse(self.mode)
        sizes, largest = self.capture_sizes, self.max_capture_size
        if sizes is not None and largest is not None and max(sizes) != largest:
            raise EngineStartError(
                f"max_cudagraph_capture_size {largest:,} is not the largest of the "
                f"cudagraph_capture_sizes, {max(sizes):,}; give one of the two"
            )

    @property
    def effective_mode(self) -> CudaGraphMode:
        """The mode, or NONE if `enforce_eager` is set."""
        return CudaGraphMode.NONE if self.enforce_eager else CudaGraphMode.parse(self.mode)
