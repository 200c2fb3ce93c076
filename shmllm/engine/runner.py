"""What an engine's steps run on, as its core sees it.

Owns the order of calls: steps are submitted, released and asked for their results. Must not know
what computes, nor where.
"""

from __future__ import annotations

from typing import Any, Protocol

from shmllm.config.info import EngineInfo
from shmllm.core.grammar_queue import CompiledGrammar
from shmllm.core.plan import StepPlan, StepResult
from shmllm.core.sleeping import Memory


class Step(Protocol):
    """A step that was submitted."""

    def release(self) -> None:
        """The tokens of the step before are where they belong: what waits for them may go on."""

    def result(self) -> StepResult:
        """What came of it; waits for that."""


class Runner(Protocol):
    """What executes the plans, in the order in which they are submitted.

    Attributes:
        overlaps: whether `submit` returns before the step has run, so that it pays to prepare
            the next one meanwhile.
    """

    facts: EngineInfo
    overlaps: bool

    @property
    def memory(self) -> Memory:
        """What can be given back while the engine sleeps."""

    @property
    def model(self) -> Any:
        """What computes; its weights may be replaced between two steps."""

    def submit(self, plan: StepPlan) -> Step: ...
    def compile_grammar(self, text: str) -> CompiledGrammar: ...

    def check_embeds(self, embeds: Any, length: int) -> Any:
        """A prompt's embeddings as `submit` takes them; RequestError if they are none."""
