"""The results of pooling requests: vectors, embeddings and scores, with vLLM's names.

Vectors are numpy arrays. Properties convert them to a torch tensor or a list when they are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]


@dataclass(slots=True, eq=False)
class PoolingOutput:
    """The vector of a prompt, as `LLM.encode` returns it.

    Attributes:
        array: the vector, a read-only float32 array of shape (components,).
    """

    array: Vector

    @property
    def data(self) -> Any:
        """A copy of the vector as a torch tensor. Imports torch."""
        import torch

        return torch.from_numpy(self.array.copy())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolingOutput) and np.array_equal(self.array, other.array)


@dataclass(slots=True, eq=False)
class EmbeddingOutput:
    """The embedding of a prompt, as `LLM.embed` returns it.

    Attributes:
        array: the vector, a read-only float32 array of shape (hidden_size,).
    """

    array: Vector

    @property
    def embedding(self) -> list[float]:
        """The vector as a list of floats."""
        values: list[float] = self.array.tolist()
        return values

    @property
    def hidden_size(self) -> int:
        """The number of components of the vector."""
        return len(self.array)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EmbeddingOutput) and np.array_equal(self.array, other.array)

    def __repr__(self) -> str:
        return f"EmbeddingOutput(hidden_size={self.hidden_size})"


@dataclass(slots=True)
class ScoringOutput:
    """The similarity of two prompts, as `LLM.score` returns it.

    Attributes:
        score: the cosine of the angle between the two embeddings, from -1 to 1.
    """

    score: float


Output = TypeVar("Output")


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Output]):
    """The result of one pooling request.

    Attributes:
        request_id: a counter of the front end's requests, as text. The id of a score consists
            of the ids of its two requests.
        outputs: the vector, embedding or score.
        prompt_token_ids: the token ids of the prompt. A score has those of both prompts, one
            after the other.
        num_cached_tokens: the number of prompt tokens whose keys and values were prefix-cache
            hits.
        finished: always True.
        error: the error message of a request that failed, whose vector is empty or whose score
            is 0. `LLM.encode` does not raise it, in order to return the other prompts' vectors.
        prompt: the text of the prompt; None if the prompt was given without a text, and for a
            score.
        is_aborted: whether the engine aborted the request, because it was stopped, paused or put to
            sleep; `error` says so, too.
    """

    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    error: str | None = None
    prompt: str | None = None
    is_aborted: bool = False


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The result of one prompt of `LLM.embed`."""

    __slots__ = ()


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The result of one pair of prompts of `LLM.score`."""

    __slots__ = ()
