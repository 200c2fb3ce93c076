"""The results of pooling requests: vectors, probabilities and scores, with vLLM's names.

Vectors are numpy arrays. The fields of vLLM convert them to a torch tensor or a list when they are
read, also by `dataclasses.asdict`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, Self, TypeVar, overload

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]


Read = TypeVar("Read")


class _HasArray:
    """What has an `array`, which is no field."""

    array: Vector


class Converted(Generic[Read]):
    """A field that is kept as `array` and converted each time that it is read.

    Args:
        convert: makes the field's value of the array.
    """

    def __init__(self, convert: Callable[[Vector], Read]) -> None:
        self._convert = convert

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: _HasArray, owner: type) -> Read: ...

    def __get__(self, instance: _HasArray | None, owner: type) -> Read | Self:
        if instance is None:
            raise AttributeError("the field has no default")  # which dataclasses asks for
        return self._convert(instance.array)

    def __set__(self, instance: _HasArray, value: Vector | Sequence[float] | Read) -> None:
        instance.array = np.asarray(value, np.float32)


def _as_list(array: Vector) -> list[float]:
    values: list[float] = array.tolist()
    return values


def _as_tensor(array: Vector) -> Any:
    import torch

    return torch.from_numpy(array.copy())


@dataclass(eq=False, repr=False)
class PoolingOutput(_HasArray):
    """What was computed of a prompt, as `LLM.encode` returns it.

    Attributes:
        data: a copy of the array as a torch tensor. Reading it imports torch.
        array: a read-only float32 array, of shape (components,) for "embed" and "classify",
            (tokens, components) for tasks of tokens, (chunks, components) with late chunking, and
            () for the score of a document by late interaction.
    """

    data: Converted[Any] = Converted(_as_tensor)

    @classmethod
    def empty(cls) -> Self:
        """The output of a request that failed."""
        return cls(np.frombuffer(b"", np.float32))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolingOutput) and np.array_equal(self.array, other.array)

    def __repr__(self) -> str:
        return f"PoolingOutput(array={self.array!r})"


@dataclass(eq=False, repr=False)
class EmbeddingOutput(_HasArray):
    """The embedding of a prompt, as `LLM.embed` returns it.

    Attributes:
        embedding: the vector as a list of floats.
        array: the vector, a read-only float32 array of shape (hidden_size,).
    """

    embedding: Converted[list[float]] = Converted(_as_list)

    @property
    def hidden_size(self) -> int:
        """The number of components of the vector."""
        return len(self.array)

    @property
    def sparse(self) -> dict[int, float]:
        """The components that are not 0, by their index: of a sparse vector that is the id of a
        token of the vocabulary."""
        (indices,) = self.array.nonzero()
        return dict(zip(indices.tolist(), self.array[indices].tolist(), strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EmbeddingOutput) and np.array_equal(self.array, other.array)

    def __repr__(self) -> str:
        return f"EmbeddingOutput(hidden_size={self.hidden_size})"

    @classmethod
    def from_base(cls, pooling_output: PoolingOutput) -> Self:
        """The same vector. Raises ValueError if it is none."""
        return cls(_one_vector(pooling_output, "embedding"))


@dataclass(eq=False, repr=False)
class ClassificationOutput(_HasArray):
    """The scores of the classes for a prompt, as `LLM.classify` returns them.

    Attributes:
        probs: the scores as a list of floats.
        array: a read-only float32 array of shape (num_classes,): probabilities, or logits without
            `use_activation`.
    """

    probs: Converted[list[float]] = Converted(_as_list)

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.array)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClassificationOutput) and np.array_equal(self.array, other.array)

    def __repr__(self) -> str:
        return f"ClassificationOutput(num_classes={self.num_classes})"

    @classmethod
    def from_base(cls, pooling_output: PoolingOutput) -> Self:
        """The same vector. Raises ValueError if it is none."""
        return cls(_one_vector(pooling_output, "probability"))


@dataclass
class ScoringOutput:
    """The score of two prompts, as `LLM.score` returns it.

    Attributes:
        score: the cosine of the angle between two embeddings, from -1 to 1; the score that a
            cross-encoder gives; or the MaxSim of two lists of token embeddings.
    """

    score: float

    @classmethod
    def from_base(cls, pooling_output: PoolingOutput) -> Self:
        """The one number of an output. Raises ValueError if it has several."""
        if pooling_output.array.size != 1:
            raise ValueError("pooled_data should be a scalar score")
        return cls(float(pooling_output.array.reshape(())))


def _one_vector(output: PoolingOutput, what: str) -> Vector:
    if output.array.ndim != 1:
        raise ValueError(f"pooled_data should be a 1-D {what} vector")
    return output.array


@dataclass
class LateChunk:
    """A chunk of a text, whose vector is a row of the result.

    Attributes:
        token_range: its tokens, as a half-open range.
        char_range: the characters of the text that they stand for, as a half-open range; None if
            they are special tokens only.
    """

    token_range: tuple[int, int]
    char_range: tuple[int, int] | None


@dataclass
class LateChunkingMetadata:
    """Where the vectors of a text come from.

    Attributes:
        chunk_size: the number of tokens of each chunk but the last.
        input_tokens: the number of tokens of the text.
        chunks: the chunks in their order, one for each row of the result.
    """

    chunk_size: int
    input_tokens: int
    chunks: list[LateChunk]


Output = TypeVar("Output")


@dataclass
class PoolingRequestOutput(Generic[Output]):
    """The result of one pooling request.

    Attributes:
        request_id: a counter of the front end's requests, as text. The id of a score of two
            requests consists of their ids.
        outputs: the vectors, embedding, probabilities or score.
        prompt_token_ids: the token ids of the prompt. A score of two prompts has those of both,
            one after the other.
        num_cached_tokens: the number of prompt tokens whose keys and values were prefix-cache
            hits.
        finished: always True.
        error: the error message of a request that failed, whose vector is empty or whose score
            is 0. `LLM.encode` does not raise it, in order to return the other prompts' vectors.
        prompt: the text of the prompt; None if the prompt was given without a text, and for a
            score of two prompts.
        is_aborted: whether the engine aborted the request, because it was stopped, paused or put to
            sleep; `error` says so, too.
        late_chunking: which tokens and characters the rows stand for; None without
            `late_chunking_params`, and if the request failed.
    """

    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    error: str | None = None
    prompt: str | None = None
    is_aborted: bool = False
    late_chunking: LateChunkingMetadata | None = None


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The result of one prompt of `LLM.embed`."""

    @classmethod
    def from_base(cls, request_output: PoolingRequestOutput[PoolingOutput]) -> Self:
        """The same result as an embedding, which is empty if the request failed."""
        embedding = EmbeddingOutput.from_base(request_output.outputs)
        return cls(**_with_outputs(request_output, embedding))


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """The result of one prompt of `LLM.classify`."""

    @classmethod
    def from_base(cls, request_output: PoolingRequestOutput[PoolingOutput]) -> Self:
        """The same result as probabilities, which are empty if the request failed."""
        probs = ClassificationOutput.from_base(request_output.outputs)
        return cls(**_with_outputs(request_output, probs))


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The result of one pair of prompts of `LLM.score`."""

    @classmethod
    def from_base(cls, request_output: PoolingRequestOutput[PoolingOutput]) -> Self:
        """The same result as a score, which is 0 if the request failed."""
        failed = request_output.error is not None
        score = ScoringOutput(0.0) if failed else ScoringOutput.from_base(request_output.outputs)
        return cls(**_with_outputs(request_output, score))


def _with_outputs(output: PoolingRequestOutput[PoolingOutput], outputs: Any) -> dict[str, Any]:
    """The fields of a result, with other outputs."""
    return {each.name: getattr(output, each.name) for each in fields(output)} | {"outputs": outputs}
