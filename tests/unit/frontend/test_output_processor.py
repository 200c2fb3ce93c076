"""OutputProcessor: updates request states from output columns, and makes outputs of them."""

from __future__ import annotations

import gc
import itertools
import random
import time

import numpy as np
import pytest
from support.tokenizer_helpers import token_id_of

from shmllm.client.protocol import StartedOver
from shmllm.frontend.input_processor import PreparedRequest
from shmllm.frontend.output_processor import OutputProcessor
from shmllm.frontend.request_outputs import next_output, request_output
from shmllm.frontend.request_state import RequestState
from shmllm.outputs.columns import FinishReason, OutputColumns
from shmllm.outputs.logprobs import Logprob, LogprobColumns, PromptLogprobs
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import RequestOutputKind, SamplingParams
from shmllm.params.structured_outputs import StructuredOutputsParams
from shmllm.wire.messages import Rejected, WeightVersion

STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT


def columns(*rows, time_ns=0, cached=(), drafted=()):
    """Output columns.

    Args:
        rows: (number, token ids) or (number, token ids, finish) of each row.
        time_ns: the time of the columns.
        cached: (row, number of cached prompt tokens) of some rows.
        drafted: (row, drafted tokens, accepted ones) of some rows.
    """
    result = OutputColumns(time_ns=time_ns)
    for number, token_ids, *finish in rows:
        result.numbers.append(number)
        result.counts.append(len(token_ids))
        result.token_ids += token_ids
        result.finishes.append(finish[0] if finish else FinishReason.NONE)
    for row, count in cached:
        result.cached_rows.append(row)
        result.cached_counts.append(count)
    for row, count, num_accepted in drafted:
        result.drafted_rows.append(row)
        result.drafted_counts.append(count)
        result.accepted_counts.append(num_accepted)
    return result


@pytest.fixture
def tokenizer(tokenizer_of):
    return tokenizer_of("byte_level")


@pytest.fixture
def processor(tokenizer):
    return OutputProcessor(tokenizer)


@pytest.fixture
def end_id(tokenizer):
    return token_id_of(tokenizer, "<|end|>")


def add(processor, *, index=0, streaming=False, prompt=(5, 6), **options):
    params = SamplingParams(**{"max_tokens": 100} | options)
    request = PreparedRequest(None, params, EngineCoreRequest(-1, list(prompt), params))
    (state,) = processor.add_all(request, index, streaming)
    return state


def feed(processor, state, token_ids, finish=FinishReason.NONE):
    """Process one token per step, the last one with `finish`. Returns the numbers to abort."""
    to_abort = []
    for position, token_id in enumerate(token_ids):
        is_last = position == len(token_ids) - 1
        row = (state.number, [token_id], finish if is_last else FinishReason.NONE)
        to_abort += processor.process([columns(row)])[1]
    return to_abort


def completion(state):
    return request_output(state).outputs[0]


def ending(state):
    result = completion(state)
    return result.text, result.finish_reason, result.stop_reason


def test_numbers_are_consecutive_and_never_reused(processor):
    states = [add(processor) for _ in range(3)]
    processor.discard([states[2].number])
    assert [*(state.number for state in states), add(processor).number] == [0, 1, 2, 3]


def test_tokens_and_text_of_a_finished_request(processor, tokenizer):
    state = add(processor, index=4)
    ids = tokenizer.encode(" jumps over")
    assert feed(processor, state, ids, LENGTH) == []
    output = request_output(state)
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


@pytest.mark.parametrize("streaming", [False, True])
def test_the_last_token_of_a_structured_output_is_part_of_its_text(tokenizer, end_id, streaming):
    constraint = StructuredOutputsParams(choice=["dog"])
    ids = tokenizer.encode("dog")
    processor = OutputProcessor(tokenizer, [end_id])
    by_grammar, by_end, by_stop_id = (
        add(processor, structured_outputs=constraint, streaming=streaming, **options)
        for options in ({}, {"ignore_eos": True}, {"stop_token_ids": [7]})
    )
    feed(processor, by_grammar, ids, STOP)
    feed(processor, by_end, [*ids, end_id], STOP)
    feed(processor, by_stop_id, [*ids, 7], STOP)
    assert ending(by_grammar) == ("dog", "stop", None)
    assert ending(by_end) == ("dog", "stop", None)
    assert ending(by_stop_id) == ("dog", "stop", 7)


