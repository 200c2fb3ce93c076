"""Which steps of a GPU's engine are captured as graphs, and at which sizes."""

from __future__ import annotations

from dataclasses import dataclass

from shmllm.errors import EngineStartError

GRAPH_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


@dataclass(frozen=True, slots=True)
class GraphConfig:
    """
    Attributes:
        mode: one of GRAPH_MODES, as vLLM's `cudagraph_mode`.
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
        if self.mode not in GRAPH_MODES:
            known = ", ".join(GRAPH_MODES)
            raise EngineStartError(f"cudagraph_mode {self.mode!r} is not one of {known}")
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
    def effective_mode(self) -> str:
        """The mode, with `enforce_eager` heeded."""
        return "NONE" if self.enforce_eager else self.mode


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
