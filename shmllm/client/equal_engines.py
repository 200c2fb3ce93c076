"""What the engines of a pool have in common, and what they must have in common."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import fields, replace

from shmllm.config.info import EngineInfo
from shmllm.errors import EngineStartError
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams

MAY_DIFFER = frozenset(
    {
        "num_blocks", "num_states", "kv_cache_bytes", "weight_bytes", "max_num_seqs", "seed",
        "num_threads", "wait_policy", "load_seconds", "device", "device_uuid", "graphs",
        "gpu_memory_utilization", "warnings", "async_scheduling",
        "enable_prefix_caching", "max_loras", "tensor_parallel_size", "pipeline_parallel_size",
        "speculative_method", "speculative_model", "num_speculative_tokens", "max_model_len",
        "max_blocks_per_request", "max_states_per_request", "role", "shared_kv_cache_bytes",
    }
)  # fmt: skip
"""The fields of EngineInfo on which no output depends, but by what an engine has room for."""


def check_equal(infos: Sequence[EngineInfo]) -> None:
    """Raise EngineStartError if engines would give other outputs for equal requests, or if their
    roles do not complete each other."""
    for field in fields(EngineInfo):
        if field.name not in MAY_DIFFER:
            check_values(field.name, [getattr(info, field.name) for info in infos])
    _check_roles(infos)


def _check_roles(infos: Sequence[EngineInfo]) -> None:
    roles = [info.role for info in infos]
    num_prefills, num_decodes = roles.count("prefill"), roles.count("decode")
    if num_prefills == len(roles):
        raise EngineStartError(
            f"all {num_prefills} engines of the pool have the role 'prefill' and none decodes: add "
            "at least 1 engine that was started with --role decode or without a role"
        )
    if num_decodes and not num_prefills:
        raise EngineStartError(
            f"{num_decodes} of the {len(roles)} engines of the pool have the role 'decode' and 0 "
            "the role 'prefill': add at least 1 engine that was started with --role prefill"
        )
    for index, info in enumerate(infos):
        if num_prefills and not info.shared_kv_cache_bytes:
            raise EngineStartError(
                f"engine {index + 1} of the pool, of the role {info.role!r}, has no shared cache "
                "in which prompts reach the engines that decode: start all engines of a pool with "
                "roles with shared_kv_cache_bytes, such as --shared-kv-cache-bytes 1GiB"
            )


def num_shared_blocks(infos: Sequence[EngineInfo]) -> int:
    """How many KV blocks the shared cache of engines has room for, by the sizes of their own."""
    return min(
        info.shared_kv_cache_bytes * info.num_blocks // max(info.kv_cache_bytes, 1)
        for info in infos
    )


def check_values(name: str, values: Sequence[object]) -> None:
    """Raise EngineStartError unless the values of all engines are equal.

    Args:
        name: what the values are, for the error.
        values: the value of each engine.
    """
    for index, value in enumerate(values):
        if value != values[0]:
            raise EngineStartError(
                f"the engines of a pool are equal, but {name} of the first one is "
                f"{values[0]!r}, and of number {index + 1} {value!r}"
            )


def info_of_all(infos: Sequence[EngineInfo]) -> EngineInfo:
    """What a front end is told of equal engines: each request has to fit into every one."""
    return replace(
        infos[0],
        device_uuid="",
        role="both",
        max_model_len=min(each.max_model_len for each in infos),
        max_logprobs=min(each.max_logprobs for each in infos),
        max_loras=min(each.max_loras for each in infos),
        data_parallel_size=len(infos),
    )


def bounded(request: EngineCoreRequest, max_model_len: int) -> EngineCoreRequest:
    """Bound the length of a request without a bound. It then does not depend on its engine, which
    may have room for more than `max_model_len` tokens."""
    params = request.params
    if not isinstance(params, SamplingParams) or params.max_tokens is not None:
        return request
    params = copy(params)
    params.max_tokens = max_model_len - len(request.prompt_token_ids)
    return replace(request, params=params)
