"""ADD: encodes and decodes a request that generates tokens.

    ADD_HEADER | PARAMS, stop ids i32[], bias ids i32[], biases f64[], allowed ids i32[],
                 bad word lengths u32[], bad word ids i32[], scored ids i32[], trace ids i32[],
                 ids that begin and that end reasoning, i32[] each,
                 scored ids of prompt tokens i32[]
               | prompt ids i32[], ids of the encoder's text i32[], salt, grammar,
                 extra arguments as JSON, adapter

The bytes from PARAMS to the last of these ids are equal for most requests of a batch, so equal byte
strings are decoded once, except large ones. Only the sampling fields that the engine acts on are
transmitted.
"""

from __future__ import annotations

import copy
import json
from array import array
from functools import lru_cache
from struct import Struct
from typing import Any

from shmllm.errors import ProtocolMismatchError
from shmllm.params.ranges import MOST_EXTRA_CHARACTERS
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import RepetitionDetectionParams, SamplingParams, TokenSequences
from shmllm.params.thinking import ThinkingBudget
from shmllm.params.token_table import PADDING, TokenTable
from shmllm.wire.adapter import decode_adapter, encode_adapter
from shmllm.wire.sections import Parts, Sections, column

# number, seed, priority, bytes of the parameters, prompt tokens, tokens of the encoder's text, salt
# bytes, grammar bytes, bytes of extra arguments, adapter bytes
ADD_HEADER = Struct("<qqiIIIIIII")
# temperature, top_p, min_p, presence, frequency, repetition, top_k, max_tokens,
# min_tokens, flags, logprobs, prompt_logprobs, repetition detection (longest, shortest,
# count), thinking budget, stop ids, biases, allowed ids, bad words, ids of bad words, scored ids,
# trace ids, ids that begin, end and close reasoning, ids of each scored
# prompt token, those of all, tokens that are not scored
PARAMS = Struct("<ddddddiIIIiiIIIIIIIIIIIIIIIII")

IGNORE_EOS = 1
UNBOUNDED = 2
HAS_LOGPROBS = 4
HAS_PROMPT_LOGPROBS = 8
SKIP_PREFIX_CACHE = 16
MAX_INT = 2**31 - 1
MAX_UINT = 2**32 - 1
LARGEST_KEPT = 2**14
"""The most bytes of parameters whose decoded form is kept for the next request. A faulty front end
can send parameters of many MiB, and no two requests of it need to have the same."""
_NO_DETECTION = RepetitionDetectionParams()
NO_TABLE = TokenTable(1, array("i"))
_NO_THINKING = ThinkingBudget(0, (), (), ())


def encode_add(request: EngineCoreRequest) -> Parts:
    params = request.params
    assert isinstance(params, SamplingParams)
    salt, grammar = request.cache_salt.encode(), request.grammar.encode()
    extra = request.extra_args.encode()
    lora = encode_adapter(request.lora)
    bias = params.logit_bias or {}
    allowed = params.allowed_token_ids or ()
    bad_words = request.bad_words
    thinking = request.thinking or _NO_THINKING
    fixed = _encode_params(params, len(bias), len(allowed), bad_words, thinking)
    sections = column("i", params.stop_token_ids)
    scored, trace = params.logprob_token_ids or (), params.trace_decode_token_ids or ()
    table = params.prompt_logprob_token_ids or NO_TABLE
    if bias or allowed or bad_words or scored or trace or thinking.end or table.ids:
        sections += (
            column("i", list(bias))
            + column("d", list(bias.values()))
            + column("i", allowed)
            + column("I", [len(word) for word in bad_words])
            + column("i", [token for word in bad_words for token in word])
            + column("i", scored)
            + column("i", trace)
            + column("i", thinking.begin)
            + column("i", thinking.end)
            + column("i", thinking.closes)
            + table.ids.tobytes()
        )
    header = ADD_HEADER.pack(
        request.number,
        request.seed,
        request.priority,
        len(fixed) + len(sections),
        len(request.prompt_token_ids),
        len(request.encoder_token_ids),
        len(salt),
        len(grammar),
        len(extra),
        len(lora),
    )
    prompt = column("i", request.prompt_token_ids)
    if request.encoder_token_ids:
        prompt += column("i", request.encoder_token_ids)
    return (header, fixed, sections, prompt, salt, grammar, extra, lora)


def _encode_params(
    params: SamplingParams,
    num_biases: int,
    num_allowed: int,
    bad_words: TokenSequences,
    thinking: ThinkingBudget,
) -> bytes:
    logprobs, prompt_logprobs = params.logprobs, params.prompt_logprobs
    detection = params.repetition_detection or _NO_DETECTION
    table = params.prompt_logprob_token_ids or NO_TABLE
    flags = (
        (IGNORE_EOS if params.ignore_eos else 0)
        | (UNBOUNDED if params.max_tokens is None else 0)
        | (HAS_LOGPROBS if logprobs is not None else 0)
        | (HAS_PROMPT_LOGPROBS if prompt_logprobs is not None else 0)
        | (SKIP_PREFIX_CACHE if params.skip_reading_prefix_cache else 0)
    )
    return PARAMS.pack(
        params.temperature,
        params.top_p,
        params.min_p,
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
        min(params.top_k, MAX_INT),
        min(params.max_tokens or 0, MAX_UINT),
        min(params.min_tokens, MAX_UINT),
        flags,
        min(logprobs or 0, MAX_INT),
        min(prompt_logprobs or 0, MAX_INT),
        detection.max_pattern_size,
        detection.min_pattern_size,
        detection.min_count,
        min(thinking.limit, MAX_INT),
        len(params.stop_token_ids),
        num_biases,
        num_allowed,
        len(bad_words),
        sum(map(len, bad_words)),
        len(params.logprob_token_ids or ()),
        len(params.trace_decode_token_ids or ()),
        len(thinking.begin),
        len(thinking.end),
        len(thinking.closes),
        table.width,
        len(table.ids),
        min(params.prompt_logprob_start or 0, MAX_UINT),
    )


