"""PoolingPlan: what becomes of the rows that the engine returns for a pooling request.

The engine applies the model's head, and cuts and normalises embeddings of prompts. Everything else
is here: scores of logits, the rows of steps, means of chunks. Sums and quotients are float64, the
results float32. A result depends on its own request only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shmllm.config.pooling import PoolingTask
from shmllm.outputs.pooling import LateChunkingMetadata
from shmllm.outputs.rows import Rows, normalized
from shmllm.params.pooling_tasks import TOKEN_TASKS


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingPlan:
    """
    Attributes:
        task: the task of the request.
        width: the number of components of a row that the engine returns.
        step_tag_id: the token id whose rows remain; None keeps all.
        columns: the indices of the components that remain; None keeps all.
        first, last: the token ids whose rows are left out at the beginning and at the end of a
            text; None leaves none out.
        flat: whether rows of one component become numbers.
        chunks: the chunks whose means replace the rows; None: there are none.
        dimensions: how many leading components remain then; 0 keeps all.
        normalize: whether rows are divided by their norms then.
        mean, sigma: (logit - mean) / sigma replaces the logits.
        activation: what makes scores of logits, "sigmoid" or "softmax", or a sparse vector of them,
            "log1p_relu" or "log1p_log1p_relu"; "none".
    """

    task: PoolingTask
    width: int
    step_tag_id: int | None = None
    columns: tuple[int, ...] | None = None
    first: int | None = None
    last: int | None = None
    flat: bool = False
    chunks: LateChunkingMetadata | None = None
    dimensions: int = 0
    normalize: bool = False
    mean: float = 0.0
    sigma: float = 1.0
    activation: str = "none"

    def finish(self, data: bytes, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Make the result of a request.

        Args:
            data: what the engine returned, the bytes of float32 rows.
            token_ids: the token ids of the prompt. The rows are those of the last of them.

        Returns:
            A read-only array of shape (components,), or (rows, components) for tasks of tokens.
        """
        rows: Rows = np.frombuffer(data, np.float32)
        if self.task in TOKEN_TASKS:
            rows = self._inner(rows.reshape(-1, self.width), token_ids)
        if self.chunks is not None:
            rows = chunk_means(rows, self.chunks.chunk_size)
        if self.dimensions:
            rows = rows[..., : self.dimensions]
        if self.normalize:
            rows = normalized(rows)
        if self.flat:
            rows = rows[:, 0]
        if self.activation != "none" or self.task in ("classify", "token_classify"):
            rows = self._scores(rows)
        result = np.ascontiguousarray(rows, np.float32)
        result.flags.writeable = False
        return result

    def _inner(self, rows: Rows, token_ids: Sequence[int]) -> Rows:
        """Rows without those of the ends of a text, and of other steps."""
        own = token_ids[len(token_ids) - len(rows) :]
        rows = self._selected(rows, token_ids)
        if len(rows) != len(own):
            return rows
        begin = int(len(own) == len(token_ids) and own[0] == self.first)
        end = len(own) - int(own[-1] == self.last)
        return rows[begin : max(begin, end)]

    def _selected(self, rows: Rows, token_ids: Sequence[int]) -> Rows:
        if self.step_tag_id is not None:
            own = np.asarray(token_ids[len(token_ids) - len(rows) :])
            rows = rows[own == self.step_tag_id]
        return rows if self.columns is None else rows[:, list(self.columns)]

    def _scores(self, logits: Rows) -> Rows:
        values: Rows = (logits.astype(np.float64) - self.mean) / self.sigma
        return ACTIVATIONS[self.activation](values)


def chunk_means(rows: Rows, chunk_size: int) -> Rows:
    """The mean of each `chunk_size` rows; of the rest at the end, if there is one."""
    begins = np.arange(0, len(rows), chunk_size)
    counts = np.minimum(len(rows) - begins, chunk_size)
    means: Rows = np.add.reduceat(rows.astype(np.float64), begins, axis=0) / counts[:, None]
    return means


def _sigmoid(values: Rows) -> Rows:
    results: Rows = np.exp(-np.logaddexp(0.0, -values))
    return results


def _softmax(values: Rows) -> Rows:
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    results: Rows = powers / powers.sum(axis=-1, keepdims=True)
    return results


def _log1p_relu(values: Rows) -> Rows:
    results: Rows = np.log1p(np.maximum(values, 0.0))
    return results


def _relu(values: Rows) -> Rows:
    results: Rows = np.maximum(values, 0.0)
    return results


ACTIVATIONS: dict[str, Callable[[Rows], Rows]] = {
    "none": lambda values: values,
    "sigmoid": _sigmoid,
    "softmax": _softmax,
    "relu": _relu,
    "log1p_relu": _log1p_relu,
    "log1p_log1p_relu": lambda values: _log1p_relu(_log1p_relu(values)),
}
