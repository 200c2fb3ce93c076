"""The front end: the parts between prompts and an engine that `LLM` and `AsyncLLM` share.

A FrontEnd connects a tokenizer, an input processor, an output processor and a dispatcher, and runs
requests through them. It must not know which caller waits for results, or how.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self, cast

from shmllm.client.protocol import EngineClient, StartProgress
from shmllm.config.engine import EngineConfig
from shmllm.config.front_end import FrontEndConfig
from shmllm.errors import RequestError
from shmllm.frontend.adapters import RequestAdapters, read_default_adapters
from shmllm.frontend.dispatcher import POLL_S, Dispatcher
from shmllm.frontend.engines import names_of, start_engine
from shmllm.frontend.given_items import DATA, overrides_of
from shmllm.frontend.input_processor import InputProcessor, Params, PreparedRequest, match_params
from shmllm.frontend.items.ready import by_modality
from shmllm.frontend.options.engine_options import read_model_defaults
from shmllm.frontend.output_processor import OutputProcessor
from shmllm.frontend.progress import Progress, Shown, progress_of
from shmllm.frontend.prompt_items import ItemOptions, PromptItems
from shmllm.frontend.prompts import Prompt, TokensPrompt
from shmllm.frontend.replies.formats import ReplyFormats, ToolChoice
from shmllm.frontend.replies.parser import Tools
from shmllm.frontend.replies.reasoning_config import name_and_marks
from shmllm.frontend.replies.registry import check_names
from shmllm.frontend.request_group import RequestGroup
from shmllm.frontend.request_outputs import request_output
from shmllm.frontend.request_state import RequestState
from shmllm.frontend.text.tokenizer import Tokenizer
from shmllm.frontend.text.tokenizer_backend import NoBackend
from shmllm.frontend.tracing import FrontEndTracing, Inputs
from shmllm.frontend.videos.chosen_frames import read_media_options
from shmllm.outputs.request import RequestOutput
from shmllm.params.lora import LoRARequest
from shmllm.params.pooling import Pooling
from shmllm.params.sampling import SamplingParams
from shmllm.params.structured_outputs import StructuredOutputsDefaults
from shmllm.tracing.layout import Slice
from shmllm.wire.messages import Method

logger = logging.getLogger(__name__)

REQUESTS_PER_POLL = 32

Messages = Sequence[Mapping[str, Any]]


class FrontEnd:
    """
    Args:
        client: the client of an engine that is ready.
        tokenizer_directory: the directory of the tokenizer's files.
        tokenizer: the tokenizer loaded from it.
        model_defaults: the sampling options that come with the model.
        tracing: records traces of this front end; None creates it.
        structured_outputs: the defaults of structured outputs.
        replies: how the model's replies are read; None finds it out.
        item_options: the options of images.
        default_adapters: the adapters of prompts with items that name none, by modality.
        stream_interval: that of requests whose parameters have none.

    Attributes:
        info: what the engine reports about itself and the model.
        adapters: sets the adapters of requests.
        images: prepares images.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer_directory: Path,
        tokenizer: Tokenizer,
        model_defaults: dict[str, Any],
        tracing: FrontEndTracing | None = None,
        structured_outputs: StructuredOutputsDefaults | None = None,
        replies: ReplyFormats | None = None,
        item_options: ItemOptions | None = None,
        default_adapters: Mapping[str, LoRARequest] | None = None,
        stream_interval: int = 1,
    ) -> None:
        self.client = client
        self.info = client.info
        self.tokenizer_directory = tokenizer_directory
        self.tokenizer = tokenizer
        tokenizer.keep_whole(self.info.pooling.markers)
        self.model_defaults = model_defaults
        self._replies = replies or ReplyFormats(tokenizer)
        self.items = PromptItems(self.info, item_options)
        self.inputs: Inputs = InputProcessor(
            tokenizer, self.info, structured_outputs, self._replies, self.items
        )
        self.adapters = RequestAdapters(self.info, default_adapters or {})
        self.outputs = OutputProcessor(
            tokenizer,
            self.info.eos_token_ids,
            self.info.routed,
            stream_interval,
            returns_masks=self.info.sampling_masks,
        )
        self.dispatcher = Dispatcher(client, self.outputs)
        self._tracing = tracing or FrontEndTracing(client)
        self._tracing.attach(self)
        logger.info("engine ready: %s", self.info)
        for warning in self.info.warnings:
            logger.warning("%s", warning)

    @classmethod
    def start(cls, options: FrontEndConfig, config: EngineConfig, progress: StartProgress) -> Self:
        """Start an engine and connect to it."""
        directory = Path(config.load.directory)
        tokenizer_directory = Path(config.load.tokenizer_directory or directory)
        defaults = _read_defaults(options, directory)
        adapters = read_default_adapters(options.default_mm_loras, config.lora.enable_lora)
        parts = _read_parts(options)
        template = _given_template(options, tokenizer_directory)
        client = start_engine(options, config)
        tracing = FrontEndTracing(client)
        try:
            # The engine starts meanwhile.
            if options.skip_tokenizer_init:
                tokenizer = Tokenizer(NoBackend())
            else:
                tokenizer = Tokenizer.from_directory(tokenizer_directory, template)
            tracing.record_slice(Slice.LOAD_TOKENIZER)
            client.wait_ready(progress)
            tracing.record_slice(Slice.START_ENGINE)
            replies = _reply_formats(tokenizer, options)
            return cls(
                client,
                tokenizer_directory,
                tokenizer,
                defaults,
                tracing,
                replies=replies,
                default_adapters=adapters,
                **parts,
            )
        except BaseException:
            client.close()
            raise

    @classmethod
    def attach(cls, name: str | Sequence[str], options: FrontEndConfig) -> Self:
        """Connect to a named engine that is already running, or to several."""
        parts = _read_parts(options)
        from shmllm.client.start import attach_engines

        client = attach_engines(names_of(name))
        tracing = FrontEndTracing(client)
        info = client.wait_ready()
        if info.role != "both":
            logger.warning(
                "the engine has the role %r, but serves all of every request, because it is the "
                "only one that was attached to",
                info.role,
            )
        directory = Path(info.model_directory)
        try:
            defaults = _read_defaults(options, directory)
            adapters = read_default_adapters(options.default_mm_loras, info.max_loras > 0)
            template = _given_template(options, directory)
            tokenizer = Tokenizer.from_directory(directory, template)
            tracing.record_slice(Slice.LOAD_TOKENIZER)
            replies = _reply_formats(tokenizer, options)
            return cls(
                client,
                directory,
                tokenizer,
                defaults,
                tracing,
                replies=replies,
                default_adapters=adapters,
                **parts,
            )
        except BaseException:
            client.close()
            raise

    def default_sampling_params(self) -> SamplingParams:
        return SamplingParams(**self.model_defaults)

    def prepare(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Params | None = None,
        names: Sequence[str] | None = None,
    ) -> list[PreparedRequest]:
        """Check and tokenize prompts that are completed.

        Args:
            names: what errors call each; None counts them.
        """
        self.dispatcher.check_open()
        self._check_generates("generate")
        default = self.default_sampling_params()
        params = match_params(sampling_params, len(prompts), default)
        return self.inputs.prepare(prompts, params, names)

    def add_adapters(self, requests: Sequence[PreparedRequest]) -> None:
        """Let the engine read the adapters that requests name, unless it knows them.

        Raises:
            RequestError: an adapter cannot be read, or does not suit the model.
        """
        given = (request.submitted.lora for request in requests)
        for lora in {each.lora_int_id: each for each in given if each is not None}.values():
            self.add_adapter(lora)

    def add_adapter(self, lora: LoRARequest) -> bool:
        """Let the engine read an adapter, unless it knows it. Returns whether it read it."""
        return bool(self.dispatcher.call(Method.ADD_LORA, asdict(lora)))

    def chat_prompts(
        self, messages: Messages | Sequence[Messages], /, **template_options: Any
    ) -> list[TokensPrompt]:
        """Turn one conversation or several into prompts."""
        self.dispatcher.check_open()
        if not isinstance(messages, Sequence) or not messages:
            raise RequestError("messages must be a list of {'role': ..., 'content': ...}")
        is_one = isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if is_one else messages
        return [self.chat_prompt(each, **template_options) for each in conversations]

    def chat_prompt(
        self,
        messages: Messages,
        /,
        *,
        tools: Tools | None = None,
        tool_choice: ToolChoice = None,
        chat_template: str | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **template_options: Any,
    ) -> TokensPrompt:
        """Turn a conversation into a prompt. The template itself writes the special tokens."""
        from shmllm.frontend.chat_items import take_items

        self._check_generates("chat")
        messages, given = take_items(messages, self.items.options.folder)
        overrides = overrides_of("the conversation", mm_processor_kwargs)
        marks = {item.modality: self.items.mark(item.modality) for item in given.items}
        options = {**template_options, "tools": tools, "chat_template": chat_template}
        text = self.tokenizer.render_chat(messages, options, marks)
        prompt: Any = {"prompt": text}
        expanded = text
        if given:
            items = self.items.ready("the conversation", replace(given, overrides=overrides))
            expanded = self.items.expand_text("the conversation", text, items)
            prompt[DATA] = by_modality(items)
        prompt["prompt_token_ids"] = self.tokenizer.encode(expanded, add_special_tokens=False)
        source = self.tokenizer.chat_template(chat_template, has_tools=tools is not None)
        reply_format = self._replies.of(text, source, tools, tool_choice)
        if reply_format is not None:
            prompt["reply_format"] = reply_format
        return cast(TokensPrompt, prompt)

    def _check_generates(self, method: str) -> None:
        """Raise RequestError if the engine computes no tokens."""
        if not self.info.pooling.generates:
            raise RequestError(
                f"LLM.{method}() is only supported for generative models: this model has no LM "
                "head, or the engine was started without it, by runner='pooling' or convert. To "
                "generate, pass runner='generate' or leave both options out"
            )

    def serve(
        self,
        requests: Iterable[PreparedRequest],
        *,
        streaming: bool = False,
        time_tokens: bool = False,
    ) -> Generator[list[RequestState], None, None]:
        """Run requests, and yield the states that changed after every poll.

        If the caller leaves the iterator early, also by an exception, the requests that still run
        are aborted.

        Args:
            requests: as `prepare` returned them.
            streaming: decode tokens as they arrive, for `state.text.take_delta()`.
            time_tokens: fill `state.token_times`.
        """
        group = RequestGroup()
        try:
            # No loop stands here: from CPython 3.12 on, the jump back to a loop's beginning, where
            # a signal handler may raise, can lie outside the `try`.
            yield from self._polls(group, requests, streaming, time_tokens)
        finally:
            self.dispatcher.discard_group(group)

    def _polls(
        self,
        group: RequestGroup,
        requests: Iterable[PreparedRequest],
        streaming: bool,
        time_tokens: bool,
    ) -> Generator[list[RequestState], None, None]:
        submit, collect = self.dispatcher.submit, self.dispatcher.collect
        for index, request in enumerate(requests):
            submit(group, request, index, streaming=streaming, time_tokens=time_tokens)
            if index % REQUESTS_PER_POLL == REQUESTS_PER_POLL - 1:
                yield collect(group, 0)
        while group.num_open:
            yield collect(group, POLL_S)

    def run(self, requests: list[PreparedRequest], show_progress: Shown) -> list[RequestOutput]:
        """Run requests. Returns their outputs, in their order, when all have ended.

        Raises:
            EnginePausedError: the engine takes no requests now.
        """
        # An exception here would leave the generator to the garbage collector, and the requests
        # running until then.
        with contextlib.closing(self.run_each(requests, show_progress)) as ended:
            outputs = {state.index: request_output(state) for state in ended}
        return [outputs[index] for index in sorted(outputs)]

    def run_each(
        self, requests: list[PreparedRequest], show_progress: Shown
    ) -> Generator[RequestState, None, None]:
        """Run requests, and yield the last state of each when it ends.

        Raises:
            EnginePausedError: the engine takes no requests now.
        """
        with (
            _progress(requests, show_progress) as progress,
            contextlib.closing(self.serve(requests)) as served,
        ):
            yield from _ended(served, progress)


