"""The offline API: `LLM(...).generate(prompts)`, with vLLM's names and meaning.

This module owns what users see: names, arguments and documentation. `front_end` and one module for
each kind of call do the work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from shmllm.client.protocol import StartProgress
from shmllm.config.front_end import FrontEndConfig
from shmllm.config.views import VllmConfigView
from shmllm.errors import ShmLLMError
from shmllm.frontend.adapters import Adapters
from shmllm.frontend.beam_search import BeamSearch
from shmllm.frontend.engine_controls import EngineControls
from shmllm.frontend.engine_view import EngineView
from shmllm.frontend.enqueued import Enqueued
from shmllm.frontend.front_end import FrontEnd, Messages
from shmllm.frontend.input_processor import Params, Priority
from shmllm.frontend.io_processing import is_data, prompts_of, result_of
from shmllm.frontend.model_files import loadable_name
from shmllm.frontend.options.engine_options import (
    read_attach_options,
    read_llm_options,
    takes_llm_options,
)
from shmllm.frontend.options.profiler import read_profiler_config
from shmllm.frontend.pooling.calls import PoolingCalls
from shmllm.frontend.priorities import set_priorities
from shmllm.frontend.progress import Shown
from shmllm.frontend.prompts import Prompt, as_list
from shmllm.frontend.replies.formats import ToolChoice
from shmllm.frontend.replies.parser import Tools
from shmllm.frontend.stat_loggers import StatLoggers, make_loggers
from shmllm.frontend.streaming import OnError, stream
from shmllm.frontend.transcription.calls import TranscriptionCalls
from shmllm.frontend.weights.push import WeightPush
from shmllm.frontend.weights.transfer import WeightTransfer
from shmllm.outputs.beam_search import BeamSearchOutput
from shmllm.outputs.request import RequestOutput
from shmllm.params.beam_search import BeamSearchParams
from shmllm.params.lora import LoRARequest
from shmllm.params.pooler_config import PoolerConfig
from shmllm.params.sampling import RequestOutputKind, SamplingParams
from shmllm.params.template_kwargs import chat_options

if TYPE_CHECKING:
    from shmllm.frontend.options.engine_args import EngineArgs  # which needs the options, not LLM


@takes_llm_options
class LLM(EngineControls, PoolingCalls, TranscriptionCalls):
    """A model and the engine process that runs it.

    Args:
        options: see below.
        options of vLLM that are not listed: docs/vllm.md says which are accepted.

    Attributes:
        facts: what the engine reports about itself and the model, an EngineInfo.
        front_end: the parts that the tools of this package use directly.

    Raises:
        EngineStartError: says which file, number or option is wrong.
        NoSpaceError: shared memory is too small.
        TypeError: an unknown option; names the nearest one.
    """

    def __init__(self, model: str = "tiny", **options: Any) -> None:
        front_end, engine = read_llm_options("LLM", model, options)
        pooler_config = PoolerConfig.make(front_end.pooler_config)
        self.profiles = read_profiler_config(front_end.profiler_config)
        self._tokenizer_name = str(front_end.tokenizer or front_end.model)
        progress = StartProgress(front_end.on_load_progress, front_end.on_capture_progress)
        self._use(FrontEnd.start(front_end, engine, progress))
        self._use_pooling(pooler_config)
        self._use_plugins(front_end)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Create an LLM from an EngineArgs."""
        return cls(**engine_args.llm_options())

    @classmethod
    def attach(cls, name: str | Sequence[str], **options: Any) -> Self:
        """Use an engine that `shmllm engine start NAME` started, or several, by a list of names:
        each request goes to the one where it costs least (docs/pool.md). This loads neither a model
        nor torch, and `close` leaves the engines running.

        Args:
            name: the engine's name, or those of several.
            options: those of `LLM` that are no engine's, see `engine_options.ATTACH_OPTIONS`.

        Raises:
            TypeError: an unknown option, or one for starting an engine; names the nearest one.
            EngineStartError: a value is not valid.
            SegmentError: the engine is not running, still starting, dead, or another user's.
        """
        llm = cls.__new__(cls)
        front_end = read_attach_options("LLM.attach", options)
        pooler_config = PoolerConfig.make(front_end.pooler_config)
        llm.profiles = read_profiler_config(front_end.profiler_config)
        llm._use(FrontEnd.attach(name, front_end))
        llm._use_pooling(pooler_config)
        llm._tokenizer_name = llm.facts.model_directory
        llm._use_plugins(front_end)
        return llm

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | None = None,
        *,
        use_tqdm: Shown = True,
        priority: Priority = None,
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:
        """Complete prompts as one batch.

        Args:
            prompts: a str, a list of token ids, {"prompt": ...}, {"prompt_token_ids":
                [...]}, either of these with {"multi_modal_data": {"image": ...}} (see
                `MultiModalPrompt`), or a list of these; or one {"data": ...}, of which an IO
                processor makes prompts. The list then has one output, whose `outputs` is the
                processor's result.
            sampling_params: one for all prompts or one for each; None takes the defaults.
            use_tqdm: show a progress bar on stderr, or by a function such as `tqdm`.
            priority: one for all prompts or one for each; lower values run first. It needs an
                engine with `scheduling_policy="priority"`.
            lora_request: an adapter for all prompts, or for each one or None. It needs an engine
                with `enable_lora=True`, which reads an adapter when it is first named.

        Returns:
            One output for each prompt, in their order.

        Raises:
            RequestError: a prompt or parameter is wrong; nothing was queued.
            EngineDeadError: the engine died.
        """
        if is_data(prompts):
            io = self.find_io_processor()
            of_data = io.merge_sampling_params(sampling_params)  # type: ignore[arg-type]
            done = self.generate(
                prompts_of(io, prompts),
                of_data,
                use_tqdm=use_tqdm,
                lora_request=lora_request,
                priority=priority,
            )
            return result_of(io, done)  # type: ignore[return-value]
        requests = self.front_end.prepare(as_list(prompts), sampling_params)
        self._set_adapters(requests, lora_request)
        return self.front_end.run(set_priorities(requests, priority, self.facts), use_tqdm)

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        ordered: bool = False,
        max_in_flight: int | None = None,
        on_error: OnError = "raise",
        output_kind: RequestOutputKind | None = None,
        priority: int | None = None,
        lora_request: LoRARequest | Iterable[LoRARequest | None] | None = None,
    ) -> Iterator[RequestOutput]:
        """Complete any number of prompts, and yield each result as soon as it is complete.

        The method takes prompts from the iterable as the engine finishes others, so memory does
        not grow with their number. Leaving the iterator early aborts the running requests.

        Args:
            prompts: any iterable of the prompts that `generate` takes, generators included. It
                runs in the caller's thread, between results.
            sampling_params: one for all prompts, or an iterable aligned with the prompts.
            ordered: yield results in the order of the prompts. A slow request delays the results
                after it, of which at most four times `max_in_flight` are kept.
            max_in_flight: how many prompts are in flight at once. None means twice as
                many as run at once, so that the next prompts already wait in the engine.
            on_error: what happens with a prompt that cannot be served: "raise" ends the stream;
                "yield" yields an output with finish_reason "error" and the message in `error`.
            output_kind: what the outputs contain: FINAL_ONLY yields the complete result once;
                DELTA yields new tokens as they arrive; CUMULATIVE yields all tokens so far. None
                means DELTA if the parameters ask for it, else FINAL_ONLY.
            priority: of all prompts, as for `generate`.
            lora_request: an adapter for all prompts, or an iterable aligned with them, of adapters
                and None.

        Yields:
            Outputs; `prompt_index` is the index of the prompt. An output before the last one of
            a prompt contains one completion, and its `finished` is False.

        Raises:
            RequestError: an option or, unless `on_error="yield"`, a prompt is wrong.
            EngineDeadError: the engine died.
        """
        return stream(
            self.front_end,
            prompts,
            sampling_params,
            ordered=ordered,
            max_in_flight=max_in_flight,
            on_error=on_error,
            output_kind=output_kind,
            priority=priority,
            lora_request=lora_request,
        )

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | None = None,
        *,
        use_tqdm: Shown = True,
        priority: Priority = None,
        lora_request: Adapters = None,
    ) -> list[str]:
        """Queue prompts and return at once; `wait_for_completion` returns the results.

        The engine begins immediately. A front end of a named engine has to collect its results
        before `client_timeout` passes with a full output ring.

        Args:
            prompts, sampling_params, priority, lora_request: as for `generate`.
            use_tqdm: accepted for compatibility; queueing shows no progress.

        Returns:
            The `request_id` of each prompt's output.
        """
        requests = self.front_end.prepare(as_list(prompts), sampling_params)
        self._set_adapters(requests, lora_request)
        return self._enqueued.add(set_priorities(requests, priority, self.facts))

    def wait_for_completion(
        self, output_type: type | tuple[type, ...] | None = None, *, use_tqdm: Shown = True
    ) -> list[RequestOutput]:
        """Wait for all prompts that `enqueue` queued. Returns their outputs in that order.

        Args:
            output_type: accepted for compatibility; the outputs are RequestOutputs.
            use_tqdm: show a progress bar on stderr, or by a function such as `tqdm`.
        """
        self._dispatcher.check_open()
        return self._enqueued.wait(use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params | None = None,
        *,
        use_tqdm: Shown = True,
        priority: Priority = None,
        lora_request: Adapters = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Tools | None = None,
        tool_choice: ToolChoice = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate the next message of conversations, as `generate` completes prompts.

        Args:
            messages: a list of {"role": ..., "content": ...}, or a list of such lists.
            chat_template: template source or name; None takes the option `chat_template`'s.
            tools: definitions of tools in OpenAI's form, for templates that take them. Calls are
                in `tool_calls` of the completions, and reasoning in `reasoning`.
            tool_choice: "auto" or None, "none", "required", or {"type": "function", "function":
                {"name": ...}}. The last two force a call whose arguments match their schema.
            chat_template_kwargs: further variables for the template, or the arguments above.
        """
        own = add_generation_prompt, continue_final_message, chat_template, tools, tool_choice
        options = chat_options(*own, chat_template_kwargs)
        prompts = self.front_end.chat_prompts(messages, **options)
        requests = self.front_end.prepare(prompts, sampling_params)
        self._set_adapters(requests, lora_request)
        return self.front_end.run(set_priorities(requests, priority, self.facts), use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: Shown = False,
        concurrency_limit: int | None = None,
        priority: Priority = None,
        lora_request: Adapters = None,
    ) -> list[BeamSearchOutput]:
        """Continue prompts by beam search.

        Args:
            prompts, priority, lora_request: as for `generate`; no prompt has embeddings.
            params: the parameters of all searches.
            use_tqdm: whether a bar shows how many tokens the sequences have, or a function that
                makes one.
            concurrency_limit: how many prompts are searched at a time; None means all at once.

        Returns:
            One output for each prompt, in their order, with its best sequences.

        Raises:
            RequestError: a prompt or parameter is wrong, or the engine's `max_logprobs` is
                below twice the beam width.
        """
        search = BeamSearch(self.front_end, params)
        requests = search.prepare(as_list(prompts))
        self._set_adapters(requests, lora_request)
        requests = set_priorities(requests, priority, self.facts)
        return search.run(requests, concurrency_limit, use_tqdm)

    @property
    def llm_engine(self) -> EngineView:
        """The engine's configuration and model, under vLLM's names."""
        # Not kept: it refers to this object, and a circle would outlive its last user.
        return EngineView(self)

    @property
    def model_config(self) -> Any:
        """`llm_engine.model_config`."""
        return self.llm_engine.model_config

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer of the model. The engine itself does not use it.

        Its `name_or_path` is the hub id if the model was given by one, otherwise its directory.

        Raises:
            RequestError: the engine was started with `skip_tokenizer_init`.
        """
        self.front_end.tokenizer.check_exists()
        from transformers import AutoTokenizer

        directory = self.front_end.tokenizer_directory
        tokenizer = AutoTokenizer.from_pretrained(directory)
        tokenizer.name_or_path = loadable_name(self._tokenizer_name, directory)
        return tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters that `generate` uses without `sampling_params`."""
        return self.front_end.default_sampling_params()

    def close(self) -> None:
        """End the engine process. Idempotent; also called at exit and on garbage collection."""
        self._stat_loggers.close()
        self._dispatcher.close()
        self._weight_push.close()

    shutdown = close

    def __reduce__(self) -> Any:
        raise ShmLLMError(
            "an LLM belongs to the process that made it and cannot be pickled; make one there, "
            "or attach there to a named engine with LLM.attach(NAME)"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _use(self, front_end: FrontEnd) -> None:
        self.front_end = front_end
        self._client = front_end.client
        self._dispatcher = front_end.dispatcher
        self._enqueued = Enqueued(front_end.dispatcher)
        self._weight_push = WeightPush(
            front_end.dispatcher, front_end.info, front_end.client.sharing
        )
        self._weight_transfer = WeightTransfer(front_end.dispatcher)
        self.facts = front_end.info
        self.model_defaults = front_end.model_defaults
        self._io_processor = None
        self._stat_loggers = StatLoggers((), front_end.client, 1.0)

    def _use_plugins(self, options: FrontEndConfig) -> None:
        """Make the stat loggers and the IO processor that options and installed plugins name."""
        self._io_processor_name = options.io_processor_plugin
        config = VllmConfigView.of(self.facts, self.model_defaults)
        try:
            loggers = make_loggers(options.stat_loggers, config)
            self._stat_loggers = StatLoggers(loggers, self._client, options.stat_interval)
            if options.io_processor_plugin is not None:
                self.find_io_processor()
        except BaseException:
            self.close()
            raise

    def _num_unfinished(self) -> int:
        """How many queued requests have not ended, for `llm_engine`."""
        return self._enqueued.num_open
