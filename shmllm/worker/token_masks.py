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

from shmllm.core.plan import Constraint
from shmllm.worker.background import Background
from shmllm.worker.grammar import GrammarCompiler, GrammarMatcher

WORD_BITS = 32


class PendingMasks:
    """The masks of one step: what the sampler takes as its mask.

    Args:
        rows: which rows of the step's logits they are for.
        forbidden: (len(rows), V) bool, at once or later.
    """

    def __init__(self, rows: list[int], forbidden: Future[npt.NDArray[np.bool_]]) -> None:
        self._rows = rows
        self._forbidden = forbidden

    def __call__(self, logits: torch.Tensor) -> None:
        """Set what the grammars forbid to -inf, in place; other rows are not touched.

        Args:
            logits: (N, V) float32.
        """
        forbidden = torch.from_numpy(self._forbidden.result()).to(logits.device)
        if len(self._rows) == len(logits):
            logits.masked_fill_(forbidden, -torch.inf)
        else:
            rows = torch.tensor(self._rows, device=logits.device)
            logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)


class TokenMasks:
    """
    Args:
        compiler: made the matchers, and knows the tokenizer's size.
        max_num_rows: rows of a step, at most.
        vocab_size: entries of a logits row. Those beyond the tokenizer's stay forbidden.
        num_threads: that fill masks.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        max_num_rows: int,
        vocab_size: int,
        num_threads: int = 1,
    ) -> None:
        self._compiler = compiler
        self._max_num_rows = max_num_rows
        self._vocab_size = vocab_size
        self._num_threads = num_threads
        self._thread = Background("shmllm-masks")
        self._words: npt.NDArray[np.int32] | None = None
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

    def _fill(self, matchers: list[tuple[Any, int]]) -> npt.NDArray[np.bool_]:
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
        bits = np.unpackbits(words[: len(matchers)].view(np.uint8), axis=1, bitorder="little")[
            :, : self._vocab_size
        ]
        forbidden = np.ones((len(matchers), self._vocab_size), np.bool_)
        np.equal(bits, 0, out=forbidden[:, : bits.shape[1]])
        return forbidden