def test_an_error_keeps_the_tokens_before_it(processor, tokenizer):
    state = add(processor)
    ids = tokenizer.encode("dog and")
    feed(processor, state, ids)
    processor.process([Rejected(state.number, "cannot go on")])
    assert ending(state) == ("dog and", "error", None)
    assert request_output(state).error == "cannot go on"
    assert completion(state).token_ids == ids


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


def test_include_stop_str_in_output_keeps_a_stop_token_in_the_text(processor, tokenizer):
    ids = tokenizer.encode("the dog")
    state = add(processor, stop_token_ids=[ids[-1]], include_stop_str_in_output=True)
    feed(processor, state, ids, STOP)
    assert ending(state) == ("the dog", "stop", ids[-1])


def test_a_stop_token_at_the_length_limit_is_no_stop_reason(processor, tokenizer):
    state = add(processor, stop_token_ids=[7])
    feed(processor, state, [7], LENGTH)
    assert ending(state)[1:] == ("length", None)


def test_a_stop_string_ends_the_output_and_aborts_the_request_in_the_engine(processor, tokenizer):
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


def test_include_stop_str_in_output_keeps_a_stop_string_in_the_text(processor, tokenizer):
    state = add(processor, stop=["fox"], include_stop_str_in_output=True)
    feed(processor, state, tokenizer.encode("The fox jumps"))
    assert ending(state) == ("The fox", "stop", "fox")


def test_a_stop_string_completed_by_the_last_token_needs_no_abort(processor, tokenizer):
    state = add(processor, stop=["jumps"])
    assert feed(processor, state, tokenizer.encode("fox jumps"), LENGTH) == []
    assert ending(state) == ("fox ", "stop", "jumps")


def test_the_text_of_an_end_token_completes_no_stop_string(processor, tokenizer, end_id):
    state = add(processor, stop=["<|end|>"], skip_special_tokens=False)
    assert feed(processor, state, [*tokenizer.encode("dog"), end_id], STOP) == []
    assert ending(state) == ("dog", "stop", None)


def test_a_stop_token_takes_precedence_over_a_stop_string_at_the_same_token(processor, tokenizer):
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
    ids = [token_id_of(tokenizer, letter) for letter in "xaxbxc"]
    state = add(processor, stop=["x"], min_tokens=2)
    assert feed(processor, state, ids) == [state.number]
    assert ending(state) == ("xa", "stop", "x")
    assert len(completion(state).token_ids) == 3


def test_a_stop_string_that_begins_before_min_tokens_counts_if_it_ends_after(processor, tokenizer):
    ids = [token_id_of(tokenizer, letter) for letter in "abcd"]
    state = add(processor, stop=["bc"], min_tokens=2)
    assert feed(processor, state, ids) == [state.number]
    assert ending(state) == ("a", "stop", "bc")


def test_min_tokens_also_apply_at_the_end_of_the_request(processor, tokenizer):
    ids = [token_id_of(tokenizer, letter) for letter in "ab"]
    state = add(processor, stop=["b"], min_tokens=2)
    assert feed(processor, state, ids, LENGTH) == []
    assert ending(state) == ("ab", "length", None)


def test_text_decoded_at_the_end_completes_no_stop_string_before_min_tokens(processor, tokenizer):
    ids = tokenizer.encode("\U0001f9a9")[:1]
    state = add(processor, stop=["\ufffd"], min_tokens=3)
    feed(processor, state, ids, LENGTH)
    assert ending(state) == ("\ufffd", "length", None)


def test_events_after_a_stop_string_are_ignored(processor, tokenizer):
    state = add(processor, stop=["fox"])
    feed(processor, state, tokenizer.encode("The fox"))
    before = ending(state), list(state.token_ids)
    late = [columns((state.number, [9])), columns((state.number, [], ABORT))]
    assert processor.process(late) == ([], [])
    assert (ending(state), state.token_ids) == before


