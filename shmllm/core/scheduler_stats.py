"""What a scheduler counts, and the requests that it ends with an error."""

from __future__ import annotations

from dataclasses import dataclass, field

from shmllm.config.speculative import MOST_DRAFTED
from shmllm.core.request import Request


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that ended with an error after the engine had queued it."""

    client: int
    number: int
    message: str


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start. `prefix_*` and `shared_*` count tokens; recomputed requests do not
    count.

    Attributes:
        shared_query_tokens: the prompt tokens that the engine's own prefix cache lacked, while it
            shared blocks with others.
        shared_hit_tokens: those of them, and of prefix_hit_tokens, that shared blocks had.
        drafts: how often tokens were drafted for a request.
        draft_tokens: the drafted tokens that a step computed.
        accepted_tokens: those that were the tokens that were sampled.
        draft_break_even: the share of drafts that must be accepted for them to save time, measured
            when some were drafted last; 1 and more: none would. 0: it is not known.
        accepted_at: by their place in the draft, from 0.
    """

    steps: int = 0
    preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    shared_query_tokens: int = 0
    shared_hit_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    requests_finished: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    draft_break_even: float = 0.0
    accepted_at: list[int] = field(default_factory=lambda: [0] * MOST_DRAFTED)

    def add_admitted(self, request: Request, num_elsewhere: int | None) -> None:
        """Count a request that is admitted for the first time.

        Args:
            request: the request.
            num_elsewhere: how many of its cached tokens are from outside of the engine's own cache;
                None: the engine shares no blocks.
        """
        num_prompt = request.num_prompt_tokens - request.num_encoded
        num_cached = request.num_cached_tokens or 0
        self.prompt_tokens += num_prompt
        if request.params.reads_prefix_cache:
            self.prefix_query_tokens += num_prompt
            self.prefix_hit_tokens += num_cached
            if num_elsewhere is not None:
                self.shared_query_tokens += num_prompt - (num_cached - num_elsewhere)
                self.shared_hit_tokens += num_elsewhere

    def add_draft(self, num_drafted: int, num_accepted: int) -> None:
        """Count one draft."""
        self.drafts += 1
        self.draft_tokens += num_drafted
        self.accepted_tokens += num_accepted
        for place in range(num_accepted):
            self.accepted_at[place] += 1
