"""Stand-ins for the parts around scheduling: a model without arithmetic, and ready facts.

FakeRunner executes plans on a simulated KV cache. A slot holds a fingerprint of the token
written there and of the slot before it, found through the row's block table, as a real
key depends on everything before it. The next token is a function of all slots of the
context that each group of layers reads. So a wrong block table, a prefix hit on the wrong
block, a block that was freed too early, or one that two requests write changes the tokens,
and `expected_tokens` says what they should have been.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from shmllm.config.info import EngineInfo
from shmllm.core.grammar_queue import CompiledGrammar
from shmllm.core.kv_groups import ONE_GROUP, KVGroup
from shmllm.core.plan import PromptScores, StepPlan, StepResult
from shmllm.core.request import RequestStatus
from shmllm.core.shared_blocks import BlockCopy
from shmllm.errors import EngineDeadError, EngineStartError, RequestError
from shmllm.ipc.device_memory import LocalSharing
from shmllm.outputs.columns import FinishReason, OutputColumns, Piece
from shmllm.outputs.logprobs import TokenLogprobs
from shmllm.outputs.sleep_report import OwnedBytes, SleepState
from shmllm.params.items import Item
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams
from shmllm.wire.messages import Method, Rejected

VOCAB_SIZE = 50
MASK = 2**61 - 1


def _mix(left: int, right: int) -> int:
    value = (left * 0x9E3779B97F4A7C15 + right * 0xBF58476D1CE4E5B9 + 0x94D049BB) & MASK
    return value ^ (value >> 29)


def _written(before: int, token_id: int) -> int:
    return _mix(before, token_id + 1)


def _read(context: Iterable[int], vocab_size: int) -> int:
    total = 0
    for fingerprint in context:
        total = _mix(total, fingerprint)
    return (total >> 7) % vocab_size


def value_of(item: Item, index: int) -> int:
    """What a runner reads in place of the token that has an item's embedding of this index."""
    return int.from_bytes(
        sha256(item.identity + index.to_bytes(4, "little")).digest()[:4], "little"
    )


def positions_of(item: Item) -> Iterator[int]:
    """The positions that have the item's embeddings, in order."""
    for begin, end in item.spans:
        yield from range(begin, end)


def as_read(prompt: Sequence[int], items: Iterable[Item]) -> list[int]:
    """A prompt with what a runner reads in place of placeholders."""
    tokens = list(prompt)
    for item in items:
        for index, position in enumerate(positions_of(item)):
            tokens[position] = value_of(item, index)
    return tokens


def _first_read(group: KVGroup, position: int) -> int:
    """The first position whose fingerprint makes the token after `position`."""
    return group.rule.first_kept(position) if group.rule.interval is None else position


def _reads_last(group: KVGroup, position: int) -> bool:
    """Whether a token reads the position before it."""
    return group.rule.first_kept(position) < position


def expected_tokens(
    prompt: Sequence[int],
    max_tokens: int,
    *,
    stop_ids: Collection[int] = (),
    min_tokens: int = 0,
    vocab_size: int = VOCAB_SIZE,
    groups: Sequence[KVGroup] = ONE_GROUP,
) -> list[int]:
    """What a request gets that runs alone, without blocks, chunks or a cache."""
    output: list[int] = []
    context: list[int]
    while len(output) < max_tokens:
        context = []
        for group in groups:
            written: list[int] = []
            for position, token_id in enumerate([*prompt, *output]):
                before = written[-1] if _reads_last(group, position) else 0
                written.append(_written(before, token_id))
            context += written[_first_read(group, len(written) - 1) :]
        output.append(_read(context, vocab_size))
        if output[-1] in stop_ids and len(output) > min_tokens:
            break
    return output


