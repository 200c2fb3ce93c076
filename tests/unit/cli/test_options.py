"""The engine's options on the command line, as keyword arguments of LLM."""

from __future__ import annotations

import inspect
from typing import Any

import click
import pytest
from click.testing import CliRunner

from shmllm import LLM
from shmllm.cli.options import engine_options, take_engine_options


def taken(*arguments: str) -> tuple[dict[str, Any], str]:
    """What a command with these arguments starts the engine with, and what it prints."""
    found: dict[str, Any] = {}

    @click.command()
    @engine_options
    def command(**options: Any) -> None:
        found.update(take_engine_options(options))

    return found, CliRunner().invoke(command, arguments).output


def test_without_arguments_they_are_the_defaults_of_llm():
    parameters = inspect.signature(LLM.__init__).parameters
    options, _ = taken()
    assert options == {name: parameters[name].default for name in options}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--device", "cuda:1"], {"device": "cuda:1"}),
        (["--gpu-memory-utilization", "0.5"], {"gpu_memory_utilization": 0.5}),
        (["--enforce-eager"], {"enforce_eager": True}),
        (["--async-scheduling"], {"async_scheduling": True}),
        (["--no-async-scheduling"], {"async_scheduling": False}),
        (["--block-size", "64"], {"block_size": 64}),
        (["--no-prefix-caching"], {"enable_prefix_caching": False}),
    ],
)
def test_what_is_given_is_passed_on(arguments: list[str], expected: dict[str, Any]):
    options, _ = taken(*arguments)
    assert options == taken()[0] | expected


@pytest.mark.parametrize("value", ["0", "1.1", "all"])
def test_a_part_of_memory_lies_between_0_and_1(value: str):
    options, said = taken("--gpu-memory-utilization", value)
    assert not options
    assert "--gpu-memory-utilization" in said
