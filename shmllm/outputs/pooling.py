"""What pooling requests return: vectors, embeddings, scores. Names as in vLLM.

Vectors stay numpy arrays until somebody asks for a tensor or a list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]


@dataclass(slots=True, eq=False)
class PoolingOutput:
    """A vector.

    Attributes:
        array: (components,) float32, read-only.
    """

    array: Vector

    @property
    def data(self) -> Any:
        """The vector as a torch tensor of its own; imports torch."""
        import torch

        return torch.from_numpy(self.array.copy())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolingOutput) and np.array_equal(self.array, other.array)


@dataclass(slots=True, eq=False)
class EmbeddingOutput:
    """An embedding.

    Attributes:
        array: (hidden_size,) float32, read-only.
    """

    array: Vector

    @property
    def embedding(self) -> list[float]:
        """The same as a list."""
        values: list[float] = self.array.tolist()
        return values

    @property
    def hidden_size(self) -> int:
        return len(self.array)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EmbeddingOutput) and np.array_equal(self.array, other.array)

    def __repr__(self) -> str:
        return f"EmbeddingOutput(hidden_size={self.hidden_size})"


@dataclass(slots=True)
class ScoringOutput:
    """How similar two prompts are: the cosine of the angle between their embeddings."""

    score: float


Output = TypeVar("Output")


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Output]):
    """A prompt and what was made of it.

    Attributes:
        request_id: counts requests.
        outputs: the vector, embedding or score.
        prompt_token_ids: of the prompt; of a score, of both prompts.
        num_cached_tokens: prompt tokens whose keys and values came from the prefix cache.
        finished: True.
        error: why there is none; `outputs` is empty then. Not raised, so that the other
            prompts' vectors are not lost.
        prompt: the text, None when token ids were given. Of a score, None.
    """

    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    error: str | None = None
    prompt: str | None = None


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """What `LLM.embed` returns."""

    __slots__ = ()


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """What `LLM.score` returns."""

    __slots__ = ()
