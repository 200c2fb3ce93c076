"""The same loads as msgpack, for the transports of other projects.

This module owns msgspec structs with the shape of vLLM's EngineCoreRequest, SamplingParams,
EngineCoreOutput and EngineCoreOutputs: the same fields in the same order, encoded by position,
without defaults. Logprobs are lists, one message object per request; later versions of vLLM send
them as an array object per request, which costs more. The module is imported only where msgspec is
installed.
"""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any, NamedTuple

from shmllm.bench.cases import Case, Payload
from shmllm.bench.loads import SAMPLING, Load, Parts, StepLoad, acknowledgement, prompt
from shmllm.ipc.ring import BytesLike

msgspec: Any = import_module("msgspec")


class LogprobsLists(NamedTuple):
    """The logprobs of one request.

    Attributes:
        logprob_token_ids: token ids, [tokens, top].
        logprobs: log-probabilities, [tokens, top].
        sampled_token_ranks: ranks of the sampled tokens, [tokens].
    """

    logprob_token_ids: list[list[int]]
    logprobs: list[list[float]]
    sampled_token_ranks: list[int]


def _struct(name: str, required: dict[str, Any], optional: dict[str, Any]) -> Any:
    fields = [*required.items(), *((key, kind, None) for key, kind in optional.items())]
    return msgspec.defstruct(name, fields, array_like=True, omit_defaults=True, gc=False)


# vLLM encodes SamplingParams as a map and all other structs by position.
EngineSamplingParams: Any = msgspec.defstruct(
    "EngineSamplingParams",
    [
        ("n", int, 1),
        ("presence_penalty", float, 0.0),
        ("frequency_penalty", float, 0.0),
        ("repetition_penalty", float, 1.0),
        ("temperature", float, 1.0),
        ("top_p", float, 1.0),
        ("top_k", int, 0),
        ("min_p", float, 0.0),
        ("seed", int | None, None),
        ("stop", list[str] | None, None),
        ("stop_token_ids", list[int] | None, None),
        ("ignore_eos", bool, False),
        ("max_tokens", int | None, 16),
        ("min_tokens", int, 0),
        ("logprobs", int | None, None),
        ("detokenize", bool, True),
    ],
    omit_defaults=True,
)
EngineCoreRequest: Any = _struct(
    "EngineCoreRequest",
    {
        "request_id": str,
        "prompt_token_ids": list[int] | None,
        "mm_features": list[Any] | None,
        "sampling_params": EngineSamplingParams | None,
        "pooling_params": Any,
        "arrival_time": float,
        "lora_request": Any,
        "cache_salt": str | None,
        "data_parallel_rank": int | None,
    },
    {"prompt_embeds": Any, "client_index": int | None, "priority": int | None},
)
EngineCoreOutput: Any = _struct(
    "EngineCoreOutput",
    {"request_id": str, "new_token_ids": list[int]},
    {
        "new_logprobs": LogprobsLists | None,
        "new_prompt_logprobs_tensors": Any,
        "finish_reason": int | None,
        "stop_reason": int | str | None,
    },
)
EngineCoreOutputs: Any = _struct(
    "EngineCoreOutputs",
    {
        "engine_index": int,
        "outputs": list[EngineCoreOutput],
        "scheduler_stats": Any,
        "timestamp": float,
    },
    {"finished_requests": set[str] | None},
)


def _add_load(case: Case) -> Load:
    token_ids, params = prompt(case.size), EngineSamplingParams(**SAMPLING)
    encoder = msgspec.msgpack.Encoder()
    decoder = msgspec.msgpack.Decoder(EngineCoreRequest)

    def encode(number: int) -> Parts:
        identity, now = str(number), time.monotonic()
        request = EngineCoreRequest(identity, token_ids, None, params, None, now, None, None, None)
        return (encoder.encode(request),)

    def decode(message: BytesLike) -> bytes:
        return acknowledgement(int(decoder.decode(message).request_id))

    return Load(encode, decode)


def _outputs_load(case: Case) -> Load:
    step = StepLoad.of(case.size)
    identities = [str(number) for number in step.numbers]
    encoder = msgspec.msgpack.Encoder()
    decoder = msgspec.msgpack.Decoder(EngineCoreOutputs)

    def plain() -> list[Any]:
        tokens = step.token_ids
        return [EngineCoreOutput(name, [tokens[row]]) for row, name in enumerate(identities)]

    def with_logprobs() -> list[Any]:
        tokens = step.token_ids
        ids, values, ranks = (column.tolist() for column in step.columns)
        return [
            EngineCoreOutput(
                name, [tokens[row]], LogprobsLists([ids[row]], [values[row]], [ranks[row]])
            )
            for row, name in enumerate(identities)
        ]

    build = with_logprobs if case.logprobs else plain

    def encode(number: int) -> Parts:
        return (encoder.encode(EngineCoreOutputs(number, build(), None, time.monotonic())),)

    def decode(message: BytesLike) -> bytes:
        return acknowledgement(decoder.decode(message).engine_index)

    return Load(encode, decode)


def msgpack_load(case: Case) -> Load:
    """The load of a case of messages (ADD or OUTPUTS) as msgpack."""
    return _add_load(case) if case.payload is Payload.ADD else _outputs_load(case)
