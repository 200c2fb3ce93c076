"""InputProcessor: valid prompts become token ids, and each kind of invalid input has its error."""

from __future__ import annotations

import numpy as np
import pytest
from support.encoder_tokenizers import CORPUS, our_tokenizer
from support.fakes import info

from shmllm.errors import RequestError
from shmllm.frontend.input_processor import InputProcessor, match_params
from shmllm.frontend.model_files import resolve_model
from shmllm.frontend.prompt_embeds import read_embeds
from shmllm.frontend.prompts import as_list
from shmllm.frontend.text.tokenizer import Tokenizer
from shmllm.frontend.text.tokenizer_backend import NoBackend, TransformersBackend
from shmllm.frontend.text.truncation import Truncation
from shmllm.params.pooling import PoolingParams
from shmllm.params.sampling import SamplingParams
from shmllm.params.structured_outputs import StructuredOutputsParams

VOCAB_SIZE = 600
MAX_MODEL_LEN = 32


@pytest.fixture
def tokenizer(tokenizer_of):
    return tokenizer_of("byte_level")


@pytest.fixture
def processor(tokenizer):
    return InputProcessor(tokenizer, info(vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN))


def prepare(processor, *prompts, names=None, **options):
    return processor.prepare(prompts, [SamplingParams(**options)] * len(prompts), names)


def test_text_is_tokenized_and_kept(processor, tokenizer):
    (request,) = prepare(processor, "The quick fox")
    assert request.prompt == "The quick fox"
    assert request.prompt_token_ids == tokenizer.encode("The quick fox")
    assert request.submitted.cache_salt == ""


@pytest.mark.parametrize(
    ("prompt", "text", "salt"),
    [
        ([5, 6], None, ""),
        ((5, 6), None, ""),
        (range(5, 7), None, ""),
        ({"prompt_token_ids": [5, 6]}, None, ""),
        ({"prompt_token_ids": (5, 6), "prompt": "known"}, "known", ""),
        ({"prompt_token_ids": [5, 6], "cache_salt": "s"}, None, "s"),
        ({"prompt_token_ids": [5, 6], "prompt": None, "cache_salt": None}, None, ""),
    ],
)
def test_token_ids_are_taken_as_they_are(processor, prompt, text, salt):
    (request,) = prepare(processor, prompt)
    assert request.prompt_token_ids == [5, 6]
    assert type(request.prompt_token_ids) is list
    assert (request.prompt, request.submitted.cache_salt) == (text, salt)


def test_a_dict_with_text_is_tokenized(processor, tokenizer):
    (request,) = prepare(processor, {"prompt": "dog", "cache_salt": "s"})
    assert (request.prompt, request.submitted.cache_salt) == ("dog", "s")
    assert request.prompt_token_ids == tokenizer.encode("dog")


def test_texts_and_token_ids_in_one_batch_keep_their_order(processor, tokenizer):
    requests = prepare(processor, "fox", [5], {"prompt": "dog"}, [6, 7], "again")
    assert [request.prompt_token_ids for request in requests] == [
        tokenizer.encode("fox"),
        [5],
        tokenizer.encode("dog"),
        [6, 7],
        tokenizer.encode("again"),
    ]


def test_each_request_has_its_own_parameters(processor):
    params = [SamplingParams(max_tokens=n) for n in (1, 2)]
    requests = processor.prepare([[5], [6]], params)
    assert [request.params for request in requests] == params


@pytest.mark.parametrize("length", [1, MAX_MODEL_LEN - 1])
def test_the_longest_and_the_shortest_prompt_are_accepted(processor, length):
    assert len(prepare(processor, [5] * length)[0].prompt_token_ids) == length


def test_the_first_and_last_token_id_are_accepted(processor):
    prepare(processor, [0, VOCAB_SIZE - 1], stop_token_ids=[0, VOCAB_SIZE - 1])


BAD_PROMPTS = [
    (5, "must be a str, a list of token ids, or a dict .* got int"),
    (None, "got NoneType"),
    (b"bytes", "got bytes"),
    ([1, "a"], "got list"),
    ([1.0], "got list"),
    ([True], "got list"),
    (["a", "b"], "got list"),
    ([], "is empty: .* the decoder prompt cannot be empty"),
    ((), "is empty"),
    ("", "is empty"),
    ({"prompt": ""}, "is empty"),
    ({"prompt_token_ids": []}, "is empty"),
    ({}, "has neither 'prompt' nor 'prompt_token_ids'"),
    ({"cache_salt": "s"}, "has neither 'prompt' nor 'prompt_token_ids'"),
    ({"prompt": None}, "has neither"),
    ({"text": "a"}, r"has unknown keys \['text'\]; known are \['cache_salt', 'mm_proces"),
    ({"prompt": "a", 5: 1}, r"has unknown keys \['5'\]"),
    ({"prompt": 5}, "'prompt' must be a str, got int"),
    ({"prompt": 5, "prompt_token_ids": [1]}, "'prompt' must be a str, got int"),
    ({"prompt_token_ids": "12"}, "'prompt_token_ids' must be a list of whole numbers"),
    ({"prompt_token_ids": [1.5]}, "'prompt_token_ids' must be a list of whole numbers"),
    ({"prompt_token_ids": 5}, "'prompt_token_ids' must be a list of whole numbers"),
    ({"prompt": "a", "cache_salt": 5}, "'cache_salt' must be a str, got int"),
    ({"prompt": "a", "cache_salt": "s\0x"}, "'cache_salt' has a NUL character"),
    ([5] * 32, "has 32 tokens; max_model_len is 32, so a prompt may have at most 31"),
    ([5] * 1234, "has 1,234 tokens"),
    ("x" * 4000, r"maximum context length is 32 tokens .* Please reduce the length"),
    ([5, 600], "has token id 600; the vocabulary has ids from 0 to 599"),
    ([5, -1], "token id -1; the vocabulary has ids from 0 to 599, so it is out of vocabulary"),
    ([-1, 600], "has token id -1"),
    ([2**40], "has token id 1099511627776"),
    ("lone \ud800 surrogate", "lone surrogate"),
]


