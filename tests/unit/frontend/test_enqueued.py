"""LLM.enqueue and wait_for_completion, with a fake engine."""

from __future__ import annotations

import pytest

from shmllm.errors import RequestError
from shmllm.params.sampling import SamplingParams


def lengths(values):
    return [SamplingParams(max_tokens=n) for n in values]


def test_outputs_are_in_the_order_of_enqueueing_with_the_returned_ids(make_llm):
    llm, engine = make_llm()
    ids = llm.enqueue([[5], [6], [8]], lengths([3, 1, 2]))
    ids += llm.enqueue([9], lengths([1])[0])
    assert len(engine.added) == 4
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert len(set(ids)) == 4
    assert [output.prompt_token_ids[0] for output in outputs] == [5, 6, 8, 9]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 1, 2, 1]


def test_the_engine_view_counts_the_queued_requests(make_llm):
    llm, _ = make_llm()
    assert llm.llm_engine.get_num_unfinished_requests() == 0
    llm.enqueue([[5]] * 3)
    assert llm.llm_engine.get_num_unfinished_requests() == 3
    llm.wait_for_completion(use_tqdm=False)
    assert llm.llm_engine.get_num_unfinished_requests() == 0


def test_outputs_are_returned_only_once(make_llm):
    llm, _ = make_llm()
    llm.enqueue([[5]] * 3)
    assert len(llm.wait_for_completion(use_tqdm=False)) == 3
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_generate_between_enqueue_and_wait_returns_only_its_own_outputs(make_llm):
    llm, _ = make_llm(steps_per_poll=5)
    llm.enqueue([[5], [6]], lengths([2, 20]))
    outputs = llm.generate([[8], [9]], lengths([9, 1]), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [[8], [9]]
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 20]


def test_a_bad_prompt_queues_nothing(make_llm):
    llm, engine = make_llm()
    with pytest.raises(RequestError, match="prompt 1"):
        llm.enqueue([[5], [999]])
    assert engine.added == []


def test_an_interrupted_wait_can_be_repeated(make_llm):
    llm, engine = make_llm()
    llm.enqueue([[5]] * 3, lengths([1, 5, 9]))
    engine.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        llm.wait_for_completion(use_tqdm=False)
    engine.error = None
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5, 9]
