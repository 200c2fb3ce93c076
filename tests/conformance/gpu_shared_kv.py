"""The tests of KV blocks that engines share by copies, on a device.

Each folder has a fixture `gpu_device`: the fake GPU, or a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.device import no_waits
from conformance.gpu_drafting_models import with_model
from conformance.gpu_engine import (
    BLOCK_SIZE,
    SCALE,
    SHAPE,
    Engine,
    expected,
    make_config,
    other_model,
)
from conformance.gpu_program import SHAPE as PROGRAM_SHAPE
from conformance.gpu_program import VARIANTS
from support.model_helpers import reference_model, save
from support.shared_regions import new_region
from support.variants import slow

from shmllm.config.engine import EngineConfig
from shmllm.config.shared_kv import SharedKVConfig
from shmllm.core.shared_blocks import BlockCopy
from shmllm.shared_kv.layout import RegionLayout, Section
from shmllm.shared_kv.own_region import OwnRegion
from shmllm.shared_kv.region import Region
from shmllm.wire.messages import Method
from shmllm.worker.cpu.runner import CpuRunner
from shmllm.worker.gpu import mapped_region, shared_cache
from shmllm.worker.gpu.device import Device
from shmllm.worker.gpu.shared_cache import GpuSharedCache

FAMILIES = ["llama", *map(slow, ("gemma3", "qwen3_5", "mamba2", "deepseek_v3", "gemma4"))]
PROMPT = [(5 * i) % 90 + 1 for i in range(2 * BLOCK_SIZE + 3)]
REGION_BYTES = 2**20
NUM_BUFFERS, NUM_INTEGERS, NUM_BLOCKS, STATE_BYTES = 3, 128, 7, 4096
PART_BYTES = 8 * NUM_INTEGERS
LAYOUT = RegionLayout((Section(16, 1, NUM_BUFFERS * PART_BYTES), Section(3, 1, STATE_BYTES)))


def sharing(config: EngineConfig) -> EngineConfig:
    return replace(config, shared_kv=SharedKVConfig(REGION_BYTES))


def ask(engine: Engine, number: int, prompt: list[int], **options: Any) -> tuple[Any, int]:
    """Returns the tokens and log-probabilities of a request, and how many of its prompt's tokens
    were cached."""
    before = engine.core.scheduler.stats.prefix_hit_tokens
    engine.add(number, prompt, logprobs=2, **options)
    engine.run()
    hits = engine.core.scheduler.stats.prefix_hit_tokens - before
    return (engine.tokens[number], engine.logprobs[number]), hits


def watch_publications(engine: Engine) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns a list that gets each block that an engine publishes in its region, and a copy of its
    contents at that time."""
    tier, memory = engine.core.elsewhere.tier, engine.runner.shared_cache
    found, publish = [], tier.publish

    def watched(section: int, block_id: int) -> None:
        block = memory._block(section, block_id)
        found.append((block, torch.from_numpy(block.numpy().copy())))
        publish(section, block_id)

    tier.publish = watched
    return found