def _progress(requests: list[PreparedRequest], shown: Shown) -> Progress:
    """What shows the progress of requests that all generate, or that all do not."""
    is_pooling = bool(requests) and isinstance(requests[0].submitted.params, Pooling)
    return progress_of(len(requests), shown, generates=not is_pooling)


def _ended(served: Iterable[list[RequestState]], progress: Progress) -> Iterator[RequestState]:
    for changed in served:
        progress.update(changed)
        for state in changed:
            if state.is_retryable:
                state.raise_error()
            if state.ends_request:
                yield state


def _read_defaults(options: FrontEndConfig, directory: Path) -> dict[str, Any]:
    """The sampling options that come with a model, as the options change them."""
    overrides = options.override_generation_config or {}
    return read_model_defaults(directory, options.generation_config, overrides)


def _read_parts(options: FrontEndConfig) -> dict[str, Any]:
    """The arguments of `FrontEnd` that options say by themselves, which are checked first."""
    name, _ = name_and_marks(options.reasoning_parser, options.reasoning_config)
    check_names(name, options.tool_parser)
    return {
        "structured_outputs": StructuredOutputsDefaults.make(options.structured_outputs_config),
        "stream_interval": options.stream_interval,
        "item_options": ItemOptions(
            options.limit_mm_per_prompt or {},
            options.mm_processor_kwargs or {},
            options.allowed_local_media_path,
            options.enable_mm_embeds,
            read_media_options(options.media_io_kwargs),
        ),
    }


def _given_template(options: FrontEndConfig, directory: Path) -> str | None:
    """The source of the chat template that the options name; None without one."""
    if options.chat_template is None:
        return None
    from shmllm.frontend.text.chat_template import read_given_template

    return read_given_template(options.chat_template, directory)


def _reply_formats(tokenizer: Tokenizer, options: FrontEndConfig) -> ReplyFormats:
    name, marks = name_and_marks(options.reasoning_parser, options.reasoning_config)
    return ReplyFormats(tokenizer, name, options.tool_parser, marks)