@pytest.mark.parametrize(("prompt", "words"), BAD_PROMPTS, ids=lambda value: ascii(value)[:40])
def test_the_error_for_a_bad_prompt_says_what_is_wrong(processor, prompt, words):
    with pytest.raises(RequestError, match=words):
        prepare(processor, prompt)


@pytest.mark.parametrize(("prompt", "words"), BAD_PROMPTS, ids=lambda value: ascii(value)[:40])
def test_the_error_for_a_bad_prompt_in_a_batch_names_it(processor, prompt, words):
    with pytest.raises(RequestError, match=f"line 7.*{words}"):
        prepare(processor, [1], prompt, "good", names=["line 2", "line 7", "line 9"])


def test_an_error_has_the_parameter_and_its_value(processor):
    with pytest.raises(RequestError) as caught:
        prepare(processor, [5] * 33)
    assert (caught.value.parameter, caught.value.value) == ("input_tokens", 33)


@pytest.mark.parametrize(
    ("prompts", "name"), [([[]], "^the prompt is"), ([[1], []], "^prompt 1 is")]
)
def test_prompts_without_names_are_named_by_their_position(processor, prompts, name):
    with pytest.raises(RequestError, match=name):
        prepare(processor, *prompts)


@pytest.mark.parametrize(
    "prompt",
    [
        np.array([1, 2]),
        np.array([5]),
        np.array([]),
        {"prompt_token_ids": np.array([1, 2])},
        {"prompt_token_ids": np.array([5])},
    ],
    ids=["array", "array of one", "empty array", "array in a dict", "array of one in a dict"],
)
def test_an_array_instead_of_a_list_is_an_error_that_names_the_prompt(processor, prompt):
    with pytest.raises(RequestError, match="prompt 1"):
        prepare(processor, [1], prompt)


def test_a_cache_salt_that_cannot_be_encoded_is_refused_before_anything_is_queued(processor):
    with pytest.raises(RequestError, match=r"prompt 1.*cache_salt"):
        prepare(processor, [1], {"prompt_token_ids": [1], "cache_salt": "\ud800"})


def test_a_stop_token_outside_the_vocabulary_is_refused(processor):
    with pytest.raises(RequestError, match=r"stop_token_ids has 600; .* from 0 to 599"):
        prepare(processor, [1], stop_token_ids=[5, 600])


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("text", ["text"]),
        ("", [""]),
        ([1, 2], [[1, 2]]),
        ((1, 2), [(1, 2)]),
        ({"prompt": "a"}, [{"prompt": "a"}]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2]], [[1], [2]]),
        (["a", [1], {"prompt": "b"}], ["a", [1], {"prompt": "b"}]),
        (("a", "b"), ["a", "b"]),
        ([[]], [[]]),
        ([], []),
        ((), []),
    ],
    ids=str,
)
def test_as_list_accepts_one_prompt_or_several(prompts, expected):
    assert as_list(prompts) == expected


@pytest.mark.parametrize(
    "prompts", [5, None, b"a", {1}, iter(["a"]), np.array([1])], ids=lambda p: type(p).__name__
)
def test_as_list_refuses_other_types(prompts):
    with pytest.raises(RequestError, match=f"prompts must be .* got {type(prompts).__name__}"):
        as_list(prompts)


DEFAULT = SamplingParams(max_tokens=3)


def test_no_parameters_mean_the_default():
    assert match_params(None, 2, DEFAULT) == [DEFAULT, DEFAULT]


def test_one_parameter_object_applies_to_all_prompts():
    params = SamplingParams(top_k=5)
    assert match_params(params, 3, DEFAULT) == [params] * 3


def test_a_list_of_parameters_has_one_per_prompt():
    params = (SamplingParams(top_k=5), SamplingParams(top_k=6))
    assert match_params(params, 2, DEFAULT) == list(params)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ([DEFAULT], "2 prompts and 1 sampling_params: give one"),
        ([DEFAULT] * 3, "2 prompts and 3 sampling_params"),
        ([], "2 prompts and 0 sampling_params"),
        ("greedy", "must be a SamplingParams or a list of them, got str"),
        (5, "got int"),
        ({"top_k": 1}, "got dict"),
        ([DEFAULT, {"top_k": 1}], r"sampling_params\[1\] is a dict, not a SamplingParams"),
        ([None, DEFAULT], r"sampling_params\[0\] is a NoneType"),
    ],
)
def test_parameters_that_do_not_match_are_refused(params, words):
    with pytest.raises(RequestError, match=words):
        match_params(params, 2, DEFAULT)