def test_an_aborted_request_keeps_its_tokens(processor, tokenizer):
    state = add(processor)
    feed(processor, state, tokenizer.encode("fox"))
    changed, to_abort = processor.process([columns((state.number, [], ABORT))])
    assert (changed, to_abort) == ([state], [])
    assert ending(state) == ("fox", "abort", None)


def test_a_request_can_be_aborted_before_its_first_token(processor):
    state = add(processor, stop=["x"])
    processor.process([columns((state.number, [], ABORT))])
    assert ending(state) == ("", "abort", None)
    assert state.metrics.first_token_ts is None
    assert state.metrics.first_token_time is None


def test_a_rejected_request_ends_with_the_error(processor):
    state = add(processor)
    changed, to_abort = processor.process([Rejected(state.number, "too long")])
    assert (changed, to_abort) == ([state], [])
    output = request_output(state)
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


def test_discard_returns_the_numbers_of_unfinished_requests(processor):
    states = [add(processor) for _ in range(3)]
    feed(processor, states[1], [5], LENGTH)
    assert processor.discard([0, 1, 2, 9]) == [0, 2]
    assert processor.process([columns((0, [5]))]) == ([], [])


def test_a_state_is_reported_once_per_poll(processor):
    """A poll can return several steps. A caller that counts ended requests must count each once."""
    state, other = add(processor), add(processor, index=1)
    changed, _ = processor.process(
        [
            columns((state.number, [7]), (other.number, [8])),
            columns((state.number, [7], LENGTH), (other.number, [8])),
        ]
    )
    assert sum(item.finish_reason is not None for item in changed) == 1


def test_prefix_cache_hits_are_recorded(processor):
    first, second = add(processor), add(processor)
    rows = ((first.number, [5]), (second.number, [6]))
    processor.process([columns(*rows, cached=[(1, 48)])])
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 48)
    assert request_output(second).num_cached_tokens == 48


def test_times_are_those_of_the_output_columns(processor):
    state = add(processor)
    for time_ns in (2_000_000_000, 3_000_000_000, 5_500_000_000):
        processor.process([columns((state.number, [7]), time_ns=time_ns)])
    metrics = request_output(state).metrics
    assert (metrics.first_token_ts, metrics.last_token_ts) == (2.0, 5.5)
    assert metrics.num_generation_tokens == 3


def test_a_request_arrives_on_the_wall_clock(processor):
    began = time.time(), time.monotonic()
    state = add(processor)
    ended = time.time(), time.monotonic()
    queued_ns, first_ns = (time.monotonic_ns() + later for later in (0, 2 * 10**9))
    state.metrics.queued_ts = queued_ns / 1e9
    processor.process([columns((state.number, [7]), time_ns=first_ns)])
    metrics = request_output(state).metrics
    for before, moment, after in zip(
        began, (metrics.arrival_time, metrics.arrival_ts), ended, strict=True
    ):
        assert before <= moment <= after
    latency = metrics.first_token_ts - metrics.arrival_ts
    assert metrics.first_token_latency == latency
    assert metrics.first_token_time == pytest.approx(metrics.arrival_time + latency, abs=1e-3)
    assert metrics.arrival_time <= metrics.queued_time < metrics.first_token_time


def drafted_of(state):
    metrics = request_output(state).metrics
    return metrics.num_draft_tokens, metrics.num_accepted_tokens


def test_the_counts_of_drafts_come_with_the_end_of_a_request(processor):
    drafted, plain, open_one = (add(processor) for _ in "abc")
    processor.process([columns((drafted.number, [5, 6]))])
    assert drafted_of(drafted) == (None, None)
    rows = (plain.number, [7], LENGTH), (drafted.number, [7], STOP), (open_one.number, [7])
    processor.process([columns(*rows, drafted=[(1, 9, 4)])])
    assert [drafted_of(each) for each in (drafted, plain, open_one)] == [
        (9, 4),
        (0, 0),
        (None, None),
    ]


