"""Engines in the test's process whose models draft, and what they drafted."""

from __future__ import annotations

from typing import Any

from shmllm import LLM
from shmllm.core.plan import StepPlan

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 2,
    "kv_cache_memory_bytes": 2**24,
    "skip_tokenizer_init": True,
    "multiprocess": False,
}


def drafting(**config: Any) -> dict[str, Any]:
    """Returns `OPTIONS` with drafts in all steps, by this `speculative_config`."""
    return OPTIONS | {"speculative_config": {"adaptive": False, **config}}


def record_drafts(llm: LLM) -> list[tuple[int, list[int]]]:
    """Returns a list that gets, for each draft of row 0, its position and its tokens."""
    drafter = llm._client._core.runner._drafter  # type: ignore[attr-defined]
    draft: Any = drafter.draft
    found: list[tuple[int, list[int]]] = []

    def recorded(plan: StepPlan) -> None:
        draft(plan)
        for column, tokens in plan.drafts.items():
            found.append((plan.starts[column] + plan.counts[column] - len(tokens), list(tokens)))

    drafter.draft = recorded
    return found
