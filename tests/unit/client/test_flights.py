"""Flights: where requests are, and where they may go when their engine has ended."""

from __future__ import annotations

import pytest

from shmllm.client.flights import OTHER_WEIGHTS, TWO_DEATHS, Flights, aborted
from shmllm.client.phases import LONG_BLOCKS, Phase, Phases
from shmllm.client.routing import Router
from shmllm.outputs.columns import FinishReason, OutputColumns
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams
from shmllm.wire.messages import SHUTTING_DOWN, Rejected, WeightVersion


def make(count=2, num_rows=2, versions=None):
    rows = [num_rows] * count
    phases = Phases(["both"] * count, 0, 4)
    return Flights(Router([16] * count, 4), 4, rows, versions or [0] * count, phases)


def request(number, is_sibling=False):
    prompt = [number + 1] * 9
    return EngineCoreRequest(number, prompt, SamplingParams(), is_sibling=is_sibling)


def begin(flights, count):
    placed = [flights.begin(request(number)) for number in range(count)]
    for flight in placed:
        flight.sent_at = flight.request.number
    return placed


def row(number, finish=FinishReason.NONE, is_first=False):
    return OutputColumns(
        numbers=[number], counts=[1], finishes=[finish], token_ids=[3],
        cached_rows=[0] * is_first, cached_counts=[0] * is_first,
    )  # fmt: skip


def queued(flights):
    return [flights._router.queued(engine) for engine in range(len(flights.versions))]


def lose_all(flights):
    lost = flights.stranded()
    for flight in lost:
        flights.lose(flight)
    return lost


def test_completions_of_a_prompt_stay_together():
    flights = make()
    first = flights.begin(request(0))
    others = [flights.begin(request(number, is_sibling=True)) for number in (1, 2)]
    assert {each.placement.engine for each in [first, *others]} == {first.placement.engine}
    assert flights.begin(request(3)).placement.engine != first.placement.engine


def of_encoder(number, text, prompt=(1,)):
    return EngineCoreRequest(number, list(prompt), SamplingParams(), encoder_token_ids=text)


def test_what_an_encoder_reads_counts_as_a_part_of_the_prompt():
    """It is queued, and a request with the same text goes where that was computed."""
    flights = make()
    first = flights.begin(of_encoder(0, [7] * 9))
    plain = make()
    other = plain.begin(EngineCoreRequest(0, [3] * 10, SamplingParams()))
    assert queued(flights)[first.placement.engine] == queued(plain)[other.placement.engine]
    engine = first.placement.engine
    flights.note(engine, row(0, FinishReason.STOP, is_first=True), False)
    elsewhere = flights.begin(of_encoder(1, [8] * 9)).placement.engine
    flights.note(elsewhere, row(1, FinishReason.STOP, is_first=True), False)
    assert elsewhere != engine
    for number, (text, wanted) in enumerate([([7] * 9, engine), ([8] * 9, elsewhere)], 2):
        assert flights.begin(of_encoder(number, text)).placement.engine == wanted
        flights.note(wanted, row(number, FinishReason.STOP, is_first=True), False)


def test_a_long_prompt_of_a_decoder_has_a_prefill_behind_a_short_text():
    phases = Phases(["prefill", "decode"], 100, 4)
    flights = Flights(Router([16, 16], 4), 4, [2, 2], [0, 0], phases)
    prompt = list(range(4 * (LONG_BLOCKS + 6)))
    assert flights.begin(of_encoder(0, [5] * 5, prompt)).phase is Phase.PREFILL


def test_a_completion_goes_elsewhere_if_its_engine_has_ended():
    flights = make()
    first = flights.begin(request(0))
    engine = first.placement.engine
    flights.lose_engine(engine)
    assert flights.begin(request(1, is_sibling=True)).placement.engine == 1 - engine


def test_ends_release_the_queue_once():
    flights = make()
    begin(flights, 4)
    for _ in range(2):
        for number in range(4):
            flights.note(0, row(number, is_first=True), False)
            flights.note(0, row(number, FinishReason.STOP), False)
    assert queued(flights) == [0, 0]
    assert len(flights._flights) == 0


def test_an_abort_releases_the_queue_once_and_the_row_ends_the_request():
    flights = make()
    begin(flights, 2)
    for _ in range(2):
        found = flights.abort([0, 1, 7])
        assert sorted(number for numbers in found.values() for number in numbers) == [0, 1]
    assert queued(flights) == [0, 0]
    flights.note(0, aborted([0, 1]), False)
    assert len(flights._flights) == 0
    assert queued(flights) == [0, 0]


def test_an_aborted_request_that_was_not_sent_is_nowhere():
    flights = make()
    flight = flights.begin(request(0))
    engine = flight.placement.engine
    assert flights.abort([0]) == {engine: [0], None: [0]}
    assert flights.lost() == [flight]
    assert queued(flights) == [0, 0]


