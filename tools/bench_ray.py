#!/usr/bin/env python3
"""Measures tokens/s of Ray Data with several engines and of `LLM` without Ray, in turns.

    python tools/bench_ray.py --model MODEL [--engines 2] [--rounds 3] [--pool]

All cases compute the same rows, with as many compute threads in all as there are engines: `threads`
is one engine with all threads; `halves` is an engine for each thread, each with its share of the
rows, divided beforehand; `ray` is examples/ray_data.py's actor on a local Ray; `pool`, with --pool,
is `LLM(data_parallel_size=N)`. The time begins when the engines are ready, and ends with the last
text; the start of engines and of Ray is recorded beside it.
"""

from __future__ import annotations

import json
import os
import runpy
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import click
import ray

from shmllm.cli.bench_output import describe_machine
from shmllm.frontend.model_files import resolve_model

REPOSITORY = Path(__file__).resolve().parents[1]
Completer: Any = runpy.run_path(str(REPOSITORY / "examples" / "ray_data.py"))["Completer"]
FURTHER_CPUS = 2  # for Ray's tasks that read rows
OBJECT_STORE_BYTES = 200 * 2**20
WAIT_FOR_ACTORS_S = 600

Batch = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """What each case computes.

    Attributes:
        rows: the rows, with `id` and `prompt`.
        max_tokens: of each row.
        num_engines: number of engines, and of compute threads in all.
        batch_size: rows that Ray gives to an actor at once.
        options: options of each engine.
    """

    rows: list[Batch]
    max_tokens: int
    num_engines: int
    batch_size: int
    options: dict[str, Any]

    @property
    def columns(self) -> Batch:
        return {name: [row[name] for row in self.rows] for name in ("id", "prompt")}


@dataclass(frozen=True)
class Result:
    """What a case took.

    Attributes:
        texts: the texts by id.
        num_tokens: number of tokens of all texts.
        span_s: from the engines' readiness to the last text.
        whole_s: the same with the start and the end of all processes.
    """

    texts: dict[Any, str]
    num_tokens: int
    span_s: float
    whole_s: float


class Timed(Completer):  # type: ignore[misc]
    """The example's actor, which also says when it computed each row."""

    def __call__(self, batch: Batch) -> Batch:
        began = time.time()
        batch = super().__call__(batch)
        return batch | {
            "began": [began] * len(batch["id"]),
            "ended": [time.time()] * len(batch["id"]),
        }


def _result(batches: list[Batch], began: float) -> Result:
    texts = {
        i: text for batch in batches for i, text in zip(batch["id"], batch["text"], strict=True)
    }
    num_tokens = sum(int(count) for batch in batches for count in batch["num_tokens"])
    first = min(min(batch["began"]) for batch in batches)
    last = max(max(batch["ended"]) for batch in batches)
    return Result(texts, num_tokens, last - first, time.time() - began)


def with_engines(work: Work, shares: int, **options: Any) -> Result:
    """The rows by engines in this process, each of which gets a share of them at once."""
    began = time.time()
    engines = [Timed(work.max_tokens, **work.options, **options) for _ in range(shares)]
    columns = work.columns
    batches = [{name: each[k::shares] for name, each in columns.items()} for k in range(shares)]
    with ThreadPoolExecutor(shares) as threads:
        found = list(threads.map(lambda engine, batch: engine(batch), engines, batches))
    for engine in engines:
        engine.llm.close()
    return _result(found, began)


