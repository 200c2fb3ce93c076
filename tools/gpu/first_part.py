"""A part of gpu_check: within a minute, whether the engine's foundations work on this GPU.

The steps go from what everything else stands on to what is merely fast: an arena that is mapped
again under a captured graph, attention with the tiles of production, a tiny engine that sleeps, and
the depth of attention's pipeline. compute-sanitizer watches one case beside the other steps.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from gpu.attention_case import AttentionCase, AttentionSizes
from gpu.clock import synchronize
from gpu.compile_part import compile_ahead
from gpu.figures import Figures
from gpu.kernels_part import time_products
from gpu.rehearsal import open_device
from gpu.sanitizer import Sanitizer
from gpu.settings import Settings
from shmllm import LLM, SamplingParams
from shmllm.worker.gpu.device import Device
from shmllm.worker.gpu.plain_arena import PlainArena

LARGEST_ERROR = 0.05
"""The largest difference from torch's attention, as a share of the root mean square of a head's
results. bfloat16 rounds to 0.4 % of a number, and the largest of many results is about four times
the root mean square. A tile of keys that is missing or used twice changes 10 % or more. The first
tokens of a prompt attend to few keys: their results are tens of times those of the last ones."""
ARENA_BYTES = 2**27
FIRST_IDS = 4096
"""The prompts of the tiny engine have token ids below this number."""
RESERVE_S = 5.0
DEFAULT_S = 120.0


def run(settings: Settings, figures: Figures) -> None:
    ends = time.monotonic() + float(os.environ.get("GPU_CHECK_SECONDS", DEFAULT_S)) - RESERVE_S

    def step(name: str, work: Callable[[], Any]) -> None:
        began = time.monotonic()
        print(f"step {name}", flush=True)
        figures.put("reached", name)
        found = work()
        figures.put(name, {"seconds": round(time.monotonic() - began, 1), **found})

    torch.manual_seed(0)
    with open_device(settings) as device, Sanitizer(settings.rehearsal) as sanitizer:
        step("arena", lambda: remap_arena(device))
        step("compiled", lambda: compile_ahead(settings, ("tiles", "stages", "tiny")))
        sanitizer.start()
        step("tiles", lambda: check_tiles(settings))
        step("tiny", lambda: check_engine(settings))
        step("stages", lambda: time_stages(settings))
        step("product", lambda: time_one_row(settings))
        step("sanitizer", lambda: sanitizer.result(ends - time.monotonic()))


def remap_arena(device: Device) -> dict[str, Any]:
    """Checks that a captured graph computes on memory that was unmapped and mapped again.

    Raises:
        AssertionError: the driver cannot map memory, or the graph reads or writes elsewhere.
    """
    arena = device.make_arena(ARENA_BYTES, "the first check")
    assert not isinstance(arena, PlainArena), f"engines could not sleep: {arena._reason}"
    x, y = (arena.allocate((2**20,), torch.float32) for _ in range(2))
    with device.capturing():
        torch.mul(x, 2, out=y)
        device.begin_capture()
        torch.mul(x, 2, out=y)
        graph = device.end_capture()
    for value in (3.0, 5.0):
        arena.release()
        arena.restore()
        x.fill_(value)
        graph.replay()
        device.synchronize()
        low, high = y.min().item(), y.max().item()
        assert low == high == 2 * value, f"a replay gave {low} to {high}, not {2 * value}"
    return {"mapped_again": 2}


def tile_cases(settings: Settings) -> Iterator[AttentionCase]:
    """Yields the steps whose attention is compared with torch's."""
    least = replace(settings, rotated_bytes=1)  # two sets of keys and values
    for dim in settings.tile_dims:
        for step in settings.tiles:
            yield AttentionCase(AttentionSizes(*settings.tile_heads, dim, *step), least)