def blocks_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of blocks on the host."""
    return tensor.cpu().clone()


@pytest.fixture
def region() -> Iterator[OwnRegion]:
    with new_region(LAYOUT) as own:
        yield own


@pytest.fixture
def engines(own_regions: Path, gpu_device: Device) -> Iterator[Callable[..., Engine]]:
    """A function that starts an engine, which is closed behind the test at the latest."""
    made: list[Engine] = []

    def start(config: EngineConfig) -> Engine:
        made.append(Engine(config, gpu_device))
        return made[-1]

    yield start
    for engine in made:
        engine.core.close()


class SharedKVConformance:
    """An engine's results equal those of an engine that shares nothing and has computed the same
    prompt before: both compute what is behind the cached prefix."""

    @pytest.mark.parametrize("family", FAMILIES)
    def test_blocks_of_another_engine_change_no_bit(
        self, engines: Callable[..., Engine], family: str, tmp_path: Path
    ) -> None:
        shape = SHAPE if family == "llama" else PROGRAM_SHAPE | VARIANTS[family]
        directory = save(reference_model(family, SCALE, **shape), tmp_path)
        config = make_config(directory, budget=32)
        if family != "llama":
            cache = replace(config.cache, memory_bytes=2**21, mamba_block_size=BLOCK_SIZE)
            config = replace(config, cache=cache)
        alone = engines(config)
        computed, hits = ask(alone, 0, PROMPT)
        assert hits == 0
        wanted, hits = ask(alone, 1, PROMPT)
        assert hits >= BLOCK_SIZE
        first = engines(sharing(config))
        assert ask(first, 0, PROMPT) == (computed, 0)
        assert first.core.elsewhere.stats.saved >= 2
        second = engines(sharing(config))
        assert ask(second, 0, PROMPT) == (wanted, hits)

    @pytest.mark.slow
    def test_blocks_are_saved_before_later_steps_overwrite_them(
        self, engines: Callable[..., Engine], tmp_path: Path
    ) -> None:
        """Steps overlap, and the first engine has so few blocks that each is soon used again. When
        a block is published its contents are there, and they stay when the engine has ended."""
        reference = reference_model("llama", SCALE, **SHAPE)
        directory = save(reference, tmp_path)
        config = sharing(make_config(directory, num_blocks=4, num_seqs=2, mode="NONE"))
        prompts = [[(7 * n + 3 * i) % 90 + 1 for i in range(9 + n)] for n in range(4)]
        wanted = [expected(reference, prompt, 3) for prompt in prompts]
        hits = 0
        for _ in range(2):
            engine = engines(config)
            published = watch_publications(engine)
            for number, prompt in enumerate(prompts):
                engine.add(number, prompt, max_tokens=3)
            engine.run()
            for block, contents in published:
                assert torch.equal(block, contents)
            assert [engine.tokens[number] for number in range(len(prompts))] == wanted
            assert engine.core.scheduler.stats.prefix_hit_tokens == hits
            assert bool(published) == (not hits)
            hits = len(prompts) * BLOCK_SIZE
            engine.core.close()

    @pytest.mark.slow
    def test_sleep_and_new_weights(
        self, engines: Callable[..., Engine], gpu_device: Device, tmp_path: Path
    ) -> None:
        """A sleeping engine gives its blocks back; blocks of other weights are never found."""
        reference = reference_model("llama", SCALE, **SHAPE)
        config = sharing(make_config(save(reference, tmp_path), num_seqs=2, budget=16))
        engine = engines(config)
        first, _ = ask(engine, 0, PROMPT)
        engine.call(Method.SLEEP, {"level": 1, "mode": "keep"})
        assert engine.runner.shared_cache.mapped_bytes == 0
        assert getattr(gpu_device, "num_pinned", 0) == 0
        engine.call(Method.WAKE_UP)
        assert ask(engine, 1, PROMPT) == (first, 0)
        assert engine.runner.shared_cache.mapped_bytes > 0
        other = other_model()
        engine.runner.model.load_weights(other.state_dict().items())
        engine.core.weights.weights_changed()
        changed, hits = ask(engine, 2, PROMPT)
        assert changed[0] == expected(other, PROMPT, 4) != first[0]
        assert hits == 0
        last, hits = ask(engines(config), 0, PROMPT)
        assert last[0] == first[0]
        assert hits == 2 * BLOCK_SIZE, "of the weights in the directory"

    @pytest.mark.slow
    def test_a_draft_model_s_blocks_are_shared_when_it_has_written_them(
        self, engines: Callable[..., Engine], tmp_path: Path
    ) -> None:
        reference = reference_model("llama", SCALE, **SHAPE)
        directory = save(reference, tmp_path)
        config = sharing(with_model(make_config(directory, overlaps=False), directory))
        wanted = expected(reference, PROMPT, 12)
        counts = []
        for hits in (0, 2 * BLOCK_SIZE):
            engine = engines(config)
            (tokens, _), found = ask(engine, 0, PROMPT, max_tokens=12)
            assert (tokens, found) == (wanted, hits)
            stats = engine.core.scheduler.stats
            counts.append((stats.draft_tokens, stats.accepted_tokens))
        assert counts[0] == counts[1]
        assert counts[0][1] > 0

    def test_a_cpu_and_other_options_share_nothing(
        self, engines: Callable[..., Engine], gpu_device: Device, tmp_path: Path
    ) -> None:
        directory = save(reference_model("llama", SCALE, **SHAPE), tmp_path)
        config = sharing(make_config(directory, mode="NONE"))
        fixed = replace(config, load=replace(config.load, deterministic=True))
        names = [json.dumps(engines(each).runner.numerics()) for each in (config, fixed)]
        names.append(json.dumps(CpuRunner(config).numerics()))
        assert len(set(names)) == 3

    @pytest.fixture(params=["whole", "pieces", "refused"])
    def make(
        self, request: pytest.FixtureRequest, gpu_device: Device, monkeypatch: pytest.MonkeyPatch
    ) -> Callable[[], tuple[GpuSharedCache, list[torch.Tensor]]]:
        """A function that makes a cache and the engine's blocks of each section: in one piece of
        registered memory, with small pieces and staging memory, or without registration."""
        staged = 2**16
        if request.param != "whole":
            monkeypatch.setattr(mapped_region, "PIECE_BYTES", 1)
            staged = 2 * STATE_BYTES
        if request.param == "refused":
            monkeypatch.setattr(gpu_device, "pin", lambda memory, is_writable: False)

        def of() -> tuple[GpuSharedCache, list[torch.Tensor]]:
            where = gpu_device.torch_device
            shapes = (NUM_BUFFERS, NUM_BLOCKS, NUM_INTEGERS), (1, NUM_BLOCKS, STATE_BYTES // 8)
            blocks = [
                torch.randint(2**62, shape, dtype=torch.int64).to(where).transpose(0, 1)
                for shape in shapes
            ]
            staging = torch.empty(staged, dtype=torch.uint8, device=where)
            return GpuSharedCache(blocks, staging, gpu_device), blocks

        return of

    @pytest.mark.parametrize(("section", "count"), [(0, 6), (1, 2)])
    def test_a_saved_block_is_loaded_from_the_region(
        self, make: Any, gpu_device: Device, region: OwnRegion, section: int, count: int
    ) -> None:
        """By another cache, which may only read the region. Blocks that are overwritten behind a
        save, and read behind a load, have the contents of then."""
        (cache, blocks), (other, copied) = make(), make()
        wanted = blocks_of(blocks[section])
        before = blocks_of(copied[section])
        firsts = cache.map(region.fd, LAYOUT)
        reading = Region.open(region.path, 1)
        theirs = other.map(reading.fd, LAYOUT)
        assert firsts[section] >= NUM_BLOCKS
        cache.save([BlockCopy(section, 1 + n, firsts[section] + n) for n in range(count)])
        blocks[section].zero_()
        gpu_device.synchronize()
        loads = [BlockCopy(section, theirs[section] + n, count - n) for n in range(count)]
        other.load(loads)
        result = copied[section] + 1
        gpu_device.synchronize()
        before[1 : count + 1] = wanted[1 : count + 1].flip(0)
        assert torch.equal(blocks_of(result), before + 1)
        other.unmap(theirs)
        cache.unmap(firsts)
        reading.close()
        assert cache.mapped_bytes == other.mapped_bytes == 0

    def test_no_host_waits_for_copies_of_registered_memory(
        self, make: Any, gpu_device: Device, region: OwnRegion, request: pytest.FixtureRequest
    ) -> None:
        if "refused" in request.node.name:
            pytest.skip("such copies wait")
        cache, _ = make()
        firsts = cache.map(region.fd, LAYOUT)
        with no_waits(gpu_device):
            cache.save([BlockCopy(0, n, firsts[0] + n) for n in range(NUM_BLOCKS)])
            cache.load([BlockCopy(0, firsts[0] + n, n) for n in range(NUM_BLOCKS)])
        gpu_device.synchronize()
        cache.unmap(firsts)

    def test_several_regions_have_ids_of_their_own(
        self, make: Any, gpu_device: Device, region: OwnRegion
    ) -> None:
        cache, _ = make()
        reading = Region.open(region.path, 1)
        first, second = cache.map(region.fd, LAYOUT), cache.map(reading.fd, LAYOUT)
        assert second[0] >= first[0] + LAYOUT.sections[0].num_blocks
        assert cache.mapped_bytes == 2 * LAYOUT.data_bytes
        cache.unmap(first)
        assert cache.map(region.fd, LAYOUT) == first
        cache.unmap(first)
        cache.unmap(second)
        reading.close()
        assert getattr(gpu_device, "num_pinned", 0) == 0

    def test_all_that_is_staged_fits(self) -> None:
        sizes = 2**10, shared_cache.STAGED_BYTES, 3 * shared_cache.STAGED_BYTES
        assert [shared_cache.staged_bytes(each, 8) for each in sizes] == [*sizes[1:2] * 2, sizes[2]]