def test_an_abort_of_the_engine_has_the_counts_of_drafts(processor):
    state = add(processor)
    processor.process([columns((state.number, [], ABORT), drafted=[(0, 3, 0)])])
    assert drafted_of(state) == (3, 0)


def test_after_a_stop_string_the_counts_of_drafts_are_known_only_from_the_engines_end(
    processor, tokenizer
):
    early, last = (add(processor, stop=["fox"]) for _ in "ab")
    ids = tokenizer.encode("The fox")
    processor.process([columns((early.number, ids))])
    processor.process([columns((early.number, [], ABORT), drafted=[(0, 9, 4)])])
    processor.process([columns((last.number, [*ids, 9], LENGTH), drafted=[(0, 8, 3)])])
    assert (ending(early), ending(last)) == (("The ", "stop", "fox"),) * 2
    assert (drafted_of(early), drafted_of(last)) == ((None, None), (8, 3))


def test_a_refused_request_has_no_counts_of_drafts(processor):
    state = add(processor)
    processor.process([Rejected(state.number, "no")])
    assert drafted_of(state) == (None, None)


def test_an_unfinished_request_has_an_output(processor, tokenizer):
    state = add(processor, streaming=True)
    feed(processor, state, tokenizer.encode("The fox"))
    assert not request_output(state).finished
    assert ending(state) == ("The fox", None, None)


def test_the_deltas_of_a_stream_join_to_the_whole_text(processor, tokenizer):
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
    ids = [token_id_of(tokenizer, "a"), end_id, token_id_of(tokenizer, "b")]
    feed(processor, state, ids, LENGTH)
    assert completion(state).text == text


def test_an_incomplete_character_at_the_end_becomes_a_replacement_character(processor, tokenizer):
    ids = tokenizer.encode("a\U0001f9a9")
    assert len(ids) > 2
    state = add(processor)
    feed(processor, state, ids[:-1], LENGTH)
    assert completion(state).text == "a\ufffd"


def test_token_times_are_recorded_only_if_requested(processor):
    measured, other = add(processor), add(processor)
    measured.token_times = []
    for time_ns in (1_000_000_000, 2_500_000_000):
        processor.process([columns((0, [7, 8]), (1, [7, 8]), time_ns=time_ns)])
    assert measured.token_times == [1.0, 1.0, 2.5, 2.5]
    assert other.token_times is None


def logprob_columns(rows, ks, logprobs, ranks, top_ids=(), top_logprobs=()):
    return LogprobColumns(
        list(rows),
        list(ks),
        np.array(logprobs, np.float32),
        np.array(ranks, np.int32),
        np.array(top_ids, np.int32),
        np.array(top_logprobs, np.float32),
    )


def without_text(entries):
    return [{token: (lp.logprob, lp.rank) for token, lp in entry.items()} for entry in entries]


def test_logprobs_go_to_the_requests_that_want_them(processor):
    plain, some, bare = add(processor), add(processor, logprobs=2), add(processor, logprobs=0)
    for step in range(2):
        event = columns((plain.number, [7]), (some.number, [8]), (bare.number, [9]))
        event.logprobs = logprob_columns(
            [1, 2], [2, 0], [-1.0 - step, -2.0], [3, 4], [30, 8], [-0.5, -1.0 - step]
        )
        processor.process([event])
    assert completion(plain).logprobs is None
    assert completion(plain).cumulative_logprob is None
    assert without_text(completion(some).logprobs) == [
        {8: (-1.0, 3), 30: (-0.5, 1)},
        {8: (-2.0, 3), 30: (-0.5, 1)},
    ]
    assert without_text(completion(bare).logprobs) == [{9: (-2.0, 4)}] * 2
    assert completion(some).cumulative_logprob == -3.0


def test_logprobs_of_unknown_requests_are_skipped(processor):
    gone, stays = add(processor, logprobs=1), add(processor, logprobs=1)
    processor.discard([gone.number])
    event = columns((gone.number, [7]), (stays.number, [8, 9]))
    event.logprobs = logprob_columns(
        [0, 1], [1, 1], [-1, -2, -3], [1, 2, 3], [5, 6, 7], [-4, -5, -6]
    )
    processor.process([event])
    assert without_text(completion(stays).logprobs) == [
        {8: (-2.0, 2), 6: (-5.0, 1)},
        {9: (-3.0, 3), 7: (-6.0, 1)},
    ]


