"""TRL's public `rollout_func`: an LLM that the caller made generates, without patches of TRL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.client_helpers import needs
from support.grpo_runs import MAX_TOKENS, NUM_STEPS, train

from shmllm import LLM, RequestOutput, SamplingParams

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore"),  # the client's own
    pytest.mark.usefixtures("no_leaks", "kept_environment"),
    needs("trl", "datasets"),
]

FIELDS = ("prompt_ids", "completion_ids", "logprobs")
SAME = 1e-3


@pytest.fixture
def llm(policy: Path) -> Iterator[LLM]:
    with LLM(str(policy), logprobs_mode="processed_logprobs", kv_cache_memory_bytes=2**26) as llm:
        yield llm


class Rollouts:
    """Completions of prompts with the trainer's weights, as TRL wants them.

    Attributes:
        differences: the largest difference of log-probabilities to the trainer's model, of
            each call.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.differences: list[float] = []
        self.params = SamplingParams(temperature=1, max_tokens=MAX_TOKENS, logprobs=0)

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        step = trainer.state.global_step
        self.llm.wake_up(["weights"])
        self.llm.update_weights(trainer.model.named_parameters(), version=step)
        assert self.llm.wake_up(["kv_cache"])
        outputs = self.llm.generate(prompts, self.params, use_tqdm=False)
        self.llm.sleep(level=2)
        spans = [span for output in outputs for span in output.outputs[0].weight_versions]
        assert [span.version for span in spans] == [step] * len(prompts)
        sequences = [sequence(output) for output in outputs]
        self.differences.append(max(difference(trainer.model, *each) for each in sequences))
        return dict(zip(FIELDS, map(list, zip(*sequences, strict=True)), strict=True))


def sequence(output: RequestOutput) -> tuple[list[int], list[int], list[float]]:
    """The fields of one completion that FIELDS names."""
    (completion,) = output.outputs
    ids = list(completion.token_ids)
    logprobs = [
        of_place[token].logprob for token, of_place in zip(ids, completion.logprobs, strict=True)
    ]
    return list(output.prompt_token_ids), ids, logprobs


@torch.no_grad()
def difference(model: Any, prompt: list[int], ids: list[int], given: list[float]) -> float:
    logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    return float((expected - torch.tensor(given)).abs().max())


def test_rollouts_of_an_llm_that_the_caller_made(policy: Path, llm: LLM) -> None:
    rollouts = Rollouts(llm)
    run = train(policy, use_vllm=False, rollout_func=rollouts)
    assert len(rollouts.differences) == NUM_STEPS
    assert max(rollouts.differences) < SAME
    assert run.has_learnt(by=0.3)
