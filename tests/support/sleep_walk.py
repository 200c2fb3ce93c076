"""A random walk over all that changes whether an engine can generate, and a model of it.

The model knows the documented behaviour and nothing of how it comes about: what is asleep,
which weights are there, who paused, and so what each call has to do. Whatever the engine does
otherwise fails the walk, with its seed and its last steps.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shmllm import LLM, EnginePausedError, RequestError, SamplingParams
from shmllm.frontend.pausing import PauseMode

TAGS = ("weights", "kv_cache", "scheduling")
MEMORY = {"weights", "kv_cache"}
MODES: tuple[PauseMode, ...] = ("abort", "wait", "keep")
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)

Weights = Mapping[str, Any]


@dataclass
class Pending:
    """A request that was queued and not collected.

    Attributes:
        refused: has to be an error.
        aborted: has to end with "abort", or has ended before.
        exact: no weights were written since, so that its tokens are known.
    """

    prompt: int
    refused: bool
    aborted: bool = False
    exact: bool = True


@dataclass
class Walk:
    """
    Args:
        llm: the engine; loaded with the weights `sets[0]`.
        sets: complete weights, by name.
        prompts: token ids.
        expected: tokens of prompt p with weights w.

    Attributes:
        refusals_s: how long each refusal took.
        steps: how often each was done.
    """

    llm: LLM
    sets: list[Weights]
    prompts: list[list[int]]
    expected: list[list[list[int]]]
    rng: random.Random
    asleep: set[str] = field(default_factory=set)
    keeps: bool = False
    pause: str | None = None
    weights: dict[str, int | None] = field(default_factory=dict)
    pending: list[Pending] = field(default_factory=list)
    refusals_s: list[float] = field(default_factory=list)
    steps: Counter[str] = field(default_factory=Counter)
    log: deque[str] = field(default_factory=lambda: deque(maxlen=30))

    def __post_init__(self) -> None:
        self.weights = dict.fromkeys(self.sets[0], 0)

    def run(self, num_steps: int) -> None:
        """Walk. Raises AssertionError, with the last steps, where the engine does otherwise."""
        kinds: list[tuple[Callable[[], None], int]] = [
            (self.sleep, 5),
            (self.wake, 7),
            (self.update_all, 3),
            (self.update_one, 1),
            (self.update_wrongly, 1),
            (self.reload, 2),
            (self.generate, 6),
            (self.enqueue, 3),
            (self.run_a_little, 4),
            (self.abort, 1),
            (self.collect, 2),
            (self.pausing, 2),
            (self.resume, 3),
            (self.reset, 1),
            (self.nonsense, 1),
            (self.recover, 1),
        ]
        steps, shares = zip(*kinds, strict=True)
        for _ in range(num_steps):
            step = self.rng.choices(steps, shares)[0]
            self.steps[step.__name__] += 1
            self.log.append(step.__name__)
            try:
                step()
                self.check()
            except BaseException as problem:
                problem.add_note(f"state: {self.state()}; last steps: {', '.join(self.log)}")
                raise
        self.recover()

    # What the model says.

    @property
    def missing(self) -> bool:
        return None in self.weights.values()

    @property
    def is_frozen(self) -> bool:
        return bool(self.asleep or self.missing or self.pause in ("abort", "keep"))

    @property
    def refuses(self) -> bool:
        sleeping = bool(self.asleep) and not self.keeps
        return sleeping or (not self.asleep and self.missing) or self.pause == "wait"

    @property
    def pure(self) -> int | None:
        """Which complete set the engine has."""
        found = set(self.weights.values())
        return found.pop() if len(found) == 1 else None

    def state(self) -> str:
        return (
            f"asleep={sorted(self.asleep)} keeps={self.keeps} pause={self.pause} "
            f"weights={set(self.weights.values())} pending={len(self.pending)}"
        )

    def check(self) -> None:
        assert self.llm.is_sleeping() == bool(self.asleep)

    # What can be done.

    def sleep(self) -> None:
        level, mode = self.rng.choice((0, 1, 2)), self.rng.choice(MODES)
        self.log.append(f"({level}, {mode})")
        was_asleep = bool(self.asleep)
        report = self.llm.sleep(level, mode)
        self.asleep |= {"scheduling"} if level == 0 else set(TAGS)
        if not was_asleep or mode != "wait":
            self.keeps = mode == "keep"
        if level == 2:
            self.weights = dict.fromkeys(self.weights, None)
        if mode == "abort":
            self._abort_all()
        assert report.asleep == tuple(tag for tag in TAGS if tag in self.asleep)
        assert bool(report.num_missing) == self.missing
        if mode == "abort":
            assert report.num_kept == 0

    def wake(self) -> None:
        tags = None
        if self.rng.random() < 0.6:
            tags = self.rng.sample(TAGS, self.rng.choice((0, 1, 1, 1, 2, 3)))
        self.log.append(f"({tags})")
        is_awake = self.llm.wake_up(tags)
        had_memory = bool(self.asleep & MEMORY)
        self.asleep -= set(TAGS if tags is None else tags)
        if had_memory and not self.asleep & MEMORY:
            self.asleep.clear()
        assert is_awake == (not self.asleep and not self.missing)

    def update_all(self) -> None:
        index = self.rng.randrange(len(self.sets))
        names = list(self.sets[index])
        self.rng.shuffle(names)
        self._update(names, index)

    def update_one(self) -> None:
        index = self.rng.randrange(len(self.sets))
        self._update([self.rng.choice(list(self.weights))], index)

    def update_wrongly(self) -> None:
        name = self.rng.choice(list(self.weights))
        good, bad = self.rng.choice(list(self.weights)), self.sets[0][name][:-1]
        self.refused(RequestError, lambda: self._load([(good, self.sets[0][good]), (name, bad)]))

    def reload(self) -> None:
        def call() -> None:
            self.llm.collective_rpc("reload_weights")

        if "weights" in self.asleep:
            self.refused(RequestError, call)
        else:
            call()
            self._written(self.weights, 0)

    def generate(self) -> None:
        index = self.rng.randrange(len(self.prompts))
        prompt: Any = {"prompt_token_ids": self.prompts[index]}
        if self.refuses:
            self.refused(
                EnginePausedError, lambda: self.llm.generate(prompt, GREEDY, use_tqdm=False)
            )
        elif not self.is_frozen:
            (output,) = self.llm.generate(prompt, GREEDY, use_tqdm=False)
            tokens = output.outputs[0].token_ids
            if self.pure is not None:
                assert tokens == self.expected[self.pure][index]
            assert len(tokens) == 5

    def enqueue(self) -> None:
        index = self.rng.randrange(len(self.prompts))
        self.llm.enqueue({"prompt_token_ids": self.prompts[index]}, GREEDY, use_tqdm=False)
        self.pending.append(Pending(index, self.refuses, exact=self.pure is not None))

    def run_a_little(self) -> None:
        """Have what was queued get some of its tokens."""
        for _ in range(self.rng.choice((1, 2, 3))):
            self.llm._dispatcher.pump(0.001)

    def abort(self) -> None:
        if self.pending:
            place = self.rng.randrange(len(self.pending))
            number = self.llm._enqueued._states[place].number
            self.llm._dispatcher.abort([number])
            self.pending[place].aborted = True

    def collect(self) -> None:
        """Everything that was queued, where it can end."""
        alive = [each for each in self.pending if not each.refused and not each.aborted]
        if self.is_frozen and alive:
            return
        pending, self.pending = self.pending, []
        outputs = self.llm.wait_for_completion(use_tqdm=False)
        for each, output in zip(pending, outputs, strict=True):
            completion = output.outputs[0]
            if each.refused:
                assert completion.finish_reason == "error"
                assert output.error
                continue
            allowed = ("abort", "length") if each.aborted else ("length",)
            assert completion.finish_reason in allowed
            if each.exact and self.pure is not None:
                tokens = self.expected[self.pure][each.prompt]
                assert completion.token_ids == tokens[: len(completion.token_ids)]

    def pausing(self) -> None:
        mode = self.rng.choice(MODES)
        self.log.append(f"({mode})")
        self.llm.reset_prefix_cache()  # the engine has taken what was sent before
        metrics = self.llm.get_metrics()
        unfinished = metrics["running"] + metrics["waiting"]

        def call() -> None:
            self.llm.pause_generation(mode, clear_cache=self.rng.random() < 0.5)

        if mode == "wait" and unfinished and (self.asleep or self.missing):
            self.refused(RequestError, call)
            return
        call()
        self.pause = mode
        if mode == "abort":
            self._abort_all()

    def resume(self) -> None:
        self.pause = None
        assert self.llm.resume_generation() == (not self.is_frozen)

    def reset(self) -> None:
        self.llm.reset_prefix_cache()

    def nonsense(self) -> None:
        self.refused(
            RequestError,
            self.rng.choice(
                (
                    lambda: self.llm.sleep(5),
                    lambda: self.llm.sleep(mode="now"),  # type: ignore[arg-type]
                    lambda: self.llm.wake_up(["everything"]),
                    lambda: self.llm.pause_generation("later"),  # type: ignore[arg-type]
                    lambda: self.llm.collective_rpc("get_weight", args=("none",)),
                )
            ),
        )

    def recover(self) -> None:
        """However it stands: what is documented to mend it does."""
        self.resume()
        self.llm.wake_up()
        self.asleep.clear()
        self.update_all()
        assert self.llm.wake_up()
        self.collect()
        self.generate()

    # How it is done.

    def refused(self, kind: type[Exception], call: Callable[[], Any]) -> None:
        """The call raises exactly that, and how long that took is kept."""
        began = time.perf_counter()
        try:
            call()
        except kind:
            self.refusals_s.append(time.perf_counter() - began)
        else:
            raise AssertionError(f"no {kind.__name__}")

    def _update(self, names: list[str], index: int) -> None:
        update = [(name, self.sets[index][name]) for name in names]
        if "weights" in self.asleep:
            self.refused(RequestError, lambda: self._load(update))
        else:
            self._load(update)
            self._written(names, index)

    def _load(self, update: list[tuple[str, Any]]) -> None:
        runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        runner.model.load_weights(update)

    def _written(self, names: Any, index: int) -> None:
        self.weights |= dict.fromkeys(names, index)
        for each in self.pending:
            each.exact = False

    def _abort_all(self) -> None:
        for each in self.pending:
            each.aborted = True
