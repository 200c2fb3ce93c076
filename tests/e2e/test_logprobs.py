"""Log-probabilities of prompts and outputs equal transformers' to 1e-4 in float32."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines import assert_idle
from support.one_thread import one_thread
from support.reference_models import make_model, make_prompts
from support.variants import slow

from shmllm import LLM, Logprob, RequestError, SamplingParams
from shmllm.outputs.flat_logprobs import FlatLogprobs

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

TOLERANCE = 1e-4
NUM_PROMPTS = 12
MAX_TOKENS = 8


class Reference:
    """A small model in float32, and the log-probabilities of any sequence after it."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.directory = directory
        self.model = make_model(kind, directory)
        prompts = make_prompts(self.model.config.vocab_size, longest=200)
        self.prompts = prompts[:NUM_PROMPTS]

    @one_thread()
    @torch.inference_mode()
    def logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """(len(token_ids), vocabulary): row i is what follows token i."""
        logits = self.model(torch.tensor([token_ids])).logits[0]
        return logits.double().log_softmax(dim=1)


@pytest.fixture(scope="module", params=["llama", slow("qwen3")])
def reference(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Reference:
    return Reference(request.param, tmp_path_factory.mktemp(request.param))


def check_entry(entry: Any, expected: torch.Tensor, token: int, k: int) -> None:
    """Check the entry of one position: the token itself first, then the best k tokens."""
    ids = list(entry)
    assert ids[0] == token
    best = expected.topk(max(k, 1)).values
    inside = bool(expected[token] >= best[-1] - TOLERANCE) and k > 0
    assert len(ids) in ((k, k + 1) if inside else (k + 1,))
    for token_id, logprob in entry.items():
        assert isinstance(logprob, Logprob)
        assert logprob.logprob == pytest.approx(float(expected[token_id]), abs=TOLERANCE)
        better = int((expected > expected[token_id] + TOLERANCE).sum())
        as_good = int((expected > expected[token_id] - TOLERANCE).sum())
        assert better < logprob.rank <= as_good
    top = sorted((lp.logprob for lp in entry.values()), reverse=True)[:k]
    assert top == pytest.approx(best[:k].tolist(), abs=TOLERANCE)


def check_output(output: Any, reference: Reference, k: int, prompt_k: int) -> None:
    prompt, completion = output.prompt_token_ids, output.outputs[0]
    expected = reference.logprobs(prompt + completion.token_ids)
    assert len(completion.logprobs) == len(completion.token_ids) == MAX_TOKENS
    for index, token in enumerate(completion.token_ids):
        check_entry(completion.logprobs[index], expected[len(prompt) + index - 1], token, k)
    chosen = [e[t].logprob for e, t in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(chosen), abs=1e-3)
    assert len(output.prompt_logprobs) == len(prompt)
    assert output.prompt_logprobs[0] is None
    for position in range(1, len(prompt)):
        entry = output.prompt_logprobs[position]
        check_entry(entry, expected[position - 1], prompt[position], prompt_k)


def ask(llm: LLM, reference: Reference, **options: Any) -> list[Any]:
    params = SamplingParams(**{"max_tokens": MAX_TOKENS, "ignore_eos": True} | options)
    prompts = [{"prompt_token_ids": prompt} for prompt in reference.prompts]
    return llm.generate(prompts, params, use_tqdm=False)


LOCAL: dict[str, Any] = {"dtype": "float32", "multiprocess": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "chunked": LOCAL | {"max_num_batched_tokens": 24, "max_num_seqs": 4, "block_size": 128},
    "no cache": LOCAL | {"enable_prefix_caching": False},
    "small blocks": LOCAL | {"block_size": 8, "max_num_seqs": 3},
}


@pytest.fixture(scope="module")
def engine(reference: Reference) -> Iterator[LLM]:
    """An engine process, which reports any number of alternatives."""
    with LLM(str(reference.directory), dtype="float32", max_logprobs=-1) as engine:
        yield engine


@pytest.fixture
def apart(engine: LLM) -> Iterator[LLM]:
    """The engine process of the module, which the test must leave idle."""
    yield engine
    assert_idle(engine)


@pytest.fixture(params=["apart", "chunked", slow("no cache"), slow("small blocks")])
def llm(request: pytest.FixtureRequest, apart: LLM, reference: Reference) -> Iterator[LLM]:
    if request.param == "apart":
        yield apart
        return
    with LLM(str(reference.directory), **SETTINGS[request.param]) as engine:
        yield engine


def test_log_probabilities_equal_those_of_transformers(llm: LLM, reference: Reference) -> None:
    greedy = ask(llm, reference, temperature=0, logprobs=5, prompt_logprobs=3)
    for output in greedy:
        check_output(output, reference, 5, 3)
    # Again, after the prompts were cached: the whole prompt has numbers all the same.
    for output in ask(llm, reference, seed=3, temperature=1.3, logprobs=0, prompt_logprobs=0):
        assert output.num_cached_tokens == 0
        check_output(output, reference, 0, 0)


def test_after_preemption_each_position_is_reported_once(reference: Reference) -> None:
    options = LOCAL | {"max_model_len": 256}
    with LLM(str(reference.directory), **options) as probe:
        block_bytes = probe.facts.kv_cache_bytes // (probe.facts.num_blocks + 1)
    room = (256 // 16 + 6) * block_bytes
    options |= {"kv_cache_memory_bytes": room, "max_num_batched_tokens": 64}
    with LLM(str(reference.directory), **options) as llm:
        wanted = {"temperature": 0, "logprobs": 2, "prompt_logprobs": 2}
        for output in ask(llm, reference, **wanted):
            check_output(output, reference, 2, 2)
        long = [{"prompt_token_ids": prompt[:20] or [1]} for prompt in reference.prompts]
        params = SamplingParams(max_tokens=100, ignore_eos=True, **wanted)
        for output in llm.generate(long, params, use_tqdm=False):
            completion = output.outputs[0]
            assert len(completion.logprobs) == len(completion.token_ids) == 100
            assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
            expected = reference.logprobs(output.prompt_token_ids + completion.token_ids)
            for index in (0, 50, 99):
                row = expected[len(output.prompt_token_ids) + index - 1]
                check_entry(completion.logprobs[index], row, completion.token_ids[index], 2)
        assert llm.get_metrics()["preemptions"] > 0


def test_a_request_with_prompt_logprobs_fills_the_prefix_cache(reference: Reference) -> None:
    with LLM(str(reference.directory), **LOCAL) as llm:
        prompt = {"prompt_token_ids": list(range(1, 65))}
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
        plain = SamplingParams(max_tokens=1, temperature=0)
        unread = SamplingParams(max_tokens=1, temperature=0, skip_reading_prefix_cache=True)
        cached = [
            llm.generate(prompt, each, use_tqdm=False)[0].num_cached_tokens
            for each in (params, params, plain, unread)
        ]
    assert cached == [0, 0, 48, 0]


def test_log_probabilities_of_the_whole_vocabulary(apart: LLM, reference: Reference) -> None:
    """The records are larger than a ring record may be: the numbers lie in tensor slots."""
    prompts = [{"prompt_token_ids": prompt[:12]} for prompt in reference.prompts[:4]]
    params = SamplingParams(max_tokens=4, temperature=0, logprobs=-1, prompt_logprobs=-1)
    outputs = apart.generate(prompts, params, use_tqdm=False)
    size = reference.model.config.vocab_size
    for output in outputs:
        token_ids = output.outputs[0].token_ids
        expected = reference.logprobs(output.prompt_token_ids + token_ids)
        for position in {1, len(output.prompt_token_ids) - 1} - {0, len(output.prompt_token_ids)}:
            entry = output.prompt_logprobs[position]
            assert len(entry) == size
            check_entry(entry, expected[position - 1], output.prompt_token_ids[position], size)
        first = output.outputs[0].logprobs[0]
        assert len(first) == size
        check_entry(first, expected[len(output.prompt_token_ids) - 1], token_ids[0], size)


@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 16}, slow({"multiprocess": True})], ids=str
)
def test_given_tokens_of_prompts(reference: Reference, options: dict[str, Any]) -> None:
    """In chunks, with a start, and of several completions; -1 fills a row up."""
    size = reference.model.config.vocab_size
    prompts = [each for each in reference.prompts if len(each) > 5]
    choose = np.random.default_rng(3)
    with LLM(str(reference.directory), **LOCAL | options) as llm:
        for start in (None, 4):
            tables = [choose.integers(0, size, (len(p) - 1 - (start or 0), 7)) for p in prompts]
            for table in tables:
                table[0, 3] = -1
            params = [
                SamplingParams(
                    max_tokens=2, n=2, seed=1, prompt_logprob_token_ids=each,
                    prompt_logprob_start=start,
                )
                for each in tables
            ]  # fmt: skip
            asked = [{"prompt_token_ids": each} for each in prompts]
            outputs = llm.generate(asked, params, use_tqdm=False)
            for output, table in zip(outputs, tables, strict=True):
                found = output.prompt_token_id_logprobs
                assert output.prompt_logprobs is None
                assert found[0, 3] == -math.inf
                found[0, 3], table[0, 3] = 0, 0
                rows = reference.logprobs(output.prompt_token_ids)[start or 0 : -1]
                expected = rows.gather(1, torch.from_numpy(table))
                expected[0, 3] = 0
                assert torch.allclose(torch.from_numpy(found).double(), expected, atol=TOLERANCE)
        with pytest.raises(RequestError, match=r"must have \d+ rows with prompt_logprob_start 0"):
            llm.generate(asked[:1], SamplingParams(prompt_logprob_token_ids=[[1]]))
        with pytest.raises(RequestError, match="has 4096; the vocabulary"):
            llm.generate([{"prompt_token_ids": [1, 2]}], given([[4096]]))
        with pytest.raises(RequestError, match="max_logprobs is 20"):
            llm.generate([{"prompt_token_ids": [1, 2]}], given([[1] * 21]))


