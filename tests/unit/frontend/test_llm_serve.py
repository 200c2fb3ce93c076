"""LLM.generate with a fake engine: each prompt has an output, however many steps a poll returns."""

from __future__ import annotations

import pytest

from shmllm import LLM
from shmllm.errors import EngineStartError, RequestError
from shmllm.frontend import dispatcher, front_end
from shmllm.params.sampling import SamplingParams
from shmllm.wire.messages import Rejected


@pytest.mark.parametrize("steps_per_poll", [1, 2, 3, 50])
def test_every_prompt_has_its_output_however_many_records_a_poll_brings(make_llm, steps_per_poll):
    llm, _ = make_llm(steps_per_poll)
    lengths = [5, 1, 40, 2, 3, 9]
    params = [SamplingParams(max_tokens=n) for n in lengths]
    outputs = llm.generate([[5, n] for n in range(6)], params, use_tqdm=False)
    assert [output.prompt_token_ids[1] for output in outputs] == list(range(6))
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


def test_more_prompts_than_are_submitted_between_polls(make_llm):
    llm, _ = make_llm(3)
    outputs = llm.generate([[5]] * 100, SamplingParams(max_tokens=4), use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4] * 100


def test_no_prompts_have_no_outputs(make_llm):
    llm, engine = make_llm()
    assert llm.generate([], use_tqdm=False) == []
    assert engine.added == []


def test_one_bad_prompt_means_that_nothing_is_queued(make_llm):
    llm, engine = make_llm()
    with pytest.raises(RequestError, match="prompt 2"):
        llm.generate([[5], [6], [999], [7]], use_tqdm=False)
    assert engine.added == []


def test_a_rejection_is_one_failed_output_among_good_ones(make_llm):
    llm, engine = make_llm()
    engine.rejected.append(Rejected(1, "no"))
    outputs = llm.generate([[5]] * 3, SamplingParams(max_tokens=2), use_tqdm=False)
    assert [output.error for output in outputs] == [None, "no", None]


def test_closing_the_generator_aborts_unfinished_requests(make_llm):
    llm, engine = make_llm()
    params = [SamplingParams(max_tokens=n) for n in (1, 5, 5)]
    for _ in llm.front_end.serve(llm.front_end.prepare([[5]] * 3, params)):
        break
    assert sorted(engine.aborted) == [1, 2]


def test_a_stop_string_aborts_the_request_in_the_engine(make_llm):
    llm, engine = make_llm()
    stop = llm.front_end.tokenizer.decode([7])
    outputs = llm.generate([5], SamplingParams(stop=stop, max_tokens=9), use_tqdm=False)
    assert outputs[0].outputs[0].stop_reason == stop
    assert engine.aborted == [0]


def test_close_in_a_signal_handler_does_not_wait_for_its_own_thread(make_llm, monkeypatch):
    monkeypatch.setattr(dispatcher, "CLOSE_S", 0.01)
    llm, engine = make_llm()
    with llm._dispatcher.reading():
        llm.close()
    assert engine.is_closed


def test_requests_of_a_generator_that_is_closed_under_the_lock_are_aborted_later(
    make_llm, monkeypatch
):
    monkeypatch.setattr(dispatcher, "DISCARD_S", 0.01)
    llm, engine = make_llm()
    stream = llm.front_end.serve(llm.front_end.prepare([[5]] * 3, SamplingParams(max_tokens=50)))
    next(stream)
    with llm._dispatcher.reading():
        stream.close()
    assert engine.aborted == []
    llm.generate([6], SamplingParams(max_tokens=1), use_tqdm=False)
    assert sorted(engine.aborted) == [0, 1, 2]


def test_the_chat_template_of_the_llm_is_the_default_of_chat(make_llm, tmp_path):
    params = SamplingParams(max_tokens=1)
    messages = [{"role": "user", "content": "hi"}]
    file = tmp_path / "template.jinja"
    file.write_text("file {{ messages[0].content }}", encoding="utf-8")
    source = "source {{ messages[0].content }}"
    for given, wanted in [(None, "user:hi\n"), (file, "file hi"), (source, "source hi")]:
        llm, _ = make_llm(options={"chat_template": given})
        assert llm.chat(messages, params, use_tqdm=False)[0].prompt == wanted
        (output,) = llm.chat(messages, params, use_tqdm=False, chat_template="call")
        assert output.prompt == "call"


def test_a_bad_chat_template_is_found_before_an_engine_starts(monkeypatch, make_llm):
    make_llm()
    monkeypatch.setattr(front_end, "start_engine", lambda *_: pytest.fail("an engine started"))
    for given in ("missing.jinja", "{% if %}", 5):
        with pytest.raises(EngineStartError, match=r"^chat_template"):
            LLM(chat_template=given)
