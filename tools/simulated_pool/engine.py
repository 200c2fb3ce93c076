"""An engine in simulated time: the scheduler of `shmllm.core` without tokens, and its prefix cache.

As in `core.scheduler`, running requests come first and waiting ones follow under one token budget,
a prompt is computed in chunks, and the request that was admitted last is preempted if no block is
free. A step takes the time that a `StepCost` says. This module must not know the rules that choose
an engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepCost:
    """The duration of a step in seconds: a + b * tokens + c * requests + d * context.

    Attributes:
        step_s: a, what every step takes.
        token_s: b, for each token that the step computes.
        request_s: c, for each request of the step.
        context_s: d, for each pair of a computed token and an earlier token of its request.
    """

    step_s: float
    token_s: float
    request_s: float
    context_s: float

    def seconds(self, tokens: int, requests: int, context: float) -> float:
        """The duration of a step."""
        return (
            self.step_s
            + self.token_s * tokens
            + self.request_s * requests
            + self.context_s * context
        )


@dataclass(frozen=True)
class Limits:
    """What an engine holds, with the names of its options."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    num_blocks: int = 4096
    block_size: int = 16


@dataclass(slots=True, eq=False)
class Job:
    """One completion of a request.

    Attributes:
        num_prompt: the number of its prompt tokens.
        num_outputs: the number of tokens that it generates; at least 1.
        hashes: the hash of each full block of its prompt and output.
        arrival_s: when it was sent.
        num_cached: prompt tokens that were cached when it was first admitted; None before that.
        num_computed: the number of computed tokens.
        num_generated: the number of sampled tokens.
        num_blocks: the number of its blocks.
        registered: the hashes of those that are in the prefix cache, in their order.
    """

    num_prompt: int
    num_outputs: int
    hashes: Sequence[int]
    arrival_s: float
    num_cached: int | None = None
    num_computed: int = 0
    num_generated: int = 0
    num_blocks: int = 0
    registered: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """The number of its known tokens."""
        return self.num_prompt + self.num_generated


