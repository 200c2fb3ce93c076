"""Several front ends of one pool of named engines change adapters at the same time."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from support import lora_adapters
from support.engines import assert_unused, named_engine
from support.programs import start_source
from support.waiting import PATIENCE_S, join_all, wait_until

from shmllm import LLM, LoRARequest, SamplingParams
from shmllm.ipc.liveness import is_stopped

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

OPTIONS = {"enable_lora": True, "client_timeout": 1.0}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ROUNDS = 10

STOPS = """
import json, os, sys
from shmllm import LLM, LoRARequest
from shmllm.client.channel_client import ChannelEngineClient
from shmllm.wire.messages import Method
names, lora, number = json.loads(sys.argv[1])
call = ChannelEngineClient.call
def stop_behind(client, method, argument=None):
    answer = call(client, method, argument)
    if method is Method.ADD_LORA:
        os.kill(os.getpid(), number)
    return answer
ChannelEngineClient.call = stop_behind
LLM.attach(names).add_lora(LoRARequest(**lora))
"""
"""A front end that gets a signal when the first engine of two has an adapter."""


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    folder = tmp_path_factory.mktemp("engines")
    (folder / "1").mkdir()
    with named_engine(folder, **OPTIONS) as (one, _), named_engine(folder / "1", **OPTIONS) as two:
        yield [one, two[0]]


@pytest.fixture
def loras(tmp_path: Path) -> list[LoRARequest]:
    """Two adapters with one number."""
    shapes = {"model.layers.0.self_attn.o_proj": (256, 256)}
    for name in "ab":
        (tmp_path / name).mkdir()
        drawn = lora_adapters.draw(shapes, ord(name), factor=4.0)
        lora_adapters.write(tmp_path / name, drawn)
    return [LoRARequest(name, 1, str(tmp_path / name), load_inplace=True) for name in "ab"]


def texts(llms: list[LLM]) -> list[str]:
    """What each engine generates with what it has as adapter 1."""
    known = LoRARequest("any", 1)
    outputs = [llm.generate("import os\n", GREEDY, lora_request=known)[0] for llm in llms]
    return [output.outputs[0].text for output in outputs]


def test_all_engines_have_the_adapter_of_one_front_end(
    engines: list[str], loras: list[LoRARequest]
) -> None:
    """The front ends name the engines in different orders, so each meets the other's half."""
    with ExitStack() as stack:
        orders = engines[:1], engines[1:], engines, engines[::-1]
        one, other, *pools = [stack.enter_context(LLM.attach(names)) for names in orders]
        for _ in range(ROUNDS):
            ways = zip(pools, loras, strict=True)
            threads = [threading.Thread(target=pool.add_lora, args=(lora,)) for pool, lora in ways]
            for thread in threads:
                thread.start()
            join_all(threads)
            first, second = texts([one, other])
            assert first == second
        assert pools[0].remove_lora(1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_front_end_that_ends_in_a_change_blocks_no_other(
    number: signal.Signals, engines: list[str], loras: list[LoRARequest]
) -> None:
    """Its change is undone. A stopped one is disconnected after `client_timeout`. The engines
    remove the names of both in shared memory."""
    other = start_source(STOPS, json.dumps([engines, asdict(loras[0]), number]))
    try:
        wait_until(lambda: other.poll() is not None or is_stopped(other.pid), "the signal")
        with LLM.attach(engines) as llm:
            assert llm.add_lora(replace(loras[1], load_inplace=False))
            assert llm.remove_lora(1)
    finally:
        other.kill()
        other.communicate(timeout=PATIENCE_S)
    for name in engines:
        assert_unused(name)
