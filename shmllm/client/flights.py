"""The requests of a pool of engines that have not ended: where each is, and where it may go.

This module decides what happens to requests whose engine has ended. It sends nothing; see `pool`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from shmllm.client.equal_engines import num_shared_blocks
from shmllm.client.flight import NOT_SENT, Flight
from shmllm.client.phases import FIRST_PREFILL, Phase, Phases
from shmllm.client.protocol import EngineOutput
from shmllm.client.routing import Placement, Router, chain_hashes
from shmllm.config.info import EngineInfo
from shmllm.outputs.columns import FinishReason, OutputColumns
from shmllm.params.request import EngineCoreRequest
from shmllm.wire.messages import SHUTTING_DOWN, Rejected, WeightVersion

TWO_DEATHS = "it was running when two engines died, and is not tried a third time"
UNCOMPUTED = (FinishReason.ABORT, FinishReason.ERROR)
"""Ends of requests whose prompts may not have been computed."""
OTHER_WEIGHTS = "its engine has ended, and no other engine has the weights that it began with"


class Flights:
    """
    Args:
        router: chooses engines.
        block_size: tokens of a block of keys and values.
        num_rows: how many requests each engine runs at once; others wait there.
        versions: the version of each engine's weights.
        phases: decides which requests have a prefill.

    Attributes:
        alive: the indexes of the engines that run.
        versions: the version of each engine's weights.
    """

    def __init__(
        self,
        router: Router,
        block_size: int,
        num_rows: Sequence[int],
        versions: Sequence[int | str],
        phases: Phases,
    ) -> None:
        self._router = router
        self._phases = phases
        self._block_size = block_size
        self._num_rows = num_rows
        self._flights: dict[int, Flight] = {}
        self._last: tuple[Sequence[int], int | None] = (), None
        self._num_placed = 0
        self._leaving: set[int] = set()
        self._ran: dict[int, frozenset[int]] = {}
        self.alive = list(range(len(versions)))
        self.versions = [*versions]

    def begin(self, request: EngineCoreRequest, is_whole: bool = False) -> Flight:
        """Add a request, and choose its engine.

        Args:
            request: the request.
            is_whole: give it no prefill, as engines may refuse what comes after that.
        """
        chain, near = self._last if request.is_sibling else (self._chain_of(request), None)
        self._flights[request.number] = flight = Flight(request, chain)
        if is_whole:
            flight.phase = Phase.DECODE
        self._place(flight, self.open or self.alive, near)
        self._last = chain, None if flight.placement is None else flight.placement.engine
        return flight

    def _chain_of(self, request: EngineCoreRequest) -> Sequence[int]:
        if not request.params.reads_prefix_cache:
            return ()
        lora = None if request.lora is None else request.lora.lora_int_id
        salt = request.cache_salt, lora
        return chain_hashes(request.computed_token_ids, self._block_size, salt)

    @property
    def open(self) -> list[int]:
        """The engines that take new requests."""
        return [engine for engine in self.alive if engine not in self._leaving]

    def _place(self, flight: Flight, engines: Sequence[int], near: int | None = None) -> None:
        """Choose an engine of these, unless the request waits for the prefill of another one."""
        if not engines:
            return
        if flight.phase is Phase.NEW:
            flight.phase = self._decide(flight, engines)
        if flight.phase is Phase.WAIT:
            return
        engines = self._phases.engines(flight.phase, engines)
        if near is not None and near in engines:
            engines = [near]
        num_tokens = len(flight.request.computed_token_ids)
        num_shared = self._phases.num_shared(flight.chain)
        placed = self._router.place(flight.chain, num_tokens, 1, engines, num_shared)
        self._num_placed += 1
        flight.place = self._num_placed
        flight.sent_at = NOT_SENT
        if flight.phase is not Phase.PREFILL:
            flight.version = self.versions[placed.engine]
        flight.placement = placed

    def _decide(self, flight: Flight, engines: Sequence[int]) -> Phase:
        phase, leader = self._phases.decide(flight.request, flight.chain, engines)
        if phase is Phase.WAIT:
            flight.queued_ns = flight.queued_ns or time.monotonic_ns()
            self._flights[leader].followers.append(flight)
        elif phase is Phase.PREFILL:
            flight.phase = phase  # so that its end is noted, whatever ends this
            self._phases.begun(flight.request.number, flight.chain)
        return phase

    def _end_prefill(self, flight: Flight) -> None:
        """The prefill of a request has ended, whatever the reason: it goes on where requests are
        decoded, and those that wait for it decide again. Idempotent."""
        self._phases.ended(flight.request.number, flight.chain)
        for each in flight.followers:
            if each.phase is Phase.WAIT:
                each.phase = Phase.NEW
        placed, flight.placement = flight.placement, None
        flight.phase = Phase.DECODE
        if placed is not None and not flight.is_aborted:
            self._release(placed)

    def end_prefills(self) -> dict[int, list[int]]:
        """All requests go on without a prefill. Returns the prefills to abort, by engine."""
        found: dict[int, list[int]] = {}
        for flight in self._flights.values():
            if flight.phase is Phase.PREFILL:
                if flight.placement is not None:
                    found.setdefault(flight.placement.engine, []).append(flight.sent.number)
                self._end_prefill(flight)
        for flight in self._flights.values():
            if flight.phase is Phase.NEW:
                flight.phase = Phase.DECODE
        return found

    def note(self, engine: int, event: EngineOutput, is_ending: bool) -> Sequence[EngineOutput]:
        """Take note of an event. Idempotent.

        Args:
            engine: the engine that it is from.
            event: the event.
            is_ending: whether the engine ends by itself. It then aborts its requests, which go on
                elsewhere unless their end was asked for.

        Returns:
            What the front end has to know of it.
        """
        if isinstance(event, OutputColumns):
            pieces = self._note_prefills(event)
            noted = [self._note_columns(each, is_ending) for each in pieces]
            return [each for each in noted if each.numbers]
        if isinstance(event, Rejected):
            return self._note_refusal(engine, event)
        if isinstance(event, WeightVersion):
            self.versions[engine] = event.version
        return [event]

    def _note_refusal(self, engine: int, event: Rejected) -> Sequence[EngineOutput]:
        is_leaving = event.message == SHUTTING_DOWN
        if is_leaving:
            self._leaving.add(engine)
        if event.number >= FIRST_PREFILL:
            self._prefill_ended(event.number)
            return []
        flight = self._flights.get(event.number)
        if is_leaving and flight is not None and self.open and not flight.is_aborted:
            placed, flight.placement = flight.placement, None
            if placed is not None:
                self._release(placed)
            return []
        self.end(event.number)
        return [event]

    def _note_prefills(self, columns: OutputColumns) -> Sequence[OutputColumns]:
        """Take note of the rows of prefills. Returns the others."""
        numbers = columns.numbers
        if not self._phases.has_prefills or not numbers or max(numbers) < FIRST_PREFILL:
            return [columns]
        rows = [row for row, number in enumerate(numbers) if number >= FIRST_PREFILL]
        for row in rows:
            flight = self._flights.get(numbers[row] - FIRST_PREFILL)
            if flight is None or not columns.finishes[row]:
                continue
            if columns.finishes[row] not in UNCOMPUTED:
                self._phases.share(flight.chain)
            flight.note_prefill(columns, row)
            self._prefill_ended(numbers[row])
        return columns.without(rows)

    def _prefill_ended(self, number: int) -> None:
        flight = self._flights.get(number - FIRST_PREFILL)
        if flight is not None and flight.phase is Phase.PREFILL:
            self._end_prefill(flight)

    def _note_columns(self, columns: OutputColumns, is_ending: bool) -> OutputColumns:
        numbers, flights = columns.numbers, self._flights
        for at, row in enumerate(columns.cached_rows):
            flight = flights.get(numbers[row])
            if flight is not None and flight.placement is not None:
                self._router.begun(flight.placement)
                flight.complete(columns, at)
        finishes = columns.finishes
        if is_ending and {*finishes} == {FinishReason.ABORT}:
            asked = [n for n in numbers if n not in flights or flights[n].is_aborted]
            if len(asked) < len(numbers):
                columns = aborted(asked)
                numbers, finishes = columns.numbers, columns.finishes
        if finishes.count(0) < len(finishes):
            for number, finish in zip(numbers, finishes, strict=True):
                if finish:
                    self.end(number, is_computed=finish not in UNCOMPUTED)
        return columns

    def end(self, number: int, is_computed: bool = False) -> None:
        """A request has ended. Idempotent.

        Args:
            number: the number of the request.
            is_computed: whether its prompt was computed.
        """
        flight = self._flights.get(number)
        if flight is None:
            return
        if flight.phase is Phase.PREFILL:
            self._end_prefill(flight)
        elif is_computed:
            self._phases.share(flight.chain)
        self._flights.pop(number, None)
        if flight.placement is not None and not flight.is_aborted:
            self._release(flight.placement)

    def abort(self, numbers: Sequence[int]) -> dict[int | None, list[int]]:
        """Returns those of the requests that have not ended, by engine; None: by no engine. They
        no longer count where they are."""
        found: dict[int | None, list[int]] = {}
        for number in numbers:
            flight = self._flights.get(number)
            if flight is None:
                continue
            placed = flight.placement
            engine = None if placed is None else placed.engine
            found.setdefault(engine, []).append(flight.sent.number)
            if not flight.is_aborted:
                if placed is not None:
                    self._release(placed)
                flight.is_aborted = True
            if placed is not None and flight.sent_at == NOT_SENT:
                # An exception has ended `pool` before the engine had it, which then tells nothing.
                flight.placement = None
                found.setdefault(None, []).append(number)
        return found

    def _release(self, placed: Placement) -> None:
        if placed.engine in self.alive:
            self._router.ended(placed)

    def lose_engine(self, engine: int, taken: int = NOT_SENT) -> None:
        """An engine has ended. Its requests are `stranded`; those that it took first were running.
        Idempotent.

        Args:
            engine: the engine.
            taken: the position up to which it has read its ring of requests.
        """
        if engine in self.alive:
            at_it = (each for each in self._flights.values() if each.is_at(engine))
            here = [flight for flight in at_it if flight.sent_at <= taken]
            here.sort(key=lambda flight: flight.place)
            self._ran[engine] = frozenset(f.request.number for f in here[: self._num_rows[engine]])
            self.alive.remove(engine)
        self._router.forget(engine)

    def clear_cached(self) -> None:
        """The engines have forgotten all prefixes."""
        self._router.clear_cached()
        self._phases.clear()

    def add_engine(self, engine: int) -> None:
        """An engine takes requests again, with the weights with which it started."""
        self.versions[engine] = 0
        self._leaving.discard(engine)
        self.alive.append(engine)

    def stranded(self) -> list[Flight]:
        """The requests whose engine has ended and that `lose` has not been told of."""
        return [
            flight
            for flight in self._flights.values()
            if flight.placement is not None and flight.placement.engine not in self.alive
        ]

    def lose(self, flight: Flight) -> bool:
        """Take a stranded request off its engine. Its `problem` says whether it may start over.

        Returns:
            Whether what was seen of it comes again.
        """
        placed = flight.placement
        assert placed is not None
        is_seen = flight.phase is not Phase.PREFILL
        flight.num_deaths += flight.request.number in self._ran[placed.engine]
        if flight.num_deaths > 1:
            flight.problem = TWO_DEATHS
        elif is_seen and self.versions[placed.engine] != flight.version:
            flight.problem = OTHER_WEIGHTS
        if is_seen:
            flight.placement = None
        else:
            self._end_prefill(flight)
        return is_seen and not flight.problem and not flight.is_aborted

    def lost(self) -> list[Flight]:
        """The requests that are nowhere, and wait for no other one."""
        return [
            flight
            for flight in self._flights.values()
            if flight.placement is None and (flight.phase is not Phase.WAIT or flight.is_aborted)
        ]

    def place_again(self, flight: Flight) -> bool:
        """Choose another engine, with the weights with which the request began. Returns whether
        there is one, or the request waits for the prefill of another one."""
        self._place(flight, [k for k in self.open if flight.version in (None, self.versions[k])])
        return flight.placement is not None or flight.phase is Phase.WAIT


def make_flights(infos: Sequence[EngineInfo], versions: Sequence[int | str]) -> Flights:
    """The flights of a new pool.

    Args:
        infos: what each engine reports.
        versions: the version of each engine's weights.
    """
    size = infos[0].block_size
    router = Router([each.num_blocks * each.enable_prefix_caching for each in infos], size)
    phases = Phases([each.role for each in infos], num_shared_blocks(infos), size)
    return Flights(router, size, [each.num_rows for each in infos], versions, phases)


def aborted(numbers: Sequence[int]) -> OutputColumns:
    """The last rows of requests that were aborted."""
    return OutputColumns(
        time_ns=time.monotonic_ns(),
        numbers=[*numbers],
        counts=[0] * len(numbers),
        finishes=[FinishReason.ABORT] * len(numbers),
    )
