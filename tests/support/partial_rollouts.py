"""A policy of several versions, and what fresh engines say of trajectories.

A rollout is *partial* if the weights change while it runs. The walk below interrupts rollouts at
random places, by all calls that may come between two of their tokens, and compares what the engine
says with engines that were started with the same weights and have done nothing else.
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from support.reference_models import make_model

from shmllm import LLM, RequestOutput, SamplingParams
from shmllm.frontend.prompts import TokensPrompt

OPTIONS: dict[str, Any] = {
    "kv_cache_memory_bytes": 2**24,
    "num_threads": 1,
    "max_num_batched_tokens": 64,
}
"""Prompts of more than 64 tokens are computed in chunks."""
SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)

Scores = list[float]
Spans = list[tuple[int | str, int, int]]


def spans_of(output: RequestOutput, index: int = 0) -> Spans:
    found = output.outputs[index].weight_versions
    assert found is not None
    return [(span.version, span.start, span.end) for span in found]


def tokens_of(given: Sequence[int]) -> TokensPrompt:
    """A prompt of these token ids, even of few."""
    return {"prompt_token_ids": [*given]}


def said(output: RequestOutput) -> tuple[list[int], list[Any]]:
    """The tokens of an output and all log-probabilities, comparable with ==."""
    completion = output.outputs[0]
    assert completion.logprobs is not None
    return completion.token_ids, [[*entry.items()] for entry in completion.logprobs]


class Policy:
    """Several sets of weights of one small model, and a fresh engine of each.

    Args:
        directory: for the models.
        kind: a key of `reference_models.VARIANTS`.
        num_versions: the number of sets.
        options: of the fresh engines.

    Attributes:
        weights: the sets, by version.
        paths: a directory of a model with each set.
        fresh: an engine in this process for each set, without a prefix cache.
    """

    def __init__(
        self, directory: Path, kind: str = "llama", num_versions: int = 3, **options: Any
    ) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []
        self.paths: list[Path] = []
        self.fresh: list[LLM] = []
        self._engines = ExitStack()
        for version in range(num_versions):
            path = directory / f"{kind}{version}"
            model = make_model(kind, path, num_hidden_layers=2)
            torch.manual_seed(100 + version)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += version * 0.3 * parameter.std() * torch.randn_like(parameter)
            model.save_pretrained(path)
            named = model.named_parameters()
            self.weights.append({name: each.detach().clone() for name, each in named})
            self.paths.append(path)
        settings = OPTIONS | options | {"enable_prefix_caching": False, "multiprocess": False}
        for path in self.paths:
            self.fresh.append(self._engines.enter_context(LLM(str(path), **settings)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._engines.close()

    def start(self, **options: Any) -> LLM:
        """An engine with the first set."""
        return LLM(str(self.paths[0]), **(OPTIONS | options))


def scores(fresh: LLM, prompt: Sequence[int], completion: Sequence[int]) -> Scores:
    """What an engine says of a completion, by prompt_logprobs."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = fresh.generate(tokens_of([*prompt, *completion]), params, use_tqdm=False)
    entries = [*output.prompt_logprobs][len(prompt) :]
    return [entry[token].logprob for entry, token in zip(entries, completion, strict=True)]


def continuation(
    fresh: LLM, prompt: Sequence[int], params: SamplingParams
) -> tuple[list[int], list[Any]]:
    """What an engine generates alone."""
    return said(fresh.generate(tokens_of(prompt), params, use_tqdm=False)[0])


