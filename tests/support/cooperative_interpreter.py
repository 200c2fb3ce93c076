"""Lets Triton's interpreter run the programs of a cooperative launch at the same time.

The interpreter runs the programs of a launch one after another, so that one which waits for a later
one would wait for ever. Here each program of a cooperative launch has a thread, and one of them
runs at a time: before each atomic operation, which is what programs wait with, chance decides which
one goes on. What a program does between two atomic operations thereby comes as early or as late as
a GPU may do it, and results depend on the order wherever a meeting is missing.
"""

from __future__ import annotations

import contextvars
import inspect
import random
import threading
from collections.abc import Callable
from typing import Any

from triton.runtime import interpreter

LIMIT_S = 600
"""How long a program may wait for its turn: a launch whose programs wait for ever fails."""

call = interpreter.GridExecutor.__call__
make_atomic = interpreter.InterpreterBuilder.create_atomic_rmw


class Turns:
    """The programs of a launch, of which one runs at a time.

    Args:
        grid: the numbers of programs.
        seed: of the order in which they run.
    """

    def __init__(self, grid: tuple[int, int, int], seed: int) -> None:
        sizes = [range(size) for size in grid]
        self.programs = [(x, y, z) for x in sizes[0] for y in sizes[1] for z in sizes[2]]
        self.problem: BaseException | None = None
        self._running = dict.fromkeys(self.programs)
        self._events = {program: threading.Event() for program in self.programs}
        self._random = random.Random(seed)

    def run(self, function: Callable[[], None]) -> None:
        """Run all programs. Raises what the first of them raised."""
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run, args=(self._run, program, function)
            )
            for program in self.programs
        ]
        for thread in threads:
            thread.start()
        self._go_on()
        for thread in threads:
            thread.join()
        if self.problem is not None:
            raise self.problem

    def _run(self, program: tuple[int, int, int], function: Callable[[], None]) -> None:
        try:
            self._await_turn(program)
            function()
        except BaseException as problem:
            self.problem = self.problem or problem
        del self._running[program]
        self._go_on()

    def change(self) -> None:
        """Let another program go on, or the one that calls."""
        program = tuple(interpreter.interpreter_builder.grid_idx)
        self._go_on()
        self._await_turn(program)

    def _go_on(self) -> None:
        if self._running:
            self._events[self._random.choice([*self._running])].set()

    def _await_turn(self, program: Any) -> None:
        event = self._events[program]
        if not event.wait(LIMIT_S):
            raise TimeoutError(f"program {program} has not run for {LIMIT_S} s")
        event.clear()
        if self.problem is not None:
            raise RuntimeError("another program of the launch has failed")
        interpreter.interpreter_builder.set_grid_idx(*program)


turns: Turns | None = None
"""Those of the cooperative launch that runs."""
seeds = random.Random(0)
"""Each launch has another order, the same in each run of a process."""


def _call(executor: Any, *args: Any, **options: Any) -> None:
    """Launch a kernel: `GridExecutor.__call__` if it is no cooperative launch."""
    if not options.pop("launch_cooperative_grid", False):
        call(executor, *args, **options)
        return
    global turns
    names = inspect.getfullargspec(executor.fn).args
    options = {name: value for name, value in options.items() if name in names}
    scope = interpreter._patch_lang(executor.fn)
    try:
        found = inspect.getcallargs(executor.fn, *args, **options)
        values = {
            name: value if name in executor.constexprs else interpreter._implicit_cvt(value)
            for name, value in found.items()
        }
        grid = (*executor.grid, 1, 1)[:3]
        interpreter.interpreter_builder.set_grid_dim(*grid)
        turns = Turns(grid, seeds.randrange(2**32))
        turns.run(lambda: executor.fn(**values))
    finally:
        turns = None
        scope.restore()


def _make_atomic(builder: Any, *args: Any) -> Any:
    if turns is not None:
        turns.change()
    return make_atomic(builder, *args)


def install() -> None:
    """Change the interpreter of this process."""
    interpreter.GridExecutor.__call__ = _call
    interpreter.InterpreterBuilder.create_atomic_rmw = _make_atomic
