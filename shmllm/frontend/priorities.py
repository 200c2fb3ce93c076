"""The argument `priority`: which requests the engine schedules first."""

from __future__ import annotations

from collections.abc import Sequence

from shmllm.config.info import EngineInfo
from shmllm.errors import RequestError
from shmllm.frontend.input_processor import PreparedRequest, Priority


def set_priorities(
    requests: list[PreparedRequest], priority: Priority, info: EngineInfo
) -> list[PreparedRequest]:
    """Set the priorities of the requests, and return the requests.

    Args:
        requests: the requests of the batch.
        priority: one number for all requests or one per request; None changes nothing. The
            engine schedules requests with a lower number first.
        info: the engine's info, with its scheduling policy.

    Raises:
        RequestError: a value is not a 32-bit whole number, the numbers of requests and
            priorities differ, or the engine does not schedule by priority.
    """
    if priority is None:
        return requests
    values = [priority] * len(requests) if isinstance(priority, int) else priority
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise RequestError(f"priority must be a whole number or a list of them, got {priority!r}")
    if len(values) != len(requests):
        raise RequestError(f"{len(requests)} prompts and {len(values)} priorities")
    for request, value in zip(requests, values, strict=True):
        check_priority(value, info)
        request.submitted.priority = value
    return requests


def check_priority(priority: int | None, info: EngineInfo) -> None:
    """Check the priority of a request; None is no priority.

    Raises:
        RequestError: it is not a 32-bit whole number, or the engine does not schedule by priority.
    """
    if priority is None:
        return
    if type(priority) is not int or not -(2**31) <= priority < 2**31:
        raise RequestError(f"priority must be a 32-bit whole number, got {priority!r}")
    if priority and info.scheduling_policy != "priority":
        raise RequestError(
            f"priority {priority} has no effect: this engine schedules first come, first "
            "served; start it with scheduling_policy='priority'"
        )