def check_current(llm: LLM, fresh: LLM, version: int, trajectories: list[list[int]]) -> None:
    """Assert that an engine is as a fresh one of a version for new requests, which begin like given
    trajectories."""
    prompts = [tokens_of(each) for each in trajectories]
    outputs = llm.generate(prompts, SHORT, use_tqdm=False)
    for prompt, output in zip(trajectories, outputs, strict=True):
        assert said(output) == continuation(fresh, prompt, SHORT)
        assert spans_of(output) == [(version, 0, len(output.outputs[0].token_ids))]
    cut = [(each[: len(each) // 2], each[len(each) // 2 :]) for each in trajectories]
    scored = llm.score_tokens([tokens_of(prompt) for prompt, _ in cut], [rest for _, rest in cut])
    for (prompt, completion), given in zip(cut, scored, strict=True):
        assert given == scores(fresh, prompt, completion)


@dataclass
class Rollout:
    """A request of the walk.

    Attributes:
        prompt: its prompt.
        starts: (version, number of output tokens when it came into force).
        exact_from: the number of output tokens from which on the request is as a new one with its
            tokens so far as prompt; None: it has keys and values of two versions.
    """

    prompt: list[int]
    starts: list[tuple[int, int]]
    exact_from: int | None = 0

    def spans(self, num_tokens: int) -> Spans:
        ends = [start for _, start in self.starts[1:]] + [num_tokens]
        found: Spans = []
        for (version, start), end in zip(self.starts, ends, strict=True):
            if start == end:
                continue
            if found and found[-1][0] == version:
                found[-1] = (version, found[-1][1], end)
            else:
                found.append((version, start, end))
        return found


@dataclass
class Walk:
    """A random walk of rollouts and updates.

    Args:
        llm: an engine in this process that began with version 0 of the policy, so that it computes
            only while it is polled.
        policy: the policy.
        rng: chooses the steps.

    Attributes:
        version: the version in force.
        rollouts: the requests that were queued and not collected.
        seen: trajectories that prompts begin with.
        is_mixed: prefix-cache hits may combine versions, because the walk told the engine so.
    """

    llm: LLM
    policy: Policy
    rng: random.Random
    version: int = 0
    rollouts: list[Rollout] = field(default_factory=list)
    seen: deque[list[int]] = field(default_factory=lambda: deque(maxlen=8))
    is_mixed: bool = False
    log: deque[str] = field(default_factory=lambda: deque(maxlen=40))

    def run(self, num_steps: int) -> None:
        steps = {
            self.begin: 5,
            self.run_a_little: 8,
            self.update_between_steps: 2,
            self.update_in_a_pause: 4,
            self.update_and_keep_prefixes: 1,
            self.recompute: 1,
            self.compare: 4,
            self.collect: 2,
        }
        for _ in range(num_steps):
            step = self.rng.choices([*steps], [*steps.values()])[0]
            self.log.append(step.__name__)
            try:
                step()
            except BaseException as problem:
                problem.add_note(f"version {self.version}; last steps: {', '.join(self.log)}")
                raise
        self.collect()

    def begin(self) -> None:
        if len(self.rollouts) >= 6:
            return
        prompt = self._prompt()
        params = SamplingParams(
            temperature=0, max_tokens=self.rng.randrange(1, 70), ignore_eos=True, logprobs=1
        )
        self.llm.enqueue([tokens_of(prompt)], params, use_tqdm=False)
        exact = None if self.is_mixed else 0
        self.rollouts.append(Rollout(prompt, [(self.version, 0)], exact))

    def run_a_little(self) -> None:
        for _ in range(self.rng.randrange(1, 12)):
            self.llm._dispatcher.pump(0.001)

    def update(self, reset: bool = True) -> None:
        version = self.rng.randrange(len(self.policy.weights))
        self.llm.update_weights(
            self.policy.weights[version], version=version, reset_prefix_cache=reset
        )
        changed, self.version = version != self.version, version
        self.is_mixed = not reset and (self.is_mixed or changed)
        for rollout, (status, count) in zip(self.rollouts, self._states(), strict=True):
            rollout.starts.append((version, count))
            if status and changed:
                rollout.exact_from = None

    def update_between_steps(self) -> None:
        """In another process the engine would have gone on before we counted its tokens."""
        if self.llm.engine_pid == os.getpid():
            self.update()

    def update_in_a_pause(self) -> None:
        clear = self.rng.random() < 0.5
        self.llm.pause_generation("keep", clear_cache=clear)
        self.update()
        if self.rng.random() < 0.3:
            self.update()
        if clear:
            self._recomputed()
        self.run_a_little()  # nothing runs
        assert self.llm.resume_generation()

    def update_and_keep_prefixes(self) -> None:
        self.llm.pause_generation("keep", clear_cache=False)
        self.update(reset=False)
        self.llm.resume_generation()

    def recompute(self) -> None:
        assert self.llm.reset_prefix_cache(reset_running_requests=True)
        self.is_mixed = False
        self._recomputed()

    def compare(self) -> None:
        if self.is_mixed:
            return
        trajectories = [self._prompt() for _ in range(2)]
        for state in self.llm._enqueued._states:
            trajectories.append(state.request.prompt_token_ids + state.token_ids)
        check_current(self.llm, self.policy.fresh[self.version], self.version, trajectories[-3:])

    def collect(self) -> None:
        states, rollouts, self.rollouts = [*self.llm._enqueued._states], self.rollouts, []
        for rollout, state, output in zip(
            rollouts, states, self.llm.wait_for_completion(use_tqdm=False), strict=True
        ):
            completion = output.outputs[0]
            assert completion.finish_reason == "length"
            assert spans_of(output) == rollout.spans(len(completion.token_ids))
            self.seen.append(rollout.prompt + completion.token_ids)
            if rollout.exact_from is not None:
                self._check_end(rollout, state.request.params, output)

    def _check_end(self, rollout: Rollout, params: SamplingParams, output: RequestOutput) -> None:
        """Assert that the tokens since the last update are those of a fresh engine."""
        token_ids, logprobs = said(output)
        assert rollout.exact_from is not None
        begin = max(rollout.exact_from, rollout.starts[-1][1])
        if begin < len(token_ids):
            rest = SamplingParams(
                temperature=0, max_tokens=len(token_ids) - begin, ignore_eos=True, logprobs=1
            )
            prompt = rollout.prompt + token_ids[:begin]
            version = rollout.starts[-1][0]
            expected = continuation(self.policy.fresh[version], prompt, rest)
            assert (token_ids[begin:], logprobs[begin:]) == expected

    def _recomputed(self) -> None:
        for rollout, (_, count) in zip(self.rollouts, self._states(), strict=True):
            rollout.exact_from = count

    def _states(self) -> list[tuple[bool, int]]:
        """Of each rollout, whether it has not ended, and its number of output tokens so far."""
        self.llm._dispatcher.pump(
            0.0
        )  # takes what was computed before a call, and computes nothing
        return [
            (state.finish_reason is None, len(state.token_ids))
            for state in self.llm._enqueued._states
        ]

    def _prompt(self) -> list[int]:
        """New tokens, or the beginning of a trajectory and new tokens."""
        own = [self.rng.randrange(1, 4096) for _ in range(self.rng.choice((3, 20, 100, 150)))]
        if self.seen and self.rng.random() < 0.7:
            known = self.rng.choice(self.seen)
            return (known[: self.rng.randrange(len(known))] + own[:3])[:300]
        return own
