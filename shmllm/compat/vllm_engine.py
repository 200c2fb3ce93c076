"""`LLM` and `LLMEngine` with vLLM's arguments: two faces of one engine.

`LLM` translates arguments and calls the class of the same name in shmllm. `LLMEngine` is vLLM's
loop of `add_request` and `step`, in the caller's thread. The engine itself does not wait for
`step`: it works on all added requests, and `step` returns what is new. `vllm_async` has `AsyncLLM`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from inspect import signature
from itertools import count
from typing import Any, Self

from shmllm.compat.external_launcher import is_launched, own_options, shared_llm
from shmllm.compat.vllm_engine_args import EngineArgs, config_options
from shmllm.compat.vllm_engine_calls import EngineCalls
from shmllm.compat.vllm_names import (
    conversation_options,
    is_of_engine,
    known,
    usable_priority,
    with_processor_kwargs,
    without_nones,
)
from shmllm.compat.vllm_options import translate
from shmllm.compat.vllm_tokenization import (
    of_pairs,
    tokenize,
    tokenize_chat,
    tokenize_for_pooling,
)
from shmllm.errors import RequestError
from shmllm.frontend.dispatcher import POLL_S
from shmllm.frontend.engine_view import EngineView
from shmllm.frontend.front_end import FrontEnd
from shmllm.frontend.priorities import set_priorities
from shmllm.frontend.prompts import as_list
from shmllm.frontend.request_group import RequestGroup
from shmllm.frontend.request_outputs import join_completions, next_output
from shmllm.frontend.request_state import RequestState
from shmllm.outputs.beam_search import BeamSearchOutput
from shmllm.outputs.pooling import PoolingOutput, PoolingRequestOutput, ScoringRequestOutput
from shmllm.outputs.request import RequestOutput
from shmllm.params.sampling import RequestOutputKind, SamplingParams
from shmllm.params.signatures import takes_fields_of
from shmllm.params.unknown_options import reject_unknown_options

logger = logging.getLogger(__name__)


class SteppedRequests:
    """The requests of `LLMEngine.add_request`, which an LLM keeps.

    Attributes:
        group: the requests, for the dispatcher.
        states: the states of each open request, by its id.
        indexes: the numbers of the next requests.
    """

    def __init__(self) -> None:
        self.group = RequestGroup(is_kept=True)
        self.states: dict[str, list[RequestState]] = {}
        self.indexes = count()


@takes_fields_of(EngineArgs, num_positional=1)
class LLM(EngineCalls):
    """`shmllm.LLM` with vLLM's options and arguments.

    Attributes:
        request_counter: numbers for the ids of requests that the caller adds to `llm_engine`.
    """

    def __new__(cls, model: str = "tiny", **options: Any) -> Self:
        """With the backend "external_launcher", processes of a launcher such as torchrun share an
        engine: see `SharedLLM`."""
        shared: Any = shared_llm(options, partial(cls, model))
        return super().__new__(cls) if shared is None else shared

    def __init__(self, model: str = "tiny", **options: Any) -> None:
        given = own_options(options) if is_launched(options) else options
        super().__init__(**translate({"model": model, **given}))

    def generate(
        self, prompts: Any, sampling_params: Any = None, *, use_tqdm: Any = True, **options: Any
    ) -> list[RequestOutput]:
        prepared, given = self._translate_call(prompts, **options)
        return super().generate(prepared, sampling_params, use_tqdm=use_tqdm, **given)

    def enqueue(
        self, prompts: Any, sampling_params: Any = None, *, use_tqdm: Any = True, **options: Any
    ) -> list[str]:
        prepared, given = self._translate_call(prompts, **options)
        return super().enqueue(prepared, sampling_params, use_tqdm=use_tqdm, **given)

    def chat(
        self,
        messages: Any,
        sampling_params: Any = None,
        use_tqdm: Any = True,
        lora_request: Any = None,
        *,
        priority: Any = None,
        **options: Any,
    ) -> list[RequestOutput]:
        return super().generate(
            self._chat_prompts(messages, **options),
            sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            priority=usable_priority(priority, self.facts),
        )

    def enqueue_chat(
        self,
        messages: Any,
        sampling_params: Any = None,
        use_tqdm: Any = True,
        lora_request: Any = None,
        *,
        priority: Any = None,
        **options: Any,
    ) -> list[str]:
        """Queue conversations, as `enqueue` queues prompts."""
        return super().enqueue(
            self._chat_prompts(messages, **options),
            sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            priority=usable_priority(priority, self.facts),
        )

    def beam_search(
        self,
        prompts: Any,
        params: Any,
        lora_request: Any = None,
        use_tqdm: Any = False,
        concurrency_limit: int | None = None,
        priority: Any = None,
    ) -> list[BeamSearchOutput]:
        return super().beam_search(
            without_nones(prompts),
            params,
            lora_request=lora_request,
            use_tqdm=use_tqdm,
            concurrency_limit=concurrency_limit,
            priority=usable_priority(priority, self.facts),
        )

    def encode(
        self,
        prompts: Any,
        pooling_params: Any = None,
        *,
        use_tqdm: Any = True,
        tokenization_kwargs: Any = None,
        **options: Any,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        prepared, cut = tokenize_for_pooling(
            self.front_end, without_nones(prompts), tokenization_kwargs
        )
        given = known(options) | cut
        return super().encode(prepared, pooling_params, use_tqdm=use_tqdm, **given)

    def score(
        self,
        data_1: Any,
        data_2: Any,
        /,
        *,
        use_tqdm: Any = True,
        tokenization_kwargs: Any = None,
        **options: Any,
    ) -> list[ScoringRequestOutput]:
        given = known(options) | of_pairs(tokenization_kwargs)
        return super().score(data_1, data_2, use_tqdm=use_tqdm, **given)

    def _chat_prompts(
        self, messages: Any, *, tokenization_kwargs: Any = None, **options: Any
    ) -> Any:
        reject_unknown_options("LLM.chat", options, signature(conversation_options).parameters)
        own = conversation_options(**known(options))
        prompts = self.front_end.chat_prompts(messages, **own)
        return tokenize_chat(self.front_end, prompts, tokenization_kwargs)

    def _translate_call(
        self,
        prompts: Any,
        tokenization_kwargs: Any = None,
        priority: Any = None,
        mm_processor_kwargs: Any = None,
        **options: Any,
    ) -> tuple[Any, dict[str, Any]]:
        given = with_processor_kwargs(prompts, mm_processor_kwargs)
        prepared = self.prepare_prompts(given, tokenization_kwargs)
        return prepared, known(options | {"priority": usable_priority(priority, self.facts)})

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """As `shmllm.LLM.collective_rpc`. The methods in `OF_ENGINES` have one result."""
        if is_of_engine(method, self.facts):
            return [getattr(self, method)(*args, **kwargs or {})]
        return super().collective_rpc(method, timeout, args, kwargs)

    def prepare_prompts(self, prompts: Any, tokenization_kwargs: Any, min_room: int = 1) -> Any:
        given = without_nones(prompts)
        return tokenize(self.front_end, given, tokenization_kwargs, min_room=min_room)

    @property
    def engine_class(self) -> type[LLMEngine]:
        """The class of `llm_engine`."""
        return LLMEngine

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine, whose requests this object keeps."""
        return LLMEngine(self)

    def _use(self, front_end: FrontEnd) -> None:
        super()._use(front_end)
        self._stepped = SteppedRequests()
        self.request_counter = count()

    def _num_unfinished(self) -> int:
        return super()._num_unfinished() + len(self._stepped.states)


