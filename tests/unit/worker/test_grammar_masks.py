"""The masks behind drafted tokens are those that the same tokens have when they are sampled."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import shmllm
from shmllm.core.constraint import Constraint
from shmllm.core.plan import Constrained
from shmllm.frontend.constraints.structured_outputs import grammar_of
from shmllm.params.structured_outputs import StructuredOutputsParams
from shmllm.worker.arrays import IntArray
from shmllm.worker.grammar import GrammarCompiler
from shmllm.worker.grammar_masks import GrammarMasks

TINY = Path(shmllm.__file__).parent / "assets" / "tiny"
EOS = 0


def allowed(words: IntArray) -> list[int]:
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def test_masks_of_requests_with_and_without_drafts() -> None:
    compiler = GrammarCompiler(TINY, [EOS])
    masks = GrammarMasks(compiler, 8)
    grammar = grammar_of(StructuredOutputsParams(regex="(ab|cd)[x-z]{2}"))
    make = compiler.compile(grammar).result()

    def begin() -> Constraint:
        return make()

    def after(*token_ids: int) -> list[int]:
        constraint = begin()
        for token in token_ids:
            constraint.take(token)
        pending = masks.begin([Constrained(0, 0, constraint)], {})
        assert pending is not None
        return allowed(pending.words[0])

    first = after()[0]
    second = after(first)[0]
    constraints = [
        Constrained(0, 0, begin()),
        Constrained(1, 2, begin()),
        Constrained(5, 3, begin()),
    ]
    for _ in range(2):  # the drafts leave the constraints as they are
        pending = masks.begin(constraints, {1: [7], 2: [first, second]})
        assert pending is not None
        assert pending.rows == [0, 1, 2, 3, 5]
        found = [allowed(words) for words in pending.words]
        assert found == [after(), after(), after(first), after(first, second), after()]
    assert len({tuple(each) for each in found}) == 3
