"""The scheduler's part of the seam for KV connectors: blocks that another tier has.

A request that is admitted gets own blocks for the tokens that its connector can load. They count as
computed and are registered in the prefix cache like all others, because the step that is being
planned loads them before it computes. If that fails, everything is taken back that depends on it:
the requests that read these blocks end, and all blocks are forgotten that were registered since.

This module must not know what a connector stores, nor how a step calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from shmllm.core.block_pool import KVBlock
from shmllm.core.kv_cache_manager import KVCacheManager
from shmllm.core.plan import ExternalStep, StepPlan, StepResult
from shmllm.core.prefix_cache import BlockObserver, hash_blocks
from shmllm.core.request import Request, RequestStatus
from shmllm.errors import RequestError
from shmllm.plugins.kv_connector import (
    FullBlock,
    KVConnector,
    RequestView,
    ScheduledRequest,
    StepView,
    failure_of,
)


class NoConnector:
    """What the scheduler asks if there is no connector."""

    is_on = False

    def num_loadable(self, request: Request, num_computed_tokens: int) -> int:
        """The number of tokens that can be loaded behind those that the engine has.

        Raises:
            RequestError: the connector failed.
        """
        return 0

    def admitted(self, request: Request, num_computed_tokens: int, num_loaded: int) -> None:
        """Let the step that is being planned load tokens of a request, which has its blocks.

        Raises:
            RequestError: the connector failed.
        """

    def planned(self, plan: StepPlan) -> None:
        """Describe a step, whose plan is otherwise complete."""

    def applied(
        self, plan: StepPlan, result: StepResult, requests: Iterable[Request]
    ) -> list[Request]:
        """Take note of a step's result. Returns those of `requests`, which are all that have not
        ended, that must end because a load failed."""
        return []

    def finished(self, request: Request) -> None:
        """A request ends, and still has its blocks, if it has any."""


class _Load(NamedTuple):
    """Blocks of a request that a step loads, and their hashes."""

    blocks: list[KVBlock]
    hashes: list[bytes]


class SchedulerConnector(NoConnector, BlockObserver):
    """Asks a connector for the scheduler.

    Args:
        connector: the connector.
        name: its name, for messages.
        role: see `ConnectorContext.role`.
        kv_cache: has one group of layers, which keep everything.
        on_problem: called with a sentence about something that failed and ends no request.

    Attributes:
        is_on: whether blocks are loaded and saved: the connector's identity is the engine's.
    """

    def __init__(
        self,
        connector: KVConnector,
        name: str,
        role: str,
        kv_cache: KVCacheManager,
        on_problem: Callable[[str], None],
    ) -> None:
        self.is_on = True
        self._connector, self._name, self._kv_cache = connector, name, kv_cache
        self._loads, self._saves = role != "kv_producer", role != "kv_consumer"
        self._block_size = kv_cache.block_size
        self._on_problem = on_problem
        self._reported: dict[str, str] = {}
        self._epoch = 0
        self._planned_loads: list[_Load] = []
        self._complete: dict[KVBlock, bytes] = {}
        self._registered: list[KVBlock] = []
        self._in_flight: dict[int, tuple[list[_Load], list[KVBlock]]] = {}
        kv_cache.prefix_cache.observer = self

    def num_loadable(self, request: Request, num_computed_tokens: int) -> int:
        if not (self.is_on and self._loads and request.params.reads_prefix_cache):
            return 0
        most = (request.num_tokens - 1) // self._block_size * self._block_size
        most -= num_computed_tokens
        if not most:
            return 0
        found = self._call("get_num_new_matched_tokens", self._view(request), num_computed_tokens)
        return self._checked(found, most)

    def _checked(self, found: Any, most: int) -> int:
        """The number of tokens in what a connector has returned. Raises RequestError."""
        method = f"the KV connector {self._name}: get_num_new_matched_tokens"
        if not isinstance(found, tuple) or len(found) != 2:
            raise RequestError(f"{method} must return (number of tokens, False), got {found!r}")
        count, is_asynchronous = found
        if is_asynchronous:
            raise RequestError(
                f"{method} returned True: loading between steps is not supported; return False, "
                "and the step that computes the request loads its blocks"
            )
        is_whole = isinstance(count, int) and 0 <= count <= most and not count % self._block_size
        if not is_whole:
            raise RequestError(
                f"{method} returned {count!r}: it must be a multiple of {self._block_size} from 0 "
                f"to {most}, as the last token is always computed"
            )
        return int(count)

    def admitted(self, request: Request, num_computed_tokens: int, num_loaded: int) -> None:
        if not self.is_on:
            return
        first = num_computed_tokens // self._block_size
        end = first + num_loaded // self._block_size
        table = request.block_tables[0]
        self._call("update_state_after_alloc", self._view(request), table.block_ids, num_loaded)
        if num_loaded:
            hashes = request.block_hashes[first:end]
            self._planned_loads.append(_Load(table.blocks[first:end], hashes))

    def planned(self, plan: StepPlan) -> None:
        loads, self._planned_loads = self._planned_loads, []
        registered, self._registered = self._registered, []
        complete, self._complete = self._complete, {}
        self._in_flight[plan.step] = loads, registered
        if not self.is_on:
            return
        loaded = {block.block_id for load in loads for block in load.blocks}
        saves = [
            FullBlock(block.block_id, block_hash)
            for block, block_hash in complete.items()
            if block.block_id not in loaded
        ]
        metadata, error = None, ""
        try:
            step = StepView(plan.step, saves, lambda: self._scheduled(plan))
            metadata = self._call("build_connector_meta", step)
        except RequestError as problem:
            error = str(problem)
        plan.external = ExternalStep(metadata, [*loaded], bool(saves), self._epoch, error)

    def applied(
        self, plan: StepPlan, result: StepResult, requests: Iterable[Request]
    ) -> list[Request]:
        loads, _ = self._in_flight.get(plan.step, ((), ()))
        for problem in result.problems:
            self._report(problem)
        ended: list[Request] = []
        if result.load_failure:
            self._epoch += 1
            self._reported[_kind_of(result.load_failure)] = result.load_failure
            ended = [each for each in requests if _depends_on(each, loads, plan.step)]
            self._take_back()
        self._in_flight.pop(plan.step, None)
        return ended

    def _take_back(self) -> None:
        """Forget the blocks that were registered for steps whose results are not known. Those that
        were registered since have tokens of earlier steps."""
        for _, registered in self._in_flight.values():
            for block in registered:
                if block.block_hash is not None:
                    self._kv_cache.prefix_cache.forget(block)

    def finished(self, request: Request) -> None:
        table = request.block_tables[0].block_ids if request.block_tables else []
        try:
            answer = self._call("request_finished", self._view(request), table)
        except RequestError as problem:
            self._report(str(problem))
            return
        delays, params = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, 0)
        if delays or params is not None:
            self._report(
                f"the KV connector {self._name}: request_finished must return (False, None), got "
                f"{answer!r}: blocks are freed at once, and outputs have no parameters of it"
            )

    def registered(self, block: KVBlock, block_hash: bytes) -> None:
        self._registered.append(block)
        if self._saves:
            self._complete[block] = block_hash

    def forgotten(self, block: KVBlock) -> None:
        self._complete.pop(block, None)

    def cleared(self) -> None:
        self._complete.clear()
        self._registered.clear()

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the connector. Raises RequestError if it raises."""
        try:
            return getattr(self._connector, method)(*arguments)
        except Exception as problem:
            raise RequestError(failure_of(self._name, method, problem)) from problem

    def _report(self, problem: str) -> None:
        """Report a problem, unless it is the last one of its kind."""
        kind = _kind_of(problem)
        if self._reported.get(kind) != problem:
            self._reported[kind] = problem
            self._on_problem(problem)

    def _view(self, request: Request) -> RequestView:
        hash_blocks(request, self._block_size)
        return RequestView(
            request.client,
            request.number,
            request.token_ids,
            request.num_prompt_tokens,
            tuple(request.block_hashes),
            self._block_size,
        )

    def _scheduled(self, plan: StepPlan) -> list[ScheduledRequest]:
        columns = zip(plan.requests, plan.starts, plan.counts, strict=True)
        return [
            ScheduledRequest(self._view(each), each.block_tables[0].block_ids, start, count)
            for each, start, count in columns
        ]


def _kind_of(problem: str) -> str:
    """The part of a sentence that names the connector and the method."""
    return problem.partition(": ")[0]


def _depends_on(request: Request, loads: Sequence[_Load], step: int) -> bool:
    """Whether a request was computed from blocks that a step should have loaded."""
    if request.status is RequestStatus.RUNNING:
        blocks = {block for load in loads for block in load.blocks}
        return not blocks.isdisjoint(request.block_tables[0].blocks)
    # One that was preempted since has no blocks, but its token comes with the step.
    hashes = {block_hash for load in loads for block_hash in load.hashes}
    return request.last_step >= step and not hashes.isdisjoint(request.block_hashes)
