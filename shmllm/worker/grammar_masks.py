"""Which tokens a step's constrained rows may choose, found while the model computes.

Knows the grammars' matchers and rows of logits; what else the sampler does to those is its
own business.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from shmllm.core.constraint import Constraint
from shmllm.worker.arrays import IntArray
from shmllm.worker.background import BackgroundThread
from shmllm.worker.grammar import GrammarCompiler, GrammarMatcher

WORD_BITS = 32


class PendingMasks:
    """The masks of one step: what the samplers take as their mask.

    Args:
        rows: which rows of the step's logits they are for.
        words: (len(rows), W) int32, at once or later.
    """

    def __init__(self, rows: list[int], words: Future[IntArray]) -> None:
        self.rows = rows
        self._words = words

    @property
    def words(self) -> IntArray:
        """(len(rows), W) int32: bit t % 32 of word t // 32 allows token t, and what has no word
        is forbidden. Waits for them; they are valid until the next step's masks are begun."""
        return self._words.result()

    def __call__(self, logits: torch.Tensor) -> None:
        """Set what the grammars forbid to -inf, in place; other rows are not touched.

        Args:
            logits: (N, V) float32, on the CPU.
        """
        forbidden = torch.from_numpy(_forbidden(self.words, logits.shape[1]))
        if len(self.rows) == len(logits):
            logits.masked_fill_(forbidden, -torch.inf)
        else:
            rows = torch.tensor(self.rows)
            logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)


def _forbidden(words: IntArray, vocab_size: int) -> npt.NDArray[np.bool_]:
    """(rows, vocab_size), true for what a row may not have."""
    bits = np.unpackbits(np.invert(words).view(np.uint8), axis=1, bitorder="little")
    if bits.shape[1] >= vocab_size:
        return bits[:, :vocab_size].view(np.bool_)
    forbidden = np.ones((len(words), vocab_size), np.bool_)
    forbidden[:, : bits.shape[1]] = bits
    return forbidden


class GrammarMasks:
    """
    Args:
        compiler: made the matchers, and knows the tokenizer's size.
        max_num_rows: rows of a step, at most.
        num_threads: that fill masks.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        max_num_rows: int,
        num_threads: int = 1,
    ) -> None:
        self._compiler = compiler
        self._max_num_rows = max_num_rows
        self._num_threads = num_threads
        self._thread = BackgroundThread("shmllm-masks")
        self._words: IntArray | None = None
        self._executor: Any = None

    @property
    def workspace_bytes(self) -> int:
        """Memory of the words."""
        return 0 if self._words is None else self._words.nbytes

    def drop_workspace(self) -> None:
        """Let go of them; not while masks are filled."""
        self._words = None

    def begin(self, constraints: Sequence[tuple[int, Constraint]]) -> PendingMasks | None:
        """Begin to find the masks of (row of the step's logits, what it has to match)."""
        if not constraints:
            return None
        matchers = [
            (cast(GrammarMatcher, constraint).matcher, index)
            for index, (_, constraint) in enumerate(constraints)
        ]
        rows = [row for row, _ in constraints]
        return PendingMasks(rows, self._thread.submit(lambda: self._fill(matchers)))

    def _fill(self, matchers: list[tuple[Any, int]]) -> IntArray:
        """A matcher that fails allows the end alone, and says so when it takes a token."""
        if self._words is None:
            from llguidance import LLExecutor

            num_words = -(-self._compiler.vocab_size // WORD_BITS)
            self._words = np.zeros((self._max_num_rows, num_words), np.int32)
            self._executor = LLExecutor(num_threads=self._num_threads)
        words = self._words
        self._executor.unsafe_compute_mask_ptr(
            matchers, words.ctypes.data, words.shape[1] * words.itemsize, self._max_num_rows
        )
        return words[: len(matchers)]