def test_lost_requests_are_placed_elsewhere():
    flights = make()
    placed = begin(flights, 4)
    flights.lose_engine(0)
    flights.lose_engine(0)
    lost = lose_all(flights)
    assert [each.request.number for each in lost] == [
        each.request.number for each in placed if each in lost
    ]
    assert len(lost) == 2
    assert flights.stranded() == []
    assert flights.lost() == lost
    assert all(flights.place_again(flight) for flight in lost)
    assert {flight.placement.engine for flight in placed} == {1}
    assert flights.lost() == []


def test_waiting_requests_survive_any_number_of_deaths_and_running_ones_two():
    flights = make(3, num_rows=1)
    placed = begin(flights, 6)
    victim = placed[0].placement.engine
    ran = [flight for flight in placed if flight.placement.engine == victim]
    flights.lose_engine(victim)
    for flight in lose_all(flights):
        assert flight.problem == ""
        flights.place_again(flight)
    assert [flight.num_deaths for flight in ran] == [1, 0]
    # The request that ran is at the end of the queue now, so it does not run at the second one.
    flights.lose_engine(ran[0].placement.engine)
    lose_all(flights)
    assert ran[0].num_deaths == 1
    assert ran[0].problem == ""


def test_a_request_that_an_engine_has_not_taken_did_not_run_there():
    flights = make(3)
    (flight,) = begin(flights, 1)
    for taken, num_deaths in ((7, 1), (6, 1), (7, 2)):
        flight.sent_at = 7
        flights.lose_engine(flight.placement.engine, taken)
        lose_all(flights)
        assert flight.num_deaths == num_deaths
        flights.place_again(flight)
    assert flight.problem == TWO_DEATHS


def test_a_request_that_ran_at_two_deaths_has_a_problem():
    flights = make(3)
    (flight,) = begin(flights, 1)
    for _ in range(2):
        assert flight.problem == ""
        flights.lose_engine(flight.placement.engine)
        lose_all(flights)
        if not flight.problem:
            flights.place_again(flight)
    assert flight.problem == TWO_DEATHS


def test_only_equal_weights_continue_a_request():
    flights = make()
    first, second = begin(flights, 2)
    engine = first.placement.engine
    flights.note(engine, WeightVersion("new"), False)
    flights.lose_engine(second.placement.engine)
    lose_all(flights)
    assert second.problem == ""
    assert not flights.place_again(second)
    flights.lose_engine(engine)
    lose_all(flights)
    assert first.problem == OTHER_WEIGHTS  # it began with others


def test_versions_of_named_engines_count_from_the_start():
    flights = make(versions=[5, 5])
    (flight,) = begin(flights, 1)
    flights.note(flight.placement.engine, WeightVersion(5), False)
    flights.lose_engine(flight.placement.engine)
    lose_all(flights)
    assert flight.problem == ""
    assert flights.place_again(flight)


def test_aborts_of_an_engine_that_ends_are_not_the_end_of_a_request():
    flights = make(1)
    first, second = begin(flights, 2)
    flights.abort([1])
    for _ in range(2):
        (event,) = flights.note(0, aborted([0, 1]), True)
        assert event.numbers == [1]
    assert flights.note(0, aborted([0]), True) == []
    assert first.placement is not None
    assert [e.numbers for e in flights.note(0, row(0, FinishReason.STOP), True)] == [[0]]
    assert len(flights._flights) == 0
    assert second.is_aborted


def test_an_engine_that_takes_no_requests_gets_none():
    flights = make()
    flight = begin(flights, 1)[0]
    engine = flight.placement.engine
    for _ in range(2):
        assert flights.note(engine, Rejected(0, SHUTTING_DOWN), False) == []
    assert flights.lost() == [flight]
    assert queued(flights) == [0, 0]
    assert flights.place_again(flight)
    assert flight.placement.engine == 1 - engine
    assert flights.begin(request(1)).placement.engine == 1 - engine
    flights.lose_engine(engine)
    flights.add_engine(engine)
    assert flights.open == [1 - engine, engine]


@pytest.mark.parametrize("message", ["no", SHUTTING_DOWN])
def test_other_refusals_are_passed_on(message):
    flights = make(1)
    begin(flights, 1)
    event = Rejected(0, message)
    assert flights.note(0, event, False) == [event]
    assert len(flights._flights) == 0


def test_an_engine_that_joins_again_has_no_queue():
    flights = make()
    begin(flights, 4)
    flights.lose_engine(0)
    for flight in lose_all(flights):
        flights.place_again(flight)
    flights.add_engine(0)
    assert queued(flights)[0] == 0
    assert flights.begin(request(9)).placement.engine == 0
