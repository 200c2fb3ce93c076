"""Holds requests until their grammars are compiled.

The runner compiles grammars on another thread; this module only checks the futures. It must not
know the transport or the grammars themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from shmllm.core.constraint import Constraint
from shmllm.core.request import Request, RequestStatus
from shmllm.core.scheduler import Scheduler

CompiledGrammar = Future[Callable[[], Constraint]]
"""A future whose result is a factory of Constraints, one for each request. Its exception says why
the grammar cannot be compiled."""


class GrammarQueue:
    """
    Args:
        scheduler: the scheduler to which the requests are added.
        compile_grammar: starts to compile a grammar's text, or finds the compiled grammar.
        wake: called from any thread when the grammar of a held request is compiled.
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
        """Add a request that has a grammar to the scheduler.

        Returns:
            Why the grammar cannot be compiled, if that is already known; otherwise None.
        """
        compiled = self._compile(grammar)
        if compiled.done():
            problem = _set_constraint(request, compiled)
            if problem is None:
                self._scheduler.add(request)
            return problem
        self._scheduler.hold(request)
        self._held.append((request, compiled))
        wake = self._wake  # the compiler keeps the future, which must not keep the scheduler
        compiled.add_done_callback(lambda _: wake())
        return None

    def release_ready(self) -> None:
        """Release the requests whose grammars are compiled now, and end those whose grammars
        cannot be compiled."""
        if not self._held:
            return
        held, self._held = self._held, []
        for request, compiled in held:
            if request.status is RequestStatus.FINISHED:
                continue
            if not compiled.done():
                self._held.append((request, compiled))
            elif (problem := _set_constraint(request, compiled)) is None:
                self._scheduler.release(request)
            else:
                self._scheduler.fail(request, problem)


def _set_constraint(request: Request, compiled: CompiledGrammar) -> str | None:
    """Set the request's constraint. Returns the problem if the grammar was not compiled."""
    error = compiled.exception()
    if error is not None:
        return f"{error}" or type(error).__name__
    request.constraint = compiled.result()()
    return None
