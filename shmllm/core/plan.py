"""The scheduler's instructions to the runner for one step, and the runner's answer.

Every running request occupies a row: an index below max_num_seqs that belongs to it until it ends
or is preempted. The runner keeps state for each row (tokens, block table, sampling parameters), so
a plan carries only the changes: requests that enter rows, and blocks appended to block tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from shmllm.core.block_pool import KVBlock
from shmllm.core.constraint import Constraint
from shmllm.core.request import Request
from shmllm.core.shared_blocks import BlockCopy
from shmllm.outputs.columns import Piece
from shmllm.outputs.logprobs import TokenLogprobs
from shmllm.outputs.sampling_masks import SamplingMasks
from shmllm.params.items import Item, Span
from shmllm.params.pooling import Pooling
from shmllm.params.sampling import SamplingParams, TokenSequences
from shmllm.params.thinking import ThinkingBudget
from shmllm.params.token_table import TokenTable


@dataclass(slots=True)
class NewRequest:
    """A request that enters a row: a new one, or one that returns after a preemption.

    Attributes:
        row: the request's row.
        token_ids: all tokens known so far, first the prompt, then the output.
        block_ids: the request's block table in each group of layers.
        params: its sampling parameters.
        seed: the seed of its random draws. The draw of a token depends only on the seed and on
            the token's position.
        min_position: no position below this one may hold a token of `forbidden_ids`.
        forbidden_ids: the tokens that would end the request.
        num_prompt_tokens: the number of prompt tokens at the beginning of `token_ids`.
        bad_words: token sequences that the output must not contain.
        thinking: the limit of its reasoning; None without one.
        embeds: a (tokens, hidden) tensor that replaces the first tokens' embeddings, or None.
        second_segment: the index of the first token of the second text of a pair; 0: there is none.
        items: the images of the prompt, in order.
        num_encoded: see `Request.num_encoded`.
        num_routed: of how many of its tokens the experts were reported before.
    """

    row: int
    token_ids: Sequence[int]
    block_ids: list[list[int]]
    params: SamplingParams
    seed: int
    min_position: int
    forbidden_ids: Sequence[int]
    num_prompt_tokens: int = 0
    bad_words: TokenSequences = ()
    thinking: ThinkingBudget | None = None
    embeds: Any = None
    second_segment: int = 0
    items: tuple[Item, ...] = ()
    num_encoded: int = 0
    num_routed: int = 0

    @classmethod
    def of(cls, request: Request) -> Self:
        """Describe a request that already has its row and its blocks."""
        return cls(
            row=request.row,
            token_ids=request.token_ids,
            block_ids=[table.block_ids for table in request.block_tables],
            params=request.params,
            seed=request.seed,
            min_position=request.num_prompt_tokens + request.params.min_tokens,
            forbidden_ids=tuple(request.stop_ids) if request.params.min_tokens else (),
            num_prompt_tokens=request.num_prompt_tokens,
            bad_words=request.bad_words,
            thinking=request.thinking,
            embeds=request.embeds,
            second_segment=0 if request.pooling is None else request.pooling.second_segment,
            items=request.items,
            num_encoded=request.num_encoded,
            num_routed=request.num_tokens - 1 if request.num_output_tokens else 0,
        )

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """The tokens of the prompt's text."""
        return self.token_ids[self.num_encoded : self.num_prompt_tokens]


@dataclass(slots=True)
class BlockAppend:
    """Blocks to append to the block tables of a row.

    Attributes:
        row: the row.
        firsts: for each group of layers the index at which its blocks begin.
        block_ids: the blocks of each group.
    """

    row: int
    firsts: list[int]
    block_ids: list[list[int]]


@dataclass(slots=True)
class PromptScores:
    """Prompt tokens of one request whose log-probabilities the step can compute.

    Attributes:
        index: the request's index in the columns of the plan.
        first: the position of the first such token, at least 1.
        end: the position after the last such token. The step computes the token before each of
            them.
        k: the number of alternatives to report for each token; -1 means the whole vocabulary.
        token_ids: the alternatives of each token; None: the most likely ones.
    """

    index: int
    first: int
    end: int
    k: int
    token_ids: TokenTable | None = None


class Constrained(NamedTuple):
    """A request whose tokens a grammar restricts.

    first: the first of its rows among those of the step's logits.
    column: its index in the columns of the plan.
    constraint: the state of its grammar.
    """

    first: int
    column: int
    constraint: Constraint


