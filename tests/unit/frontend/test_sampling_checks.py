"""SamplingChecks: checks of sampling parameters that need the engine's limits or the tokenizer."""

from __future__ import annotations

import pytest
from support.fakes import info

from shmllm.errors import RequestError
from shmllm.frontend.sampling_checks import EncodedConstraints, SamplingChecks
from shmllm.params.sampling import SamplingParams


@pytest.fixture
def tokenizer(tokenizer_of):
    return tokenizer_of("byte_level")


def checks_of(tokenizer, max_logprobs=20):
    return SamplingChecks(tokenizer, info(vocab_size=500, max_logprobs=max_logprobs))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stop_token_ids": [1, 500]}, "stop_token_ids has 500; .* ids from 0 to 499"),
        ({"allowed_token_ids": [500]}, "allowed_token_ids has 500; .* ids from 0 to 499"),
        ({"logit_bias": {3: 1.0, 777: 2.0}}, "logit_bias has 777; .* ids from 0 to 499"),
        ({"logprobs": 21}, "logprobs=21 asks for 21 tokens .* max_logprobs is 20"),
        ({"prompt_logprobs": 21}, "prompt_logprobs=21 asks for 21 tokens .* max_logprobs is 20"),
        ({"logprobs": -1}, "logprobs=-1 asks for 500 tokens .* max_logprobs is 20"),
        ({"bad_words": [" "]}, "bad_words has ' ', which has no tokens"),
    ],
    ids=str,
)
def test_parameters_beyond_the_limits_of_the_engine_are_refused(options, words, tokenizer):
    with pytest.raises(RequestError, match=words):
        checks_of(tokenizer).check(SamplingParams(**options))


@pytest.mark.parametrize(
    "options",
    [
        {"stop_token_ids": [499]},
        {"allowed_token_ids": [0, 499]},
        {"logit_bias": {499: 1.0}},
        {"logprobs": 20, "prompt_logprobs": 0},
    ],
    ids=str,
)
def test_parameters_at_the_limits_are_allowed(options, tokenizer):
    assert checks_of(tokenizer).check(SamplingParams(**options)) == EncodedConstraints((), "")


def test_an_allowed_token_must_have_a_logit(tokenizer):
    checks = SamplingChecks(tokenizer, info(vocab_size=500, num_outputs=490))
    checks.check(SamplingParams(allowed_token_ids=[495, 489]))
    with pytest.raises(RequestError, match=r"allowed_token_ids has no id below 490; .* no logits"):
        checks.check(SamplingParams(allowed_token_ids=[490, 499]))


def test_without_a_limit_logprobs_of_the_whole_vocabulary_are_allowed(tokenizer):
    checks_of(tokenizer, 500).check(SamplingParams(logprobs=-1, prompt_logprobs=-1))


def test_bad_words_are_forbidden_at_the_start_and_after_a_space(tokenizer):
    sequences = checks_of(tokenizer).check(SamplingParams(bad_words=["dog", " dog"])).bad_words
    bare, blank = tokenizer.encode("dog"), tokenizer.encode(" dog")
    expected = {tuple(bare)} | ({tuple(blank)} if len(blank) == len(bare) else set())
    assert set(sequences) == expected
    assert len(sequences) == len(expected)