def given(rows: list[list[int]]) -> SamplingParams:
    return SamplingParams(prompt_logprob_token_ids=rows)


def test_given_tokens_a_known_output_and_flat_lists(apart: LLM, reference: Reference) -> None:
    """A trace is what greedy sampling would not give; its log-probabilities are transformers'."""
    asked, trace = [4000, 0, 17], [9, 9, 4095, 0, 1, 2, 3, 5]
    eos = apart.llm_engine.model_config.hf_config.eos_token_id
    trace[3] = eos if isinstance(eos, int) else 0
    outputs = ask(
        apart,
        reference,
        logprob_token_ids=asked,
        trace_decode_token_ids=trace,
        max_tokens=None,
        ignore_eos=False,
        bad_words=["a"],
        temperature=1.5,
        flat_logprobs=True,
        prompt_logprobs=1,
    )
    [cut] = ask(apart, reference, trace_decode_token_ids=trace, max_tokens=3)[:1]
    with pytest.raises(RequestError, match="trace_decode_token_ids has 4096; the vocabulary"):
        ask(apart, reference, trace_decode_token_ids=[4096])
    with pytest.raises(RequestError, match="logprob_token_ids has 5000; the vocabulary"):
        ask(apart, reference, logprob_token_ids=[5000])
    assert cut.outputs[0].token_ids == trace[:3]
    for output in outputs:
        prompt, completion = output.prompt_token_ids, output.outputs[0]
        assert completion.token_ids == trace
        assert completion.finish_reason == "length"
        flat = completion.logprobs
        assert isinstance(flat, FlatLogprobs)
        assert isinstance(output.prompt_logprobs, FlatLogprobs)
        assert (len(flat), len(output.prompt_logprobs)) == (len(trace), len(prompt))
        assert output.prompt_logprobs[0] == {}
        expected = reference.logprobs(prompt + trace)[len(prompt) - 1 : -1]
        for index, token in enumerate(trace):
            begin, end = flat.start_indices[index], flat.end_indices[index]
            assert flat.token_ids[begin:end] == list(dict.fromkeys([token, *asked]))
            wanted = expected[index, flat.token_ids[begin:end]]
            assert flat.logprobs[begin:end] == pytest.approx(wanted.tolist(), abs=TOLERANCE)
            assert flat.ranks[begin + 1 : end] == [None] * (end - begin - 1)


def test_a_bound_on_alternatives_names_both_numbers(reference: Reference) -> None:
    with LLM(str(reference.directory), max_logprobs=3, **LOCAL) as llm:
        for options in ({"logprobs": 4}, {"prompt_logprobs": 4}):
            with pytest.raises(RequestError, match=r"=4 asks for 4 tokens.* max_logprobs is 3"):
                llm.generate("x", SamplingParams(**options), use_tqdm=False)
        with pytest.raises(RequestError, match=r"=-1 asks for 4,096 tokens.* max_logprobs is 3"):
            llm.generate("x", SamplingParams(logprobs=-1), use_tqdm=False)
        assert len(llm.generate("x", SamplingParams(logprobs=3), use_tqdm=False)) == 1


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_lower_precision_still_normalises_in_float32(reference: Reference, dtype: Any) -> None:
    with LLM(str(reference.directory), dtype=dtype, max_logprobs=-1, multiprocess=False) as llm:
        params = SamplingParams(max_tokens=2, temperature=0, logprobs=-1)
        [output] = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
    for entry in output.outputs[0].logprobs:
        total = torch.tensor([lp.logprob for lp in entry.values()]).double().exp().sum()
        assert float(total) == pytest.approx(1, abs=1e-4)
