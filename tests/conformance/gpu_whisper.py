"""The tests of Whisper in a whole engine, compared with transformers' greedy tokens.

Each folder has a fixture `gpu_device`: the fake GPU, a GPU, or None for the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conformance.device import no_waits
from conformance.gpu_engine import Engine
from support.variants import slow
from support.whisper_models import SECONDS, features, make_sound, make_whisper, reference_tokens
from torch import Tensor

from shmllm.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from shmllm.config.graphs import GraphConfig
from shmllm.config.load import LoadConfig
from shmllm.params.items import Item
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams
from shmllm.wire.messages import Method
from shmllm.worker.gpu.device import Device

BLOCK_SIZE, COUNT, POSITIONS = 16, 4, 50 * SECONDS
BEGIN = [301, 302, 305]
PENALTY = 0.2


class Asked(NamedTuple):
    """A request, and transformers' tokens for it."""

    prompt: list[int]
    items: tuple[Item, ...]
    wanted: list[int]


class Subject(NamedTuple):
    """A model of transformers'.

    Attributes:
        directory: where it is.
        asked: requests by name.
        other: other weights.
        wanted: transformers' tokens for the request "long" with those.
        penalised: its tokens for the same request with a repetition penalty.
    """

    directory: Path
    asked: dict[str, Asked]
    other: dict[str, Tensor]
    wanted: list[int]
    penalised: list[int]


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    directory = tmp_path_factory.mktemp("whisper")
    model = make_whisper(directory, decoder_layers=2)
    sounds = [make_sound(seconds, seed) for seed, seconds in enumerate((1.0, 0.4, 0.7))]

    def ask(sound: int, *text: int) -> Asked:
        prompt = [*BEGIN, *text]
        data = features([sounds[sound]])[0].T.contiguous().numpy()
        identity = sha256(data.tobytes()).digest()
        grid = (2 * POSITIONS, 1, 1)
        item = Item(identity, ((0, POSITIONS),), grid, data, "audio")
        return Asked(prompt, (item,), reference_tokens(model, prompt, sounds[sound], COUNT))

    asked = {
        "whole": ask(0),
        "short": ask(1),
        "long": ask(2, *range(20, 50)),
        "same sound": ask(2, 7, 8, 9),
    }
    penalised = reference_tokens(model, asked["long"].prompt, sounds[2], COUNT, PENALTY)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.flip(0))
    wanted = reference_tokens(model, asked["long"].prompt, sounds[2], COUNT)
    return Subject(directory, asked, dict(model.state_dict()), wanted, penalised)


def make_config(
    directory: Path, *, mode: str = "FULL_AND_PIECEWISE", budget: int = 64, **sizes: Any
) -> EngineConfig:
    return EngineConfig(
        LoadConfig(str(directory), dtype="float32"),
        CacheConfig(BLOCK_SIZE, **{"num_blocks": 60} | sizes),
        SchedulerConfig(3, budget),
        graphs=GraphConfig(mode, None if mode == "NONE" else (2, 16)),
        num_threads=1,
    )


def add(engine: Engine, number: int, asked: Asked, **options: Any) -> None:
    params = SamplingParams(
        **{"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True} | options
    )
    request = EngineCoreRequest(number, asked.prompt, params, items=asked.items, seed=number)
    assert engine.core.add(0, request) is None


def ask(engine: Engine, subject: Subject, names: Sequence[str]) -> None:
    """Run requests together, and check their tokens."""
    first = max(engine.tokens, default=-1) + 1
    for number, name in enumerate(names, first):
        add(engine, number, subject.asked[name])
    engine.run()
    for number, name in enumerate(names, first):
        assert engine.tokens[number] == subject.asked[name].wanted, name


class WhisperConformance:
    @pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", slow("NONE"), slow("PIECEWISE")])
    def test_greedy_tokens_equal_those_of_transformers(
        self, subject: Subject, gpu_device: Device, mode: str
    ) -> None:
        """Requests share steps, and two of them a sound, which is encoded once; then one runs
        alone, and finds its blocks in the prefix cache."""
        wanted = [tuple(asked.wanted) for asked in subject.asked.values()]
        assert len(set(wanted)) == len(wanted), "a sound or a text makes no difference"
        engine = Engine(make_config(subject.directory, mode=mode), gpu_device)
        ask(engine, subject, ["whole", "long", "short", "same sound"])
        stats = engine.core.scheduler.stats
        assert engine.core.scheduler.encoder_cache.num_encoded == 3
        hits = stats.prefix_hit_tokens
        ask(engine, subject, ["long"])
        whole = (len(subject.asked["long"].prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert stats.prefix_hit_tokens - hits == whole
        ask(engine, subject, ["whole"])

    @pytest.mark.slow
    def test_a_step_may_have_a_part_of_the_text(self, subject: Subject, gpu_device: Device) -> None:
        engine = Engine(make_config(subject.directory, mode="NONE", budget=5), gpu_device)
        ask(engine, subject, ["long", "short"])

    @pytest.mark.slow
    def test_preempted_requests_hear_their_sounds_again(
        self, subject: Subject, gpu_device: Device
    ) -> None:
        """Two requests fit into the cache when they begin, and not when they end."""
        longest = (128 + 48) // BLOCK_SIZE
        config = make_config(subject.directory, mode="NONE", num_blocks=2 * longest - 2)
        engine = Engine(config, gpu_device)
        ask(engine, subject, ["whole", "long"])
        for number, name in ((2, "whole"), (3, "short")):
            add(engine, number, subject.asked[name], max_tokens=25)
        engine.run()
        assert engine.core.scheduler.stats.preemptions > 0
        for number, name in ((2, "whole"), (3, "short")):
            assert engine.tokens[number][:COUNT] == subject.asked[name].wanted

    @pytest.mark.slow
    def test_sleep_and_new_weights(self, subject: Subject, gpu_device: Device) -> None:
        """A request falls asleep behind its sound, and with other weights the same sound has other
        keys and values. The bias that keys lack is still none."""
        engine = Engine(make_config(subject.directory, mode="NONE"), gpu_device)
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
    def test_penalties_count_the_text_alone(self, subject: Subject, gpu_device: Device) -> None:
        """Positions of the encoder are no tokens."""
        engine = Engine(make_config(subject.directory, mode="NONE"), gpu_device)
        add(engine, 0, subject.asked["long"], repetition_penalty=PENALTY)
        engine.run()
        assert engine.tokens[0] == subject.penalised != subject.asked["long"].wanted

    def test_a_request_needs_a_sound(self, subject: Subject, gpu_device: Device) -> None:
        engine = Engine(make_config(subject.directory, mode="NONE"), gpu_device)
        params = SamplingParams(max_tokens=1)
        refused = engine.core.add(0, EngineCoreRequest(0, BEGIN, params))
        assert refused is not None
        assert "the model needs one item" in refused.message


class WhisperOnDeviceConformance(WhisperConformance):
    @pytest.mark.slow
    def test_the_host_does_not_wait_for_sounds(self, subject: Subject, gpu_device: Device) -> None:
        engine = Engine(make_config(subject.directory, mode="NONE"), gpu_device)
        add(engine, 0, subject.asked["short"])
        engine.step()
        add(engine, 1, subject.asked["long"])
        with no_waits(gpu_device):
            for _ in range(2):
                engine.step()
        engine.run()
        names = {0: "short", 1: "long"}
        assert engine.tokens == {each: subject.asked[name].wanted for each, name in names.items()}
