"""LLM.stream with a fake engine: bounded, complete, optionally ordered, cleaned up when closed."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
from support import fakes

from shmllm.errors import EngineDeadError, RequestError, ShmLLMError
from shmllm.params.sampling import RequestOutputKind, SamplingParams
from shmllm.wire.messages import Rejected

ONE = SamplingParams(max_tokens=1)
BAD = [999]
DELTA, CUMULATIVE = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE


def lengths(values):
    return [SamplingParams(max_tokens=n) for n in values]


def indices(outputs):
    return [output.prompt_index for output in outputs]


def counted(num_prompts, taken):
    """Yield prompts [5, i], and append the index of each one to `taken`."""
    for index in range(num_prompts):
        taken.append(index)
        yield [5, index % 100]


@pytest.mark.parametrize("steps_per_poll", [1, 7])
@pytest.mark.parametrize("max_in_flight", [1, 3, 1000])
@pytest.mark.parametrize("ordered", [False, True])
def test_every_prompt_has_one_finished_output(make_llm, steps_per_poll, max_in_flight, ordered):
    llm, engine = make_llm(steps_per_poll)
    wanted = [1 + 13 * n % 7 for n in range(100)]
    outputs = list(
        llm.stream(
            counted(100, []), iter(lengths(wanted)), ordered=ordered, max_in_flight=max_in_flight
        )
    )
    assert sorted(indices(outputs)) == list(range(100))
    for output in outputs:
        assert output.finished
        assert output.prompt_token_ids == [5, output.prompt_index]
        assert len(output.outputs[0].token_ids) == wanted[output.prompt_index]
    assert engine.most <= max_in_flight


def test_results_are_yielded_when_they_finish(make_llm):
    llm, _ = make_llm()
    assert indices(llm.stream([[5]] * 4, lengths([4, 1, 3, 2]))) == [1, 3, 2, 0]


def test_an_ordered_stream_yields_results_in_the_order_of_the_prompts(make_llm):
    llm, _ = make_llm()
    assert indices(llm.stream([[5]] * 4, lengths([4, 1, 3, 2]), ordered=True)) == [0, 1, 2, 3]


def test_only_as_many_prompts_are_read_as_may_be_in_flight(make_llm):
    llm, engine = make_llm(max_num_seqs=4)
    taken = []
    for done, _ in enumerate(llm.stream(counted(500, taken), ONE), start=1):
        assert len(taken) - done <= 2 * 4
    assert engine.most == 2 * 4


def test_an_ordered_stream_reads_a_bounded_number_of_prompts_after_a_slow_one(make_llm):
    llm, engine = make_llm()
    taken = []
    params = itertools.chain(lengths([300]), itertools.repeat(ONE))
    stream = llm.stream(counted(1000, taken), params, ordered=True, max_in_flight=5)
    assert next(stream).prompt_index == 0
    assert len(taken) == 4 * 5
    assert indices(stream) == list(range(1, 1000))
    assert engine.aborted == []


def test_the_prompts_may_be_an_infinite_generator(make_llm):
    llm, _ = make_llm()
    stream = llm.stream(itertools.repeat([5]), ONE)
    assert len(list(itertools.islice(stream, 3000))) == 3000
    stream.close()


@pytest.mark.parametrize("prompts", ["a text", [5, 6], {"prompt_token_ids": [5]}])
def test_a_single_prompt_is_one_prompt(make_llm, prompts):
    llm, _ = make_llm()
    assert len(list(llm.stream(prompts, ONE))) == 1


def test_no_prompts_have_no_outputs(make_llm):
    llm, _ = make_llm()
    assert list(llm.stream(iter(()), ONE)) == list(llm.stream([], ONE)) == []


def test_an_output_says_whether_the_request_can_be_sent_again(make_llm, monkeypatch):
    llm, engine = make_llm()
    engine.refuse = {1, 3}
    outputs = list(llm.stream([[5]] * 2, ONE, on_error="yield", ordered=True))
    assert [output.is_retryable for output in outputs] == [False, False]
    monkeypatch.setattr(fakes, "Rejected", partial(Rejected, is_retryable=True))
    outputs = list(llm.stream([[5]] * 2, ONE, on_error="yield", ordered=True))
    assert [output.is_retryable for output in outputs] == [False, True]


def test_all_prompts_have_the_priority(make_llm, monkeypatch):
    llm, engine = make_llm(scheduling_policy="priority")
    priorities, add = [], engine.add
    monkeypatch.setattr(
        engine, "add", lambda request: (priorities.append(request.priority), add(request))
    )
    assert len(list(llm.stream([[5]] * 3, ONE, priority=-4))) == 3
    assert priorities == [-4] * 3


def leave_by_break(stream):
    for _ in stream:
        break


def leave_by_close(stream):
    next(stream)
    stream.close()


def leave_by_exception(stream):
    def look(output):
        raise KeyError(output.prompt_index)

    with pytest.raises(KeyError):
        any(map(look, stream))


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_close, leave_by_exception])
def test_leaving_a_stream_aborts_unfinished_requests(make_llm, leave):
    llm, engine = make_llm()
    leave(llm.stream([[5]] * 4, lengths([9, 1, 9, 9])))
    assert sorted(engine.aborted) == [0, 2, 3]
    assert engine.left == {}
    assert llm.generate([5], ONE, use_tqdm=False)[0].outputs[0].token_ids == [7]


def test_an_exception_of_the_prompts_iterable_aborts_unfinished_requests(make_llm):
    llm, engine = make_llm()

    def prompts():
        yield from [[5]] * 40
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        list(llm.stream(prompts(), SamplingParams(max_tokens=50)))
    assert engine.added
    assert engine.left == {}


def test_a_bad_prompt_ends_the_stream_with_an_error_that_names_it(make_llm):
    llm, engine = make_llm()
    prompts = itertools.chain([[5]] * 50, [BAD], itertools.repeat([5]))
    with pytest.raises(RequestError, match="prompt 50 has token id 999"):
        list(llm.stream(prompts, SamplingParams(max_tokens=50)))
    assert engine.left == {}


@pytest.mark.parametrize("ordered", [False, True])
def test_a_bad_prompt_can_be_an_output(make_llm, ordered):
    llm, _ = make_llm()
    prompts = [BAD if n % 5 == 3 else [5] for n in range(60)]
    outputs = list(llm.stream(iter(prompts), ONE, on_error="yield", ordered=ordered))
    assert sorted(indices(outputs)) == list(range(60))
    if ordered:
        assert indices(outputs) == list(range(60))
    for output in outputs:
        is_bad = output.prompt_index % 5 == 3
        assert (output.outputs[0].finish_reason == "error") == is_bad
        assert output.finished
        assert (output.error is not None) == is_bad
        assert not is_bad or f"prompt {output.prompt_index} has token id 999" in output.error


def test_bad_prompts_alone_end_the_stream(make_llm):
    llm, engine = make_llm()
    assert len(list(llm.stream([BAD] * 100, ONE, on_error="yield", ordered=True))) == 100
    assert engine.added == []


def test_a_request_that_the_engine_refuses_is_treated_like_a_bad_prompt(make_llm):
    llm, engine = make_llm()
    engine.refuse = {1, 4}
    outputs = llm.stream([[5]] * 3, ONE, on_error="yield", ordered=True)
    assert [output.error for output in outputs] == [None, "no", None]
    with pytest.raises(RequestError, match="prompt 1: no"):
        list(llm.stream([[5]] * 3, ONE))


@pytest.mark.parametrize(
    ("prompts", "params", "options", "message"),
    [
        (17, ONE, {}, "iterable, got int"),
        (b"x", ONE, {}, "iterable, got bytes"),
        ([[5]], 3, {}, "SamplingParams or an iterable of them, got int"),
        ([[5]] * 2, [ONE], {}, "2 prompts and 1 sampling_params"),
        ([[5]], ONE, {"max_in_flight": 0}, "max_in_flight must be a whole number from 1, got 0"),
        ([[5]], ONE, {"on_error": "skip"}, "on_error is 'raise' or 'yield', got 'skip'"),
        ([[5]], ONE, {"priority": 1}, "priority 1 has no effect"),
        ([[5]], ONE, {"priority": 1.5}, "priority must be a 32-bit whole number"),
    ],
)
def test_wrong_arguments_raise_immediately(make_llm, prompts, params, options, message):
    llm, _ = make_llm()
    with pytest.raises(RequestError, match=message):
        llm.stream(prompts, params, **options)


@pytest.mark.parametrize(
    ("params", "message"),
    [([ONE], "ended before prompt 1"), ([ONE, "x"], "sampling_params 1 is a str")],
)
def test_invalid_parameters_in_the_iterable_end_the_stream(make_llm, params, message):
    llm, engine = make_llm()
    with pytest.raises(RequestError, match=message):
        list(llm.stream(iter([[5]] * 3), iter(params)))
    assert engine.left == {}


def test_generate_within_a_stream_does_not_affect_it(make_llm):
    llm, _ = make_llm(steps_per_poll=3)
    found = []
    for output in llm.stream([[5]] * 40, lengths([1 + n % 9 for n in range(40)])):
        found.append(output.prompt_index)
        inner = llm.generate([[6], [8]], lengths([5, 2]), use_tqdm=False)
        assert [len(o.outputs[0].token_ids) for o in inner] == [5, 2]
        assert [o.prompt_token_ids for o in inner] == [[6], [8]]
    assert sorted(found) == list(range(40))


def test_streams_can_be_nested(make_llm):
    llm, _ = make_llm()
    pairs = [
        (outer.prompt_index, inner.prompt_index)
        for outer in llm.stream([[5]] * 5, lengths([3] * 5))
        for inner in llm.stream([[6]] * 4, lengths([2] * 4))
    ]
    assert sorted(pairs) == list(itertools.product(range(5), range(4)))


def test_two_streams_can_be_read_in_alternation(make_llm):
    llm, _ = make_llm()
    streams = [llm.stream([[n]] * 50, lengths([2] * 50), max_in_flight=4) for n in (5, 6)]
    for first, second in zip(*streams, strict=True):
        assert (first.prompt_token_ids, second.prompt_token_ids) == ([5], [6])


def test_the_stream_raises_when_the_engine_dies(make_llm):
    llm, engine = make_llm()
    stream = llm.stream([[5]] * 10, lengths([1] + [50] * 9))
    next(stream)
    engine.error = EngineDeadError("gone")
    with pytest.raises(EngineDeadError):
        next(stream)


def test_stream_raises_after_close(make_llm):
    llm, engine = make_llm()
    stream = llm.stream([[5]] * 10, lengths([1] + [50] * 9))
    next(stream)
    llm.close()
    assert engine.is_closed
    with pytest.raises(ShmLLMError, match="closed"):
        next(stream)
    with pytest.raises(ShmLLMError, match="closed"):
        llm.stream([[5]], ONE)


def pieces(outputs):
    """The token ids of each output by (prompt, completion), and the finished prompts in order."""
    found, ended = {}, []
    for output in outputs:
        for completion in output.outputs:
            key = (output.prompt_index, completion.index)
            found.setdefault(key, []).append(completion.token_ids)
        if output.finished:
            ended.append(output.prompt_index)
    return found, ended


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("steps_per_poll", [1, 3])
def test_the_tokens_of_deltas_join_to_the_whole_output(make_llm, ordered, steps_per_poll):
    llm, _ = make_llm(steps_per_poll)
    params = [
        SamplingParams(max_tokens=1 + n % 7, n=1 + n % 3, output_kind=DELTA) for n in range(20)
    ]
    outputs = list(llm.stream([[5]] * 20, params, ordered=ordered, max_in_flight=6))
    found, ended = pieces(outputs)
    for index, own in enumerate(params):
        for completion in range(own.n):
            parts = found.pop((index, completion))
            assert all(parts)
            assert list(itertools.chain(*parts)) == [7] * own.max_tokens
            assert steps_per_poll > 1 or ordered or len(parts) == own.max_tokens
    assert found == {}
    assert sorted(ended) == list(range(20))
    if ordered:
        assert indices(outputs) == sorted(indices(outputs))


def test_the_texts_of_deltas_join_to_the_whole_text(make_llm):
    llm, _ = make_llm()
    whole = llm.generate([5], SamplingParams(max_tokens=9), use_tqdm=False)[0].outputs[0].text
    outputs = llm.stream([5], SamplingParams(max_tokens=9, output_kind=DELTA))
    assert "".join(output.outputs[0].text for output in outputs) == whole != ""


@pytest.mark.parametrize(
    ("kind", "expected"), [(DELTA, [[7]] * 3), (CUMULATIVE, [[7], [7] * 2, [7] * 3])]
)
def test_output_kind_of_the_call_applies_to_all_prompts(make_llm, kind, expected):
    llm, _ = make_llm()
    params = SamplingParams(max_tokens=3)
    outputs = llm.stream([5], params, output_kind=kind)
    assert pieces(outputs) == ({(0, 0): expected}, [0])
    assert params.output_kind is CUMULATIVE


def test_cumulative_in_the_parameters_means_final_outputs(make_llm):
    llm, _ = make_llm()
    outputs = list(llm.stream([[5]] * 3, SamplingParams(max_tokens=3, n=2)))
    assert indices(outputs) == [0, 1, 2]
    assert all(len(output.outputs) == 2 and output.finished for output in outputs)


def test_an_output_kind_of_another_type_is_an_error(make_llm):
    llm, _ = make_llm()
    with pytest.raises(RequestError, match="output_kind is a RequestOutputKind, got 'delta'"):
        llm.stream([[5]], ONE, output_kind="delta")


@pytest.mark.parametrize("on_error", ["raise", "yield"])
def test_parameters_that_were_changed_to_invalid_values_are_errors(make_llm, on_error):
    llm, _ = make_llm()
    params = lengths([1, 1, 1])
    params[1].temperature = -3
    stream = llm.stream(iter([[5]] * 3), iter(params), on_error=on_error)
    if on_error == "raise":
        with pytest.raises(RequestError, match="sampling_params 1: temperature"):
            list(stream)
    else:
        outputs = sorted(stream, key=lambda output: output.prompt_index)
        assert [output.error is None for output in outputs] == [True, False, True]