def decode_add(record: memoryview) -> EngineCoreRequest:
    number, seed, priority, params_bytes, num_tokens, num_encoder_tokens, *lengths = (
        ADD_HEADER.unpack_from(record)
    )
    salt_bytes, grammar_bytes, extra_bytes, lora_bytes = lengths
    sections = Sections(record, ADD_HEADER.size)
    run = sections.take_bytes(params_bytes)
    decode_params = _decode_params if len(run) <= LARGEST_KEPT else _decode_params.__wrapped__
    params, bad_words, thinking = decode_params(run)
    prompt = array("i", sections.take_bytes(4 * num_tokens))
    encoder_text = sections.take("i", num_encoder_tokens)
    salt = sections.text(salt_bytes) if salt_bytes else ""
    grammar = sections.text(grammar_bytes) if grammar_bytes else ""
    extra = sections.text(extra_bytes) if extra_bytes else ""
    lora = decode_adapter(sections.text(lora_bytes), "ADD") if lora_bytes else None
    sections.end()
    if extra:
        params = copy.copy(params)  # requests without extra arguments share it
        params.extra_args = decode_extra_args(extra)
    return EngineCoreRequest(
        number,
        prompt,
        params,
        salt,
        priority,
        bad_words,
        grammar,
        thinking,
        extra,
        encoder_token_ids=encoder_text or (),
        lora=lora,
        seed=seed,
    )


def decode_extra_args(text: str) -> dict[str, Any]:
    """Decode the extra arguments of a request.

    Raises:
        ProtocolMismatchError: they are too long, or no JSON object.
    """
    try:
        arguments = json.loads(text) if len(text) <= MOST_EXTRA_CHARACTERS else None
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ProtocolMismatchError("the extra arguments of ADD are too long or no JSON object")
    return arguments


@lru_cache(maxsize=64)
def _decode_params(
    run: bytes,
) -> tuple[SamplingParams, TokenSequences, ThinkingBudget | None]:
    """Decode a parameter byte string. Requests share the result, which nobody modifies."""
    (
        temperature,
        top_p,
        min_p,
        presence_penalty,
        frequency_penalty,
        repetition_penalty,
        top_k,
        max_tokens,
        min_tokens,
        flags,
        logprobs,
        prompt_logprobs,
        *detection,
        limit,
        num_stop_ids,
        num_biases,
        num_allowed,
        num_bad_words,
        num_bad_word_ids,
        num_scored,
        num_traced,
        num_begin,
        num_end,
        num_closes,
        table_width,
        num_table_ids,
        start,
    ) = PARAMS.unpack_from(run)
    sections = Sections(run, PARAMS.size)
    stop_ids = sections.take("i", num_stop_ids)
    biased, biases = sections.take("i", num_biases), sections.take("d", num_biases)
    allowed = sections.take("i", num_allowed)
    lengths = sections.take("I", num_bad_words)
    bad_words = _cut(lengths, sections.take("i", num_bad_word_ids))
    scored, trace = sections.take("i", num_scored), sections.take("i", num_traced)
    begin, end = sections.take("i", num_begin), sections.take("i", num_end)
    closes = sections.take("i", num_closes)
    table = _decode_table(table_width, sections.take("i", num_table_ids), start)
    sections.end()
    if not bool(begin) == bool(end) == bool(closes):
        raise ProtocolMismatchError("the columns of ADD's reasoning tokens are inconsistent")
    params = SamplingParams(
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        stop_token_ids=stop_ids,
        ignore_eos=bool(flags & IGNORE_EOS),
        max_tokens=None if flags & UNBOUNDED else max_tokens,
        min_tokens=min_tokens,
        logprobs=logprobs if flags & HAS_LOGPROBS else None,
        prompt_logprobs=prompt_logprobs if flags & HAS_PROMPT_LOGPROBS else None,
        prompt_logprob_token_ids=table,
        prompt_logprob_start=start if table is not None else None,
        logprob_token_ids=scored or None,
        logit_bias=dict(zip(biased, biases, strict=True)) or None,
        allowed_token_ids=allowed or None,
        repetition_detection=RepetitionDetectionParams(*detection) if any(detection) else None,
        skip_reading_prefix_cache=True if flags & SKIP_PREFIX_CACHE else None,
        trace_decode_token_ids=trace or None,
    )
    thinking = ThinkingBudget(limit, tuple(begin), tuple(end), tuple(closes)) if end else None
    return params, bad_words, thinking


def _decode_table(width: int, ids: list[int], start: int) -> TokenTable | None:
    if not ids and (width, start) == (NO_TABLE.width, 0):
        return None
    if not ids or not width or len(ids) % width or min(ids) < PADDING:
        raise ProtocolMismatchError("the columns of ADD's scored prompt tokens are inconsistent")
    return TokenTable(width, array("i", ids))


def _cut(lengths: list[int], ids: list[int]) -> TokenSequences:
    if sum(lengths) != len(ids) or 0 in lengths or any(token < 0 for token in ids):
        raise ProtocolMismatchError("the columns of ADD's bad words are inconsistent")
    words, begin = [], 0
    for length in lengths:
        words.append(tuple(ids[begin : begin + length]))
        begin += length
    return tuple(words)
