"""Times what engines that share a prefix cache gain, and what it costs.

    python tools/bench_shared_kv.py DIRECTORY [--rounds 7] [--json FILE]

DIRECTORY holds a model. All engines run at once, and one at a time has requests. In each round the
first engine computes a new prompt of 2,000 tokens (`cold`) and gets it once more (`own`); an engine
that reads shared blocks in place, and one that copies them, then get it for the first time
(`in_place`, `copied`). Before that, each of them has used all of its cache once. Times are those of
a request for one token, in milliseconds. `decode_on` is the throughput of an engine that shares,
over one that does not. The tool writes one JSON object.

With --vllm PYTHON, the interpreter of an environment with vLLM (`tools/compare.py` says how to make
one), it measures instead the first request after a restart: both engines get a prompt of 900
tokens, end, start again, and get it once more, in turns.

With --apart it measures instead how long 16 requests that decode wait for each token while a prompt
of 4,000 tokens comes in: with one engine for both, and with two engines of roles, each on one core.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from compare_peers import Precision, find_peers

from shmllm import LLM, AsyncLLM, SamplingParams, TokensPrompt
from shmllm.cli.bench_output import describe_machine

PROMPT_TOKENS = 2000
LONG_PROMPT_TOKENS = 4000
RESTART_TOKENS = 900
NUM_DECODING = 16
DECODE_TOKENS = 128
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)


def prompt_of(seed: int, length: int) -> TokensPrompt:
    """A prompt of random tokens."""
    return {"prompt_token_ids": random.Random(seed).choices(range(100, 4000), k=length)}


def milliseconds(llm: LLM, prompt: TokensPrompt, num_cached: int | None = None) -> float:
    """The time of a request for one token.

    Args:
        llm: the engine.
        prompt: the prompt.
        num_cached: how many of its tokens have to be cached.
    """
    began = time.perf_counter()
    [output] = llm.generate(prompt, ONE_TOKEN, use_tqdm=False)
    found = (time.perf_counter() - began) * 1e3
    assert num_cached is None or output.num_cached_tokens == num_cached, output.num_cached_tokens
    return found


def tokens_per_second(llm: LLM, seed: int) -> float:
    """The throughput of requests that mostly decode."""
    prompts = [prompt_of(seed + k, 32) for k in range(NUM_DECODING)]
    params = SamplingParams(temperature=0, max_tokens=DECODE_TOKENS, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return NUM_DECODING * DECODE_TOKENS / (time.perf_counter() - began)


def summary(values: list[float]) -> dict[str, float]:
    """The minimum and the median."""
    return {"min": round(min(values), 3), "median": round(statistics.median(values), 3)}


def sharing(directory: Path, rounds: int, options: dict[str, Any]) -> dict[str, Any]:
    """Measure first tokens and decoding in turns."""
    shared = options | {"shared_kv_cache_bytes": "512M"}
    seed = random.randrange(2**40)
    with ExitStack() as stack:
        first, in_place, copied, alone = (
            stack.enter_context(LLM(str(directory), **each))
            for each in (
                shared,
                shared | {"shared_kv_cache_reads": "in_place"},
                shared | {"shared_kv_cache_reads": "copy"},
                options,
            )
        )
        most = (PROMPT_TOKENS - 1) // first.facts.block_size * first.facts.block_size
        # The first use of a page of the cache costs a fault, and what the machine adds to it.
        for number in range(first.facts.num_blocks * first.facts.block_size // PROMPT_TOKENS + 2):
            for llm in (first, in_place, copied):
                milliseconds(llm, prompt_of(seed - 1 - number, PROMPT_TOKENS))
        tokens_per_second(alone, seed)
        times: dict[str, list[float]] = {"cold": [], "own": [], "in_place": [], "copied": []}
        speeds: dict[str, list[float]] = {"on": [], "off": []}
        for number in range(1, rounds + 1):
            prompt = prompt_of(seed + number, PROMPT_TOKENS)
            times["cold"].append(milliseconds(first, prompt, 0))
            times["own"].append(milliseconds(first, prompt, most))
            arms = [("in_place", in_place), ("copied", copied)]
            for name, llm in arms[:: 1 if number % 2 else -1]:
                times[name].append(milliseconds(llm, prompt, most))
            turns = [("on", first), ("off", alone)]
            for name, llm in turns[:: 1 if number % 2 else -1]:
                speeds[name].append(tokens_per_second(llm, seed - 100 * number))
    results: dict[str, Any] = {name: summary(each) for name, each in times.items()}
    pairs = list(zip(times["in_place"], times["copied"], times["own"], strict=True))
    results["in_place_over_own"] = summary([a / own for a, _, own in pairs])
    results["copied_minus_own"] = summary([b - own for _, b, own in pairs])
    ratios = [on / off for on, off in zip(speeds["on"], speeds["off"], strict=True)]
    results["decode_tokens_per_s"] = {name: summary(each) for name, each in speeds.items()}
    results["decode_on_over_off"] = summary(ratios)
    return results


async def gaps(llm: AsyncLLM, seed: int, length: int) -> list[float]:
    """The times between tokens of requests that decode, in milliseconds, while a prompt of `length`
    tokens comes in; 0: none does."""
    params = SamplingParams(temperature=0, max_tokens=DECODE_TOKENS, ignore_eos=True)
    found: list[float] = []
    started = asyncio.Event()

    async def decode(number: int) -> None:
        last = None
        prompt = prompt_of(seed + number, 32)
        async for output in llm.generate(prompt, params, f"{seed}-{number}"):
            now = time.perf_counter()
            if last is not None:
                found.append((now - last) * 1e3)
            last = now
            if len(output.outputs[0].token_ids) == DECODE_TOKENS // 8:
                started.set()

    async def disturb() -> None:
        await started.wait()
        prompt = prompt_of(seed - 1, length)
        async for _ in llm.generate(prompt, ONE_TOKEN, f"{seed}-long"):
            pass

    long = [disturb()] if length else []
    await asyncio.gather(*map(decode, range(NUM_DECODING)), *long)
    return found


def percentile(values: list[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * percent / 100), len(ordered) - 1)]


async def apart(directory: Path, rounds: int, options: dict[str, Any]) -> dict[str, Any]:
    """Measure the times between tokens."""
    one_core = options | {"max_num_batched_tokens": 512}
    roles = one_core | {"data_parallel_size": 2, "prefill_engines": 1, "num_threads": 2}
    arms = {
        "together": one_core | {"num_threads": 1},
        "apart": roles | {"shared_kv_cache_bytes": "512M"},
    }
    results: dict[str, Any] = {}
    for name, each in arms.items():
        llm = AsyncLLM(str(directory), **each)
        p99: dict[str, list[float]] = {"quiet": [], "disturbed": []}
        try:
            await gaps(llm, 1, 0)
            for _ in range(rounds):
                for kind, length in (("quiet", 0), ("disturbed", LONG_PROMPT_TOKENS)):
                    seed = random.randrange(2**40)
                    p99[kind].append(percentile(await gaps(llm, seed, length), 99))
        finally:
            llm.shutdown()
        ratios = [a / b for a, b in zip(p99["disturbed"], p99["quiet"], strict=True)]
        results[name] = {kind: summary(values) for kind, values in p99.items()}
        results[name]["disturbed_over_quiet"] = summary(ratios)
    return results


def restarted(directory: Path, rounds: int, dtype: str, vllm: str) -> dict[str, Any]:
    """Measure the first request after a restart, in turns with vLLM. vLLM's prefix cache ends with
    its engine; LMCache, which would keep it, has no connector for a CPU."""
    peers = find_peers({"shmllm": sys.executable, "vllm": vllm}, Precision(dtype))
    seed = random.randrange(2**40)
    prompt = list(prompt_of(seed, RESTART_TOKENS)["prompt_token_ids"])
    short = list(prompt_of(seed + 1, 64)["prompt_token_ids"])
    times: dict[str, list[float]] = {}
    for number in range(-1, rounds):
        for peer in peers:
            if peer.name == "shmllm":
                peer.options["shared_kv_cache_bytes"] = "512M"
            with open(os.devnull, "w") as log:
                running = peer.start(directory, [short], log)
                running.wait_ready()
                rate, _ = running.rate([prompt], 1)
                running.stop()
            kind = "first" if number < 0 else "restarted"
            times.setdefault(f"{peer.name}_{kind}", []).append(1e3 / rate)
    ratios = [
        a / b for a, b in zip(times["vllm_restarted"], times["shmllm_restarted"], strict=True)
    ]
    return {name: summary(each) for name, each in times.items()} | {"vllm_over": summary(ratios)}


@click.command(help=__doc__)
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--rounds", default=7, show_default=True)
@click.option("--dtype", default="float32", show_default=True)
@click.option("--apart", "is_apart", is_flag=True, help="Measure prefill and decode apart.")
@click.option("--vllm", help="The interpreter of an environment with vLLM.")
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path))
def main(
    directory: Path, rounds: int, dtype: str, is_apart: bool, vllm: str | None, path: Path | None
) -> None:
    options: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": 5120,
        "kv_cache_memory_bytes": 2**29,
        "num_threads": len(os.sched_getaffinity(0)),
    }
    if vllm is not None:
        found = restarted(directory, rounds, dtype, vllm)
    elif is_apart:
        found = asyncio.run(apart(directory, rounds, options))
    else:
        found = sharing(directory, rounds, options)
    text = json.dumps({"machine": describe_machine(), "model": directory.name, **found}, indent=1)
    print(text)
    if path is not None:
        path.write_text(text + "\n")


if __name__ == "__main__":
    main()
