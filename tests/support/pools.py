"""Requests of every kind for pools of engines, and what they give with one engine."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from support.engines import assert_idle, held_steps
from support.waiting import join_all, wait_until

from shmllm import LLM, RequestOutput, RequestOutputKind, SamplingParams, StructuredOutputsParams
from shmllm.client import revival
from shmllm.client.flights import TWO_DEATHS

OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 2**26, "dtype": "float32"}
DIGITS = StructuredOutputsParams(regex="[0-9]{12}")
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "ignore_eos": True},
    "sampled": {"ignore_eos": True},
    "seeded": {"seed": 7, "temperature": 0.8, "top_p": 0.9},
    "completions": {"n": 3, "ignore_eos": True},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1, "ignore_eos": True},
    "stops": {"stop": ["e", "self"], "min_tokens": 4},
    "structured": {"structured_outputs": DIGITS},
}
"""By name, parameters of a request."""
Row = list[Any]


def params_of(kind: str, num_tokens: int) -> SamplingParams:
    """The parameters of a kind of requests, with at most so many tokens."""
    return SamplingParams(max_tokens=num_tokens, **KINDS[kind])


def prompts(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Random prompts of up to 60 tokens, some of which begin like others."""
    common = [rng.randrange(5, 500) for _ in range(40)]
    return [
        {
            "prompt_token_ids": common[: rng.randrange(40)]
            + [rng.randrange(5, 500) for _ in range(rng.randrange(1, 20))]
        }
        for _ in range(count)
    ]


def row_of(output: RequestOutput) -> Row:
    """What must not depend on the number of engines."""
    return [
        (
            each.index,
            each.token_ids,
            each.text,
            each.finish_reason,
            each.stop_reason,
            each.cumulative_logprob,
            None if each.logprobs is None else [*map(str, each.logprobs)],
        )
        for each in output.outputs
    ] + [None if output.prompt_logprobs is None else [*map(str, output.prompt_logprobs)]]


def rows(llm: LLM, given: list[Any], params: Any, first_number: int = 0) -> list[Row]:
    """The rows of requests whose numbers begin with `first_number`, from which seeds follow.

    No request may run, and the numbers must be larger than those of the requests before.
    """
    number_from(llm, first_number)
    return [row_of(each) for each in llm.generate(given, params, use_tqdm=False)]


def number_from(llm: LLM, number: int) -> None:
    """Give the next request this number, or a later one that requests before make necessary."""
    outputs: Any = llm.front_end.outputs
    assert outputs._next_number <= number
    outputs._next_number = number


def joined(outputs: Iterator[RequestOutput]) -> dict[int, list[int]]:
    """The tokens of each request of a stream of deltas."""
    tokens: dict[int, list[int]] = {}
    for output in outputs:
        tokens.setdefault(output.prompt_index, []).extend(output.outputs[0].token_ids)
    return tokens


def deltas(llm: LLM, given: list[Any], params: SamplingParams) -> Iterator[RequestOutput]:
    """The stream of requests, in deltas."""
    return llm.stream(given, params, output_kind=RequestOutputKind.DELTA)


def pids_of(llm: LLM) -> list[int]:
    """The pids of a pool's engines that run."""
    return list(llm._client.pids)  # type: ignore[attr-defined]


def kill_engine(llm: LLM, index: int = 0) -> None:
    """End one of the engines that run."""
    os.kill(pids_of(llm)[index], signal.SIGKILL)


@contextmanager
def two_engines(llm: LLM) -> Iterator[None]:
    """Both engines of a pool live at the beginning, and live and are idle at the end."""
    await_engines(llm, 2)
    yield
    await_engines(llm, 2)
    assert_idle(llm)


def await_engines(llm: LLM, count: int) -> None:
    """Wait until so many engines run, which they do if somebody polls."""
    wait_until(
        lambda: len(pids_of(llm)) == count and "dead" not in llm.health(),
        f"{count} engines run",
        between=lambda: llm._dispatcher.pump(0.02),
    )


def is_allowed_error(text: str | None) -> bool:
    """Whether a request may end with this error, because two engines died that ran it."""
    return text == TWO_DEATHS


@contextmanager
def immortal_pools() -> Iterator[None]:
    """Engines start again as often as they end meanwhile."""
    with patch.object(revival, "MOST_STARTS", 10**9):
        yield


def num_generated(llm: LLM, index: int) -> int:
    """The number of tokens that one of a pool's engines has made."""
    clients = llm._client._clients  # type: ignore[attr-defined]
    return int(clients[index].stats()["generated_tokens"])


@contextmanager
def kills_running(llm: LLM, *indexes: int, how: signal.Signals = signal.SIGKILL) -> Iterator[None]:
    """End engines when all of them have made some tokens, and before their requests end."""
    pids, before = pids_of(llm), [num_generated(llm, index) for index in (0, 1)]

    def have_begun() -> bool:
        return all(num_generated(llm, index) > before[index] for index in indexes)

    def run(go_on: Callable[[], None]) -> None:
        try:
            wait_until(have_begun, "tokens")
            for index in indexes:
                os.kill(pids[index], how)
        finally:
            go_on()

    with held_steps(llm) as go_on:
        killer = threading.Thread(target=run, args=(go_on,))
        killer.start()
        yield
        join_all([killer])
