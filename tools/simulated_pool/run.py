"""Runs a load on a pool of engines in simulated time.

Three things happen: requests arrive, steps end, and idle engines begin a step. Everything that
arrives at the same time is queued before an idle engine begins. This module must not know loads.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count

from simulated_pool.engine import Engine, Job
from simulated_pool.loads import Request
from simulated_pool.rules import Rule


class Kind(IntEnum):
    """What happens, in the order in which it happens at the same time."""

    ARRIVAL = 0
    STEP_END = 1
    BEGIN = 2


@dataclass
class Outcome:
    """What became of a load.

    Attributes:
        ttft_s: seconds from sending to the first token, per completion.
        e2e_s: seconds from sending to the last token, per completion.
        num_outputs: the number of generated tokens.
        num_prompt: the number of prompt tokens, counted for each completion.
        num_cached: how many of them were cached.
        num_sent: how many requests each engine got.
        end_s: when the last request ended.
        busy_s: the duration of all steps of all engines.
    """

    num_sent: list[int]
    ttft_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    num_outputs: int = 0
    num_prompt: int = 0
    num_cached: int = 0
    end_s: float = 0.0
    busy_s: float = 0.0


class Simulation:
    """
    Args:
        engines: the engines, idle.
        rule: chooses among them.
    """

    def __init__(self, engines: Sequence[Engine], rule: Rule) -> None:
        self._engines = engines
        self._rule = rule
        self._is_busy = [False] * len(engines)
        self._events: list[tuple[float, Kind, int, Request | int]] = []
        self._order = count()
        self._requests: dict[Job, Request] = {}
        self._num_left: dict[Request, int] = {}
        self.outcome = Outcome([0] * len(engines))

    def run(self, requests: Iterable[Request]) -> Outcome:
        """Send the requests and their later turns, and wait for all."""
        for request in requests:
            self._push(request.after_s, Kind.ARRIVAL, request)
        while self._events:
            now_s, kind, _, what = heapq.heappop(self._events)
            if isinstance(what, Request):
                self._arrive(now_s, what)
                continue
            if kind is Kind.STEP_END:
                self._end_step(now_s, what)
            self._begin_step(now_s, what)
        assert not self._requests, "requests were lost"
        return self.outcome

    def _push(self, at_s: float, kind: Kind, what: Request | int) -> None:
        heapq.heappush(self._events, (at_s, kind, next(self._order), what))

    def _arrive(self, now_s: float, request: Request) -> None:
        place = self._rule.choose(request)
        self.outcome.num_sent[place] += 1
        self._num_left[request] = len(request.hashes)
        for job in request.jobs(now_s):
            self._requests[job] = request
            self._engines[place].add(job)
        if not self._is_busy[place]:
            self._is_busy[place] = True
            self._push(now_s, Kind.BEGIN, place)

    def _begin_step(self, now_s: float, place: int) -> None:
        seconds = self._engines[place].begin_step()
        self._is_busy[place] = seconds is not None
        if seconds is not None:
            self.outcome.busy_s += seconds
            self._push(now_s + seconds, Kind.STEP_END, place)

    def _end_step(self, now_s: float, place: int) -> None:
        outcome = self.outcome
        for job in self._engines[place].end_step():
            if job.num_generated == 1:
                outcome.ttft_s.append(now_s - job.arrival_s)
                self._rule.has_first(self._requests[job])
            if job.num_generated == job.num_outputs:
                self._end(now_s, job)

    def _end(self, now_s: float, job: Job) -> None:
        outcome, request = self.outcome, self._requests.pop(job)
        assert job.num_cached is not None
        outcome.e2e_s.append(now_s - job.arrival_s)
        outcome.num_outputs += job.num_outputs
        outcome.num_prompt += job.num_prompt
        outcome.num_cached += job.num_cached
        outcome.end_s = now_s
        self._rule.has_ended(request)
        self._num_left[request] -= 1
        if not self._num_left[request]:
            del self._num_left[request]
            if (then := request.next_turn) is not None:
                self._push(now_s + then.after_s, Kind.ARRIVAL, then)
