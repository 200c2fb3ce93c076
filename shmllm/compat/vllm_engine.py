"""`LLMEngine`: vLLM's loop of `add_request` and `step`, in the caller's thread.

This module runs the requests of one LLMEngine as one group of the front end of an LLM. The engine
itself does not wait for `step`: it works on all added requests, and `step` returns what is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, Self

from shmllm.compat.vllm_names import LLM, known, usable_priority
from shmllm.errors import RequestError
from shmllm.frontend.adapters import set_adapters
from shmllm.frontend.dispatcher import POLL_S
from shmllm.frontend.priorities import set_priorities
from shmllm.frontend.prompts import as_list
from shmllm.frontend.request_group import RequestGroup
from shmllm.frontend.request_outputs import join_completions, next_output
from shmllm.frontend.request_state import RequestState
from shmllm.outputs.request import RequestOutput
from shmllm.params.sampling import RequestOutputKind, SamplingParams


class LLMEngine:
    """
    Args:
        llm: the LLM whose engine runs the requests.

    All attributes of `llm.llm_engine` and of `llm` exist as well.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._group = RequestGroup(is_kept=True)
        self._states: dict[str, list[RequestState]] = {}
        self._indexes = count()

    @classmethod
    def from_engine_args(cls, engine_args: Any, *arguments: Any, **options: Any) -> Self:
        """Starts an engine with these options. Other arguments have no effect."""
        return cls(LLM(**engine_args.llm_options()))

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Any = None,
        trace_headers: Any = None,
        priority: int = 0,
        **options: Any,
    ) -> str:
        """Queues a request, and returns its id.

        Raises:
            RequestError: the prompt or a parameter is wrong, or the id is in use.
        """
        if not isinstance(request_id, str):
            raise RequestError(f"request_id must be a str, got {type(request_id).__name__}")
        if request_id in self._states:
            raise RequestError(f"request_id {request_id!r} is in use")
        known(options)
        front_end = self.llm.front_end
        given = as_list(self.llm.prepare_prompts(prompt, tokenization_kwargs))
        if len(given) != 1:
            raise RequestError(
                f"request {request_id!r} has {len(given)} prompts: add each by itself"
            )
        params = front_end.default_sampling_params() if params is None else params
        prepared = front_end.prepare(given, params, [f"request {request_id!r}"])
        priority = usable_priority(priority, self.llm.facts)
        set_adapters(prepared, lora_request, self.llm.facts)
        request = set_priorities(prepared, priority, self.llm.facts)[0]
        streaming = params.output_kind is not RequestOutputKind.FINAL_ONLY
        self._states[request_id] = front_end.dispatcher.submit(
            self._group, request, next(self._indexes), streaming=streaming, request_id=request_id
        )
        return request_id

    def step(self) -> list[RequestOutput]:
        """The outputs that are new since the last call; waits a short time for the first one.

        A request that the engine refused has the finish_reason "error" and the message in `error`.

        Raises:
            EngineDeadError: the engine process ended.
        """
        changed = self.llm.front_end.dispatcher.collect(self._group, POLL_S)
        open_states = (s for s in changed if s.parent.request_id in self._states)
        outputs = join_completions(map(next_output, open_states))
        for state in changed:
            if state.ends_request:
                self._states.pop(state.parent.request_id, None)
        return outputs

    def has_unfinished_requests(self) -> bool:
        return bool(self._states)

    def get_num_unfinished_requests(self) -> int:
        return len(self._states)

    def abort_request(self, request_ids: str | Sequence[str], internal: bool = False) -> None:
        """Ends requests. No further output comes for them; unknown ids are ignored."""
        for name in [request_ids] if isinstance(request_ids, str) else request_ids:
            states = self._states.pop(name, None)
            if states is not None and any(state.finish_reason is None for state in states):
                self.llm.front_end.dispatcher.discard(self._group, states)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "llm":
            raise AttributeError(f"LLMEngine has no {name}")
        view = self.llm.llm_engine
        return getattr(view if hasattr(view, name) else self.llm, name)
