"""Parameters of pooling requests, which turn a prompt into one vector.

PoolingParams and PoolerConfig are the classes that users construct, with vLLM's names. Pooling
is the form of them that the engine uses. This module must not know how vectors are computed.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from shmllm.errors import RequestError
from shmllm.params.unknown_options import reject_unknown_options

TASKS = ("embed",)


class PoolingType(IntEnum):
    """The hidden states that the result is made of.

    LAST: the hidden state of the last token. MEAN: the mean of the hidden states of all tokens.
    CLS: the hidden state of the first token. ALL: a row for each token.
    """

    LAST = 1
    MEAN = 2
    CLS = 3
    ALL = 4


@dataclass(frozen=True, slots=True)
class Pooling:
    """How the engine pools a prompt's hidden states, which it takes after the final norm.

    Attributes:
        type: the hidden states that the result is made of.
        dimensions: the number of leading components to keep; 0 keeps all.
        normalize: whether to divide the vector, after truncation to `dimensions`, by its
            Euclidean norm.
        reads_prefix_cache: whether prefix-cache hits may be used. Always False for MEAN and CLS,
            which need hidden states that are not cached; with ALL the tokens of a hit have no rows.
        uses_head: whether the model's projection or classifier is applied, before `dimensions`.
        second_segment: the index of the first token of the second text of a pair, for models whose
            tokens have types; 0: there is none.
        num_skipped: how many tokens at the beginning a mean leaves out.
    """

    type: PoolingType = PoolingType.LAST
    dimensions: int = 0
    normalize: bool = True
    reads_prefix_cache: bool = True
    uses_head: bool = False
    second_segment: int = 0
    num_skipped: int = 0

    def __post_init__(self) -> None:
        if self.type in (PoolingType.MEAN, PoolingType.CLS) and self.reads_prefix_cache:
            object.__setattr__(self, "reads_prefix_cache", False)


@dataclass(slots=True)
class PoolingParams:
    """Parameters of one pooling request.

    Args:
        use_activation: normalize the vector to length 1. None uses the value of the LLM's
            `pooler_config`, or True if that has none.
        dimensions: the number of leading components to keep before normalization, for models
            that were trained for it (Matryoshka); None uses the value of the `pooler_config`,
            or keeps all.
        pooling_type: "LAST" or "MEAN"; see PoolingType. None uses the value of the
            `pooler_config`, or "LAST". vLLM's class does not have this field: its engine has
            one pooling type for all requests.
        task: "embed" or None, which means the same.
        skip_reading_prefix_cache: compute the whole prompt, without prefix-cache hits.

    Raises:
        RequestError: a field is out of its range. The message contains the field, its value
            and the range.
    """

    use_activation: bool | None = None
    dimensions: int | None = None
    pooling_type: str | None = None
    task: str | None = None
    skip_reading_prefix_cache: bool | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise RequestError if a field is out of its range.

        The constructor checks, too. This method finds values that were assigned afterwards.
        """
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
        """A copy."""
        return copy.copy(self)

    def _require(self, name: str, valid: bool, allowed: str) -> None:
        if not valid:
            value = getattr(self, name)
            message = f"{name} must be {allowed}, got {value!r}"
            raise RequestError(message, parameter=name, value=value)


@dataclass(frozen=True, slots=True)
class PoolerConfig:
    """Defaults for the pooling requests of an LLM, with vLLM's names.

    Args:
        pooling_type: "LAST" or "MEAN"; None means "LAST".
        seq_pooling_type: another name of `pooling_type`.
        use_activation: normalize vectors to length 1; None means True.
        dimensions: the number of leading components to keep; None keeps all.
        task: "embed" or None, which means the same.

    Raises:
        RequestError: a field is out of its range, or the two pooling types differ.
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
        """The PoolerConfig for a value of the option `pooler_config`.

        Raises:
            TypeError: `value` has another type, or an unknown key.
            RequestError: a field is out of its range.
        """
        if value is None or isinstance(value, cls):
            return value or cls()
        if not isinstance(value, dict):
            raise TypeError(f"pooler_config is a PoolerConfig or a dict, got {value!r}")
        reject_unknown_options("PoolerConfig", value, cls.__dataclass_fields__)
        return cls(**value)

    def complete(self, params: PoolingParams) -> PoolingParams:
        """A copy of `params` in which the defaults replace None.

        Raises:
            RequestError: a field is out of its range.
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
