"""Times weight updates, sleep and wake, and a restart of the engine, as a trainer uses them.

    python tools/bench_rl.py DIRECTORY [--rounds 7] [--json FILE]

DIRECTORY holds a model, for example one of tools/make_model.py. Between two updates, one thread
copies the same number of bytes, so that updates and copies are measured under the same load. An
update ends when the engine can run the next step. The tool writes one JSON object with times in
milliseconds; `update_over_memcpy` and `wake_2_update_over_memcpy` are ratios of neighbouring times.
`first_token` is the time of a request for one token, directly after an update and after another
such request.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from safetensors.torch import load_file

from shmllm import LLM, SamplingParams
from shmllm.cli.bench_output import describe_machine

PROMPT = list(range(1, 33))


def milliseconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return (time.perf_counter() - began) * 1e3


def summary(values: list[float]) -> dict[str, float]:
    """The minimum and the median of times in milliseconds, or of ratios."""
    return {"min": round(min(values), 2), "median": round(statistics.median(values), 2)}


def ratios(times: list[float], others: list[float]) -> dict[str, float]:
    """The minimum and the median of the ratios of times that were measured in turns."""
    return summary([a / b for a, b in zip(times, others, strict=True)])


def start(directory: Path) -> LLM:
    """Starts an engine and generates two tokens."""
    llm = LLM(str(directory), kv_cache_memory_bytes=2**28, max_model_len=2048)
    llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    return llm


def one_token(llm: LLM) -> float:
    """The time of a request for one token, in milliseconds. No prefix of it is cached."""
    params = SamplingParams(temperature=0, max_tokens=1, skip_reading_prefix_cache=True)
    return milliseconds(lambda: llm.generate(PROMPT, params, use_tqdm=False))


def sleeping(
    llm: LLM, rounds: int, weights: dict[str, torch.Tensor], copy: Callable[[], object]
) -> dict[str, Any]:
    """Times sleep and wake-up at levels 1 and 2; after level 2 the weights are written again."""
    copies: list[float] = []
    found: dict[str, list[float]] = {
        "sleep_1": [],
        "wake_1": [],
        "sleep_2": [],
        "wake_2_update": [],
    }

    def wake_and_update() -> None:
        llm.wake_up(tags=["weights"])
        llm.update_weights(weights)
        llm.wake_up()

    for _ in range(rounds):
        found["sleep_1"].append(milliseconds(lambda: llm.sleep(1)))
        found["wake_1"].append(milliseconds(llm.wake_up))
        found["sleep_2"].append(milliseconds(lambda: llm.sleep(2)))
        copies.append(milliseconds(copy))
        found["wake_2_update"].append(milliseconds(wake_and_update))
    ratio = ratios(found["wake_2_update"], copies)
    return {name: summary(times) for name, times in found.items()} | {
        "wake_2_update_over_memcpy": ratio
    }


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--rounds", default=7, show_default=True, help="Repetitions of each measurement.")
@click.option("--restarts", default=2, show_default=True, help="Measured restarts of the engine.")
@click.option(
    "--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Also write to FILE."
)
def main(directory: Path, rounds: int, restarts: int, output: Path | None) -> None:
    torch.set_num_threads(1)
    weights = load_file(directory / "model.safetensors")
    weights = {name: weight.clone() for name, weight in weights.items()}
    num_bytes = sum(weight.nbytes for weight in weights.values())
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    copies, updates, first, second, starts = [], [], [], [], []
    llm = start(directory)
    llm.update_weights(weights)

    def copy() -> None:
        np.copyto(target, source)

    for _ in range(rounds):
        copies.append(milliseconds(copy))
        updates.append(milliseconds(lambda: llm.update_weights(weights)))
        first.append(one_token(llm))
        second.append(one_token(llm))
    asleep = sleeping(llm, rounds, weights, copy)
    llm.close()
    for _ in range(restarts):
        starts.append(milliseconds(lambda: start(directory).close()))
    bounds = [2.5 * copy + 50 for copy in copies]
    result = {
        "machine": describe_machine(),
        "bytes": num_bytes,
        "memcpy": summary(copies),
        "update": summary(updates),
        "update_over_memcpy": ratios(updates, copies),
        "update_over_bound": ratios(updates, bounds)["median"],
        "first_token": {"after_update": summary(first), "later": summary(second)},
        **asleep,
        "restart": summary(starts) if starts else None,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if output is not None:
        output.write_text(text + "\n")


if __name__ == "__main__":
    main()
