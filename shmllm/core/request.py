"""The scheduler's state of one request.

A request has no prefill state and no decode state. It has tokens (the prompt, then the output) and
`num_computed_tokens`, and every step lets the second number catch up with the number of tokens.
Tokens count as computed as soon as a step that computes them is planned. If all known tokens of a
request count as computed, one more token is in flight: a step samples it, and the next step may
compute it before its value is known here.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from enum import Enum, auto
from time import monotonic_ns
from typing import Any

from shmllm.core.block_table import BlockTable
from shmllm.core.constraint import Constraint
from shmllm.outputs.columns import FinishReason
from shmllm.params.pooling import Pooling
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import RepetitionDetectionParams, SamplingParams

ENCODED = -1
"""What stands for a position that an encoder computes."""


class RequestStatus(Enum):
    """
    WAITING  -> RUNNING    admitted: the request gets a row and blocks. A request whose grammar is
                           still being compiled is not admitted.
    RUNNING  -> WAITING    preempted: it gives both back and is recomputed later.
    either   -> FINISHED
    """

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Request:
    """
    Args:
        client: the front end that submitted it.
        submitted: the request as submitted, validated by the front end.
        seed: the seed of its random draws.
        max_model_len: the largest number of prompt and output tokens together.
        eos_token_ids: the model's end-of-sequence tokens.
        num_encoded: see the attribute.

    Attributes:
        number: the front end's number for it.
        params: its sampling parameters. Those of a pooling request only say whether it reads the
            prefix cache.
        pooling: how to make a vector of the prompt's hidden states; None to generate tokens.
        arrival: the number of requests that were added to the scheduler before it.
        constraint: the state of its grammar. It survives a preemption, because it follows the
            tokens and not their computation.
        last_step: the number of the last step for which the scheduler has decided to compute
            tokens of it, unchanged steps apart; -1: none.
        next_prompt_logprob: the first prompt position whose log-probability has not been planned
            yet. It only grows, so a recomputed request reports no position twice.
        queued_ns: when the request was created, in ns of CLOCK_MONOTONIC.
        scheduled_ns: when it was first admitted, in ns of CLOCK_MONOTONIC; 0 before that.
        num_cached_tokens: how many prompt tokens the prefix cache held when the request was first
            admitted; None before that.
        block_tables: its blocks in each group of layers; [] unless it is running.
        num_cached_blocks: how many blocks of each table were added to the prefix cache.
        items: the images of its prompt, in order.
        num_encoded: how many positions are before its text, of which an encoder computes those of
            its only item; 0: the model has no such positions. `token_ids` has ENCODED there, and
            the prompt includes them.
        lora_id: identifies its adapter; 0: it has none.
        adapter: the runner's form of its adapter, from its admission on; None: it has none.
        drafting: what a drafter remembers of the request.
        saved_state: the copy of its recurrent state; None: it has none.
        acceptance: takes note of how many of its drafted tokens were right; None: nobody asks.
        num_draft_tokens: how many drafted tokens of the request steps have computed.
        num_accepted_tokens: how many of them were right.
    """

    __slots__ = (
        "_own_salt",
        "acceptance",
        "adapter",
        "arrival",
        "bad_words",
        "block_hashes",
        "block_tables",
        "cache_salt",
        "client",
        "constraint",
        "drafting",
        "embeds",
        "end_ids",
        "items",
        "last_step",
        "lora_id",
        "max_tokens",
        "next_prompt_logprob",
        "num_accepted_tokens",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_draft_tokens",
        "num_encoded",
        "num_preemptions",
        "num_prompt_tokens",
        "number",
        "params",
        "pooling",
        "priority",
        "queued_ns",
        "row",
        "saved_state",
        "scheduled_ns",
        "seed",
        "status",
        "stop_ids",
        "thinking",
        "token_ids",
    )

    def __init__(
        self,
        client: int,
        submitted: EngineCoreRequest,
        *,
        seed: int,
        max_model_len: int,
        eos_token_ids: Sequence[int] = (),
        num_encoded: int = 0,
    ) -> None:
        self.client = client
        self.number = submitted.number
        self.num_encoded = num_encoded
        self.token_ids = array("i", [ENCODED]) * num_encoded
        self.token_ids.extend(submitted.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.pooling = submitted.params if isinstance(submitted.params, Pooling) else None
        self.params = params = _sampling_params_of(submitted)
        self.seed = seed
        room = max_model_len - len(submitted.prompt_token_ids)
        self.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        self.end_ids = frozenset(eos_token_ids)
        self.stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else self.end_ids
        )
        if params.trace_decode_token_ids is not None:
            self.max_tokens = min(self.max_tokens, len(params.trace_decode_token_ids))
            self.stop_ids = frozenset()
        self.cache_salt = self._own_salt = submitted.cache_salt
        self.lora_id = 0 if submitted.lora is None else submitted.lora.lora_int_id
        self.adapter: Any = None
        self.drafting: Any = None
        self.acceptance: Any = None
        self.saved_state: Any = None
        self.priority = submitted.priority
        self.arrival = 0
        self.bad_words = submitted.bad_words
        self.thinking = submitted.thinking
        self.embeds = submitted.embeds
        self.items = submitted.items
        self.constraint: Constraint | None = None
        self.next_prompt_logprob = num_encoded + 1 + (params.prompt_logprob_start or 0)
        self.status = RequestStatus.WAITING
        self.row = 0
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.last_step = -1
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.queued_ns = monotonic_ns()
        self.scheduled_ns = 0
        self.num_cached_tokens: int | None = None
        self.block_tables: list[BlockTable] = []
        self.block_hashes: list[bytes] = []
        self.num_cached_blocks = 0

    def unread_blocks(self, block_size: int) -> range:
        """The indices of blocks before the text that have no position which an encoder computes:
        nothing is written there or read. None are such in models without an encoder."""
        if not self.num_encoded:
            return range(0)
        return range(-(-self.items[0].end // block_size), self.num_encoded // block_size)

    def take_adapter(self, adapter: Any, digest: str) -> None:
        """Compute with an adapter from the next admission on.

        Args:
            adapter: the runner's form of it.
            digest: identifies its contents: blocks that other contents computed are no hits.
        """
        self.adapter = adapter
        salt = f"{self._own_salt}\0lora {digest}"
        if salt != self.cache_salt:
            self.cache_salt = salt
            self.block_hashes.clear()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens_left(self) -> int:
        """The number of output tokens until the request ends by its length."""
        return self.max_tokens - self.num_output_tokens

    @property
    def num_in_flight(self) -> int:
        """How many tokens of the request are being sampled by submitted steps: 0 or 1."""
        return int(self.num_computed_tokens == len(self.token_ids) and self.pooling is None)

    @property
    def num_uncomputed_tokens(self) -> int:
        """How many tokens can be planned. That includes the token in flight, unless the request
        ends with it."""
        if self.num_computed_tokens < len(self.token_ids):
            return len(self.token_ids) - self.num_computed_tokens
        return int(self.num_in_flight < self.num_tokens_left) * self.num_in_flight

    @property
    def is_only_decoding(self) -> bool:
        """Whether all of the request is computed except its last token or the token in flight,
        and only its length or one of `stop_ids` can end it."""
        return (
            self.num_prompt_tokens <= self.num_computed_tokens >= len(self.token_ids) - 1
            and self.pooling is None
            and self.constraint is None
            and not self.params.scores_prompt
            and self.params.repetition_detection is None
        )

    def extend(self, token_ids: Sequence[int]) -> tuple[int, FinishReason]:
        """Append sampled tokens until the request ends. Returns how many were appended, and why
        the request ends with the last one; NONE if it continues."""
        for count, token_id in enumerate(token_ids, 1):
            if finish := self.append(token_id):
                return count, finish
        return len(token_ids), FinishReason.NONE

    def append(self, token_id: int) -> FinishReason:
        """Append one sampled token. Returns why the request ends with it; NONE if it continues."""
        self.token_ids.append(token_id)
        if self.constraint is not None:
            finish = self.constraint.take(token_id)
            is_complete = finish is FinishReason.STOP and token_id not in self.end_ids
            if finish and not (is_complete and self._can_end()):
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

    def _can_end(self) -> bool:
        """Whether an end-of-sequence token may be sampled next. If so, an output that its grammar
        completes ends with one, as other outputs do."""
        params = self.params
        found = set(self.end_ids).difference(word[-1] for word in self.bad_words)
        if params.allowed_token_ids is not None:
            found.intersection_update(params.allowed_token_ids)
        biases = params.logit_bias or {}
        is_possible = any(biases.get(token, 0.0) > -math.inf for token in found)
        return is_possible and self.num_output_tokens >= params.min_tokens

    def __repr__(self) -> str:
        return (
            f"Request(client={self.client}, number={self.number}, {self.status.name}, "
            f"{self.num_computed_tokens}/{self.num_tokens} tokens computed)"
        )


def _sampling_params_of(submitted: EngineCoreRequest) -> SamplingParams:
    if isinstance(submitted.params, SamplingParams):
        return submitted.params
    skips = not submitted.params.reads_prefix_cache
    return SamplingParams(temperature=0, skip_reading_prefix_cache=skips)


def ends_in_repetition(token_ids: Sequence[int], params: RepetitionDetectionParams) -> bool:
    """Whether `token_ids` end with a pattern that occurs `min_count` times in a row."""
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
