"""Compares the ways to divide a model between processes, with the same requests in turns.

This module owns which ways there are and their measurement; it must not know how the figures are
shown.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from shmllm.bench.generation import RandomPrompts

if TYPE_CHECKING:
    from shmllm.frontend.llm import LLM
    from shmllm.params.sampling import SamplingParams

ONE = "1 process"
Rates = dict[int, dict[str, float]]
"""Tokens/s by the number of requests and the name of a division."""
_FLAGS = {
    "tensor_parallel_size": "--tensor-parallel-size",
    "pipeline_parallel_size": "--pipeline-parallel-size",
    "data_parallel_size": "--engines",
}
DIVISIONS = (*_FLAGS, "prefill_engines")
"""The options that divide work between processes."""


def divisions(count: int) -> dict[str, dict[str, int]]:
    """The ways to use `count` processes, by name, as options of `LLM`; the first is one process."""
    one = dict.fromkeys(_FLAGS, 1)
    return {
        ONE: one,
        f"{count} ranks": one | {"tensor_parallel_size": count},
        f"{count} stages": one | {"pipeline_parallel_size": count},
        f"{count} engines": one | {"data_parallel_size": count},
    }


def flags_of(division: Mapping[str, int]) -> str:
    """The flags of the command line that ask for one of the `divisions`."""
    return " ".join(f"{_FLAGS[option]} {count}" for option, count in division.items() if count > 1)


def measure(
    engines: Mapping[str, LLM],
    sizes: Sequence[int],
    prompts: RandomPrompts,
    params: SamplingParams,
    rounds: int,
    begin: Callable[[str], None],
) -> Rates:
    """Let all engines compute the same prompts, one after the other, in each round.

    Args:
        engines: by name.
        sizes: the numbers of requests.
        prompts: makes prompts.
        params: the parameters of the requests, whose outputs have a fixed length.
        rounds: the number of rounds that count; one before them does not.
        begin: called with the name of each piece of work.

    Returns:
        The median rates of output tokens.
    """
    rates: Rates = {}
    for size in sizes:
        found: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(rounds + 1):
            batch = prompts.batch(next(iter(engines.values())), size)
            for name, llm in engines.items():
                begin(f"{name}, {size} requests")
                began = time.monotonic()
                outputs = llm.generate(batch, params, use_tqdm=False)
                seconds = time.monotonic() - began
                count = sum(len(output.outputs[0].token_ids) for output in outputs)
                if number:
                    found[name].append(count / seconds)
        rates[size] = {name: statistics.median(each) for name, each in found.items()}
    return rates


def best(rates: Mapping[str, float]) -> str:
    """The name of the fastest division; one process unless another is faster by a twentieth."""
    name = max(rates, key=lambda each: rates[each])
    return name if rates[name] > 1.05 * rates[ONE] else ONE
