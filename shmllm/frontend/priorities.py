"""`priority=` of a batch: one number for all prompts, or one for each."""

from __future__ import annotations

from collections.abc import Sequence

from shmllm.config.info import EngineInfo
from shmllm.errors import RequestError
from shmllm.frontend.input_processor import PreparedRequest

Priority = int | Sequence[int] | None


def set_priorities(
    requests: list[PreparedRequest], priority: Priority, facts: EngineInfo
) -> list[PreparedRequest]:
    """The requests with their priorities, lower going first.

    Raises:
        RequestError: no 32-bit whole numbers, not one for each, or an engine that does not
            look at them.
    """
    if priority is None:
        return requests
    values = [priority] * len(requests) if isinstance(priority, int) else priority
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise RequestError(f"priority must be a whole number or a list of them, got {priority!r}")
    if len(values) != len(requests):
        raise RequestError(f"{len(requests)} prompts and {len(values)} priorities")
    for request, value in zip(requests, values, strict=True):
        if type(value) is not int or not -(2**31) <= value < 2**31:
            raise RequestError(f"priority must be a 32-bit whole number, got {value!r}")
        if value and facts.scheduling_policy != "priority":
            raise RequestError(
                f"priority {value} has no effect: this engine schedules first come, first "
                "served; start it with scheduling_policy='priority'"
            )
        request.submitted.priority = value
    return requests