class Blocks:
    """The KV blocks of an engine: those of jobs, and the free ones that are still cached.

    Args:
        num_blocks: the number of blocks.
        block_size: the number of tokens in a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self._size = block_size
        self._users: dict[int, int] = {}
        self._idle: dict[int, None] = {}
        self._num_unregistered = 0

    @property
    def num_used(self) -> int:
        """The number of blocks that jobs have."""
        return len(self._users) + self._num_unregistered

    def num_hits(self, job: Job) -> int:
        """The cached blocks at the beginning of a job, without its last known token."""
        most = (job.num_tokens - 1) // self._size
        for index in range(most):
            if job.hashes[index] not in self._users and job.hashes[index] not in self._idle:
                return index
        return most

    def admit(self, job: Job, num_hits: int, num_tokens: int) -> bool:
        """Give a job its cached blocks and those that its first `num_tokens` tokens need besides.
        Returns False, without any change, if there are too few."""
        hits = job.hashes[:num_hits]
        num_new = -(-num_tokens // self._size) - num_hits
        num_revived = sum(each in self._idle for each in hits)
        if self.num_used + num_revived + num_new > self.num_blocks:
            return False
        for each in hits:
            self._users[each] = self._users.get(each, 0) + 1
            self._idle.pop(each, None)
        job.registered = list(hits)
        job.num_blocks = num_hits
        job.num_computed = num_hits * self._size
        return self.extend(job, num_tokens)

    def extend(self, job: Job, num_tokens: int) -> bool:
        """Give a job the blocks for its first `num_tokens` tokens. Returns whether there are so
        many."""
        num_new = -(-num_tokens // self._size) - job.num_blocks
        if num_new <= 0:
            return True
        if self.num_used + num_new > self.num_blocks:
            return False
        self._num_unregistered += num_new
        job.num_blocks += num_new
        for _ in range(self.num_used + len(self._idle) - self.num_blocks):
            del self._idle[next(iter(self._idle))]
        return True

    def register(self, job: Job) -> None:
        """Add the full blocks of a job to the prefix cache, but for those of others."""
        for index in range(len(job.registered), job.num_computed // self._size):
            block = job.hashes[index]
            if block in self._users or block in self._idle:
                return  # computed twice at a time; the job keeps its copies
            self._users[block] = 1
            self._num_unregistered -= 1
            job.registered.append(block)

    def release(self, job: Job) -> None:
        """Take all blocks of a job, the last one to be reused first."""
        self._num_unregistered -= job.num_blocks - len(job.registered)
        for block in reversed(job.registered):
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
                self._idle[block] = None
        job.registered, job.num_blocks, job.num_computed = [], 0, 0


class Engine:
    """
    Args:
        cost: the duration of a step.
        limits: what the engine holds.
    """

    def __init__(self, cost: StepCost, limits: Limits) -> None:
        self._cost = cost
        self._limits = limits
        self.blocks = Blocks(limits.num_blocks, limits.block_size)
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.num_preemptions = 0
        self._sampling: list[Job] = []
        self._num_tokens = self._num_requests = 0
        self._context = 0.0

    def add(self, job: Job) -> None:
        """Queue a job."""
        self.waiting.append(job)

    def begin_step(self) -> float | None:
        """Plan a step. Returns its duration in seconds, or None if there is nothing to compute."""
        self._sampling = []
        self._num_tokens = self._num_requests = 0
        self._context = 0.0
        if self._plan_running():
            self._plan_waiting()
        if not self._num_tokens:
            return None
        return self._cost.seconds(self._num_tokens, self._num_requests, self._context)

    def _plan_running(self) -> bool:
        """Plan tokens of the running jobs. Returns whether none was preempted."""
        index, is_undisturbed = 0, True
        while index < len(self.running) and self._budget_left:
            job = self.running[index]
            index += 1
            missing = job.num_tokens - job.num_computed
            count = min(missing, self._budget_left)
            while not self.blocks.extend(job, job.num_computed + count):
                is_undisturbed = False
                victim = self.running.pop()
                self._preempt(victim)
                if victim is job:
                    return False
            self._compute(job, count, missing)
        return is_undisturbed

    def _plan_waiting(self) -> None:
        size = self._limits.block_size
        while self.waiting and self._budget_left and self._has_row:
            job = self.waiting[0]
            num_hits = self.blocks.num_hits(job)
            missing = job.num_tokens - num_hits * size
            count = min(missing, self._budget_left)
            if not self.blocks.admit(job, num_hits, num_hits * size + count):
                break
            self.running.append(self.waiting.popleft())
            if job.num_cached is None:
                job.num_cached = job.num_computed
            self._compute(job, count, missing)

    def end_step(self) -> list[Job]:
        """End the step. Returns the jobs that have a new token; those with all of them are gone."""
        sampled = self._sampling
        any_ended = False
        for job in sampled:
            job.num_generated += 1
            if job.num_generated == job.num_outputs:
                self.blocks.release(job)
                any_ended = True
        if any_ended:
            self.running = [job for job in self.running if job.num_generated < job.num_outputs]
        return sampled

    @property
    def _budget_left(self) -> int:
        return self._limits.max_num_batched_tokens - self._num_tokens

    @property
    def _has_row(self) -> bool:
        return len(self.running) < self._limits.max_num_seqs

    def _compute(self, job: Job, count: int, missing: int) -> None:
        """Plan `count` tokens of a job, which lacks `missing` to sample its next one."""
        self._num_tokens += count
        self._num_requests += 1
        self._context += count * (job.num_computed + 0.5 * (count - 1))
        job.num_computed += count
        if job.num_computed % self._limits.block_size < count:
            self.blocks.register(job)
        if count == missing:
            self._sampling.append(job)

    def _preempt(self, job: Job) -> None:
        self.blocks.release(job)
        self.waiting.appendleft(job)
        self.num_preemptions += 1
