"""OutputProcessor: from the engine's columns to texts and endings."""

from __future__ import annotations

import pytest

from shmllm.frontend.input_processor import PreparedRequest
from shmllm.frontend.output_processor import OutputProcessor
from shmllm.outputs import FinishReason, OutputColumns
from shmllm.sampling_params import SamplingParams
from shmllm.wire.messages import Rejected

STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT


def columns(*rows, time_ns=0, cached=()):
    """rows: (number, token ids) or (number, token ids, finish); cached: (row, count)."""
    result = OutputColumns(time_ns=time_ns)
    for number, token_ids, *finish in rows:
        result.numbers.append(number)
        result.counts.append(len(token_ids))
        result.token_ids += token_ids
        result.finishes.append(finish[0] if finish else FinishReason.NONE)
    for row, count in cached:
        result.cached_rows.append(row)
        result.cached_counts.append(count)
    return result


@pytest.fixture
def tokenizer(tokenizer_of):
    return tokenizer_of("byte_level")


@pytest.fixture
def processor(tokenizer):
    return OutputProcessor(tokenizer)


@pytest.fixture
def end_id(tokenizer):
    return tokenizer.token_to_id("<|end|>")


def add(processor, *, index=0, streaming=False, prompt=(5, 6), **options):
    params = SamplingParams(**{"max_tokens": 100} | options)
    return processor.add(PreparedRequest(None, list(prompt), params), index, streaming)


def feed(processor, state, token_ids, finish=FinishReason.NONE):
    """One token a step, the last with `finish`; returns what has to be aborted."""
    to_abort = []
    for position, token_id in enumerate(token_ids):
        is_last = position == len(token_ids) - 1
        row = (state.number, [token_id], finish if is_last else FinishReason.NONE)
        to_abort += processor.process([columns(row)])[1]
    return to_abort


def completion(state):
    return state.output().outputs[0]


def ending(state):
    result = completion(state)
    return result.text, result.finish_reason, result.stop_reason


def test_numbers_count_up_and_are_never_used_again(processor):
    states = [add(processor) for _ in range(3)]
    processor.discard([states[2].number])
    assert [*(state.number for state in states), add(processor).number] == [0, 1, 2, 3]


def test_tokens_and_text_of_a_finished_request(processor, tokenizer):
    state = add(processor, index=4)
    ids = tokenizer.encode(" jumps over")
    assert feed(processor, state, ids, LENGTH) == []
    output = state.output()
    assert (output.finished, output.request_id, output.prompt_token_ids) == (True, "0", [5, 6])
    assert completion(state).token_ids == ids
    assert ending(state) == (" jumps over", "length", None)


def test_rows_of_one_step_go_to_their_requests(processor):
    first, second = add(processor), add(processor, index=1)
    changed, _ = processor.process(
        [columns((second.number, [7]), (first.number, [8, 9])), columns((first.number, [10]))]
    )
    assert (first.token_ids, second.token_ids) == ([8, 9, 10], [7])
    assert {state.index for state in changed} == {0, 1}


def test_the_end_of_sequence_token_is_in_the_ids_and_not_in_the_text(processor, tokenizer, end_id):
    state = add(processor, skip_special_tokens=False)
    ids = [*tokenizer.encode("dog"), end_id]
    feed(processor, state, ids, STOP)
    assert ending(state) == ("dog", "stop", None)
    assert completion(state).token_ids == ids


def test_a_stop_token_is_the_stop_reason_and_not_in_the_text(processor, tokenizer):
    ids = tokenizer.encode("the dog")
    state = add(processor, stop_token_ids=[ids[-1], 9])
    feed(processor, state, ids, STOP)
    text, reason, stop_reason = ending(state)
    assert text == tokenizer.decode(ids[:-1])
    assert (reason, stop_reason) == ("stop", ids[-1])


def test_a_stop_token_stays_in_the_text_if_asked_for(processor, tokenizer):
    ids = tokenizer.encode("the dog")
    state = add(processor, stop_token_ids=[ids[-1]], include_stop_str_in_output=True)
    feed(processor, state, ids, STOP)
    assert ending(state) == ("the dog", "stop", ids[-1])


def test_a_stop_token_that_comes_with_the_last_length_has_no_stop_reason(processor, tokenizer):
    state = add(processor, stop_token_ids=[7])
    feed(processor, state, [7], LENGTH)
    assert ending(state)[1:] == ("length", None)


