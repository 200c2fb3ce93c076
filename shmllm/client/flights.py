"""The requests of a pool of engines that have not ended: where each is, and where it may go.

This module decides what happens to requests whose engine has ended. It sends nothing; see `pool`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from shmllm.client.protocol import EngineOutput
from shmllm.client.routing import Placement, Router, chain_hashes
from shmllm.outputs.columns import FinishReason, OutputColumns
from shmllm.params.request import EngineCoreRequest
from shmllm.wire.messages import SHUTTING_DOWN, Rejected, WeightVersion

TWO_DEATHS = "it was running when two engines died, and is not tried a third time"
NOT_SENT = 2**63
OTHER_WEIGHTS = "its engine has ended, and no other engine has the weights that it began with"


@dataclass(slots=True)
class Flight:
    """A request that has not ended.

    Attributes:
        request: the request.
        chain: the `chain_hashes` of its prompt.
        placement: where it is; None: nowhere, because its engine has ended.
        place: counts the placements of all requests: an engine gets them in this order.
        sent_at: the position in the engine's ring of requests behind it.
        version: the version of the weights with which it began.
        num_deaths: how many engines have ended while they ran it.
        is_aborted: whether its end was asked for.
        problem: why it cannot start over; "" if it can.
    """

    request: EngineCoreRequest
    chain: Sequence[int]
    placement: Placement | None = None
    place: int = 0
    sent_at: int = NOT_SENT
    version: int | str = 0
    num_deaths: int = 0
    is_aborted: bool = False
    problem: str = ""


class Flights:
    """
    Args:
        router: chooses engines.
        block_size: tokens of a block of keys and values.
        num_rows: how many requests each engine runs at once; others wait there.
        versions: the version of each engine's weights.

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
    ) -> None:
        self._router = router
        self._block_size = block_size
        self._num_rows = num_rows
        self._flights: dict[int, Flight] = {}
        self._last: tuple[Sequence[int], int | None] = (), None
        self._num_placed = 0
        self._leaving: set[int] = set()
        self._ran: dict[int, frozenset[int]] = {}
        self.alive = list(range(len(versions)))
        self.versions = [*versions]

    def begin(self, request: EngineCoreRequest) -> Flight:
        """Add a request, and choose its engine."""
        chain, near = self._last if request.is_sibling else (self._chain_of(request), None)
        self._flights[request.number] = flight = Flight(request, chain)
        engines = self.open or self.alive
        self._place(flight, [near] if near in engines else engines)
        self._last = chain, None if flight.placement is None else flight.placement.engine
        return flight

    def _chain_of(self, request: EngineCoreRequest) -> Sequence[int]:
        if not request.params.reads_prefix_cache:
            return ()
        lora = None if request.lora is None else request.lora.lora_int_id
        salt = request.cache_salt, lora
        return chain_hashes(request.prompt_token_ids, self._block_size, salt)

    @property
    def open(self) -> list[int]:
        """The engines that take new requests."""
        return [engine for engine in self.alive if engine not in self._leaving]

    def _place(self, flight: Flight, engines: Sequence[int]) -> None:
        if not engines:
            return
        num_tokens = len(flight.request.prompt_token_ids)
        placed = self._router.place(flight.chain, num_tokens, 1, engines)
        self._num_placed += 1
        flight.place = self._num_placed
        flight.sent_at = NOT_SENT
        flight.version = self.versions[placed.engine]
        flight.placement = placed

    def note(self, engine: int, event: EngineOutput, is_ending: bool) -> EngineOutput | None:
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
            return self._note_columns(event, is_ending)
        if isinstance(event, Rejected):
            if event.message == SHUTTING_DOWN:
                self._leaving.add(engine)
                flight = self._flights.get(event.number)
                if flight is not None and self.open and not flight.is_aborted:
                    self._release(flight)
                    flight.placement = None
                    return None
            self.end(event.number)
        elif isinstance(event, WeightVersion):
            self.versions[engine] = event.version
        return event

    def _note_columns(self, columns: OutputColumns, is_ending: bool) -> OutputColumns | None:
        numbers, flights = columns.numbers, self._flights
        for row in columns.cached_rows:
            flight = flights.get(numbers[row])
            if flight is not None and flight.placement is not None:
                self._router.begun(flight.placement)
        finishes = columns.finishes
        if is_ending and {*finishes} == {FinishReason.ABORT}:
            asked = [n for n in numbers if n not in flights or flights[n].is_aborted]
            if len(asked) < len(numbers):
                columns = aborted(asked)
                numbers, finishes = columns.numbers, columns.finishes
        if finishes.count(0) < len(finishes):
            for number, finish in zip(numbers, finishes, strict=True):
                if finish:
                    self.end(number)
        return columns if numbers else None

    def end(self, number: int) -> None:
        """A request has ended. Idempotent."""
        flight = self._flights.pop(number, None)
        if flight is not None and not flight.is_aborted:
            self._release(flight)

    def abort(self, numbers: Sequence[int]) -> dict[int | None, list[int]]:
        """Returns those of the requests that have not ended, by engine; None: by no engine. They
        no longer count where they are."""
        found: dict[int | None, list[int]] = {}
        for number in numbers:
            flight = self._flights.get(number)
            if flight is None:
                continue
            engine = None if flight.placement is None else flight.placement.engine
            found.setdefault(engine, []).append(number)
            if not flight.is_aborted:
                self._release(flight)
                flight.is_aborted = True
        return found

    def _release(self, flight: Flight) -> None:
        placed = flight.placement
        if placed is not None and placed.engine in self.alive:
            self._router.ended(placed)

    def lose_engine(self, engine: int, taken: int = NOT_SENT) -> None:
        """An engine has ended. Its requests are `stranded`; those that it took first were running.
        Idempotent.

        Args:
            engine: the engine.
            taken: the position up to which it has read its ring of requests.
        """
        if engine in self.alive:
            at_it = (each for each in self._flights.values() if _is_at(each, engine))
            here = [flight for flight in at_it if flight.sent_at <= taken]
            here.sort(key=lambda flight: flight.place)
            self._ran[engine] = frozenset(f.request.number for f in here[: self._num_rows[engine]])
            self.alive.remove(engine)
        self._router.forget(engine)

    def clear_cached(self) -> None:
        """The engines have forgotten all prefixes."""
        self._router.clear_cached()

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

    def lose(self, flight: Flight) -> None:
        """Take a stranded request off its engine. Its `problem` says whether it may start over."""
        placed = flight.placement
        assert placed is not None
        flight.num_deaths += flight.request.number in self._ran[placed.engine]
        if flight.num_deaths > 1:
            flight.problem = TWO_DEATHS
        elif self.versions[placed.engine] != flight.version:
            flight.problem = OTHER_WEIGHTS
        flight.placement = None

    def lost(self) -> list[Flight]:
        """The requests that are nowhere."""
        return [flight for flight in self._flights.values() if flight.placement is None]

    def place_again(self, flight: Flight) -> bool:
        """Choose another engine with the same weights. Returns whether there is one."""
        self._place(flight, [k for k in self.open if self.versions[k] == flight.version])
        return flight.placement is not None


def _is_at(flight: Flight, engine: int) -> bool:
    return flight.placement is not None and flight.placement.engine == engine


def aborted(numbers: Sequence[int]) -> OutputColumns:
    """The last rows of requests that were aborted."""
    return OutputColumns(
        time_ns=time.monotonic_ns(),
        numbers=[*numbers],
        counts=[0] * len(numbers),
        finishes=[FinishReason.ABORT] * len(numbers),
    )
