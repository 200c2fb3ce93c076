"""Requests whose grammar is still being compiled: known, and passed over until it is ready.

Compiling is somebody else's work, in another thread; this only looks at its futures. Knows
no transport and nothing about grammars.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from shmllm.core.constraint import Constraint
from shmllm.core.request import Request, RequestStatus
from shmllm.core.scheduler import Scheduler

CompiledGrammar = Future[Callable[[], Constraint]]
"""Ready at once or later: what begins a new output. Its exception says why there is none."""


class GrammarQueue:
    """
    Args:
        scheduler: gets the requests.
        compile_grammar: begins to compile a text, or finds it compiled.
        wake: called from any thread when a grammar that was waited for is ready.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        compile_grammar: Callable[[str], CompiledGrammar],
        wake: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._compile = compile_grammar
        self._wake = wake
        self._held: list[tuple[Request, CompiledGrammar]] = []

    def add(self, request: Request, grammar: str) -> str | None:
        """Queue a request under its grammar. Returns why it cannot be served, if that is
        known by now."""
        compiled = self._compile(grammar)
        if compiled.done():
            problem = _begin(request, compiled)
            if problem is None:
                self._scheduler.add(request)
            return problem
        self._scheduler.hold(request)
        self._held.append((request, compiled))
        compiled.add_done_callback(lambda _: self._wake())
        return None

    def release_ready(self) -> None:
        """Let those be scheduled whose grammar is ready, and end those that have none."""
        if not self._held:
            return
        held, self._held = self._held, []
        for request, compiled in held:
            if request.status is RequestStatus.FINISHED:
                continue
            if not compiled.done():
                self._held.append((request, compiled))
            elif (problem := _begin(request, compiled)) is None:
                self._scheduler.release(request)
            else:
                self._scheduler.fail(request, problem)


def _begin(request: Request, compiled: CompiledGrammar) -> str | None:
    """Give a request its constraint; what went wrong if there is none."""
    error = compiled.exception()
    if error is not None:
        return f"{error}" or type(error).__name__
    request.constraint = compiled.result()()
    return None