@dataclass(slots=True)
class Pool:
    """A pooling request that takes part in the step.

    Attributes:
        index: the request's index in the columns of the plan.
        pooling: the parameters of the pooling.
        is_last: whether this step completes the prompt.
    """

    index: int
    pooling: Pooling
    is_last: bool


class Encode(NamedTuple):
    """An item whose embeddings the step computes, before anything else reads them.

    number: identifies the embeddings until they are forgotten.
    item: the item.
    """

    number: int
    item: Item


class ItemUse(NamedTuple):
    """A request some of whose tokens have the embeddings of an item.

    column: its index in the columns of the plan.
    number: identifies the embeddings.
    spans: the positions that have them, in order; see `Item.spans`.
    looks_ahead: whether these attend to all of their span, in models whose images do.
    """

    column: int
    number: int
    spans: tuple[Span, ...]
    looks_ahead: bool = True


class ExternalStep(NamedTuple):
    """What a step loads from and saves to a KV connector.

    metadata: what the connector's worker half gets.
    loaded: the ids of the blocks that the step loads.
    has_saves: whether blocks can be saved behind the step.
    epoch: how many failed loads the scheduler knew of when it planned the step.
    error: why the connector could not describe the step; empty: it could.
    """

    metadata: object
    loaded: list[int]
    has_saves: bool
    epoch: int
    error: str = ""


class EncodedPrefix(NamedTuple):
    """The first positions of a request, which belong to an item that an encoder computes.

    row: the request's row.
    number: identifies the item's keys and values; see `Encode`.
    first: the first position that is not in the request's blocks yet.
    """

    row: int
    number: int
    first: int


@dataclass(slots=True)
class StepPlan:
    """The plan of one step. `requests`, `rows`, `starts` and `counts` are parallel columns.

    Attributes:
        step: the number of the step.
        rows: the row of each scheduled request.
        starts: the position of the first token that the step computes for it.
        counts: how many tokens the step computes for it, from `starts` on.
        samples: the indices of the requests that get a new token, because the step computes
            their last known token.
        num_sampled: at how many tokens the step samples: the last known one of each of `samples`,
            and the drafted ones.
        constraints: the constrained requests of `samples`.
        drafts: for a request of `samples`, by its index in the columns, the drafted tokens behind
            its last known one. The step computes and samples at each of them; `counts` includes
            them. A runner that drafts itself replaces them, as many by as many.
        state_copies: (from, to) blocks of states, which are copied before the step.
        saves_before: blocks that are copied to where other engines find them, before anything else.
        loads: shared blocks that are copied into the engine's own, after that and before the step
            computes.
        saves_after: as `saves_before`, after the step has computed.
        external: what the step loads from and saves to a KV connector; None: there is none.
        left_rows: the rows whose requests ended or were preempted since the previous step.
        new_requests: the requests that enter a row.
        block_appends: the blocks that running requests received.
        prompt_scores: the prompt tokens whose log-probabilities were asked for.
        pools: the pooling requests of the step. None of them is in `samples`.
        forgotten: the numbers of embeddings that no later step uses; they are forgotten first.
        encodes: the items that are encoded next.
        item_uses: where the step uses embeddings of items.
        prefixes: the keys and values of items that are written to the KV cache before the step
            computes, and after blocks are loaded.
        num_tokens: the sum of `counts`.
        is_repeat: the requests and their order are those of the previous step, and each request
            computes the token that the previous step sampled for it.
    """

    step: int
    requests: list[Request] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    num_sampled: int = 0
    constraints: list[Constrained] = field(default_factory=list)
    drafts: dict[int, Sequence[int]] = field(default_factory=dict)
    state_copies: list[tuple[int, int]] = field(default_factory=list)
    saves_before: list[BlockCopy] = field(default_factory=list)
    loads: list[BlockCopy] = field(default_factory=list)
    saves_after: list[BlockCopy] = field(default_factory=list)
    external: ExternalStep | None = None
    left_rows: list[int] = field(default_factory=list)
    new_requests: list[NewRequest] = field(default_factory=list)
    block_appends: list[BlockAppend] = field(default_factory=list)
    prompt_scores: list[PromptScores] = field(default_factory=list)
    pools: list[Pool] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)
    encodes: list[Encode] = field(default_factory=list)
    item_uses: list[ItemUse] = field(default_factory=list)
    prefixes: list[EncodedPrefix] = field(default_factory=list)
    num_tokens: int = 0
    is_repeat: bool = False

    def append_blocks(self, request: Request, blocks: list[list[KVBlock]] | None) -> None:
        """Record the blocks of each group, if any, that were just appended to the request's
        tables."""
        if blocks:
            tables = request.block_tables
            firsts = [len(t.blocks) - len(new) for t, new in zip(tables, blocks, strict=True)]
            ids = [[block.block_id for block in appended] for appended in blocks]
            self.block_appends.append(BlockAppend(request.row, firsts, ids))

    @property
    def num_drafts(self) -> int:
        """The number of drafted tokens."""
        return self.num_sampled - len(self.samples)

    @property
    def sample_counts(self) -> list[int]:
        """At how many tokens the step samples for each of `samples`."""
        return [1 + len(self.drafts.get(index, ())) for index in self.samples]

    def add_tokens(self, request: Request, count: int, drafts: Sequence[int] = ()) -> None:
        """Add a column for a request, whose `num_computed_tokens` already includes the tokens.

        Args:
            request: the request.
            count: how many of its tokens the step computes, with the drafted ones.
            drafts: the drafted ones.
        """
        index = len(self.requests)
        if drafts:
            self.drafts[index] = drafts
        if request.pooling is not None:
            is_last = request.num_computed_tokens == len(request.token_ids)
            self.pools.append(Pool(index, request.pooling, is_last))
        elif request.num_computed_tokens >= len(request.token_ids):
            if request.constraint is not None:
                self.constraints.append(Constrained(self.num_sampled, index, request.constraint))
            self.samples.append(index)
            self.num_sampled += 1 + len(drafts)
        if request.params.scores_prompt:
            self._add_prompt_scores(index, request)
        self.requests.append(request)
        self.rows.append(request.row)
        self.starts.append(request.num_computed_tokens - count)
        self.counts.append(count)
        self.num_tokens += count

    def _add_prompt_scores(self, index: int, request: Request) -> None:
        """Plan log-probabilities of prompt tokens: each one is computed with the token before."""
        first, params = request.next_prompt_logprob, request.params
        end = min(request.num_computed_tokens + 1, request.num_prompt_tokens)
        if first >= end:
            return
        request.next_prompt_logprob = end
        table = params.prompt_logprob_token_ids
        if table is None:
            k = params.prompt_logprobs or 0
            self.prompt_scores.append(PromptScores(index, first, end, k))
        else:
            before = request.num_encoded + 1 + (params.prompt_logprob_start or 0)
            rows = table.rows(first - before, end - before)
            self.prompt_scores.append(PromptScores(index, first, end, table.width, rows))