def test_pooling_parameters_match_prompts_in_the_same_way():
    default = PoolingParams()
    small = PoolingParams(dimensions=32)
    assert match_params(None, 2, default, "pooling_params") == [default, default]
    assert match_params([small, default], 2, default, "pooling_params") == [small, default]
    with pytest.raises(RequestError, match=r"pooling_params\[0\] is a SamplingParams, not a Pool"):
        match_params([DEFAULT], 1, default, "pooling_params")


@pytest.mark.parametrize("several", [False, True])
def test_parameters_changed_after_they_were_made_are_checked(several):
    params = SamplingParams()
    params.top_p = 5
    with pytest.raises(RequestError, match="top_p"):
        match_params([params] if several else params, 1, DEFAULT)


def test_a_structured_output_is_sent_as_a_grammar():
    tokenizer = Tokenizer.from_directory(resolve_model("tiny"))
    processor = InputProcessor(tokenizer, info(vocab_size=4096))
    constraint = StructuredOutputsParams(choice=["a", "b"])
    (request,) = prepare(processor, [1, 2], structured_outputs=constraint)
    assert request.message(3, 0).grammar.endswith('start: "a" | "b"')
    (free,) = prepare(processor, [1, 2])
    assert free.message(4, 0).grammar == ""
    with pytest.raises(RequestError, match="unclosed group"):
        prepare(processor, [1, 2], structured_outputs=StructuredOutputsParams(regex="("))


class SlowTokenizer:
    """One of transformers that `tokenizers` cannot express."""

    all_special_ids = ()

    def get_vocab(self):
        return {"a": 0}

    def get_added_vocab(self):
        return {}


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (
            TransformersBackend(SlowTokenizer()),
            r"need a tokenizer\.json, or a",
        ),
        (NoBackend(), "skip_tokenizer_init"),
    ],
)
def test_a_constraint_needs_a_tokenizer_that_engines_can_read(backend, reason):
    processor = InputProcessor(Tokenizer(backend), info(vocab_size=VOCAB_SIZE))
    with pytest.raises(RequestError, match=reason):
        prepare(processor, [1], structured_outputs=StructuredOutputsParams(regex="a"))


def truncated(processor, prompts, truncation, min_room=0):
    requests = processor.prepare(
        prompts, [SamplingParams()] * len(prompts), min_room=min_room, truncation=truncation
    )
    return [request.prompt_token_ids for request in requests]


@pytest.mark.parametrize("kind", ["bert", "qwen"])
def test_truncation_cuts_text_and_token_ids(kind):
    tokenizer = our_tokenizer(kind)
    processor = InputProcessor(tokenizer, info(vocab_size=VOCAB_SIZE, max_model_len=16))
    long = " ".join(CORPUS)
    prompts = ["fox", long, [*range(30)], {"prompt": "text", "prompt_token_ids": [*range(20)]}]
    whole = tokenizer.encode(long)
    cut = truncated(processor, prompts, Truncation(6))
    assert cut[0] == tokenizer.encode("fox")
    assert cut[1] == [*whole[:5], whole[-1]]  # the token that ends a text remains
    assert cut[2:] == [[*range(6)], [*range(6)]]
    cut = truncated(processor, prompts, Truncation(6, "left"))
    assert cut[1][-5:] == whole[-5:]
    assert cut[2:] == [[*range(24, 30)], [*range(14, 20)]]
    assert [len(ids) for ids in truncated(processor, prompts[1:], Truncation())] == [16] * 3
    assert [len(ids) for ids in truncated(processor, prompts[1:], Truncation(), 1)] == [15] * 3


def test_truncation_that_is_not_allowed_is_refused():
    processor = InputProcessor(our_tokenizer("bert"), info(max_model_len=16))
    with pytest.raises(RequestError, match="from 1 to 16, got 17"):
        truncated(processor, ["fox"], Truncation(17))
    with pytest.raises(RequestError, match="adds 2 special tokens"):
        truncated(processor, ["fox"], Truncation(1))
    with pytest.raises(RequestError, match="prompt 1 is not valid Unicode"):
        truncated(processor, ["fox", "\ud800"], Truncation(4))
    embeds = {"prompt_embeds": np.zeros((3, 8), np.float32)}
    with pytest.raises(RequestError, match="the prompt consists of embeddings"):
        truncated(processor, [embeds], Truncation(4))


@pytest.mark.parametrize("dtype", [np.longdouble, np.int32, np.complex64, object])
def test_embeddings_of_a_dtype_that_no_engine_has_are_refused(dtype):
    with pytest.raises(RequestError, match="prompt 1: 'prompt_embeds' must be floating numbers of"):
        read_embeds("prompt 1", np.ones((3, 8)).astype(dtype), 8)