class LLMEngine(EngineView):
    """
    Args:
        llm: the LLM whose engine runs the requests, and which keeps them: all LLMEngines of an LLM
            have the same ones.

    All attributes of `llm` exist as well.
    """

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm)
        self.llm = llm

    @classmethod
    def from_engine_args(
        cls,
        engine_args: Any,
        usage_context: Any = None,
        stat_loggers: Any = None,
        enable_multiprocessing: bool = False,
    ) -> Self:
        """Starts an engine with these options. Other arguments have no effect: the option
        `stat_loggers` takes loggers, and `multiprocess` says where the engine runs."""
        return cls(LLM(**engine_args.llm_options()))

    @classmethod
    def from_vllm_config(cls, vllm_config: Any, **options: Any) -> Self:
        """Starts an engine with the options of `EngineArgs.create_engine_config`. Of vLLM's other
        arguments `stat_loggers` has an effect; unknown ones are a TypeError."""
        return cls(LLM(**config_options("LLMEngine", vllm_config, options)))

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
        session_id: str | None = None,
        prompt_text: str | None = None,
        kv_hints: Any = None,
    ) -> str:
        """Queues a request, and returns its id.

        Args:
            request_id: a new id.
            prompt, params, lora_request, tokenization_kwargs, priority: as for `LLM.generate`.
            arrival_time, trace_headers, prompt_text: ignored: the request arrives now, no spans are
                sent, and the prompt has its text.
            session_id, kv_hints: must be None.

        Raises:
            RequestError: the prompt or a parameter is wrong, or the id is in use.
        """
        if session_id is not None or kv_hints is not None:
            raise RequestError("session_id and kv_hints are not supported: leave them out")
        if not isinstance(request_id, str):
            raise RequestError(f"request_id must be a str, got {type(request_id).__name__}")
        if request_id in self._requests.states:
            raise RequestError(f"request_id {request_id!r} is in use")
        front_end = self.llm.front_end
        given = as_list(self.llm.prepare_prompts(prompt, tokenization_kwargs))
        if len(given) != 1:
            raise RequestError(
                f"request {request_id!r} has {len(given)} prompts: add each by itself"
            )
        params = front_end.default_sampling_params() if params is None else params
        prepared = front_end.prepare(given, params, [f"request {request_id!r}"])
        priority = usable_priority(priority, self.llm.facts)
        self.llm._set_adapters(prepared, lora_request)
        request = set_priorities(prepared, priority, self.llm.facts)[0]
        streaming = params.output_kind is not RequestOutputKind.FINAL_ONLY
        own = self._requests
        own.states[request_id] = front_end.dispatcher.submit(
            own.group, request, next(own.indexes), streaming=streaming, request_id=request_id
        )
        return request_id

    def step(self) -> list[RequestOutput]:
        """The outputs that are new since the last call; waits a short time for the first one.

        A request that the engine refused has the finish_reason "error" and the message in `error`.

        Raises:
            EngineDeadError: the engine process ended.
        """
        changed = self.llm.front_end.dispatcher.collect(self._requests.group, POLL_S)
        open_states = (s for s in changed if s.parent.request_id in self._requests.states)
        outputs = join_completions(map(next_output, open_states))
        for state in changed:
            if state.ends_request:
                self._requests.states.pop(state.parent.request_id, None)
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has more to return. What `LLM.enqueue` queued is not for `step`."""
        return bool(self._requests.states)

    def abort_request(self, request_ids: str | Sequence[str], internal: bool = False) -> None:
        """Ends requests. No further output comes for them; unknown ids are ignored."""
        for name in [request_ids] if isinstance(request_ids, str) else request_ids:
            states = self._requests.states.pop(name, None)
            if states is not None and any(state.finish_reason is None for state in states):
                self.llm.front_end.dispatcher.discard(self._requests.group, states)

    def do_log_stats(self) -> None:
        """Writes the counters to the log."""
        logger.info("engine: %s", self.llm.get_metrics())

    def get_supported_tasks(self) -> tuple[str, ...]:
        """As `LLM.supported_tasks`."""
        return self.llm.supported_tasks

    @property
    def _requests(self) -> SteppedRequests:
        return self.llm._stepped

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "llm":
            raise AttributeError(f"LLMEngine has no {name}")
        return getattr(self.llm, name)
