"""`shmllm generate` with records: what becomes of its rows.

`shmllm.cli.batch_run` runs them.
"""

from __future__ import annotations

import copy
import re
from collections import deque
from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

from shmllm.batch.parameters import make_params, seed_of
from shmllm.batch.rows import JsonObject, Row
from shmllm.cli.adapters import Adapters
from shmllm.cli.batch_run import Work, run_plan
from shmllm.cli.item_prompts import items_of_row, prompt_with_items
from shmllm.cli.items import CommandItems
from shmllm.cli.outcome import ABORTED
from shmllm.cli.plan import GeneratePlan
from shmllm.cli.sampling import completed
from shmllm.cli.session import CommandSession
from shmllm.errors import EnginePausedError, RequestError
from shmllm.params.lora import LoRARequest
from shmllm.params.sampling import SamplingParams

if TYPE_CHECKING:
    from shmllm.frontend.llm import LLM
    from shmllm.outputs.request import RequestOutput

Completion = tuple[Any, SamplingParams, LoRARequest | None]
"""A request: the prompt, its parameters and its adapter."""


def run_batch(
    plan: GeneratePlan,
    sampling: JsonObject,
    session: CommandSession,
    items: CommandItems | None = None,
) -> int:
    """Runs a plan and returns the exit code.

    Args:
        plan: the plan.
        sampling: the sampling parameters from the command line; they override the model's defaults.
        session: starts the engine or attaches to it.
        items: the items of rows that are plain lines; None for none.
    """

    def work_on(llm: LLM) -> Work[Completion, RequestOutput]:
        from shmllm.frontend.progress import BatchProgress

        return Work(
            Preparation(llm, sampling, plan.chat_template, session.adapters, items),
            lambda requests: stream(llm, requests, plan.ordered, session.priority),
            BatchProgress,
        )

    return run_plan(plan, session, work_on)


class Preparation:
    """Makes requests from rows.

    Args:
        llm: the engine's front end; it has the chat template and the model's defaults.
        sampling: the sampling parameters from the command line.
        chat_template: the source of the chat template; None for the model's.
        adapters: those that rows can choose.
        items: the items of all rows; None for those that rows name.
    """

    def __init__(
        self,
        llm: LLM,
        sampling: JsonObject,
        chat_template: str | None,
        adapters: Adapters | None = None,
        items: CommandItems | None = None,
    ) -> None:
        self._llm = llm
        self._items = items.ready(llm) if items else []
        self._adapters = adapters or {}
        self._only = next(iter(self._adapters.values())) if len(self._adapters) == 1 else None
        self._given = llm.model_defaults | sampling
        self._common = make_params(completed(self._given), {})
        self._template: JsonObject = (
            {} if chat_template is None else {"chat_template": chat_template}
        )

    def __call__(self, row: Row) -> Completion:
        adapter = self._adapter(row)
        if not row.sampling and not row.defaults:
            params = self._common
        else:
            defaults = completed(row.defaults, self._given, row.sampling)
            params = make_params(defaults, row.sampling)
        if params.seed is None and params.temperature > 0:
            params = copy.copy(params)
            params.seed = seed_of(row.line)
        return self._prompt(row), params, adapter

    def _prompt(self, row: Row) -> Any:
        front_end, template = self._llm.front_end, {**self._template, **row.template}
        items = items_of_row(front_end, row.items) if row.items else self._items
        if items and row.prompt is not None:
            return prompt_with_items(front_end, row.prompt, items, **template)
        if isinstance(row.prompt, list):
            return dict(front_end.chat_prompt(row.prompt, **template))
        return row.prompt

    def _adapter(self, row: Row) -> LoRARequest | None:
        if row.lora is None:
            return self._only
        if row.lora and row.lora not in self._adapters:
            raise RequestError(f"'lora' names no adapter: pass --lora {row.lora}=DIR")
        return self._adapters.get(row.lora)


def stream(
    llm: LLM, requests: Iterator[Completion], ordered: bool, priority: int | None
) -> Iterator[tuple[int, RequestOutput | None]]:
    """Runs requests with `LLM.stream`, which takes prompts and parameters separately.

    Yields:
        (index of the request, output); None for a request that the engine aborted.

    Raises:
        EnginePausedError: the engine takes no requests now. No row is to blame.
    """
    params: deque[SamplingParams] = deque()
    adapters: deque[LoRARequest | None] = deque()

    def prompts() -> Iterator[Any]:
        for prompt, own, adapter in requests:
            params.append(own)
            adapters.append(adapter)
            yield prompt

    outputs = llm.stream(
        prompts(),
        iter(params.popleft, None),
        ordered=ordered,
        on_error="yield",
        priority=priority,
        lora_request=(adapters.popleft() for _ in count()),
    )
    for output in outputs:
        if output.is_retryable:
            raise EnginePausedError(output.error or "the engine is paused")
        place = output.prompt_index
        if output.error is not None:
            output.error = re.sub(rf"\bprompt {place}\b", "the prompt", output.error, count=1)
        is_lost = output.error is None and any(
            one.finish_reason in (None, ABORTED) for one in output.outputs
        )
        yield place, None if is_lost else output