def test_a_stop_string_within_the_output_ends_it_and_aborts_the_engine(processor, tokenizer):
    state = add(processor, stop=["ox ju"])
    to_abort = feed(processor, state, tokenizer.encode("The fox jumps"))
    assert to_abort == [state.number]
    assert ending(state) == ("The f", "stop", "ox ju")


def test_a_stop_string_may_span_tokens(processor, tokenizer):
    word = "lazy dog, and then"
    ids = tokenizer.encode(word)
    assert len(ids) > 3
    state = add(processor, stop=[word])
    assert feed(processor, state, ids[:-1]) == []
    assert feed(processor, state, ids[-1:]) == [state.number]
    assert ending(state) == ("", "stop", word)


def test_the_stop_string_stays_in_the_text_if_asked_for(processor, tokenizer):
    state = add(processor, stop=["fox"], include_stop_str_in_output=True)
    feed(processor, state, tokenizer.encode("The fox jumps"))
    assert ending(state) == ("The fox", "stop", "fox")


def test_a_stop_string_completed_by_the_last_token_needs_no_abort(processor, tokenizer):
    state = add(processor, stop=["jumps"])
    assert feed(processor, state, tokenizer.encode("fox jumps"), LENGTH) == []
    assert ending(state) == ("fox ", "stop", "jumps")


def test_text_of_the_ending_token_completes_no_stop_string(processor, tokenizer, end_id):
    state = add(processor, stop=["<|end|>"], skip_special_tokens=False)
    assert feed(processor, state, [*tokenizer.encode("dog"), end_id], STOP) == []
    assert ending(state) == ("dog", "stop", None)


def test_a_stop_token_beats_a_stop_string_of_the_same_token(processor, tokenizer):
    ids = tokenizer.encode("fox jumps")
    state = add(
        processor,
        stop=[tokenizer.decode(ids[-1:])],
        stop_token_ids=[ids[-1]],
        include_stop_str_in_output=True,
    )
    assert feed(processor, state, ids, STOP) == []
    assert ending(state)[1:] == ("stop", ids[-1])


def test_stop_strings_do_not_count_before_min_tokens(processor, tokenizer):
    ids = [tokenizer.token_to_id(letter) for letter in "xaxbxc"]
    state = add(processor, stop=["x"], min_tokens=2)
    assert feed(processor, state, ids) == [state.number]
    assert ending(state) == ("xa", "stop", "x")
    assert len(completion(state).token_ids) == 3


def test_a_stop_string_that_began_before_min_tokens_counts_when_it_is_complete(
    processor, tokenizer
):
    ids = [tokenizer.token_to_id(letter) for letter in "abcd"]
    state = add(processor, stop=["bc"], min_tokens=2)
    assert feed(processor, state, ids) == [state.number]
    assert ending(state) == ("a", "stop", "bc")


def test_min_tokens_hold_at_the_end_of_the_request_too(processor, tokenizer):
    ids = [tokenizer.token_to_id(letter) for letter in "ab"]
    state = add(processor, stop=["b"], min_tokens=2)
    assert feed(processor, state, ids, LENGTH) == []
    assert ending(state) == ("ab", "length", None)


def test_text_held_back_to_the_end_completes_no_stop_string_before_min_tokens(processor, tokenizer):
    ids = tokenizer.encode("\U0001f9a9")[:1]
    state = add(processor, stop=["\ufffd"], min_tokens=3)
    feed(processor, state, ids, LENGTH)
    assert ending(state) == ("\ufffd", "length", None)


def test_what_comes_after_a_stop_string_is_ignored(processor, tokenizer):
    state = add(processor, stop=["fox"])
    feed(processor, state, tokenizer.encode("The fox"))
    before = ending(state), list(state.token_ids)
    late = [columns((state.number, [9])), columns((state.number, [], ABORT))]
    assert processor.process(late) == ([], [])
    assert (ending(state), state.token_ids) == before


def test_an_abort_ends_a_request_with_what_it_has(processor, tokenizer):
    state = add(processor)
    feed(processor, state, tokenizer.encode("fox"))
    changed, to_abort = processor.process([columns((state.number, [], ABORT))])
    assert (changed, to_abort) == ([state], [])
    assert ending(state) == ("fox", "abort", None)


def test_an_abort_before_the_first_token(processor):
    state = add(processor, stop=["x"])
    processor.process([columns((state.number, [], ABORT))])
    assert ending(state) == ("", "abort", None)
    assert state.metrics.first_token_time is None


def test_a_rejected_request_ends_with_the_error(processor):
    state = add(processor)
    changed, to_abort = processor.process([Rejected(state.number, "too long")])
    assert (changed, to_abort) == ([state], [])
    output = state.output()
    assert (output.error, output.finished) == ("too long", True)
    assert ending(state) == ("", "error", None)