def test_logprobs_have_decoded_tokens_unless_detokenize_is_false(processor, tokenizer):
    ids = tokenizer.encode(" dog")
    states = [add(processor, logprobs=0), add(processor, logprobs=0, detokenize=False)]
    for state in states:
        event = columns((state.number, ids))
        event.logprobs = logprob_columns([0], [0], [-1.0] * len(ids), [1] * len(ids))
        processor.process([event])
    texts = [
        [e[t].decoded_token for e, t in zip(completion(s).logprobs, ids, strict=True)]
        for s in states
    ]
    assert "".join(texts[0]) == " dog"
    assert texts[1] == [None] * len(ids)


def prompt_logprobs(number, first, logprobs):
    size = len(logprobs)
    return PromptLogprobs(
        number,
        first,
        1,
        np.array(logprobs, np.float32),
        np.full(size, 2, np.int32),
        np.full(size, 40, np.int32),
        np.full(size, -0.25, np.float32),
    )


def test_prompt_logprobs_can_arrive_in_parts_and_begin_with_none(processor):
    state = add(processor, prompt=(5, 6, 7, 8), prompt_logprobs=1, detokenize=False)
    processor.process([prompt_logprobs(state.number, 1, [-1.0, -2.0])])
    processor.process([prompt_logprobs(99, 1, [-9.0])])
    processor.process(
        [prompt_logprobs(state.number, 3, [-3.0]), columns((state.number, [1], LENGTH))]
    )
    best = Logprob(-0.25, 1)
    assert request_output(state).prompt_logprobs == [
        None,
        {6: Logprob(-1.0, 2), 40: best},
        {7: Logprob(-2.0, 2), 40: best},
        {8: Logprob(-3.0, 2), 40: best},
    ]
    assert request_output(add(processor)).prompt_logprobs is None


def test_a_repetition_has_its_own_finish_reason(processor):
    state = add(processor)
    processor.process([columns((state.number, [7], FinishReason.REPETITION))])
    assert ending(state)[1:] == ("repetition", "repetition_detected")


def add_completions(processor, n, **options):
    params = SamplingParams(**{"max_tokens": 100, "n": n} | options)
    request = PreparedRequest(None, params, EngineCoreRequest(-1, [5, 6], params))
    return processor.add_all(request, 0, streaming=True)


def test_each_completion_is_a_request_with_its_own_seed(processor):
    states = add_completions(processor, 3, seed=10, prompt_logprobs=1, logprobs=1)
    children = [state.request.params for state in states]
    assert [params.seed for params in children] == [10, 11, 12]
    assert [params.n for params in children] == [1, 1, 1]
    assert [params.prompt_logprobs for params in children] == [1, None, None]
    assert [state.number for state in states] == [0, 1, 2]
    assert request_output(add(processor)).request_id == "1"


@pytest.mark.parametrize("seed", [None, 2**63 - 1, -2])
def test_seeds_of_completions_stay_in_range(processor, seed):
    seeds = [state.request.params.seed for state in add_completions(processor, 3, seed=seed)]
    if seed is None:
        assert seeds == [None] * 3
    else:
        assert len(set(seeds)) == 3
        assert all(-(2**63) <= each < 2**63 for each in seeds)


def test_a_request_ends_with_its_last_completion_and_orders_them_by_index(processor):
    states = add_completions(processor, 3)
    ends = []
    for state in (states[2], states[0], states[1]):
        processor.process([columns((state.number, [state.number + 7], LENGTH))])
        ends.append((state.ends_request, request_output(state).finished))
    assert ends == [(False, False), (False, False), (True, True)]
    output = request_output(states[1])
    assert [(c.index, c.token_ids) for c in output.outputs] == [(0, [7]), (1, [8]), (2, [9])]
    assert {request_output(state).request_id for state in states} == {"0"}


