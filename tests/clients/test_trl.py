"""TRL's trainers, unmodified: the engine samples with the trainer's weights, at every step.

The measure is TRL's own metric, the largest difference between the log-probability that the
engine reported for a token and the one that the model in training gives it. With weights
that are not the trainer's it is above 0.1 (see `test_without_new_weights`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from client_helpers import needs
from grpo_runs import CHATS, NUM_STEPS, Run, train

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore"),  # the client's own
    pytest.mark.usefixtures("no_leaks", "trl_uses_shmllm"),
    needs("trl", "peft", "datasets"),
]

SAME = 1e-3
OTHER = 0.1
QUARTER = NUM_STEPS // 4


def assert_same_numbers(run: Run, num_steps: int = NUM_STEPS) -> None:
    assert len(run.differences) == num_steps
    assert max(run.differences) < SAME


def assert_learnt(run: Run, by: float = 0.3) -> None:
    """The mean reward of the last quarter is above the first quarter's."""
    first, last = (sum(r) / QUARTER for r in (run.rewards[:QUARTER], run.rewards[-QUARTER:]))
    assert last > first + by


def test_at_every_step(policy: Path) -> None:
    run = train(policy)
    assert_same_numbers(run)
    assert_learnt(run)


def test_conversations_at_another_temperature(policy: Path) -> None:
    run = train(policy, prompts=CHATS, temperature=0.7)
    assert_same_numbers(run)
    assert_learnt(run)


def test_without_new_weights(policy: Path) -> None:
    """The measure sees it: an engine that keeps its first weights is far off at once."""
    run = train(policy, begin=keep_first_weights, max_steps=3)
    first, second, third = run.differences
    assert first < SAME
    assert second > OTHER
    assert third > OTHER


def keep_first_weights(trainer: Any, run: Run) -> None:
    generation = trainer.vllm_generation
    first = [(name, tensor.clone()) for name, tensor in generation._iter_named_params()]
    generation._iter_named_params = lambda: iter(first)


def test_lora(policy: Path) -> None:
    from peft import LoraConfig

    adapter = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    run = train(policy, peft_config=adapter, learning_rate=2e-2)
    assert_same_numbers(run)
    assert_learnt(run, by=0.1)


def test_a_regex(policy: Path) -> None:
    """Numbers differ here by TRL's own doing: the trainer does not know of the mask."""
    pattern = r"[a-f]{3}-[0-9]{2,5}"
    run = train(policy, vllm_structured_outputs_regex=pattern, max_steps=4)
    assert len(run.texts) == 4 * 16
    assert all(re.fullmatch(pattern, text) for text in run.texts)
    assert len(set(run.texts)) > len(run.texts) / 2


def test_rloo(policy: Path) -> None:
    run = train(policy, kind="RLOO", max_steps=4)
    assert len(run.rewards) == 4
