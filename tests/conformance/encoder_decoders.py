"""The tests of an encoder-decoder in a whole engine, compared with transformers' greedy tokens.

A module for each kind of encoder has a fixture `subject`. Each folder has a fixture `gpu_device`:
the fake GPU, a GPU, or None for the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conformance.device import no_waits
from conformance.gpu_engine import Engine
from support.variants import slow
from torch import Tensor

from shmllm.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from shmllm.config.graphs import GraphConfig
from shmllm.config.load import LoadConfig
from shmllm.params.items import Item
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams
from shmllm.wire.messages import Method
from shmllm.worker.gpu.device import Device

BLOCK_SIZE, COUNT = 16, 4
PENALTY = 0.2
TEXT = range(20, 50)
"""The text of the request "long"."""


class Asked(NamedTuple):
    """A request, and transformers' tokens for it.

    Attributes:
        prompt: what the decoder begins with.
        items: what the encoder computes, if it reads no text.
        text: what it reads, if it reads text.
        wanted: the tokens.
    """

    prompt: list[int]
    items: tuple[Item, ...]
    text: list[int]
    wanted: list[int]


class Subject(NamedTuple):
    """A model of transformers'.

    Attributes:
        directory: where it is.
        asked: requests by name: "whole" fills the encoder, "short" does not, "long" has much text
            for the decoder, and "same" what the encoder reads in it.
        other: other weights.
        wanted: transformers' tokens for the request "long" with those.
        penalised: its tokens for the same request with a repetition penalty.
        num_blocks: the blocks of the KV cache.
    """

    directory: Path
    asked: dict[str, Asked]
    other: dict[str, Tensor]
    wanted: list[int]
    penalised: list[int]
    num_blocks: int


def make_subject(
    directory: Path,
    model: Any,
    asked: dict[str, Asked],
    reference: Callable[[list[int], float], list[int]],
    num_blocks: int = 60,
) -> Subject:
    """The subject of a model, whose weights are others behind it.

    Args:
        directory: where its files are.
        model: the model.
        asked: the requests.
        reference: returns transformers' tokens for a prompt of the decoder and a repetition
            penalty, with what the encoder reads in the request "long".
        num_blocks: see `Subject`.
    """
    prompt = asked["long"].prompt
    penalised = reference(prompt, PENALTY)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:  # sinusoids stay
                weight.copy_(weight.flip(0))
    wanted = reference(prompt, 1.0)
    other = {name: weight.clone() for name, weight in model.state_dict().items()}
    return Subject(directory, asked, other, wanted, penalised, num_blocks)


def make_config(
    subject: Subject, *, mode: str = "FULL_AND_PIECEWISE", budget: int = 64, **sizes: Any
) -> EngineConfig:
    return EngineConfig(
        LoadConfig(str(subject.directory), dtype="float32"),
        CacheConfig(BLOCK_SIZE, **{"num_blocks": subject.num_blocks} | sizes),
        SchedulerConfig(3, budget, scheduler_reserve_full_isl=False),
        graphs=GraphConfig(mode, None if mode == "NONE" else (2, 16)),
        num_threads=1,
    )


def add(engine: Engine, number: int, asked: Asked, **options: Any) -> None:
    params = SamplingParams(
        **{"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True} | options
    )
    request = EngineCoreRequest(
        number,
        asked.prompt,
        params,
        items=asked.items,
        encoder_token_ids=asked.text,
        seed=number,
    )
    assert engine.core.add(0, request) is None


def ask(engine: Engine, subject: Subject, names: Sequence[str]) -> None:
    """Run requests together, and check their tokens."""
    first = max(engine.tokens, default=-1) + 1
    for number, name in enumerate(names, first):
        add(engine, number, subject.asked[name])
    engine.run()
    for number, name in enumerate(names, first):
        assert engine.tokens[number] == subject.asked[name].wanted, name


class EncoderDecoderConformance:
    @pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", slow("NONE"), slow("PIECEWISE")])
    def test_greedy_tokens_equal_those_of_transformers(
        self, subject: Subject, gpu_device: Device, mode: str
    ) -> None:
        """Requests share steps, and two of them what the encoder computes, which it computes once;
        then one runs alone, and finds its blocks in the prefix cache."""
        wanted = [tuple(asked.wanted) for asked in subject.asked.values()]
        assert len(set(wanted)) == len(wanted), "what they read makes no difference"
        engine = Engine(make_config(subject, mode=mode), gpu_device)
        ask(engine, subject, ["whole", "long", "short", "same"])
        stats = engine.core.scheduler.stats
        assert engine.core.scheduler.encoder_cache.num_encoded == 3
        hits = stats.prefix_hit_tokens
        ask(engine, subject, ["long"])
        whole = (len(subject.asked["long"].prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert stats.prefix_hit_tokens - hits == whole > 0
        ask(engine, subject, ["whole"])

    @pytest.mark.slow
    def test_a_step_may_have_a_part_of_the_text(self, subject: Subject, gpu_device: Device) -> None:
        engine = Engine(make_config(subject, mode="NONE", budget=5), gpu_device)
        ask(engine, subject, ["long", "short"])

    @pytest.mark.slow
    def test_preempted_requests_are_encoded_again(
        self, subject: Subject, gpu_device: Device
    ) -> None:
        """Requests fit into the cache when they begin, and not when they end."""
        config = make_config(subject, mode="NONE")
        engine = Engine(config, gpu_device)
        num_blocks = engine.core.info.max_blocks_per_request
        config = make_config(subject, mode="NONE", num_blocks=num_blocks + 1)
        engine = Engine(config, gpu_device)
        ask(engine, subject, ["whole", "long"])
        for number, name in enumerate(("whole", "short", "same"), 2):
            add(engine, number, subject.asked[name], max_tokens=40)
        engine.run()
        assert engine.core.scheduler.stats.preemptions > 0
        for number, name in enumerate(("whole", "short", "same"), 2):
            assert engine.tokens[number][:COUNT] == subject.asked[name].wanted

    @pytest.mark.slow
    def test_sleep_and_new_weights(self, subject: Subject, gpu_device: Device) -> None:
        """A request falls asleep behind what the encoder has computed, and with other weights the
        same item has other keys and values."""
        engine = Engine(make_config(subject, mode="NONE"), gpu_device)
        add(engine, 0, subject.asked["long"])
        engine.step()
        engine.core.settle()
        engine.call(Method.SLEEP, {"level": 1, "mode": "keep"})
        assert engine.runner.items.workspace_bytes == 0
        engine.call(Method.WAKE_UP)
        engine.run()
        assert engine.tokens[0] == subject.asked["long"].wanted
        engine.call(Method.SLEEP, {"level": 2, "mode": "keep"})
        engine.call(Method.WAKE_UP)
        engine.runner.model.load_weights(subject.other.items())
        engine.core.weights.weights_changed()
        add(engine, 1, subject.asked["long"])
        engine.run()
        assert engine.tokens[1] == subject.wanted != subject.asked["long"].wanted

    @pytest.mark.slow
    def test_penalties_count_the_decoders_text_alone(
        self, subject: Subject, gpu_device: Device
    ) -> None:
        """Positions of the encoder are no tokens."""
        engine = Engine(make_config(subject, mode="NONE"), gpu_device)
        add(engine, 0, subject.asked["long"], repetition_penalty=PENALTY)
        engine.run()
        assert engine.tokens[0] == subject.penalised != subject.asked["long"].wanted

    def test_a_request_needs_an_item(self, subject: Subject, gpu_device: Device) -> None:
        engine = Engine(make_config(subject, mode="NONE"), gpu_device)
        params = SamplingParams(max_tokens=1)
        refused = engine.core.add(0, EngineCoreRequest(0, [5], params))
        assert refused is not None
        assert "the model needs one item" in refused.message


class OnDeviceConformance(EncoderDecoderConformance):
    @pytest.mark.slow
    def test_the_host_does_not_wait_for_encoders(
        self, subject: Subject, gpu_device: Device
    ) -> None:
        engine = Engine(make_config(subject, mode="NONE"), gpu_device)
        add(engine, 0, subject.asked["short"])
        engine.step()
        add(engine, 1, subject.asked["long"])
        with no_waits(gpu_device):
            for _ in range(2):
                engine.step()
        engine.run()
        names = {0: "short", 1: "long"}
        assert engine.tokens == {each: subject.asked[name].wanted for each, name in names.items()}