def test_the_metrics_of_a_request_have_the_sums_of_its_completions(processor):
    states = add_completions(processor, 3)
    for state in states[:2]:
        event = columns((state.number, [7], LENGTH), drafted=[(0, 9, 4)])
        event.preempted_rows, event.preempted_counts = [0], [2]
        processor.process([event])
        assert drafted_of(state) == (None, None)
    processor.process([columns((states[2].number, [7], LENGTH))])
    for state in states:
        assert drafted_of(state) == (18, 8)
        assert request_output(state).metrics.num_preemptions == 4


def test_a_refused_completion_makes_the_request_an_error(processor):
    states = add_completions(processor, 2)
    processor.process([Rejected(states[0].number, "no"), columns((states[1].number, [7], LENGTH))])
    output = request_output(states[1])
    assert (output.error, output.finished) == ("no", True)
    assert [c.finish_reason for c in output.outputs] == ["error", "length"]


def stream(processor, ids, *, stop_after=None, **options):
    """The outputs of `next_output` while these tokens arrive, one per step."""
    state = add(processor, streaming=True, **options)
    outputs = []
    for position, token_id in enumerate(ids):
        finish = LENGTH if position == len(ids) - 1 else FinishReason.NONE
        processor.process([columns((state.number, [token_id], finish))])
        output = next_output(state)
        if output is not None:
            outputs.append(output)
    return outputs