def check_tiles(settings: Settings) -> dict[str, Any]:
    """Compares attention, with the configs that engines use, with torch's in float32.

    Raises:
        AssertionError: a result differs by more than `LARGEST_ERROR`.
    """
    found: dict[str, Any] = {}
    for case in tile_cases(settings):
        config, splits = case.current()
        name = f"{case.sizes.head_dim}: {case.sizes.requests}x{case.sizes.query} of "
        name += f"{case.sizes.context}, {config}, {splits} splits"
        found[name] = error = largest_error(case, config, splits)
        assert error <= LARGEST_ERROR, f"attention is wrong by {error:.3g} of its size: {name}"
    return {"errors": found}


def largest_error(case: AttentionCase, config: Any, splits: int) -> float:
    """Returns the largest difference from torch's attention, as a share of the root mean square of
    the results of the same head of a token; NaN if a result is not a number."""
    case.out.fill_(math.nan)
    case.launches(config, splits)[0]()
    wanted = case.expected(0)
    differences = (case.out.float() - wanted).abs().amax(-1)
    return float((differences / wanted.square().mean(-1).sqrt()).max())


def check_engine(settings: Settings) -> dict[str, Any]:
    """Checks that a tiny engine with graphs generates the same tokens before and after a sleep."""
    began = time.monotonic()
    with LLM(tiny_model(settings), **tiny_options(settings)) as llm:
        start_s = time.monotonic() - began
        prompts = settings.prompts(settings.tiny_requests, settings.tiny_prompt, FIRST_IDS, 0)
        before = _tokens(llm, prompts, settings.tiny_tokens)
        report = llm.sleep(level=1)
        assert llm.wake_up(), "the engine is not awake"
        after = _tokens(llm, prompts, settings.tiny_tokens)
        assert before == after, f"other tokens after sleep and wake-up: {before}, then {after}"
        facts = {name: getattr(llm.facts, name) for name in ("device", "dtype", "graphs")}
    return {**facts, "start_s": round(start_s, 2), "slept": str(report), "tokens": before}


def tiny_model(settings: Settings) -> str:
    return str(settings.directory("1b")) if settings.rehearsal else "tiny"


def tiny_options(settings: Settings) -> dict[str, Any]:
    """Returns the options of the tiny engine. Its cache has a fixed size: the rest of a GPU's
    memory would be a million blocks, each an object on the host."""
    options = {"device": "cuda", "dtype": "bfloat16", "max_num_seqs": 16}
    if settings.rehearsal:
        requests = settings.tiny_requests
        graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [requests]}
        options = {"dtype": "float32", "max_num_seqs": requests, "multiprocess": False}
        options |= {"compilation_config": graphs, "load_format": "dummy"}
        options |= {"max_num_batched_tokens": requests * settings.tiny_prompt}
    return options | {"kv_cache_memory_bytes": 2**24, "max_model_len": 256}


def _tokens(llm: LLM, prompts: list[list[int]], count: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def time_stages(settings: Settings) -> dict[str, Any]:
    """Measures attention with each number of stages, in microseconds, and checks its results."""
    found: dict[str, Any] = {}
    for case in stage_cases(settings):
        config, splits = case.current()
        sizes, times = case.sizes, {}
        for stages in settings.stages:
            deep = replace(config, num_stages=stages)
            error = largest_error(case, deep, splits)
            assert error <= LARGEST_ERROR, f"{deep} is wrong by {error:.3g} of its size"
            times[str(stages)] = case.seconds(deep, splits) * 1e6
        found[f"{sizes.head_dim}: {sizes.requests}x{sizes.query} of {sizes.context}"] = times
    return {"us": found}


def stage_cases(settings: Settings) -> Iterator[AttentionCase]:
    """Yields the steps whose attention is measured with several numbers of stages."""
    for dim in settings.tile_dims:
        for step in settings.deep_steps:
            yield AttentionCase(AttentionSizes(*settings.deep_heads, dim, *step), settings)


def time_one_row(settings: Settings) -> dict[str, Any]:
    """Measures torch's matrix products with one row, which are most of a decode step."""
    one = replace(settings, product_rows=(1,))
    found = time_products(one, settings.shape("8b"))
    synchronize(torch.device(settings.device))
    return {"8b": found}
