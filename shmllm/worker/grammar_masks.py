"""The token bitmasks that grammars put on a step's logits, computed while the model runs.

This module owns the masks' memory and the thread that fills them. It must not know the other
logits processors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from shmllm.core.plan import Constrained
from shmllm.worker.arrays import IntArray
from shmllm.worker.background import BackgroundThread
from shmllm.worker.grammar import GrammarCompiler, GrammarMatcher

WORD_BITS = 32
_Matcher = tuple[Any, int, list[int]]
"""llguidance's matcher, the first of its masks, and the drafted tokens."""


class PendingMasks:
    """The masks of one step, which a thread may still be filling.

    Args:
        rows: the rows of the step's logits that have a mask.
        words: a future of the masks, (len(rows), W) int32.
    """

    def __init__(self, rows: list[int], words: Future[IntArray]) -> None:
        self.rows = rows
        self._words = words

    @property
    def words(self) -> IntArray:
        """(len(rows), W) int32: bit t % 32 of word t // 32 allows token t; tokens beyond the last
        word are forbidden. Waits for the thread. Valid until the next call of `begin`."""
        return self._words.result()

    def __call__(self, logits: torch.Tensor) -> None:
        """Set the logits of forbidden tokens to -inf, in place. Rows without a mask do not change.

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
    """Return (rows, vocab_size) booleans, true for forbidden tokens."""
    bits = np.unpackbits(np.invert(words).view(np.uint8), axis=1, bitorder="little")
    if bits.shape[1] >= vocab_size:
        return bits[:, :vocab_size].view(np.bool_)
    forbidden = np.ones((len(words), vocab_size), np.bool_)
    forbidden[:, : bits.shape[1]] = bits
    return forbidden


class GrammarMasks:
    """Computes the masks of each step in a background thread.

    Args:
        compiler: the compiler of the grammars, which has the size of the vocabulary.
        max_num_rows: the largest number of rows of logits in a step.
    """

    def __init__(self, compiler: GrammarCompiler, max_num_rows: int) -> None:
        self._compiler = compiler
        self._max_num_rows = max_num_rows
        self._thread = BackgroundThread("shmllm-masks")
        self._words: IntArray | None = None
        self._executor: Any = None

    @property
    def workspace_bytes(self) -> int:
        """The memory of the masks."""
        return 0 if self._words is None else self._words.nbytes

    def drop_workspace(self) -> None:
        """Free the masks' memory. No masks may be pending."""
        self._words = None

    def begin(
        self, constraints: Sequence[Constrained], drafts: Mapping[int, Sequence[int]]
    ) -> PendingMasks | None:
        """Start to compute the masks of a step.

        Args:
            constraints: the constrained requests.
            drafts: by the index of a request, its drafted tokens: it has a mask behind each.

        Returns:
            The masks; None if there are no constraints.
        """
        if not constraints:
            return None
        matchers: list[_Matcher] = []
        rows: list[int] = []
        for first, column, constraint in constraints:
            drafted = list(drafts.get(column, ()))
            matchers.append((cast(GrammarMatcher, constraint).matcher, len(rows), drafted))
            rows += range(first, first + 1 + len(drafted))
        return PendingMasks(rows, self._thread.submit(lambda: self._fill(matchers, len(rows))))

    def _fill(self, matchers: list[_Matcher], num_rows: int) -> IntArray:
        """Fill the masks. A matcher that fails allows the end token alone, and reports its error
        when it takes a token. Drafted tokens leave it as it is; behind one that it does not allow,
        which is never sampled, the masks have no meaning."""
        if self._words is None:
            from llguidance import LLExecutor

            num_words = -(-self._compiler.vocab_size // WORD_BITS)
            self._words = np.zeros((self._max_num_rows, num_words), np.int32)
            self._executor = LLExecutor(num_threads=1)
        words = self._words
        at = words.ctypes.data, words.shape[1] * words.itemsize, self._max_num_rows
        if plain := [each[:2] for each in matchers if not each[2]]:
            self._executor.unsafe_compute_mask_ptr(plain, *at)
        if drafted := [each for each in matchers if each[2]]:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *at)
        return words[:num_rows]
