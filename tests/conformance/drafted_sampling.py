"""The tests of the sampler on a device behind drafted tokens: it gives the tokens, with the
log-probabilities, that it gives one after the other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from conformance.device_sampler import (
    DRAWN,
    PROCESSORS,
    VOCAB_SIZE,
    Pair,
    new_request,
    sampled_inputs,
)

from shmllm.core.plan import StepPlan, StepResult
from shmllm.worker.gpu.device import Device
from shmllm.worker.verification import accept

NAMES = ("nothing", "everything", "penalties", "thinking", "longer bad words", "min_tokens")
NUM_STEPS = 8
MOST_DRAFTED = 3
LogitsOf = Callable[[int, int], torch.Tensor]


class Drafting(Pair):
    """The sampler of a device, and its requests.

    Attributes:
        scores: by row, the log-probability of each sampled token, and of the two most likely ones.
    """

    def __init__(self, device: Device, mode: str) -> None:
        super().__init__(device, mode, max_drafts=len(NAMES) * MOST_DRAFTED)
        self.scores: dict[int, list[list[float]]] = {row: [] for row in range(len(NAMES))}
        for row, name in enumerate(NAMES):
            drawn = DRAWN[row] if row % 2 else {}
            self.add(new_request(row, logprobs=2, **PROCESSORS[name] | drawn))

    def verify(self, logits_of: LogitsOf, drafts: dict[int, list[int]]) -> StepResult:
        """Sample behind the last tokens of rows and behind drafted ones, and append the accepted
        tokens.

        Args:
            logits_of: a function from row and position to (V,) logits.
            drafts: by row, the drafted tokens.
        """
        rows = list(drafts)
        plan = StepPlan(step=0, rows=rows, samples=list(range(len(rows))))
        plan.requests = [self.requests[row].new for row in rows]
        plan.drafts = {place: drafts[row] for place, row in enumerate(rows) if drafts[row]}
        samples = []
        for row in rows:
            tokens = [*self.requests[row].token_ids, *drafts[row]]
            self.batches[1].token_ids[row, : len(tokens)] = tokens
            ends = range(self.requests[row].position, len(tokens) + 1)
            samples += [(row, end, tokens[end - 1]) for end in ends]
        inputs = sampled_inputs(*zip(*samples, strict=True))
        self.gpu.needs_tokens(plan, inputs)
        logits = torch.stack([logits_of(row, position) for row, position, _ in samples])
        accepted = accept(plan, self.launch(logits, inputs, plan).result())
        counts = accepted.counts or [1] * len(rows)
        tokens = np.array(accepted.token_ids)
        if plan.drafts:
            self.gpu.count_accepted(np.repeat(np.array(rows, np.int32), counts), tokens)
        of_tokens = np.repeat(rows, counts).tolist()
        self.append(of_tokens, tokens)
        assert accepted.logprobs is not None
        best = accepted.logprobs.top_logprobs.reshape(-1, 2)
        for row, own, two in zip(of_tokens, accepted.logprobs.logprobs, best, strict=True):
            self.scores[row].append([own, *two])
        return accepted


class DraftedSamplingConformance:
    @pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits"])
    def test_samples_behind_drafted_tokens_equal_those_of_single_steps(self, gpu_device, mode):
        single, drafting = Drafting(gpu_device, mode), Drafting(gpu_device, mode)
        table = torch.from_numpy(
            np.random.default_rng(3).normal(0, 3, (len(NAMES), 64, VOCAB_SIZE))
        )

        def logits_of(row: int, position: int) -> torch.Tensor:
            return table[row, position].float()

        for _ in range(NUM_STEPS):
            single.verify(logits_of, {row: [] for row in range(len(NAMES))})
        wanted = {row: request.token_ids for row, request in single.requests.items()}
        random, num_accepted = np.random.default_rng(4), 0
        while rows := [row for row in wanted if drafting.requests[row].position < len(wanted[row])]:
            drafts = {}
            for row in random.permutation(rows).tolist():
                known = drafting.requests[row].position
                ahead = wanted[row][known : len(wanted[row]) - 1][
                    : random.integers(MOST_DRAFTED + 1)
                ]
                is_right = random.random(len(ahead)) < 0.7
                drafts[row] = [
                    token if right else (token + 1) % VOCAB_SIZE
                    for token, right in zip(ahead, is_right, strict=True)
                ]
            accepted = drafting.verify(logits_of, drafts)
            num_accepted += len(accepted.token_ids) - len(rows)
        assert num_accepted > NUM_STEPS
        for row, request in drafting.requests.items():
            assert request.token_ids == wanted[row], NAMES[row]
            assert np.array(drafting.scores[row]) == pytest.approx(np.array(single.scores[row]))

    def test_a_wrong_draft_does_not_end_the_reasoning(self, gpu_device):
        """The budget is two tokens behind the prompt, and then its end, 40 and 3, is forced."""
        pair, row = Drafting(gpu_device, "raw_logprobs"), 0
        pair.add(new_request(row, logprobs=2, **PROCESSORS["thinking"]))
        first = pair.requests[row].position

        def logits_of(row: int, position: int) -> torch.Tensor:
            return 9.0 * torch.eye(VOCAB_SIZE)[200 + position]

        for drafted in ([40, 3, 9], [200, 40, 3], [40, 5], []):
            pair.verify(logits_of, {row: drafted})
        output = pair.requests[row].token_ids[first:]
        assert output == [200 + first, 201 + first, 40, 3, 204 + first]
