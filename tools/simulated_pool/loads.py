"""Loads: requests with token ids, lengths and times, drawn with a seed.

A request may wait for another one: the next turn of a chat is sent some time after the reply to the
turn before. Lengths are lognormal. This module must not know engines and rules.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count

from shmllm.client.routing import chain_hashes
from simulated_pool.engine import Job

VOCABULARY = range(16, 4096)
MAX_TOKENS = 900
"""The most tokens of a request: the bundled model has a context of 1,024."""


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and its completions, which one engine computes.

    Attributes:
        prompt: its token ids.
        num_outputs: the number of tokens of each completion.
        chain: the `chain_hashes` of the prompt.
        hashes: those of the blocks of each completion, prompt and output.
        after_s: when it is sent, in seconds; for a later turn the time since the reply before.
        next_turn: the request that its end lets come.
    """

    prompt: Sequence[int]
    num_outputs: int
    chain: Sequence[int]
    hashes: Sequence[Sequence[int]]
    after_s: float = 0.0
    next_turn: Request | None = None

    def jobs(self, now_s: float) -> list[Job]:
        """New jobs, one for each completion."""
        prompt, outputs = len(self.prompt), self.num_outputs
        return [Job(prompt, outputs, each, now_s) for each in self.hashes]


@dataclass
class Draw:
    """Draws the parts of requests.

    Args:
        seed: the seed of everything that is drawn.
        block_size: the number of tokens in a block.
    """

    seed: int
    block_size: int
    _numbers: count[int] = field(default_factory=lambda: count(1))

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def length(self, median: float, sigma: float, most: int) -> int:
        """A lognormal number of tokens from 1 to `most`."""
        return min(max(round(median * self.random.lognormvariate(0, sigma)), 1), most)

    def tokens(self, num_tokens: int) -> list[int]:
        """Random token ids."""
        return self.random.choices(VOCABULARY, k=num_tokens)

    def request(self, prompt: Sequence[int], num_outputs: int, n: int = 1) -> Request:
        """A request whose completions share nothing but the prompt."""
        chain = chain_hashes(prompt, self.block_size)
        num_blocks = (len(prompt) + num_outputs) // self.block_size
        own = [[next(self._numbers) for _ in range(len(chain), num_blocks)] for _ in range(n)]
        return Request(prompt, num_outputs, chain, [chain + each for each in own])

    def chat(self, system: Sequence[int], num_turns: int, think_s: float) -> Request:
        """The first turn of a chat. Each prompt repeats all turns before it, and their replies."""
        first: Request | None = None
        before: Request | None = None
        known = list(system)
        for _ in range(num_turns):
            prompt = known + self.tokens(self.length(40, 0.7, 200))
            num_outputs = self.length(60, 0.7, 200)
            known = prompt + self.tokens(num_outputs)
            if len(known) > MAX_TOKENS and before is not None:
                break
            chain = chain_hashes(prompt, self.block_size)
            request = Request(prompt, num_outputs, chain, [chain_hashes(known, self.block_size)])
            if before is None:
                first = request
            else:
                before.next_turn = request
                request.after_s = self.random.expovariate(1 / think_s)
            before = request
        assert first is not None
        return first


def systems(draw: Draw, num_engines: int, num_requests: int) -> list[Request]:
    """Requests behind system prompts of about 400 tokens, four of them an engine, whose shares
    follow Zipf's law."""
    prompts = [draw.tokens(draw.length(400, 0.3, 640)) for _ in range(4 * num_engines)]
    weights = list(accumulate(1 / rank for rank in range(1, len(prompts) + 1)))
    chosen = draw.random.choices(prompts, cum_weights=weights, k=num_requests)
    return [
        draw.request(each + draw.tokens(draw.length(40, 0.8, 120)), draw.length(40, 0.8, 120))
        for each in chosen
    ]


def chats(draw: Draw, num_engines: int, num_requests: int) -> list[Request]:
    """Chats of four turns with one system prompt of 32 tokens; a person thinks for a second."""
    system = draw.tokens(32)
    return [draw.chat(system, 4, think_s=1.0) for _ in range(num_requests // 4)]


def groups(draw: Draw, num_engines: int, num_requests: int) -> list[Request]:
    """GRPO: prompts of about 160 tokens behind the same 32, eight completions each."""
    shared = draw.tokens(32)
    return [
        draw.request(
            shared + draw.tokens(draw.length(160, 0.4, 480)), draw.length(100, 0.6, 300), n=8
        )
        for _ in range(num_requests // 8)
    ]


def apart(draw: Draw, num_engines: int, num_requests: int) -> list[Request]:
    """GRPO as some trainers send it: each completion is a request of its own."""
    shared = draw.tokens(32)
    prompts = [shared + draw.tokens(draw.length(160, 0.4, 480)) for _ in range(num_requests // 8)]
    return [draw.request(each, draw.length(100, 0.6, 300)) for each in prompts for _ in range(8)]


def skewed(draw: Draw, num_engines: int, num_requests: int) -> list[Request]:
    """Prompts that share nothing, a few of them and of the outputs much longer than the others."""
    return [
        draw.request(draw.tokens(draw.length(80, 1.2, 600)), draw.length(40, 1.2, 300))
        for _ in range(num_requests)
    ]


@dataclass(frozen=True)
class Load:
    """A kind of load.

    Attributes:
        make: draws about so many requests for so many engines.
        is_batch: whether all are sent at once; otherwise they arrive as a Poisson process.
    """

    make: Callable[[Draw, int, int], list[Request]]
    is_batch: bool


LOADS = {
    "systems": Load(systems, is_batch=False),
    "chats": Load(chats, is_batch=False),
    "skewed": Load(skewed, is_batch=False),
    "groups": Load(groups, is_batch=True),
    "apart": Load(apart, is_batch=True),
    "batch": Load(systems, is_batch=True),
}


def arrive(requests: Sequence[Request], per_s: float, seed: int) -> None:
    """Let the requests arrive as a Poisson process with so many in a second."""
    draw, now_s = random.Random(seed), 0.0
    for request in requests:
        now_s += draw.expovariate(per_s)
        request.after_s = now_s