@pytest.mark.parametrize(
    "event",
    [columns((99, [5])), columns((99, [5], STOP), cached=[(0, 3)]), Rejected(99, "x")],
    ids=["tokens", "ending", "rejection"],
)
def test_events_for_unknown_requests_are_ignored(processor, event):
    state = add(processor)
    assert processor.process([event, columns((state.number, [7]))]) == ([state], [])
    assert state.token_ids == [7]


def test_unknown_rows_do_not_shift_the_tokens_of_others(processor):
    state = add(processor)
    processor.process([columns((98, [1, 2, 3]), (state.number, [7]), (99, [4]))])
    assert state.token_ids == [7]


def test_discarded_requests_are_those_that_were_known(processor):
    states = [add(processor) for _ in range(3)]
    feed(processor, states[1], [5], LENGTH)
    assert processor.discard([0, 1, 2, 9]) == [0, 2]
    assert processor.process([columns((0, [5]))]) == ([], [])


def test_a_state_that_ended_is_not_reported_as_ended_twice(processor):
    """Several records can arrive in one poll; who counts endings must count each once."""
    state, other = add(processor), add(processor, index=1)
    changed, _ = processor.process(
        [
            columns((state.number, [7]), (other.number, [8])),
            columns((state.number, [7], LENGTH), (other.number, [8])),
        ]
    )
    assert sum(item.finish_reason is not None for item in changed) == 1


def test_cache_hits_are_noted(processor):
    first, second = add(processor), add(processor)
    rows = ((first.number, [5]), (second.number, [6]))
    processor.process([columns(*rows, cached=[(1, 48)])])
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 48)
    assert second.output().num_cached_tokens == 48


def test_times_are_those_of_the_records(processor):
    state = add(processor)
    for time_ns in (2_000_000_000, 3_000_000_000, 5_500_000_000):
        processor.process([columns((state.number, [7]), time_ns=time_ns)])
    metrics = state.output().metrics
    assert (metrics.first_token_time, metrics.last_token_time) == (2.0, 5.5)


def test_an_unfinished_request_can_be_looked_at(processor, tokenizer):
    state = add(processor, streaming=True)
    feed(processor, state, tokenizer.encode("The fox"))
    assert not state.output().finished
    assert ending(state) == ("The fox", None, None)


def test_streaming_gives_text_as_it_comes_and_all_of_it(processor, tokenizer):
    state = add(processor, streaming=True)
    text = "The quick brown fox 中文 jumps"
    deltas = []
    for position, token_id in enumerate(ids := tokenizer.encode(text)):
        feed(processor, state, [token_id], LENGTH if position == len(ids) - 1 else 0)
        deltas.append(state.text.take_delta())
    assert "".join(deltas) == text
    assert sum(map(bool, deltas)) > 3


def test_without_streaming_and_stop_strings_text_is_decoded_once_at_the_end(processor, tokenizer):
    state = add(processor)
    feed(processor, state, tokenizer.encode("fox"))
    assert completion(state).text == ""
    feed(processor, state, tokenizer.encode(" dog"), LENGTH)
    assert completion(state).text == "fox dog"


def test_without_detokenization_there_is_no_text(processor, tokenizer):
    state = add(processor, detokenize=False, streaming=True)
    ids = tokenizer.encode("fox jumps")
    feed(processor, state, ids, LENGTH)
    assert ending(state) == ("", "length", None)
    assert completion(state).token_ids == ids


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<|end|>b")])
def test_special_tokens_within_the_output(processor, tokenizer, end_id, skip, text):
    state = add(processor, skip_special_tokens=skip)
    ids = [tokenizer.token_to_id("a"), end_id, tokenizer.token_to_id("b")]
    feed(processor, state, ids, LENGTH)
    assert completion(state).text == text


def test_an_incomplete_character_at_the_end_is_shown_as_such(processor, tokenizer):
    ids = tokenizer.encode("a\U0001f9a9")
    assert len(ids) > 2
    state = add(processor)
    feed(processor, state, ids[:-1], LENGTH)
    assert completion(state).text == "a\ufffd"


def test_token_times_are_kept_only_for_who_measures(processor):
    measured, other = add(processor), add(processor)
    measured.token_times = []
    for time_ns in (1_000_000_000, 2_500_000_000):
        processor.process([columns((0, [7, 8]), (1, [7, 8]), time_ns=time_ns)])
    assert measured.token_times == [1.0, 1.0, 2.5, 2.5]
    assert other.token_times is None
