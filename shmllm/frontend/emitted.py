"""What streams show of several changes at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from shmllm.outputs.request import RequestOutput


class Shows(Protocol):
    """A RequestState, or what stands in for one."""

    index: int

    def next_output(self) -> RequestOutput | None: ...


def next_outputs(changed: Iterable[Shows]) -> list[RequestOutput]:
    """The next output of each request. Completions of one prompt that changed together share
    an output, or the first of two that end together would say that all is finished."""
    outputs: dict[int, RequestOutput] = {}
    for item in changed:
        output = item.next_output()
        if output is None:
            continue
        first = outputs.setdefault(item.index, output)
        if first is not output:
            first.outputs += output.outputs
            first.prompt_logprobs = first.prompt_logprobs or output.prompt_logprobs
    return list(outputs.values())
