"""Owners of memory: what is released with what, and that the bytes are real."""

from __future__ import annotations

import pytest
import torch
from support.model_helpers import our_logits, reference_model, save

from shmllm.errors import RequestError
from shmllm.models.config import ModelConfig
from shmllm.models.create import create_model
from shmllm.models.weights import load_weights
from shmllm.outputs.sleep_report import SleepState
from shmllm.worker.arena import CountingAllocator
from shmllm.worker.cpu.arena import HostArena
from shmllm.worker.cpu.memory import HostMemory, resident_bytes
from shmllm.worker.memory_owners import MemoryOwners

TOKENS = [3, 14, 15, 92, 6]


class Buffer:
    def __init__(self, num_bytes):
        self.workspace_bytes = num_bytes

    def drop_workspace(self):
        self.workspace_bytes = 0


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    model = reference_model("qwen3", hidden_size=512, intermediate_size=2048)
    return save(model, tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(params=[None, "int8"])
def quantization(request):
    return request.param


@pytest.fixture
def model_and_owners(directory, quantization):
    config = ModelConfig.from_directory(directory)
    counter = CountingAllocator()
    create_model(config, torch.float32, counter.allocate, quantization)
    weights, cache = HostArena(counter.num_bytes, "weights"), HostArena(2**26, "cache")
    model = create_model(config, torch.float32, weights.allocate, quantization)
    load_weights(model, directory)
    cache.allocate((2**26,), torch.uint8).fill_(1)
    return model, MemoryOwners(model, weights, cache, [Buffer(1000), Buffer(24)], HostMemory())


def test_bytes_are_counted_by_owner(model_and_owners, quantization):
    model, owners = model_and_owners
    found = owners.measure()
    matrices = 4 * sum(v[0].numel() for v in model.named_weights().values() if len(v[0].shape) == 2)
    if quantization:
        assert matrices / 4 < found.weights < 0.3 * matrices
    else:
        assert matrices < found.weights < 1.01 * matrices
    assert found.kv_cache == 2**26
    assert found.workspaces == 1024
    assert found.total == pytest.approx(resident_bytes(), abs=2**22)


@pytest.mark.parametrize("keep", [True, False])
def test_weights_are_restored_or_written_again(model_and_owners, directory, keep):
    model, owners = model_and_owners
    expected = our_logits(model, TOKENS)
    owners.release(SleepState.WEIGHTS, keep)
    found = owners.measure()
    assert (found.weights > 0) == keep
    assert owners.num_missing == (0 if keep else len(model.named_weights()))
    with pytest.raises(RequestError, match=r"wake_up\(tags=\['weights'\]\) first"):
        model.load_weights([("model.norm.weight", torch.ones(512))])
    owners.restore(SleepState.WEIGHTS)
    if not keep:
        load_weights(model, directory)
        model.weights_changed(model.named_weights())
    assert owners.num_missing == 0
    assert torch.equal(our_logits(model, TOKENS), expected)


def test_releasing_the_cache_frees_the_workspaces_too(model_and_owners):
    _, owners = model_and_owners
    before, first = resident_bytes(), owners.measure()
    owners.release(SleepState.KV_CACHE, keep=False)
    owners.release(SleepState.WEIGHTS, keep=False)
    owners.tidy()
    found = owners.measure()
    assert (found.kv_cache, found.workspaces, found.weights) == (0, 0, 0)
    held = first.kv_cache + first.weights
    assert before - resident_bytes() > 0.95 * held


def test_lost_weights_need_free_memory_to_wake_up(model_and_owners, monkeypatch):
    model, owners = model_and_owners
    owners.release(SleepState.WEIGHTS, keep=True)
    monkeypatch.setattr(HostMemory, "free_bytes", lambda self: 2**20)
    owners.restore(SleepState.WEIGHTS)  # kept weights are still in place
    owners.release(SleepState.WEIGHTS, keep=False)
    with pytest.raises(RequestError, match=r"they need \d+ MiB and 1 MiB of memory are free"):
        owners.restore(SleepState.WEIGHTS)
    assert model.is_asleep


@pytest.mark.parametrize("levels", [[False], [True, False]])
def test_what_trainers_never_send_survives_every_sleep(tmp_path, levels):
    """transformers' modules have it as buffers; trainers send parameters."""
    sizes = {"vocab_size_per_layer_input": 97, "global_head_dim": 16}
    reference = reference_model("gemma4", **sizes)
    config = ModelConfig.from_directory(save(reference, tmp_path))
    counter = CountingAllocator()
    create_model(config, torch.float32, counter.allocate)
    weights, cache = HostArena(counter.num_bytes, "weights"), HostArena(2**20, "cache")
    model = create_model(config, torch.float32, weights.allocate)
    load_weights(model, tmp_path)
    owners, expected = (
        MemoryOwners(model, weights, cache, [], HostMemory()),
        our_logits(model, TOKENS),
    )
    for keep in levels:
        owners.release(SleepState.WEIGHTS, keep)
    owners.restore(SleepState.WEIGHTS)
    assert owners.num_missing == len(model.named_weights()) - config.num_layers
    model.load_weights([(name, value.clone()) for name, value in reference.named_parameters()])
    assert owners.num_missing == 0
    assert torch.equal(our_logits(model, TOKENS), expected)
