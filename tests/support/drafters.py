"""Drafters that know what comes, or do not, and how to give one to an engine in this process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Literal

from shmllm import LLM
from shmllm.core.request import Request

Kind = Literal["right", "wrong", "random", "mixed"]
KINDS: tuple[Kind, ...] = ("right", "wrong", "random", "mixed")
MOST = 5
DRAFTING: dict[str, Any] = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": MOST,
        "adaptive": False,
    }
}
"""Options of an engine whose drafter is replaced."""


class KnowingDrafter:
    """Drafts what requests said before.

    Args:
        kind: "right" drafts what comes; "wrong" has a wrong first token; "mixed" is right up to
            some token; "random" knows nothing.
        vocab_size: the number of tokens.
        known: by (prompt, seed) the output of the request without drafts.
    """

    catches_up = False

    def __init__(
        self, kind: Kind, vocab_size: int, known: dict[tuple[tuple[int, ...], int], list[int]]
    ) -> None:
        self._kind = kind
        self._vocab_size = vocab_size
        self._known = known
        self._rng = random.Random(0)

    def draft(self, request: Request, most: int) -> Sequence[int]:
        if self._kind == "random":
            return [self._rng.randrange(self._vocab_size) for _ in range(most)]
        prompt = tuple(request.token_ids[: request.num_prompt_tokens])
        begin = request.num_output_tokens
        draft = self._known[prompt, request.seed][begin : begin + most]
        if self._kind != "right" and draft:
            place = 0 if self._kind == "wrong" else self._rng.randrange(len(draft))
            draft[place] = (draft[place] + 1) % self._vocab_size
        return draft


def use_drafter(llm: LLM, drafter: KnowingDrafter) -> None:
    """Let a drafter draft in an engine in this process, which was started with DRAFTING."""
    core = llm._client._core  # type: ignore[attr-defined]
    core.drafting._drafter = drafter
