"""The argument `lora_request`: which adapter each request is computed with."""

from __future__ import annotations

from collections.abc import Sequence

from shmllm.config.info import EngineInfo
from shmllm.errors import RequestError
from shmllm.frontend.input_processor import PreparedRequest
from shmllm.params.lora import LoRARequest

Adapters = LoRARequest | Sequence[LoRARequest | None] | None
"""The argument `lora_request`: one adapter for all prompts, or for each one or None."""


def set_adapters(
    requests: list[PreparedRequest], lora_request: Adapters, info: EngineInfo
) -> list[PreparedRequest]:
    """Set the adapters of the requests, and return the requests.

    Args:
        requests: the requests of the batch.
        lora_request: one adapter for all requests, or for each one or None; None: no adapters.
        info: the engine's info.

    Raises:
        RequestError: a value is no LoRARequest, the numbers of requests and adapters differ, or the
            engine has no adapters.
    """
    if lora_request is None:
        return requests
    is_one = isinstance(lora_request, LoRARequest)
    values = [lora_request] * len(requests) if is_one else lora_request
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise RequestError(f"lora_request must be a LoRARequest or a list of them, got {values!r}")
    if len(values) != len(requests):
        raise RequestError(f"{len(requests)} prompts and {len(values)} lora_requests")
    for request, value in zip(requests, values, strict=True):
        request.submitted.lora = check_adapter(value, info)
    return requests


def check_adapter(lora_request: object, info: EngineInfo) -> LoRARequest | None:
    """Return the adapter of a request, or None.

    Raises:
        RequestError: it is neither a LoRARequest nor None, or the engine has no adapters.
    """
    if lora_request is None:
        return None
    if not isinstance(lora_request, LoRARequest):
        raise RequestError(f"lora_request must be a LoRARequest, got {lora_request!r}")
    if not info.max_loras:
        raise RequestError(
            f"lora_request {lora_request.lora_name!r} has no effect: this engine has no adapters; "
            "start it with enable_lora=True"
        )
    return lora_request