def with_ray(work: Work) -> Result:
    """The rows by actors of a local Ray, which begin when all have their engines."""
    began = time.time()
    ray.init(
        address="local",
        num_cpus=work.num_engines + FURTHER_CPUS,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
    )
    ray.data.DataContext.get_current().wait_for_min_actors_s = WAIT_FOR_ACTORS_S
    rows = (
        ray.data.from_items(work.rows, override_num_blocks=len(work.rows) // work.batch_size)
        .map_batches(
            Timed,
            fn_constructor_args=[work.max_tokens],
            fn_constructor_kwargs=work.options | {"num_threads": 1},
            batch_size=work.batch_size,
            compute=ray.data.ActorPoolStrategy(size=work.num_engines),
            num_cpus=1,
        )
        .take_all()
    )
    ray.shutdown()
    return _result([{name: [row[name] for row in rows] for name in rows[0]}], began)


def cases(work: Work, has_pool: bool) -> dict[str, Callable[[], Result]]:
    """What is measured, by name."""
    count = work.num_engines
    found = {
        "threads": lambda: with_engines(work, 1, num_threads=count),
        "halves": lambda: with_engines(work, count, num_threads=1),
        "ray": lambda: with_ray(work),
    }
    if has_pool:
        found["pool"] = lambda: with_engines(work, 1, num_threads=count, data_parallel_size=count)
    return found


def make_rows(count: int) -> list[Batch]:
    """Rows whose texts have different lengths, where the model ends them by itself."""
    subjects = ("the sea", "a city at night", "bread", "an old clock", "the number seven")
    return [
        {"id": n, "prompt": f"{n}. Write about {subjects[n % len(subjects)]}:"}
        for n in range(count)
    ]


def _measured(
    found: dict[str, Callable[[], Result]], rounds: int
) -> tuple[dict[str, list[Result]], int]:
    """The results of all rounds, and how many texts differ from those of the first case."""
    results: dict[str, list[Result]] = {name: [] for name in found}
    num_different = 0
    for number in range(rounds):
        for name, run in found.items():
            results[name].append(run())
            rate = results[name][-1].num_tokens / results[name][-1].span_s
            click.echo(f"round {number + 1}, {name}: {rate:.1f} tokens/s", err=True)
            expected = next(iter(results.values()))[0].texts
            texts = results[name][-1].texts
            num_different += sum(texts[i] != text for i, text in expected.items())
    return results, num_different


@click.command(context_settings={"show_default": True})
@click.option("--model", default="tiny", help="Model directory or bundled name.")
@click.option("--dtype", default="auto", help="Dtype of the model.")
@click.option("--engines", default=2, help="Number of engines of one thread.")
@click.option("--rows", "num_rows", default=256, help="Number of rows.")
@click.option("--max-tokens", default=64, help="Most tokens of a row.")
@click.option("--batch-size", default=64, help="Rows that Ray gives to an actor at once.")
@click.option("--kv-cache-mib", default=512, help="Keys and values of each engine, in MiB.")
@click.option("--rounds", default=3, help="Rounds.")
@click.option("--pool", "has_pool", is_flag=True, help="Measure LLM(data_parallel_size=N), too.")
@click.option("--json", "json_file", type=click.File("w"), help="Also write the JSON to FILE.")
def main(
    model: str, dtype: str, engines: int, num_rows: int, max_tokens: int, batch_size: int,
    kv_cache_mib: int, rounds: int, has_pool: bool, json_file: Any,
) -> None:  # fmt: skip
    """Compare Ray Data with engines without Ray."""
    options: dict[str, Any] = {"model": str(resolve_model(model)), "dtype": dtype}
    options["kv_cache_memory_bytes"] = kv_cache_mib * 2**20
    work = Work(make_rows(num_rows), max_tokens, engines, batch_size, options)
    results, num_different = _measured(cases(work, has_pool), rounds)
    rates = {
        name: [one.num_tokens / one.span_s for one in found] for name, found in results.items()
    }
    record = {
        "machine": describe_machine(),
        "ray": ray.__version__,
        "model": Path(options["model"]).name,
        "engines": engines,
        "rows": num_rows,
        "max_tokens": max_tokens,
        "batch_size": batch_size,
        "num_tokens": results["ray"][0].num_tokens,
        "num_different_texts": num_different,
        "tokens_per_s": rates,
        "start_and_end_s": {
            name: statistics.median(one.whole_s - one.span_s for one in found)
            for name, found in results.items()
        },
        "ray_over": {
            name: statistics.median(
                mine / other for mine, other in zip(rates["ray"], found, strict=True)
            )
            for name, found in rates.items()
            if name != "ray"
        },
    }
    click.echo(json.dumps(record, indent=2))
    if json_file is not None:
        json.dump(record, json_file, indent=2)


if __name__ == "__main__":
    main()
