"""How a prompt becomes one vector.

Owns the parameters that people give, with vLLM's names, and the small form of them that the
engine acts on. Knows nothing of how pooling is done.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from shmllm.errors import RequestError
from shmllm.params.keywords import reject_unknown_options

TASKS = ("embed",)


class PoolingType(IntEnum):
    """Which hidden states make the vector. LAST: the last token's. MEAN: the mean of all."""

    LAST = 1
    MEAN = 2


@dataclass(frozen=True, slots=True)
class Pooling:
    """What the engine does with a prompt's hidden states, after the model's final norm.

    Attributes:
        type: which of them.
        dimensions: leading components to keep; 0 for all.
        normalize: divide by the Euclidean norm, after the cut.
        reads_prefix_cache: use cached keys and values. The mean needs every hidden state, so
            it never does.
    """

    type: PoolingType = PoolingType.LAST
    dimensions: int = 0
    normalize: bool = True
    reads_prefix_cache: bool = True

    def __post_init__(self) -> None:
        if self.type is PoolingType.MEAN and self.reads_prefix_cache:
            object.__setattr__(self, "reads_prefix_cache", False)


@dataclass(slots=True)
class PoolingParams:
    """Parameters of one pooling request.

    Args:
        use_activation: normalise the vector to length 1; None takes the engine's
            `pooler_config`, and True without one.
        dimensions: leading components to keep, before it is normalised, for models that were
            trained for that (Matryoshka); None keeps all.
        pooling_type: "LAST" or "MEAN"; None takes the engine's `pooler_config`, and "LAST"
            without one. Not in vLLM's class, whose engine has one for all.
        task: "embed", or None.
        skip_reading_prefix_cache: compute the whole prompt.

    Raises:
        RequestError: names the field, the value and what it may be.
    """

    use_activation: bool | None = None
    dimensions: int | None = None
    pooling_type: str | None = None
    task: str | None = None
    skip_reading_prefix_cache: bool | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise RequestError if a field is out of its range."""
        for name in ("use_activation", "skip_reading_prefix_cache"):
            self._require(name, getattr(self, name) in (None, True, False), "None, True or False")
        size = self.dimensions
        self._require(
            "dimensions",
            size is None or (type(size) is int and size >= 1),
            "None or a whole number of at least 1",
        )
        kinds = [kind.name for kind in PoolingType]
        self._require(
            "pooling_type", self.pooling_type in (None, *kinds), f"None, {' or '.join(kinds)}"
        )
        self._require("task", self.task in (None, *TASKS), f"None or {' or '.join(TASKS)}")

    def clone(self) -> PoolingParams:
        return copy.copy(self)

    def _require(self, name: str, valid: bool, allowed: str) -> None:
        if not valid:
            raise RequestError(f"{name} must be {allowed}, got {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class PoolerConfig:
    """Defaults of an engine's pooling requests; names as in vLLM.

    Args:
        pooling_type: "LAST" or "MEAN".
        seq_pooling_type: the same.
        use_activation: normalise vectors to length 1.
        dimensions: leading components to keep.
        task: "embed", or None.
    """

    pooling_type: str | None = None
    seq_pooling_type: str | None = None
    use_activation: bool | None = None
    dimensions: int | None = None
    task: str | None = None

    def __post_init__(self) -> None:
        kinds = (self.pooling_type, self.seq_pooling_type)
        if None not in kinds and kinds[0] != kinds[1]:
            raise RequestError(
                f"pooling_type {kinds[0]!r} and seq_pooling_type {kinds[1]!r} contradict each other"
            )
        self.complete(PoolingParams())

    @classmethod
    def make(cls, value: PoolerConfig | dict[str, Any] | None) -> PoolerConfig:
        """From what the option `pooler_config` may be."""
        if value is None or isinstance(value, cls):
            return value or cls()
        if not isinstance(value, dict):
            raise TypeError(f"pooler_config is a PoolerConfig or a dict, got {value!r}")
        reject_unknown_options("PoolerConfig", value, cls.__dataclass_fields__)
        return cls(**value)

    def complete(self, params: PoolingParams) -> PoolingParams:
        """`params` with what they leave open taken from here.

        Raises:
            RequestError: a field of either is out of its range.
        """
        kind = params.pooling_type or self.pooling_type or self.seq_pooling_type
        activate = self.use_activation if params.use_activation is None else params.use_activation
        return PoolingParams(
            use_activation=True if activate is None else activate,
            dimensions=params.dimensions or self.dimensions,
            pooling_type=kind or PoolingType.LAST.name,
            task=params.task or self.task,
            skip_reading_prefix_cache=params.skip_reading_prefix_cache,
        )