def of_stream(outputs):
    return [(output.outputs[0].text, output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("interval", [None, 1, 3])
def test_deltas_join_to_the_whole_output(processor, tokenizer, interval):
    ids = tokenizer.encode("The quick brown 😀 fox")
    outputs = stream(processor, ids, output_kind=RequestOutputKind.DELTA, stream_interval=interval)
    texts, tokens = zip(*of_stream(outputs), strict=True)
    assert "".join(texts) == "The quick brown 😀 fox"
    assert [token for each in tokens for token in each] == ids
    step = interval or 1
    assert [len(each) for each in tokens[:-1]] == [1] + [step] * (len(tokens) - 2)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


@pytest.mark.parametrize(("own", "step"), [(None, 4), (2, 2)])
def test_the_interval_of_the_front_end_is_that_of_requests_without_one(tokenizer, own, step):
    ids = tokenizer.encode("The quick brown fox jumps over the lazy dog")
    processor = OutputProcessor(tokenizer, stream_interval=4)
    kind = RequestOutputKind.DELTA
    _, *middle, _ = of_stream(stream(processor, ids, output_kind=kind, stream_interval=own))
    assert {len(tokens) for _, tokens in middle} == {step}


def test_cumulative_outputs_grow_and_do_not_change_afterwards(processor, tokenizer):
    ids = tokenizer.encode("The quick brown fox")
    outputs = of_stream(stream(processor, ids))
    assert [tokens for _, tokens in outputs] == [ids[: i + 1] for i in range(len(ids))]
    for (before, _), (after, _) in itertools.pairwise(outputs):
        assert after.startswith(before)
    assert outputs[-1][0] == "The quick brown fox"


def test_a_stream_emits_no_text_that_a_stop_string_may_remove(processor, tokenizer):
    ids = tokenizer.encode("fox END")
    for kind in (RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA):
        state = add(processor, streaming=True, stop=["END"], output_kind=kind)
        texts = []
        for token_id in ids:
            processor.process([columns((state.number, [token_id]))])
            if (output := next_output(state)) is not None:
                texts.append(output.outputs[0].text)
        assert not any("E" in text for text in texts)
        assert (texts[-1] if kind is RequestOutputKind.CUMULATIVE else "".join(texts)) == "fox "
        assert ending(state)[1:] == ("stop", "END")


def test_a_final_output_comes_once_with_all_completions(processor):
    states = add_completions(processor, 2, output_kind=RequestOutputKind.FINAL_ONLY)
    given = []
    for state, finish in ((states[0], 0), (states[1], LENGTH), (states[0], LENGTH)):
        processor.process([columns((state.number, [7], finish))])
        given.append(next_output(state))
    assert given[:2] == [None, None]
    assert [len(c.token_ids) for c in given[2].outputs] == [2, 1]


def test_completions_are_streamed_separately(processor):
    states = add_completions(processor, 2, output_kind=RequestOutputKind.DELTA)
    processor.process([columns((states[1].number, [7]))])
    output = next_output(states[1])
    assert [(c.index, c.token_ids) for c in output.outputs] == [(1, [7])]
    assert next_output(states[0]) is None
    processor.process([columns((states[1].number, [8], LENGTH))])
    assert not next_output(states[1]).finished
    processor.process([columns((states[0].number, [9], LENGTH))])
    assert next_output(states[0]).finished


def test_a_delta_has_its_own_logprobs_and_only_the_first_those_of_the_prompt(processor):
    state = add(
        processor,
        streaming=True,
        logprobs=0,
        prompt_logprobs=1,
        output_kind=RequestOutputKind.DELTA,
        detokenize=False,
    )
    processor.process([prompt_logprobs(state.number, 1, [-1.0])])
    outputs = []
    for token in (7, 8, 9):
        event = columns((state.number, [token], LENGTH if token == 9 else 0))
        event.logprobs = logprob_columns([0], [0], [-float(token)], [1])
        processor.process([event])
        outputs.append(next_output(state))
    assert [without_text(o.outputs[0].logprobs) for o in outputs] == [
        [{7: (-7.0, 1)}],
        [{8: (-8.0, 1)}],
        [{9: (-9.0, 1)}],
    ]
    assert [o.outputs[0].cumulative_logprob for o in outputs] == [-7.0, -15.0, -24.0]
    assert [o.prompt_logprobs is None for o in outputs] == [False, True, True]


def spans(output):
    return [(s.version, s.start, s.end) for s in output.outputs[0].weight_versions]


def test_an_output_has_the_versions_of_the_weights_that_sampled_it(processor):
    early, over, late = (add(processor, output_kind=RequestOutputKind.CUMULATIVE) for _ in "abc")
    processor.process([columns((early.number, [5], LENGTH), (over.number, [5, 6]))])
    assert next_output(over).outputs[0].weight_versions is None
    processor.process([WeightVersion("b"), columns((over.number, [7])), WeightVersion(2)])
    # Two updates without a token between them: the first version sampled nothing.
    processor.process([WeightVersion(3), columns((over.number, [8], STOP), (late.number, [9]))])
    processor.process([columns((late.number, [9], LENGTH)), WeightVersion(4)])
    assert spans(request_output(early)) == [(0, 0, 1)]
    assert spans(request_output(over)) == [(0, 0, 2), ("b", 2, 3), (3, 3, 4)]
    assert spans(request_output(late)) == [(3, 0, 2)]


def test_an_output_without_tokens_has_no_weight_versions(processor):
    state = add(processor)
    processor.process([WeightVersion(1), columns((state.number, [], ABORT))])
    assert spans(request_output(state)) == []


def test_a_version_without_tokens_has_no_span(processor):
    state = add(processor)
    processor.process([columns((state.number, [5])), WeightVersion(1)])
    processor.process([columns((state.number, [], ABORT))])
    assert spans(request_output(state)) == [(0, 0, 1)]


@pytest.mark.parametrize("options", [{}, {"stop": ["e"]}, {"detokenize": False}])
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_processing_several_steps_together_gives_the_same_states(
    tokenizer, options, streaming, seed
):
    """Columns of several steps in one call give the same states as one call per step."""
    rng = random.Random(seed)
    together, apart = OutputProcessor(tokenizer), OutputProcessor(tokenizer)
    states = {}
    for processor in (together, apart):
        states[processor] = [
            add(processor, streaming=streaming and index % 2 == 0, **options) for index in range(4)
        ]
        for state in states[processor]:
            state.token_times = []
    numbers = [state.number for state in states[apart]] + [99]
    for begin in range(0, 60, 15):
        events = []
        for moment in range(begin, begin + 15):
            rows = [(number, [rng.randrange(5, 40)]) for number in numbers]
            cached = [(row, 2) for row in range(4)] if moment == 0 else ()
            events.append(columns(*rows, time_ns=moment * 1000, cached=cached))
            if rng.random() < 0.1:
                events.append(WeightVersion(moment))
            if rng.random() < 0.1 and len(numbers) > 2:
                events.append(columns((numbers.pop(1), [7], LENGTH), time_ns=moment * 1000 + 5))
        _, to_abort = together.process(events)
        assert to_abort == [n for event in events for n in apart.process([event])[1]]
    for left, right in zip(states[together], states[apart], strict=True):
        assert left.token_times == right.token_times
        assert left.metrics.first_token_ts == right.metrics.first_token_ts
        assert left.metrics.last_token_ts == right.metrics.last_token_ts
        assert request_output(left).outputs == request_output(right).outputs
        assert left.text.take_delta() == right.text.take_delta()


def test_an_ended_request_is_freed_without_the_garbage_collector(processor):
    gc.collect()
    gc.disable()
    try:
        state = add(processor)
        [changed], _ = processor.process([columns((state.number, [7], LENGTH))])
        output = request_output(changed)
        del state, changed
        assert not [each for each in gc.get_objects() if type(each) is RequestState]
    finally:
        gc.enable()
    assert output.outputs[0].token_ids == [7]


def test_tokens_that_come_again_from_another_engine_are_not_repeated(processor, tokenizer):
    state = add(processor, streaming=True)
    feed(processor, state, [72, 73, 74])
    assert state.text.take_delta() == tokenizer.decode([72, 73, 74])
    processor.process([StartedOver(state.number)])
    for token_ids in ([72, 73], [74, 75]):
        processor.process([columns((state.number, token_ids))])
    steps = [columns((state.number, [token_id])) for token_id in (76, 77)]
    processor.process([*steps, columns((state.number, [78], LENGTH))])
    assert completion(state).token_ids == [*range(72, 79)]
    assert state.text.take_delta() == tokenizer.decode([75, 76, 77, 78])


def test_an_end_that_got_lost_comes_with_tokens_that_are_known(processor):
    state = add(processor)
    feed(processor, state, [72, 73])
    processor.process([StartedOver(state.number)])
    changed, to_abort = processor.process([columns((state.number, [72, 73], LENGTH))])
    assert (changed, to_abort, ending(state)[1:]) == ([state], [], ("length", None))
    assert completion(state).token_ids == [72, 73]


def test_another_engine_that_gives_other_tokens_ends_the_request_with_an_error(processor):
    state = add(processor)
    feed(processor, state, [72, 73])
    processor.process([StartedOver(state.number)])
    assert processor.process([columns((state.number, [72, 99, 74]))])[1] == [state.number]
    assert completion(state).token_ids == [72, 73]
    assert state.finish_reason == "error"
    assert "other tokens" in state.error


def test_logprobs_that_come_again_are_not_repeated(processor):
    state = add(processor, logprobs=1, prompt_logprobs=0)
    values = np.array([-0.5, -1.5, -2.5], np.float32)

    def step(token_ids, begin):
        end = begin + len(token_ids)
        given = columns((state.number, token_ids))
        given.logprobs = LogprobColumns(
            [0], [1], values[begin:end], np.ones(end - begin, np.int32),
            np.array(token_ids, np.int32), values[begin:end],
        )  # fmt: skip
        scored = np.array([-3.0], np.float32), np.ones(1, np.int32)
        none = np.zeros(0, np.int32), np.zeros(0, np.float32)
        return [*([PromptLogprobs(state.number, 1, 0, *scored, *none)] if not begin else []), given]

    processor.process(step([72, 73], 0))
    processor.process([StartedOver(state.number), *step([72], 0), *step([73, 74], 1)])
    assert state.logprobs.logprobs.tolist() == values.tolist()
    assert state.logprobs.top_ids.tolist() == [72, 73, 74]
    assert state.logprobs.top_logprobs.tolist() == values.tolist()
    assert state.logprobs.total == values.sum()
    assert len(state.prompt_logprobs.logprobs) == 1