def info(**changes: Any) -> EngineInfo:
    """Facts of a small engine, some of them replaced."""
    values: dict[str, Any] = {
        "model_directory": "",
        "model_type": "Fake",
        "dtype": "float32",
        "num_parameters": 1,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": (),
        "max_model_len": 64,
        "block_size": 4,
        "num_blocks": 16,
        "max_blocks_per_request": 16,
        "kv_cache_bytes": 1,
        "weight_bytes": 1,
        "max_num_seqs": 8,
        "num_threads": 1,
        "wait_policy": "balanced",
        "load_seconds": 0.0,
    }
    return EngineInfo(**values | changes)


def fake_logprobs(values: Sequence[int], ks: list[int]) -> TokenLogprobs:
    """Numbers that say whose they are: a token's own is `values`, its alternatives' too."""
    repeated = [value for value, k in zip(values, ks, strict=True) for _ in range(k)]
    return TokenLogprobs(
        ks,
        np.array(values, np.float32),
        np.ones(len(values), np.int32),
        np.array(repeated, np.int32),
        np.array(repeated, np.float32),
    )


class FakeConstraint:
    """Ends after so many tokens, or fails at one of them."""

    def __init__(self, length: int, fails_at: int = 0) -> None:
        self.error = ""
        self.taken: list[int] = []
        self._length = length
        self._fails_at = fails_at

    def take(self, token_id: int) -> FinishReason:
        self.taken.append(token_id)
        if len(self.taken) == self._fails_at:
            self.error = "does not fit"
            return FinishReason.ERROR
        return FinishReason.STOP if len(self.taken) == self._length else FinishReason.NONE


class FakeMemory:
    """Four weights, and slots that are gone when the KV cache sleeps.

    Attributes:
        num_missing: weights that were lost; tests write them.
        calls: what was asked for.
        is_short: whether nothing can be restored.
    """

    def __init__(self, slots: dict[int, int]) -> None:
        self.num_missing = 0
        self.calls: list[str] = []
        self.is_short = False
        self._slots = slots

    def release(self, part: SleepState, keep: bool) -> None:
        self.calls.append(f"release {' '.join(part.tags)}{' keep' * keep}")
        if part is SleepState.KV_CACHE:
            self._slots.clear()
        elif not keep:
            self.num_missing = 4

    def restore(self, part: SleepState) -> None:
        if self.is_short:
            raise RequestError("no memory")
        self.calls.append(f"restore {' '.join(part.tags)}")

    def tidy(self) -> None:
        self.calls.append("tidy")

    def measure(self) -> OwnedBytes:
        return OwnedBytes(0, len(self._slots), 0, 0, 0)


class FakeStep:
    """A step on a device that works through what was submitted, in that order and whenever it
    likes: `lag` says how many of them it leaves for later each time somebody looks."""

    def __init__(self, runner: FakeRunner, plan: StepPlan) -> None:
        self._runner = runner
        self.plan = plan
        self.is_released = False
        self.done: StepResult | None = None

    def release(self) -> None:
        for _, place, constraint in self.plan.constraints:
            request = self.plan.requests[place]
            num_known = self.plan.starts[place] + self.plan.counts[place]
            if request.status is not RequestStatus.FINISHED and request.num_computed_tokens:
                taken = constraint.taken  # type: ignore[attr-defined]
                assert len(taken) == num_known - request.num_prompt_tokens, "released too early"
        self.is_released = True
        self._runner.work_off()

    def result(self) -> StepResult:
        self._runner.work_off(until=self)
        assert self.done is not None
        return self.done


@dataclass(frozen=True)
class FakeAdapter:
    """What a FakeRunner makes of an adapter."""

    digest: str


