"""Measures steps of a real engine, and runs loads on real engines.

Engines are those of the bundled model with one compute thread each.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import fmean

from bench_engine import cpu_s

from shmllm import AsyncLLM, SamplingParams
from shmllm.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from shmllm.config.load import LoadConfig
from shmllm.engine.core import EngineCore
from shmllm.frontend.model_files import resolve_model
from shmllm.outputs.request import RequestOutput
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import RequestOutputKind
from shmllm.worker.cpu.runner import CpuRunner
from simulated_pool.engine import Limits
from simulated_pool.fitting import Fit, Row, fit
from simulated_pool.loads import VOCABULARY, Request

MODEL = "tiny"
WAVES = ((1, 32, 40), (4, 200, 40), (16, 64, 60), (32, 500, 30), (64, 100, 40), (8, 900, 40))
"""(requests, tokens of a prompt, output tokens) of the measured waves."""


def fit_steps(rounds: int) -> Fit:
    """Measures steps of an engine core in this process, and fits a StepCost to them.

    The time is the CPU time of this process, which other programs hardly disturb.

    Args:
        rounds: how often all WAVES run; the first time warms up.
    """
    limits = Limits()
    config = EngineConfig(
        LoadConfig(str(resolve_model(MODEL))),
        CacheConfig(memory_bytes=2**29, enable_prefix_caching=False),
        SchedulerConfig(limits.max_num_seqs, limits.max_num_batched_tokens),
        num_threads=1,
    )
    core = EngineCore(config, CpuRunner(config))
    draw, rows = random.Random(0), list[Row]()
    for number in range(rounds):
        for requests, prompt, outputs in WAVES:
            each = [
                (round(prompt * draw.uniform(0.5, 1.05)), round(outputs * draw.uniform(0.5, 1.5)))
                for _ in range(requests)
            ]
            steps = wave(core, draw, each)
            rows += steps if number else []
    core.runner.close()
    return fit(rows)


def wave(core: EngineCore, draw: random.Random, lengths: Sequence[tuple[int, int]]) -> list[Row]:
    """Runs requests of so many (prompt, output) tokens to their ends. Returns the steps."""
    for number, (prompt, outputs) in enumerate(lengths):
        params = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
        request = EngineCoreRequest(number, draw.choices(VOCABULARY, k=prompt), params)
        refusal = core.add(0, request)
        assert refusal is None, refusal
    rows = []
    while core.has_unfinished:
        before = [(each, each.num_computed_tokens) for each in core.scheduler.requests()]
        began_s = time.process_time()
        core.step()
        seconds = time.process_time() - began_s
        counts = [(each.num_computed_tokens - at, at) for each, at in before]
        context = sum(count * (at + 0.5 * (count - 1)) for count, at in counts)
        rows.append((core.timings.num_tokens, core.timings.num_requests, context, seconds))
    return rows


@dataclass(frozen=True)
class Times:
    """What a load took, in seconds.

    Attributes:
        end_s: when the last request ended.
        mean_ttft_s: the mean time from sending to the first token.
        mean_e2e_s: the mean time from sending to the last token.
        work_s: the time of all steps of all engines; really, the CPU time of their processes.
    """

    end_s: float
    mean_ttft_s: float
    mean_e2e_s: float
    work_s: float


def best(rounds: Sequence[Times]) -> Times:
    """The least of each time: other programs only make it longer."""
    return Times(*map(min, zip(*map(astuple, rounds), strict=True)))


def children_cpu_s() -> float:
    """The CPU time of the processes that this one has started and that run, in seconds."""
    total = 0.0
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            total += cpu_s(int(pid))
    return total


def run_real(
    requests: Sequence[Request], limits: Limits, num_engines: int, rounds: int
) -> list[Times]:
    """Sends requests of one completion to real engines, each at its `after_s`, several times.

    Args:
        requests: the requests.
        limits: the engines' options.
        num_engines: the number of engines, of one thread each.
        rounds: how often the load runs, each time with empty prefix caches.

    Returns:
        The times of each round but an additional first one.
    """
    return asyncio.run(_run_real(requests, limits, num_engines, rounds))


async def _run_real(
    requests: Sequence[Request], limits: Limits, num_engines: int, rounds: int
) -> list[Times]:
    llm = AsyncLLM(
        MODEL,
        device="cpu",
        num_threads=num_engines,
        wait_policy="idle",
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        num_gpu_blocks_override=limits.num_blocks + 1,  # one pads block tables
        data_parallel_size=num_engines,
    )
    found = []
    async with llm:
        for _ in range(rounds + 1):
            await llm.reset_prefix_cache()
            began_s, before_s = time.monotonic(), children_cpu_s()
            outputs = await asyncio.gather(*(_send(llm, each, began_s) for each in requests))
            found.append(_times(outputs, began_s, children_cpu_s() - before_s))
    return found[1:]


async def _send(llm: AsyncLLM, request: Request, began_s: float) -> RequestOutput:
    if request.after_s:
        await asyncio.sleep(began_s + request.after_s - time.monotonic())
    params = SamplingParams(
        temperature=0,
        max_tokens=request.num_outputs,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    async for output in llm.generate(list(request.prompt), params):
        last = output
    return last


def _times(outputs: Sequence[RequestOutput], began_s: float, work_s: float) -> Times:
    first, last, end_s = [], [], began_s
    for output in outputs:
        times = output.metrics
        assert times is not None
        assert times.arrival_ts is not None
        assert times.first_token_ts is not None
        assert times.last_token_ts is not None
        first.append(times.first_token_ts - times.arrival_ts)
        last.append(times.last_token_ts - times.arrival_ts)
        end_s = max(end_s, times.last_token_ts)
    return Times(end_s - began_s, fmean(first), fmean(last), work_s)
