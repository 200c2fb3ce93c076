"""Records what a rank other than 0 does in each step, while a trace is taken.

This module owns when the recording of a rank begins and ends, and its records. It must not know how
a step is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns

from shmllm.parallel.memory import GroupMemory
from shmllm.tracing.layout import Slice, Type
from shmllm.tracing.process import recorder_if_possible, recorder_of_environment
from shmllm.tracing.recorder import Recorder
from shmllm.worker.group import Kind

IS_MEASURED, WAITED_NS = 0, 1
"""The words of `Group.waits`."""


class RankTracing:
    """Records into the trace that the environment names, from the start, or into one that begins
    later.

    Args:
        memory: the memory of the group.
        what: RANK_STEP or RANK_LAUNCH: whether this process computes steps, or launches them.

    Attributes:
        recorder: where steps are recorded; None: no trace is taken.
    """

    def __init__(self, memory: GroupMemory, what: Slice) -> None:
        self._memory = memory
        self._what = what
        self._role = f"{'rank' if memory.num_stages == 1 else 'stage'} {memory.rank}"
        self.recorder: Recorder | None = None
        self._use(recorder_of_environment(self._role))

    def begin(self, directory: Path) -> None:
        """Record from now on; an earlier trace is over.

        Args:
            directory: that of the trace. If this process cannot record there, it is missing.
        """
        if self.recorder is not None:
            self.recorder.end()
        self._use(recorder_if_possible(directory, self._role))

    @contextmanager
    def step(self, kind: Kind) -> Iterator[None]:
        """Record a step, which runs inside the `with` block."""
        memory, recorder, began_ns = self._memory, self.recorder, perf_counter_ns()
        assert recorder is not None, "a trace is taken"
        memory.waits[WAITED_NS] = 0
        yield
        facts = memory.label_of_step(), int(memory.waits[WAITED_NS]), kind
        recorder.add(Type.SLICE, self._what, began_ns, perf_counter_ns(), *facts)

    def _use(self, recorder: Recorder | None) -> None:
        self.recorder = recorder
        if recorder is not None:
            self._memory.waits[IS_MEASURED] = 1
            recorder.at_end(self._end)

    def _end(self) -> None:
        self.recorder = None
        self._memory.waits[IS_MEASURED] = 0
