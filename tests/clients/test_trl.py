"""TRL's trainers, unmodified: the engine samples with the trainer's weights, at every step.

The measure is TRL's own metric, the largest difference between the log-probability that the
engine reported for a token and the one that the model in training gives it. With weights
that are not the trainer's it is above 0.1 (see `test_an_engine_with_old_weights_is_detected`).
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from support.client_helpers import needs
from support.grpo_runs import CHATS, NUM_STEPS, PLAIN, Run, low_rank_adapter, train, trainer

from shmllm import RequestError
from shmllm.compat import trl
from shmllm.frontend.engine_view import RemoteModel

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore"),  # the client's own
    pytest.mark.usefixtures("no_leaks", "trl_uses_shmllm"),
    needs("trl", "peft", "datasets"),
]

SAME = 1e-3
OTHER = 0.1
PATTERN = r"[a-f]{3}-[0-9]{2,5}"


def assert_same_numbers(run: Run, num_steps: int = NUM_STEPS) -> None:
    assert len(run.differences) == num_steps
    assert max(run.differences) < SAME


def test_log_probabilities_equal_the_trainers_at_every_step(policy: Path) -> None:
    asleep: list[bool] = []

    def watch(made: Any, run: Run) -> None:
        from transformers import TrainerCallback

        class Watch(TrainerCallback):
            def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
                asleep.append(run.llm.is_sleeping())

        made.add_callback(Watch())

    run = train(policy, begin=watch)
    assert_same_numbers(run)
    assert run.has_learnt(by=0.3)
    assert asleep == [True] * NUM_STEPS


def test_conversations_at_another_temperature(policy: Path) -> None:
    run = train(policy, prompts=CHATS, temperature=0.7)
    assert_same_numbers(run)
    assert run.has_learnt(by=0.3)


def test_without_sleep(policy: Path) -> None:
    run = train(policy, vllm_enable_sleep_mode=False)
    assert_same_numbers(run)
    assert run.has_learnt(by=0.3)


def test_adapters_that_are_merged(policy: Path) -> None:
    run = train(policy, peft_config=low_rank_adapter())
    assert_same_numbers(run)
    assert run.has_learnt(by=0.05)


@pytest.mark.parametrize("sleeps", [True, False], ids=["sleep", "no sleep"])
def test_adapters_that_are_sent_by_themselves(
    policy: Path,
    sleeps: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The base is sent once, and no weight of it after that."""
    trl.install(enable_lora=True, max_lora_rank=8)
    calls: list[str] = []

    def count(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return method(*args, **options)

        monkeypatch.setattr(owner, name, counted)

    count(RemoteModel, "load_weights")
    for name in ("update_weights", "send_adapter"):
        count(trl.LLM, name)
    with caplog.at_level(logging.WARNING, "shmllm"):
        run = train(policy, peft_config=low_rank_adapter(), vllm_enable_sleep_mode=sleeps)
    assert_same_numbers(run)
    assert run.has_learnt(by=0.05)
    assert calls == ["update_weights"] + ["send_adapter"] * NUM_STEPS
    assert not [record for record in caplog.records if record.name.startswith("shmllm")]


def test_an_old_adapter_is_detected(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trl.install(enable_lora=True)
    send = trl.LLM.send_adapter

    def send_first(llm: Any, tensors: Any, config: Any) -> None:
        if llm.policy is None:
            send(llm, tensors, config)

    monkeypatch.setattr(trl.LLM, "send_adapter", send_first)
    run = train(policy, peft_config=low_rank_adapter(), max_steps=6)
    assert run.differences[0] < SAME
    assert max(run.differences[1:]) > OTHER


def test_an_adapter_of_a_larger_rank_is_refused(policy: Path) -> None:
    trl.install(enable_lora=True, max_lora_rank=4)
    with pytest.raises(RequestError, match="has rank 8; max_lora_rank is 4: raise it"):
        train(policy, peft_config=low_rank_adapter(), max_steps=1)


def test_models_without_an_adapter_are_sent_as_before(policy: Path) -> None:
    trl.install(enable_lora=True)
    assert_same_numbers(train(policy, max_steps=3), num_steps=3)


def test_an_engine_with_old_weights_is_detected(policy: Path) -> None:
    """The measure detects an engine that receives its first weights each time."""

    def always_send_the_first(made: Any, run: Run) -> None:
        generation = made.vllm_generation
        first = [(name, tensor.clone()) for name, tensor in generation._iter_named_params()]
        generation._iter_named_params = lambda: iter(first)

    run = train(policy, begin=always_send_the_first, max_steps=3)
    assert run.differences[0] < SAME
    assert min(run.differences[1:]) > OTHER


def test_weights_that_are_not_loaded_are_detected(
    policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemoteModel, "load_weights", lambda self, weights: set())
    run = train(policy, vllm_enable_sleep_mode=False, max_steps=3)
    assert run.differences[0] < SAME
    assert min(run.differences[1:]) > OTHER


def test_an_engine_without_weights_refuses_requests(
    policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sleeping dropped the weights and nobody sends new ones: the engine raises an error."""
    monkeypatch.setattr(RemoteModel, "load_weights", lambda self, weights: set())
    with pytest.raises(RequestError, match="weights"):
        train(policy, max_steps=1)


def test_a_regex(policy: Path) -> None:
    """TRL's correction has to be off: its trainer does not know of the mask, and would give
    such completions, improbable without it, no weight in the loss."""
    run = train(
        policy, vllm_structured_outputs_regex=PATTERN, vllm_importance_sampling_correction=False
    )
    assert len(run.texts) == NUM_STEPS * 16
    assert all(re.fullmatch(PATTERN, text) for text in run.texts)
    assert len(set(run.texts)) > NUM_STEPS  # weights decide


def test_several_updates_with_the_same_completions(policy: Path) -> None:
    """TRL generates for four forward passes at once, uses them twice, and updates after two."""
    run = train(
        policy,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        num_iterations=2,
        max_steps=12,
    )
    assert max(run.differences) < SAME
    assert run.rewards[-1] > run.rewards[0]


def test_evaluation_between_steps(policy: Path) -> None:
    """For an evaluation TRL wakes the engine within a step and sends the weights once more."""
    from datasets import Dataset

    options = {
        "eval_dataset": Dataset.from_list([{"prompt": prompt} for prompt in PLAIN]),
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 8,
        "max_steps": 4,
    }
    with trainer(policy, **options) as (made, _):
        made.train()
        evaluations = [entry for entry in made.state.log_history if "eval_reward" in entry]
    assert len(evaluations) == 2
    assert all(e["eval_sampling/sampling_logp_difference/max"] < SAME for e in evaluations)


def test_rloo(policy: Path) -> None:
    run = train(policy, kind="RLOO", beta=0.0)
    assert run.has_learnt(by=0.3)


def test_options_that_trl_always_passes_cause_no_warnings(
    policy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "shmllm"):
        train(policy, max_steps=1)
    assert not [record for record in caplog.records if record.name.startswith("shmllm")]
