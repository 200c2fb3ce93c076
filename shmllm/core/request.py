"""One request as the scheduler sees it.

There is no prefill state and no decode state: a request has tokens (prompt, then output)
and `num_computed_tokens`, and every step lets the second catch up with the first. A step that
is planned counts as computed, so a request all of whose tokens are computed has one more under
way, which can be computed without being known here.
"""

from __future__ import annotations

from array import array
from enum import Enum, auto
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from shmllm.outputs.columns import FinishReason
from shmllm.params.sampling import RepetitionDetectionParams, SamplingParams, TokenSequences

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmllm.core.block_pool import KVBlock
    from shmllm.core.plan import Constraint
    from shmllm.params.pooling import Pooling


class RequestStatus(Enum):
    """
    WAITING  -> RUNNING    admitted: has a row and blocks; not while its grammar compiles
    RUNNING  -> WAITING    preempted: gave both back, will be recomputed
    either   -> FINISHED
    """

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Request:
    """
    Args:
        client: the front end it came from.
        number: the front end's number for it.
        prompt_token_ids: at least one token.
        params: as validated by the front end.
        seed: of its random draws.
        max_model_len: tokens of prompt and output together, at most.
        eos_token_ids: the model's end-of-sequence tokens.
        priority: lower goes first, where the scheduler looks at it.
        bad_words: token sequences that the output may not contain.
        embeds: a tensor in place of the embeddings of the prompt's tokens, or None.
        pooling: what to make of the prompt's hidden states instead of generating.

    Attributes:
        arrival: its place in the order in which requests came to the scheduler.
        constraint: what the output has to match, and how far it has come; it stays through
            preemption, since it follows tokens and not their computation.
        next_prompt_logprob: the first prompt position whose log-probability was not planned
            yet. It only grows, so a request that is recomputed reports none twice.
        queued_ns: when it was made, on CLOCK_MONOTONIC.
        scheduled_ns: when it first got a place in a step; 0 before.
    """

    __slots__ = (
        "arrival",
        "bad_words",
        "block_hashes",
        "blocks",
        "cache_salt",
        "client",
        "constraint",
        "embeds",
        "max_tokens",
        "next_prompt_logprob",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "number",
        "params",
        "pooling",
        "priority",
        "queued_ns",
        "row",
        "scheduled_ns",
        "seed",
        "status",
        "stop_ids",
        "token_ids",
    )

    def __init__(
        self,
        client: int,
        number: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        max_model_len: int,
        eos_token_ids: Sequence[int] = (),
        cache_salt: str = "",
        priority: int = 0,
        bad_words: TokenSequences = (),
        pooling: Pooling | None = None,
        embeds: Any = None,
    ) -> None:
        self.client = client
        self.number = number
        self.token_ids = array("i", prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.params = params
        self.seed = seed
        room = max_model_len - self.num_prompt_tokens
        self.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        self.stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        )
        self.cache_salt = cache_salt
        self.priority = priority
        self.arrival = 0
        self.bad_words = bad_words
        self.pooling = pooling
        self.embeds = embeds
        self.constraint: Constraint | None = None
        self.next_prompt_logprob = 1
        self.status = RequestStatus.WAITING
        self.row = 0
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.queued_ns = monotonic_ns()
        self.scheduled_ns = 0
        self.num_cached_tokens: int | None = None
        self.blocks: list[KVBlock] = []
        self.block_hashes: list[bytes] = []
        self.num_cached_blocks = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens_left(self) -> int:
        """Output tokens until it ends by its length."""
        return self.max_tokens - self.num_output_tokens

    @property
    def num_under_way(self) -> int:
        """Tokens that steps sample now, while the next one may be planned: 0 or 1."""
        return int(self.num_computed_tokens == len(self.token_ids) and self.pooling is None)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens to be computed, the one under way among them unless the request ends with it."""
        if self.num_computed_tokens < len(self.token_ids):
            return len(self.token_ids) - self.num_computed_tokens
        return int(self.num_under_way < self.num_tokens_left) * self.num_under_way

    @property
    def is_only_decoding(self) -> bool:
        """Whether its prompt is computed, and all of its output but the last token or the one
        under way; and only its length or one of `stop_ids` can end it."""
        return (
            self.num_prompt_tokens <= self.num_computed_tokens >= len(self.token_ids) - 1
            and self.pooling is None
            and self.constraint is None
            and self.params.prompt_logprobs is None
            and self.params.repetition_detection is None
        )

    def append(self, token_id: int) -> FinishReason:
        """Take one sampled token; says whether the request ends with it."""
        self.token_ids.append(token_id)
        if self.constraint is not None:
            finish = self.constraint.take(token_id)
            if finish:
                return finish
        num_output = len(self.token_ids) - self.num_prompt_tokens
        if token_id in self.stop_ids and num_output > self.params.min_tokens:
            return FinishReason.STOP
        if num_output >= self.max_tokens:
            return FinishReason.LENGTH
        detection = self.params.repetition_detection
        if detection is not None and num_output >= self.params.min_tokens:
            tail = self.token_ids[-detection.max_pattern_size * detection.min_count :]
            if ends_in_repetition(tail[-num_output:], detection):
                return FinishReason.REPETITION
        return FinishReason.NONE

    def __repr__(self) -> str:
        return (
            f"Request(client={self.client}, number={self.number}, {self.status.name}, "
            f"{self.num_computed_tokens}/{self.num_tokens} tokens computed)"
        )


def ends_in_repetition(token_ids: Sequence[int], params: RepetitionDetectionParams) -> bool:
    """Whether `token_ids` end with a piece that stands there `min_count` times in a row."""
    if not params.max_pattern_size:
        return False
    for size in range(max(params.min_pattern_size, 1), params.max_pattern_size + 1):
        length = size * params.min_count
        if length > len(token_ids):
            return False
        # A run repeats with this period if it equals itself shifted by the period.
        if token_ids[-length:-size] == token_ids[len(token_ids) - length + size :]:
            return True
    return False
