"""How many threads a step gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shmllm.models.config import ModelConfig
from shmllm.worker.threads import StepThreads

SMALL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=688,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_position_embeddings=4096,
    layer_windows=(None,) * 4,
)


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def number_in(threads: StepThreads, num_tokens: int, num_context_tokens: int) -> int:
    with threads.share(num_tokens, num_context_tokens):
        return torch.get_num_threads()


def test_short_steps_of_a_small_model_get_one_thread_and_long_ones_all():
    threads = StepThreads(SMALL, 4, 2)
    assert torch.get_num_threads() == 2
    for num_tokens, num_context_tokens, expected in (
        (1, 100, 1),
        (4, 400, 1),
        (64, 10_000, 2),
        (1, 16_000, 2),
        (2048, 2048, 2),
        (1, 1, 1),
    ):
        assert number_in(threads, num_tokens, num_context_tokens) == expected
        assert torch.get_num_threads() == 2


def test_every_step_of_a_larger_model_gets_all():
    config = replace(SMALL, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3)
    threads = StepThreads(config, 4, 2)
    assert number_in(threads, 1, 1) == 2


def test_one_thread_stays_one():
    threads = StepThreads(SMALL, 4, 1)
    assert number_in(threads, 2048, 2048) == 1


def test_a_step_that_fails_leaves_the_number_as_it_was():
    threads = StepThreads(SMALL, 4, 2)
    with pytest.raises(ValueError, match="broken"), threads.share(1, 1):
        raise ValueError("broken")
    assert torch.get_num_threads() == 2