class FakeRunner:
    """
    Args:
        engine_facts: what it says of itself.
        lag: None: each step is run to its end before the next one is planned. Else steps
            overlap, and it says how many of those submitted the device leaves for later.

    Attributes:
        memory: what can be given back.
        plans: every plan executed, in order.
        lent_ids: ids of blocks that other engines share, which steps may read now.
        grammars: what was asked to be compiled; tests give the futures their results.
        num_adapters_read: how often an adapter was read.
        embeddings: the items whose embeddings it has, by their numbers.
        most_under_way: steps that were submitted and not executed yet, at most.
    """

    def __init__(
        self,
        engine_facts: EngineInfo,
        lag: Callable[[], int] | None = None,
        groups: tuple[KVGroup, ...] = ONE_GROUP,
    ) -> None:
        self.info = engine_facts
        self.began_s = math.inf
        self.kv_groups = groups
        self.max_in_flight = 1 if lag is None else 2
        self.most_under_way = self.num_adapters_read = 0
        self._lag = lag or (lambda: 2)
        self._submitted: list[FakeStep] = []
        self.plans: list[StepPlan] = []
        self.grammars: dict[str, CompiledGrammar] = {}
        self._tokens: dict[int, list[int]] = {}
        self._block_tables: dict[int, list[list[int]]] = {}
        self._slots: dict[int, int] = {}
        self.lent_ids: Collection[int] = ()
        self._states: dict[int, int] = {}
        self.memory = FakeMemory(self._slots)
        self._asks: dict[int, int] = {}
        self.embeddings: dict[int, Item] = {}
        self._embedded: dict[tuple[int, int], int] = {}

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass

    def trace(self, directory: Path) -> None:
        pass

    def watch(self, report: Callable[[int], None]) -> None:
        pass

    def everywhere(self, own: Callable[[], Any], pickled: Callable[[], bytes]) -> list[Any]:
        return [own()]

    def read_weight(self, name: str) -> Any:
        return self.model.destinations()[name][0].clone()  # type: ignore[attr-defined]

    def submit(self, plan: StepPlan) -> FakeStep:
        step = FakeStep(self, plan)
        self._submitted.append(step)
        self.most_under_way = max(self.most_under_way, len(self._submitted))
        self.work_off()
        return step

    def work_off(self, until: FakeStep | None = None) -> None:
        """Run what was submitted, up to a step or as far as the device pleases."""
        while until in self._submitted or len(self._submitted) > self._lag():
            step = self._submitted[0]
            if step.plan.constraints and not step.is_released:
                assert step is not until, "its result is asked for before it was released"
                return
            del self._submitted[0]
            step.done = self.execute(step.plan)

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self._copy_blocks([*plan.saves_before, *plan.loads])
        self._update(plan)
        self._encode(plan)
        for source, target in plan.state_copies:
            self._slots[-target] = self._slots[-source]
        self._states = {slot: state for slot, state in self._slots.items() if slot < 0}
        for index, (row, start) in enumerate(zip(plan.rows, plan.starts, strict=True)):
            self._write(row, start, plan.counts[index] - len(plan.drafts.get(index, ())))
        sampled = [(plan.rows[index], self._sample(plan, index)) for index in plan.samples]
        token_ids = [token for _, tokens in sampled for token in tokens]
        chosen = [token for row, tokens in sampled if row in self._asks for token in tokens]
        asked = [self._asks[row] for row, tokens in sampled if row in self._asks for _ in tokens]
        self._copy_blocks(plan.saves_after)
        return StepResult(
            token_ids,
            fake_logprobs(chosen, asked) if asked else None,
            [self._score_prompt(plan, scores) for scores in plan.prompt_scores],
            self._pool(plan),
            counts=[len(tokens) for _, tokens in sampled] if plan.drafts else None,
        )

    def _score_prompt(self, plan: StepPlan, scores: PromptScores) -> TokenLogprobs:
        """The numbers are the positions; each has to be the successor of a computed one."""
        start, count = plan.starts[scores.index], plan.counts[scores.index]
        assert start < scores.first < scores.end <= start + count + 1
        positions = list(range(scores.first, scores.end))
        return fake_logprobs(positions, [scores.k] * len(positions))

    def observe(self, observe: object) -> None:
        """It has no kernels that could be looked at."""

    def begin_recording(self) -> None:
        """There are no other processes."""

    def end_recording(self) -> None:
        """As `begin_recording`."""

    def write_recording(self, path: object) -> None:
        """As `begin_recording`."""

    def check_params(self, params: SamplingParams) -> None:
        """There are no custom logits processors."""

    def check_item(self, item: Item) -> None:
        pass

    def keeps_state_of(self, row: int) -> bool:
        return False

    def read_lora(self, directory: str) -> FakeAdapter:
        """An adapter whose contents are the text of a file."""
        self.num_adapters_read += 1
        try:
            return FakeAdapter(Path(directory, "contents").read_text())
        except OSError as problem:
            raise EngineStartError(f"cannot read {directory}: {problem.strerror}") from None

    def make_lora(self, config: Any, tensors: Any) -> FakeAdapter:
        return FakeAdapter(repr((config, tensors)))

    def compile_grammar(self, text: str) -> CompiledGrammar:
        return self.grammars.setdefault(text, Future())

    def _pool(self, plan: StepPlan) -> list[Piece]:
        """The fingerprints that pooling requests with complete prompts are read from."""
        return [
            Piece(0, self._read(plan, pool.index) if pool.is_last else b"") for pool in plan.pools
        ]

    def _read(self, plan: StepPlan, index: int) -> bytes:
        context = self.context(plan.rows[index], plan.starts[index] + plan.counts[index])
        return repr(context).encode()

    def context(self, row: int, length: int) -> list[int]:
        """The fingerprints that each group's layers read at the last of `length` positions."""
        return [
            self._slots[self._slot(row, group, position)]
            for group, of_group in enumerate(self.kv_groups)
            for position in range(_first_read(of_group, length - 1), length)
        ]

    def _update(self, plan: StepPlan) -> None:
        for admission in plan.new_requests:
            self._tokens[admission.row] = list(admission.token_ids)
            self._block_tables[admission.row] = [list(ids) for ids in admission.block_ids]
            self._asks.pop(admission.row, None)
            if admission.params.logprobs is not None:
                self._asks[admission.row] = admission.params.logprobs
        for append in plan.block_appends:
            tables = self._block_tables[append.row]
            for table, first, ids in zip(tables, append.firsts, append.block_ids, strict=True):
                assert first == len(table), "a block table has a gap or is overwritten"
                table += ids

    def _encode(self, plan: StepPlan) -> None:
        """Forget and compute embeddings, and note what the step reads of them."""
        for number in plan.forgotten:
            del self.embeddings[number]
        for number, item in plan.encodes:
            assert number not in self.embeddings
            self.embeddings[number] = item
        self._embedded = {
            (plan.rows[use.column], position): value_of(self.embeddings[use.number], index)
            for use in plan.item_uses
            for index, position in enumerate(positions_of(Item(b"", use.spans, (1, 1, 1))))
        }

    def _copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        size = self.info.block_size
        for section, source, target in copies:
            assert section == 0, "states are not shared here"
            for position in range(size):
                self._slots[target * size + position] = self._slots[source * size + position]

    def _slot(self, row: int, group: int, position: int) -> int:
        interval, table = self.kv_groups[group].rule.interval, self._block_tables[row][group]
        size = interval or self.info.block_size
        block_id = table[position // size]
        most = self.info.num_blocks if interval is None else self.info.num_states
        assert 0 < block_id <= most or block_id in self.lent_ids
        return -block_id if interval else block_id * size + position % size

    def _write(self, row: int, start: int, count: int, is_later: bool = False) -> None:
        for group, of_group in enumerate(self.kv_groups):
            for position in range(start, start + count):
                before = 0
                if _reads_last(of_group, position):
                    slot = self._slot(row, group, position - 1)
                    is_first = position == start and not is_later
                    is_state = of_group.rule.interval is not None and is_first
                    before = (self._states if is_state else self._slots)[slot]
                token_id = self._tokens[row][position]
                token_id = self._embedded.get((row, position), token_id)
                self._slots[self._slot(row, group, position)] = _written(before, token_id)

    def _sample(self, plan: StepPlan, index: int) -> list[int]:
        """The tokens behind the last known one, up to the first that was not drafted. All drafts
        are written, as a device does."""
        row, drafts = plan.rows[index], plan.drafts.get(index, ())
        tokens = self._tokens[row]
        length = plan.starts[index] + plan.counts[index] - len(drafts)
        assert len(tokens) == length, "a sample before the last known token"
        sampled = [_read(self.context(row, length), self.info.vocab_size)]
        for draft in drafts:
            tokens.append(draft)
            self._write(row, len(tokens) - 1, 1, is_later=True)
            sampled.append(_read(self.context(row, len(tokens)), self.info.vocab_size))
        pairs = zip(drafts, sampled, strict=False)
        count = 1 + next((i for i, (a, b) in enumerate(pairs) if a != b), len(drafts))
        tokens[length:] = sampled[:count]
        return sampled[:count]


class FakeEngineClient:
    """An engine as its front end sees it: gives each request `max_tokens` tokens 7, at most
    `steps_per_poll` steps in one poll. A poll with nothing to do returns at once.

    Attributes:
        seeds: those of the requests, in their order.
        most: requests that were there at once, at most.
        refuse: numbers that are refused.
        calls: what was asked, with its argument.
        answers: to what is asked; None to all else.
        rejected: what the next poll brings first.
        error: raised by every poll, once it is set.
        steps_left: steps that may be run; None for any number.
    """

    def __init__(self, steps_per_poll: int, **changes: Any) -> None:
        self.info = info(**{"vocab_size": 600} | changes)
        self.sharing = LocalSharing()
        self.seed = self.info.seed
        self.steps_per_poll = steps_per_poll
        self.left: dict[int, int] = {}
        self.added: list[int] = []
        self.seeds: list[int] = []
        self.aborted: list[int] = []
        self.rejected: list[Rejected] = []
        self.refuse: set[int] = set()
        self.most = 0
        self.calls: list[tuple[Method, Any]] = []
        self.answers: dict[Method, Any] = {}
        self.error: BaseException | None = None
        self.steps_left: int | None = None
        self.is_closed = False
        self._events: list[Any] = []
        self._pending: list[OutputColumns] = []

    def wait_ready(self, on_progress: object = None) -> EngineInfo:
        return self.info

    def add(self, request: EngineCoreRequest) -> None:
        self.added.append(request.number)
        self.seeds.append(request.seed)
        if request.number in self.refuse:
            self.rejected.append(Rejected(request.number, "no"))
            return
        params = request.params
        assert isinstance(params, SamplingParams)
        self.left[request.number] = params.max_tokens or 1
        self.most = max(self.most, len(self.left))

    def abort(self, numbers: Sequence[int]) -> None:
        self.aborted += numbers
        known = [number for number in numbers if self.left.pop(number, None) is not None]
        self._pending.append(
            OutputColumns(
                numbers=known, counts=[0] * len(known), finishes=[FinishReason.ABORT] * len(known)
            )
        )

    def poll(self, timeout_s: float, *, urgent_only: bool = False) -> list[Any]:
        if self.error is not None:
            raise self.error
        events = self._events  # what the caller has not processed is still there
        events += [*self.rejected, *self._pending]
        self.rejected, self._pending = [], []
        for _ in range(self.steps_per_poll):
            if self.left and self.steps_left != 0:
                events.append(self._step())
        if not events:
            time.sleep(min(timeout_s, 0.001))
        return events

    def wake(self) -> None:
        pass

    def health(self) -> str:
        return "dead" if isinstance(self.error, EngineDeadError) else "ready"

    def call(self, method: Method, argument: Any = None) -> Any:
        self.calls.append((method, argument))
        return self.answers.get(method)

    def stop(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True

    def _step(self) -> OutputColumns:
        if self.steps_left is not None:
            self.steps_left -= 1
        numbers = list(self.left)
        for number in numbers:
            self.left[number] -= 1
        ended = [number for number in numbers if not self.left[number]]
        for number in ended:
            del self.left[number]
        return OutputColumns(
            numbers=numbers,
            counts=[1] * len(numbers),
            finishes=[FinishReason.LENGTH * (number in ended) for number in numbers],
            token_ids=[7] * len(numbers),
        )
