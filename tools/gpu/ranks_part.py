"""A part of gpu_check for machines with two GPUs: equal tokens with one and with two ranks, and the
time of their sums beside NCCL's.

The second rank of the sums is a process of its own, `python -m gpu.ranks_part`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gpu.clock import seconds_each
from gpu.figures import Figures
from gpu.first_part import FIRST_IDS, tiny_model, tiny_options
from gpu.rehearsal import interpret, open_device
from gpu.settings import Settings, settings_for
from shmllm import LLM, SamplingParams
from shmllm.parallel.gpu_memory import GpuGroupMemory
from shmllm.worker.gpu.device import Device, find_link_problem
from shmllm_kernels.gpu.group import WORD_BYTES, Peers, make_counts, num_words, sum_parts

SIZE = 2
CALLS = 20
"""The number of sums in a graph whose replays are measured."""
GRACE_S = 30.0


def run(settings: Settings, figures: Figures) -> None:
    if problem := find_problem(settings):
        print(f"skipped: {problem}", flush=True)
        figures.put("skipped", problem)
        return
    if not settings.rehearsal:
        figures.put("tokens", compare_tokens(settings))
    figures.put("sums", time_sums(settings))


def find_problem(settings: Settings) -> str:
    """Returns one sentence that says why two ranks cannot run here; empty if they can."""
    if settings.rehearsal:
        return ""
    count = torch.cuda.device_count()
    if count < SIZE:
        return f"the part needs {SIZE} GPUs, and CUDA finds {count}"
    return find_link_problem(range(SIZE))


def compare_tokens(settings: Settings) -> dict[str, Any]:
    """Compares the greedy tokens of one rank and of two, in float32, with and without graphs.

    Raises:
        AssertionError: they differ.
    """
    prompts = settings.prompts(settings.tiny_requests, settings.tiny_prompt, FIRST_IDS, 0)
    params = SamplingParams(
        temperature=0, max_tokens=settings.tiny_tokens, ignore_eos=True, detokenize=False
    )
    found: dict[str, Any] = {}
    for size, is_eager in ((1, False), (SIZE, False), (SIZE, True)):
        options = tiny_options(settings) | {"dtype": "float32", "enforce_eager": is_eager}
        with LLM(tiny_model(settings), **options, tensor_parallel_size=size) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens = [output.outputs[0].token_ids for output in outputs]
        found[f"{size} ranks{', launched' if is_eager else ''}"] = tokens
    one, *others = found.values()
    assert all(tokens == one for tokens in others), f"other tokens: {found}"
    return found


def time_sums(settings: Settings) -> dict[str, Any]:
    """Measures sums of parts of two ranks, of rows as wide as Llama-3.1-8B's.

    Returns:
        By the number of rows: microseconds, and those of NCCL's all-reduce.
    """
    with open_device(settings) as device:
        memory = GpuGroupMemory.create(SIZE)
        port = _free_port()
        given = {"fd": memory.fd, "places": memory.places, "port": port}
        given["rehearsal"] = settings.rehearsal
        child = subprocess.Popen(
            [sys.executable, "-m", "gpu.ranks_part", json.dumps(given)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            pass_fds=[memory.fd],
        )
        try:
            found = measure(settings, memory, device, port)
            assert child.wait(GRACE_S) == 0, "the second rank failed"
        finally:
            memory.end()
            child.kill()
            child.wait()
    return found


def measure(
    settings: Settings, memory: GpuGroupMemory, device: Device, port: int
) -> dict[str, Any]:
    """Measures the sums in one rank. Both ranks make the same calls.

    Raises:
        AssertionError: a sum is wrong, or the other rank has ended.
    """
    width = settings.shape("8b").hidden
    dtype: torch.dtype = getattr(torch, settings.dtype)
    begin = WORD_BYTES * num_words(SIZE)
    num_bytes = begin + max(settings.summed_rows) * width * dtype.itemsize
    memories, where = memory.share(num_bytes, device), device.torch_device
    bases = torch.tensor([each.data_ptr() for each in memories], dtype=torch.int64).to(where)
    peers = Peers(memory.rank, SIZE, bases, make_counts(where), memory.ended_word(device))
    part = memories[memory.rank][begin:].view(dtype)
    found: dict[str, Any] = {}
    with _library(settings, memory.rank, port) as reduce:
        for rows in settings.summed_rows:
            part.fill_(1.0 + memory.rank)
            out = torch.zeros((rows, width), dtype=dtype, device=where)
            works = [partial(sum_parts, out, begin, peers)] * CALLS
            took = seconds_each(works, where, settings.rounds)
            device.synchronize()
            assert not memory.has_ended, "the other rank has ended"
            assert bool((out == 3).all()), f"a sum of {rows} rows is wrong"
            x = torch.zeros((rows, width), dtype=dtype, device=reduce.device)
            theirs = seconds_each([partial(reduce.run, x)] * CALLS, x.device, settings.rounds)
            found[str(rows)] = {"us": took * 1e6, "nccl_us": theirs * 1e6}
    return found


class _Library:
    """All-reduces of torch.distributed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def run(self, x: torch.Tensor) -> None:
        torch.distributed.all_reduce(x)


@contextmanager
def _library(settings: Settings, rank: int, port: int) -> Iterator[_Library]:
    """Opens NCCL, whose ranks find each other over TCP on this machine; gloo in a rehearsal."""
    backend = "gloo" if settings.rehearsal else "nccl"
    where = torch.device("cpu") if settings.rehearsal else torch.device("cuda", rank)
    torch.distributed.init_process_group(
        backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=SIZE
    )
    try:
        yield _Library(where)
    finally:
        torch.distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main(text: str) -> int:
    """The process of the second rank."""
    given = json.loads(text)
    settings = settings_for(given["rehearsal"])
    if settings.rehearsal:
        interpret()
    with open_device(settings, 1) as device:
        memory = GpuGroupMemory(given["fd"], 1, SIZE)
        memory.places = {
            name: (begin, tuple(shape), dtype)
            for name, (begin, shape, dtype) in given["places"].items()
        }
        measure(settings, memory, device, given["port"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
