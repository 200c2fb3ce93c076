"""Who lends an engine the blocks that other engines share, now and before.

This module must not know requests, nor which blocks they have.
"""

from __future__ import annotations

from collections.abc import Iterable

from shmllm.core.shared_blocks import BlockCopy, Lender, StepCounts


class Lenders:
    """
    Attributes:
        current: the one whose blocks requests use; None: engines share none.
    """

    def __init__(self) -> None:
        self.current: Lender | None = None
        self._former: list[Lender] = []
        self._steps = StepCounts()

    def use(self, lender: Lender | None) -> None:
        """Borrow from a lender from now on; None: from nobody. What is borrowed goes back to those
        before."""
        if self.current is not None:
            self._former.append(self.current)
        if lender is not None:
            lender.steps = self._steps
        self.current = lender

    @property
    def is_shared(self) -> bool:
        """Whether blocks are shared with other engines."""
        return self.current is not None

    @property
    def has_saves(self) -> bool:
        """Whether blocks wait to be copied to where other engines find them."""
        return self.current is not None and self.current.has_pending

    def take_saves(self) -> list[BlockCopy]:
        """The blocks to copy to where other engines find them; see `Lender.take_saves`."""
        return [] if self.current is None else self.current.take_saves()

    def take_loads(self) -> list[BlockCopy]:
        """The shared blocks to copy into the engine's own; see `Lender.take_loads`."""
        return [] if self.current is None else self.current.take_loads()

    def step_submitted(self) -> None:
        """A step that was planned is going to run, after those before it. Blocks that other engines
        share are given back when no step reads them any more."""
        self._steps.submitted += 1

    def step_run(self, saves: Iterable[BlockCopy], loads: Iterable[BlockCopy]) -> None:
        """The first of the submitted steps has run, and has made these copies."""
        self._steps.run += 1
        if self.current is not None:
            self.current.saved(saves)
            self.current.loaded(loads)
            self.current.return_unread()
        for lender in self._former:
            lender.return_unread()
        self._former = [each for each in self._former if each.has_lent]
