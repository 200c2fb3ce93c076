#!/usr/bin/env python3
"""Whether cost grows as the work does, and no faster.

    python tools/bench_growth.py [--model DIR] [--json FILE]

    queued    tokens a second with 1,000 and with 100,000 prompts given to one `generate`, in turns
    context   the time of a decode step, one request, at 1k, 4k and 16k tokens of context,
              against the keys and values that it reads
    start     from `LLM(...)` to the first output of a stream of 10 and of 1,000,000 prompts

The model is a random one of `tools/make_model.py` unless another one is given.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from typing import Any, TextIO

import click

from shmllm import LLM, SamplingParams
from shmllm.cli.bench import describe_machine

FEW, MANY = 1_000, 100_000
CONTEXTS = (1024, 4096, 16384)


def prompts(rng: random.Random, count: int, vocab_size: int) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": rng.choices(range(16, vocab_size), k=16)} for _ in range(count)]


def measure_queued(llm: LLM, rng: random.Random) -> dict[str, Any]:
    """Few, many, few: the machine's drift shows in the two outer rates."""
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)

    def rate(count: int) -> float:
        queue = prompts(rng, count, llm.facts.vocab_size)
        began = time.monotonic()
        llm.generate(queue, params, use_tqdm=False)  # type: ignore[arg-type]
        return 2 * count / (time.monotonic() - began)

    rate(FEW)
    before = statistics.median(rate(FEW) for _ in range(10))
    many = rate(MANY)
    after = statistics.median(rate(FEW) for _ in range(10))
    few = (before + after) / 2
    return {
        "few_before_tokens_per_s": before,
        "many_tokens_per_s": many,
        "few_after_tokens_per_s": after,
        "many_over_few": many / few,
    }


def measure_context(llm: LLM, rng: random.Random) -> dict[str, Any]:
    """Median time between tokens at each context, two runs of each in turns."""
    itls: dict[int, list[float]] = {context: [] for context in CONTEXTS}
    params = SamplingParams(temperature=0, max_tokens=65, ignore_eos=True)
    for _ in range(2):
        for context in CONTEXTS:
            ids = rng.choices(range(16, llm.facts.vocab_size), k=context)
            [request] = llm.prepare([{"prompt_token_ids": ids}], params)
            for changed in llm.serve([request], time_tokens=True):
                for state in changed:
                    times = state.token_times or []
            gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
            itls[context].append(statistics.median(gaps))
    return {str(context): {"itl_ms": 1000 * min(found)} for context, found in itls.items()}


def measure_start(model: str, options: dict[str, Any]) -> dict[str, float]:
    """Seconds from nothing to the first output of a stream, by the length of what follows."""
    params = SamplingParams(temperature=0, max_tokens=1)
    times: dict[int, list[float]] = {10: [], 1_000_000: []}
    for _ in range(3):
        for count, found in times.items():
            began = time.monotonic()
            with LLM(model, **options) as llm:
                stream = llm.stream(("import os" for _ in range(count)), params)
                next(stream)
                found.append(time.monotonic() - began)
                stream.close()
    return {f"first_output_of_{count}_s": min(found) for count, found in times.items()}


@click.command(context_settings={"show_default": True}, help=__doc__)
@click.option("--model", default="tiny", help="A directory; with 16k positions for `context`.")
@click.option("--json", "json_file", type=click.File("w", lazy=True))
def main(model: str, json_file: TextIO | None) -> None:
    rng = random.Random(0)
    record: dict[str, Any] = {"machine": describe_machine(), "model": model}
    with LLM(model, dtype="float32") as llm:
        record["queued"] = measure_queued(llm, rng)
        click.echo(json.dumps(record["queued"], indent=2))
        if llm.facts.max_model_len > CONTEXTS[-1] + 65:
            record["context"] = measure_context(llm, rng)
            click.echo(json.dumps(record["context"], indent=2))
        else:
            click.echo(f"context: left out, max_model_len is {llm.facts.max_model_len:,}")
    record["start"] = measure_start(model, {"dtype": "float32"})
    click.echo(json.dumps(record["start"], indent=2))
    if json_file is not None:
        json.dump(record, json_file, indent=2)
        json_file.write("\n")


if __name__ == "__main__":
    main()
