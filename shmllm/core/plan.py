"""What the scheduler tells the runner to do in one step, and what comes back.

A running request sits in a row, an index below max_num_seqs that is its own from
admission until it ends or is preempted. The runner keeps per-row state (tokens, block
table, sampling) and needs only what changed: admissions and appended blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

from shmllm.outputs.columns import FinishReason
from shmllm.outputs.logprobs import TokenLogprobs

if TYPE_CHECKING:
    from shmllm.core.block_pool import KVBlock
    from shmllm.core.request import Request
    from shmllm.core.steady_decode import SteadyDecode
    from shmllm.params.pooling import Pooling
    from shmllm.params.sampling import SamplingParams, TokenSequences

PADDING_BLOCK_ID = 0
"""The block that pads block tables; no request ever holds it."""


class Constraint(Protocol):
    """What a request's output has to match, and how far it has come. The runner makes it
    and masks its tokens; the request tells it what was sampled.

    Attributes:
        error: why the request cannot go on; empty if it can.
    """

    error: str

    def take(self, token_id: int) -> FinishReason:
        """Follow one sampled token. STOP: nothing may follow it. ERROR: see `error`."""
        ...


@dataclass(slots=True)
class NewRequest:
    """A request that enters a row: new, or preempted earlier and back.

    Attributes:
        token_ids: all tokens known so far: prompt, then output.
        seed: of its random draws; the draw of a token depends on (seed, position) alone.
        min_position: positions below this may not hold a token of `forbidden_ids`.
        forbidden_ids: the tokens that would end the request.
        num_prompt_tokens: how many of `token_ids` are the prompt.
        bad_words: sequences that the output may not contain.
        embeds: (tokens, hidden) tensor in place of the first tokens' embeddings, or None.
    """

    row: int
    token_ids: Sequence[int]
    block_ids: list[int]
    params: SamplingParams
    seed: int
    min_position: int
    forbidden_ids: Sequence[int]
    num_prompt_tokens: int = 0
    bad_words: TokenSequences = ()
    embeds: Any = None

    @classmethod
    def of(cls, request: Request) -> Self:
        """That of a request which has its row and blocks."""
        return cls(
            row=request.row,
            token_ids=request.token_ids,
            block_ids=[block.block_id for block in request.blocks],
            params=request.params,
            seed=request.seed,
            min_position=request.num_prompt_tokens + request.params.min_tokens,
            forbidden_ids=tuple(request.stop_ids) if request.params.min_tokens else (),
            num_prompt_tokens=request.num_prompt_tokens,
            bad_words=request.bad_words,
            embeds=request.embeds,
        )


@dataclass(slots=True)
class BlockAppend:
    """Blocks appended to a row's block table from index `first` on."""

    row: int
    first: int
    block_ids: list[int]


@dataclass(slots=True)
class PromptScores:
    """Prompt tokens whose log-probabilities the step can compute.

    Attributes:
        index: of their request in the plan's columns.
        first: position of the first of them, at least 1.
        end: position behind the last; the token before each of them is computed in this step.
        k: alternatives of each, -1 for the whole vocabulary.
    """

    index: int
    first: int
    end: int
    k: int


@dataclass(slots=True)
class Pool:
    """A pooling request of this step.

    Attributes:
        index: in the plan's columns.
        pooling: what to make of its hidden states.
        is_last: its prompt is complete with this step.
    """

    index: int
    pooling: Pooling
    is_last: bool


@dataclass(slots=True)
class StepPlan:
    """One step. The columns `requests`, `rows`, `starts`, `counts` belong together.

    Attributes:
        rows: the row of each scheduled request.
        starts: position of its first token in this step.
        counts: how many tokens of it this step computes, from `starts` on.
        samples: indices into the columns of the requests that get a new token: those whose
            last known token is among the computed ones.
        constraints: (index into `samples`, constraint) of those whose output is constrained.
        prompt_scores: what to compute besides, of requests that asked.
        pools: the pooling requests; none of them is among the samples.
        run: the run of like steps that this is one of; None if it was planned by itself.
        is_repeat: the requests are those of the step before, in the same order, and each
            computes the token that was sampled for it there.
    """

    step: int
    requests: list[Request] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    constraints: list[tuple[int, Constraint]] = field(default_factory=list)
    new_requests: list[NewRequest] = field(default_factory=list)
    block_appends: list[BlockAppend] = field(default_factory=list)
    prompt_scores: list[PromptScores] = field(default_factory=list)
    pools: list[Pool] = field(default_factory=list)
    num_tokens: int = 0
    run: SteadyDecode | None = None
    is_repeat: bool = False

    def append_blocks(self, request: Request, blocks: list[KVBlock] | None) -> None:
        """Tell the runner of blocks, if any, that were appended to a request's."""
        if blocks:
            first = len(request.blocks) - len(blocks)
            ids = [block.block_id for block in blocks]
            self.block_appends.append(BlockAppend(request.row, first, ids))


@dataclass(slots=True)
class StepResult:
    """What the runner made of a plan.

    Attributes:
        token_ids: sampled, one for each entry of the plan's `samples`, in that order.
        logprobs: of those sampled tokens whose requests ask for them, in that order.
        prompt_logprobs: one for each of the plan's `prompt_scores`, in that order.
        vectors: one for each of the plan's `pools` that is its last, in that order.
        computing_ns: when the model began to compute and when it had the logits, on
            `time.perf_counter_ns()`: what lies before is preparing, and behind it sampling.
            None if the runner does not tell.
        device_ns: how long a device was busy with it; 0 if the host computed it.
    """

    token_ids: list[int]
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    vectors: Sequence[bytes] = ()
    computing_ns: tuple[int, int] | None = None
    device_ns: int = 0
