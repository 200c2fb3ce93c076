"""Layers that predict a token further ahead: compared with transformers, loaded by number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cache_shapes import cache_shape
from support.further_layers import make, reference_further_logits, save_both
from support.model_helpers import (
    allocate,
    assert_logits_close,
    our_logits,
    reference_logits,
)
from support.variants import slow
from torch import Tensor

from shmllm.config.load import LoadConfig
from shmllm.core.plan import StepPlan
from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.create import create_model
from shmllm.models.decoder import DecoderModel
from shmllm.models.weights import load_weights
from shmllm.worker.batch import InputBatch
from shmllm.worker.cpu.arena import HostArena
from shmllm.worker.cpu.buffers import CpuBuffers
from shmllm.worker.cpu.cache import CpuKVCache, cache_bytes, layout_of
from shmllm.worker.cpu.inputs import CpuInputs, Division
from shmllm.worker.cpu.instructions import auto_dtype
from shmllm.worker.cpu.logits_ops import CpuLogitsOps
from shmllm.worker.cpu.memory import HostMemory
from shmllm.worker.cpu.ops import CpuOps
from shmllm.worker.cpu.products import Products
from shmllm.worker.cpu.program import check_model
from shmllm.worker.loading import load_model
from shmllm_kernels.cpu import KernelProgram

TOKENS = [int(token) for token in torch.randint(0, 97, (30,), generator=torch.manual_seed(5))]
BLOCK_SIZE = 16


def load_further(directory: Path, count: int) -> DecoderModel:
    config = ModelConfig.from_directory(directory).with_further(count)
    model = create_model(config, torch.float32, allocate)
    load_weights(model, directory)
    return model


@torch.inference_mode()
def further_logits(model: DecoderModel, hidden: Tensor, token_ids: list[int]) -> Tensor:
    """The logits that the first layer behind gives for tokens, each with the hidden state of the
    token before it."""
    length, config = len(token_ids), model.config
    config = replace(config, layers=config.loaded_layers, further_layers=())
    shape = cache_shape(
        config, BLOCK_SIZE, lambda heads: layout_of(heads, BLOCK_SIZE, "float32").block_bytes
    )
    num_blocks = -(-length // BLOCK_SIZE)
    arena = HostArena(cache_bytes(shape, num_blocks + 1), "the cache")
    batch = InputBatch(1, num_blocks * BLOCK_SIZE, BLOCK_SIZE, config.vocab_size, 1)
    batch.block_tables[:, 0] = np.arange(1, num_blocks + 1)
    cache = CpuKVCache(config, "float32", shape, num_blocks + 1, arena)
    batch.token_ids[0, :length] = token_ids
    step = batch.inputs(StepPlan(1, rows=[0], starts=[0], counts=[length], num_tokens=length))
    inputs = CpuInputs(length, 1, {Division.of(each) for each in config.all_attentions}, 1)
    inputs.fill(step)
    buffers = CpuBuffers(model.config, length, length)
    program = KernelProgram(2)
    products = Products(program, None)
    ops = CpuOps(program, products, config, buffers, inputs, cache, batch.block_tables)
    hidden = hidden.clone()  # is overwritten
    out = model.further[0](ops, hidden, model.embedding)
    num_tokens = inputs.address_of("num_tokens")
    model.logits(CpuLogitsOps(program, products, num_tokens, buffers.logits), out)
    program.replay()
    return buffers.logits.clone()


@pytest.mark.parametrize("family", ["deepseek_v3", slow("glm4_moe")])
def test_the_logits_of_a_layer_behind_equal_transformers(family: str, tmp_path: Path) -> None:
    reference, further = make(family)
    model = load_further(save_both(reference, further, tmp_path), 1)
    with torch.inference_mode():
        hidden = reference.model(torch.tensor([TOKENS])).last_hidden_state[0, :-1]
    found = further_logits(model, hidden, TOKENS[1:])
    expected = reference_further_logits(reference, further, TOKENS)
    assert_logits_close(found, expected, 1e-4)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    assert_logits_close(our_logits(model, TOKENS), reference_logits(reference, TOKENS), 1e-4)


def test_as_many_layers_are_loaded_as_are_asked_for(tmp_path: Path) -> None:
    reference, further = make("deepseek_v3", 2)
    directory = save_both(reference, further, tmp_path)
    names = {count: set(load_further(directory, count).named_weights()) for count in range(3)}
    assert not any(name.startswith("model.layers.2.") for name in names[0])
    own = names[1] - names[0]
    assert all(name.startswith("model.layers.2.") for name in own)
    assert {"model.layers.2.enorm.weight", "model.layers.2.shared_head.norm.weight"} <= own
    assert not any("embed_tokens" in name or "shared_head.head" in name for name in own)
    assert names[2] - names[1] == {name.replace("layers.2", "layers.3") for name in own}
    with pytest.raises(EngineStartError, match=r"^method mtp needs 3 of the layers .* has 2$"):
        ModelConfig.from_directory(directory).with_further(3)


def test_an_engine_loads_them_and_computes_the_same(tmp_path: Path) -> None:
    reference, further = make("deepseek_v3")
    directory = save_both(reference, further, tmp_path)
    pool, ones = HostMemory(), []
    for count in range(2):
        load = LoadConfig(directory=str(directory), dtype="float32", further_layers=count)
        loaded = load_model(load, pool, auto_dtype, check_model)
        ones.append(our_logits(loaded.model, TOKENS))
        assert len(loaded.model.further) == count
    assert torch.equal(*ones)
    with pytest.raises(EngineStartError, match=r"^method mtp needs 2 of the layers"):
        load_model(replace(load, further_layers=2), pool, auto_dtype, check_model)