@dataclass(slots=True)
class StepResult:
    """The runner's answer to a plan.

    Attributes:
        token_ids: the sampled tokens of each entry of the plan's `samples`, in that order: one,
            or, behind drafted tokens, those up to the first that was not drafted.
        counts: how many of the tokens belong to each entry; None: one each.
        logprobs: the log-probabilities of those sampled tokens whose requests ask for them, in
            that order.
        prompt_logprobs: one element for each of the plan's `prompt_scores`, in that order.
        vectors: for each of the plan's `pools`, in that order, what the step adds to its result;
            empty if it adds nothing.
        routed_experts: the experts of tokens of each entry of `samples` that no step has reported
            yet, as a piece of (tokens, layers, top_k) numbers; empty if nobody asks for them.
        sampling_masks: the tokens among which each of `token_ids` was drawn; None if nobody asks
            for them.
        computing_ns: when the model began to compute and when it had the logits, in
            `time.perf_counter_ns()`. The time before is preparation and the time after is
            sampling. None if the runner does not measure it.
        device_ns: how long a device was busy with the step; 0 if the host computed it.
        failures: by index into the plan's `samples`, why a request cannot go on. Its token has no
            meaning.
        load_failure: why the blocks could not be loaded that a KV connector promised; empty: they
            were. The requests that read them have no results.
        problems: what else went wrong with a KV connector, a sentence each.
    """

    token_ids: list[int]
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    vectors: Sequence[Piece] = ()
    routed_experts: Sequence[Piece] = ()
    sampling_masks: SamplingMasks | None = None
    computing_ns: tuple[int, int] | None = None
    device_ns: int = 0
    failures: Mapping[int, str] = field(default_factory=dict)
    counts: list[int] | None = None
    load_failure: str = ""
    problems: Sequence[str] = ()
