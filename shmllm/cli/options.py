"""Options that several commands share: which model, and how the engine is set up."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from shmllm.config.engine import (
    BLOCK_SIZES,
    DTYPES,
    LOAD_FORMATS,
    LOGPROBS_MODES,
    QUANTIZATIONS,
    SCHEDULING_POLICIES,
    WAIT_POLICIES,
)

Command = TypeVar("Command", bound=Callable[..., Any])

_ENGINE_OPTIONS = (
    click.option(
        "-m",
        "--model",
        default="tiny",
        show_default=True,
        help="Bundled name, directory or hub id.",
    ),
    click.option(
        "--device",
        default="auto",
        show_default=True,
        metavar="DEVICE",
        help="cpu, cuda, cuda:1; auto is a GPU where there is one.",
    ),
    click.option(
        "--dtype",
        type=click.Choice(DTYPES),
        default="auto",
        show_default=True,
        help="auto is float32 on a CPU, and on a GPU what the checkpoint was saved in.",
    ),
    click.option("--max-model-len", type=click.IntRange(min=1), help="Prompt and output together."),
    click.option("--max-num-seqs", type=click.IntRange(min=1), default=256, show_default=True),
    click.option(
        "--max-num-batched-tokens",
        type=click.IntRange(min=1),
        default=2048,
        show_default=True,
        help="Token budget of a step.",
    ),
    click.option(
        "--scheduling-policy",
        type=click.Choice(SCHEDULING_POLICIES),
        default="fcfs",
        show_default=True,
    ),
    click.option(
        "--block-size",
        type=click.Choice([str(size) for size in BLOCK_SIZES]),
        default="16",
        show_default=True,
    ),
    click.option(
        "--kv-cache-memory-bytes",
        type=click.IntRange(min=1),
        help="Keys and values.  [default: 2 GiB or a quarter of what is free; on a GPU what "
        "--gpu-memory-utilization leaves]",
    ),
    click.option(
        "--gpu-memory-utilization",
        type=click.FloatRange(min=0, min_open=True, max=1),
        default=0.92,
        show_default=True,
        help="Part of a GPU's memory to use in all.",
    ),
    click.option("--enforce-eager", is_flag=True, help="Capture no CUDA graphs."),
    click.option(
        "--async-scheduling/--no-async-scheduling",
        default=None,
        help="Plan a step while the last one runs.  [default: on a GPU]",
    ),
    click.option("--prefix-caching/--no-prefix-caching", default=True, show_default=True),
    click.option("--load-format", type=click.Choice(LOAD_FORMATS), default="auto"),
    click.option(
        "--quantization",
        type=click.Choice(QUANTIZATIONS),
        help="Round the model's matrices to 8 bits.",
    ),
    click.option(
        "--deterministic",
        is_flag=True,
        help="Equal bits for a request whatever runs beside it.",
    ),
    click.option("--num-threads", type=click.IntRange(min=1), help="Compute threads."),
    click.option(
        "--max-logprobs",
        type=click.IntRange(min=-1),
        default=20,
        show_default=True,
        help="Alternatives that a request may ask for; -1 sets no bound.",
    ),
    click.option("--logprobs-mode", type=click.Choice(LOGPROBS_MODES), default="raw_logprobs"),
    click.option(
        "--wait-policy",
        type=click.Choice(WAIT_POLICIES),
        default="balanced",
        show_default=True,
        help="How long either side spins before it sleeps.",
    ),
)
metrics_port_option = click.option(
    "--metrics-port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Serve statistics as Prometheus text on 127.0.0.1:PORT.",
)
_NAMES = (
    "model",
    "device",
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "scheduling_policy",
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
    "enforce_eager",
    "async_scheduling",
    "load_format",
    "quantization",
    "deterministic",
    "num_threads",
    "wait_policy",
)


def engine_options(command: Command) -> Command:
    """Add the engine's options to a command."""
    for option in reversed(_ENGINE_OPTIONS):
        command = option(command)
    return command


def take_engine_options(options: dict[str, Any]) -> dict[str, Any]:
    """Move the engine's options out of a command's, as keyword arguments of `LLM`."""
    taken = {name: options.pop(name) for name in _NAMES}
    taken["block_size"] = int(options.pop("block_size"))
    taken["enable_prefix_caching"] = options.pop("prefix_caching")
    return taken


class Status:
    """A line on stderr that says what is going on; only where stderr is a terminal."""

    def __init__(self) -> None:
        self._shown = ""
        self._visible = os.isatty(2)

    def show(self, text: str) -> None:
        if self._visible and text != self._shown:
            click.echo(f"\r\x1b[K{text}", err=True, nl=False)
            self._shown = text

    def loading(self, done: int, total: int) -> None:
        self.show(f"loading weights {done / 2**20:,.0f} of {total / 2**20:,.0f} MiB")

    def capturing(self, done: int, total: int) -> None:
        self.show(f"capturing graphs {done} of {total}")

    def clear(self) -> None:
        if self._shown:
            click.echo("\r\x1b[K", err=True, nl=False)
            self._shown = ""
