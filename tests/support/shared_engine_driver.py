"""A program that is one of several processes that share an engine, without a trainer.

    shared_engine_driver.py DIRECTORY RANK DEADLINE_S

It answers each line of its stdin, which is the name of an action below, by a line of JSON. The
processes meet in a file of DIRECTORY.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shmllm import SamplingParams
from shmllm.compat import trl

NUM_PROCESSES = 2
GREEDY = SamplingParams(temperature=0, max_tokens=8)
NORM = "model.norm.weight"


def texts(llm: Any) -> list[str]:
    outputs = llm.generate(["def f(", "import"], GREEDY, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def update(llm: Any) -> int:
    """Returns how many tensors this process was asked for."""
    seen = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        seen.append(NORM)
        yield NORM, torch.zeros(256)

    llm.update_weights(weights(), version=7)
    return len(seen)


def update_wrongly(llm: Any) -> None:
    llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights(
        [("no.such.weight", torch.zeros(3))]
    )


def end_engine(llm: Any) -> None:
    if dist.get_rank() == 0:
        os.kill(llm.engine_pid, signal.SIGKILL)


def differ(llm: Any) -> Any:
    return llm.list_loras() if dist.get_rank() else llm.get_weight_version()


ACTIONS: dict[str, Callable[[Any], Any]] = {
    "texts": texts,
    "update": update,
    "update wrongly": update_wrongly,
    "version": lambda llm: llm.get_weight_version(),
    "sleep": lambda llm: llm.sleep(level=1).after.total > 0,
    "wake": lambda llm: llm.wake_up(),
    "facts": lambda llm: [llm.engine_pid, llm.llm_engine.model_config.max_model_len],
    "ranks": lambda llm: llm.facts.tensor_parallel_size,
    "end engine": end_engine,
    "differ": differ,
    "has engine": lambda llm: llm._llm is not None,
}


def main(directory: str, rank: int, deadline_s: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/meeting",
        rank=rank,
        world_size=NUM_PROCESSES,
        timeout=timedelta(seconds=deadline_s),
    )
    llm: Any = trl.LLM(
        "tiny",
        tensor_parallel_size=NUM_PROCESSES,
        distributed_executor_backend="external_launcher",
        num_threads=NUM_PROCESSES,
        kv_cache_memory_bytes=2**24,
    )
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        try:
            answer = ACTIONS[line.strip()](llm)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
