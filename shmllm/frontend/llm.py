"""The offline API: `LLM(...).generate(prompts)`, with vLLM's names and meaning."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shmllm.config import (
    DType,
    EngineConfig,
    EngineFacts,
    LoadFormat,
    LogprobsMode,
    WaitPolicyName,
)
from shmllm.engine.client import EngineClient, LoadProgress
from shmllm.engine.private import PrivateEngineClient
from shmllm.errors import EngineDeadError, RequestError, ShmLLMError
from shmllm.frontend.engine_options import make_engine_config, read_model_defaults
from shmllm.frontend.input_processor import (
    InputProcessor,
    Params,
    PreparedRequest,
    Prompt,
    TokensPrompt,
    as_list,
    match_params,
)
from shmllm.frontend.output_processor import OutputProcessor
from shmllm.frontend.progress import BatchProgress
from shmllm.frontend.request_state import RequestState
from shmllm.frontend.tokenizer import Tokenizer
from shmllm.model_files import resolve_model
from shmllm.options import reject_unknown_options
from shmllm.outputs import RequestOutput
from shmllm.sampling_params import SamplingParams
from shmllm.wire.messages import Method

logger = logging.getLogger(__name__)

POLL_S = 1.0
CLOSE_LOCK_S = 2.0
REQUESTS_PER_POLL = 32

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model and the engine process that runs it.

    Args:
        model: "tiny" (bundled), a Hugging Face model directory, or a hub id.
        tokenizer: directory or hub id of another tokenizer; None takes the model's.
        revision: branch, tag or commit on the hub.
        dtype: "auto" (float32 on the CPU), "float32", "bfloat16", "float16".
        max_model_len: tokens of prompt and output together; None takes the model's own. It
            shrinks to what the KV cache holds, with a warning.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: token budget of a step; longer prompts are chunked.
        block_size: tokens per KV block: 8, 16 or 32.
        enable_prefix_caching: reuse the KV blocks of equal prefixes.
        kv_cache_memory_bytes: for keys and values; None: 1 GiB or a quarter of the free
            memory, whichever is less.
        seed: of dummy weights and of requests without a seed of their own.
        load_format: "auto", "safetensors", or "dummy" (random weights).
        generation_config: "auto" takes sampling defaults from the model's
            generation_config.json, "shmllm" does not.
        num_threads: compute threads; None takes the cores this process may use.
        wait_policy: "latency", "balanced" or "idle": how long either side spins before it
            sleeps; see docs/ipc.md.
        max_logprobs: alternatives that a request may ask for at each position; -1 sets no
            bound.
        logprobs_mode: what `logprobs` report: "raw_logprobs" of the model, or
            "processed_logprobs" after penalties, temperature and filters; "raw_logits" and
            "processed_logits" are the same before normalisation.
        multiprocess: False runs the engine in this process, for debugging.
        startup_timeout: seconds until the engine has to be ready.
        on_load_progress: called with (bytes read, bytes in all) while it starts.

    Raises:
        EngineStartError: says which file, number or option is wrong.
        NoSpaceError: shared memory is too small.
        TypeError: an unknown option; names the nearest one.
    """

    def __init__(
        self,
        model: str = "tiny",
        *,
        tokenizer: str | None = None,
        revision: str | None = None,
        dtype: DType = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        kv_cache_memory_bytes: int | None = None,
        seed: int = 0,
        load_format: LoadFormat = "auto",
        generation_config: str = "auto",
        num_threads: int | None = None,
        wait_policy: WaitPolicyName = "balanced",
        max_logprobs: int = 20,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        multiprocess: bool = True,
        startup_timeout: float = 120.0,
        on_load_progress: LoadProgress | None = None,
        **unknown: Any,
    ) -> None:
        reject_unknown_options("LLM", unknown, _option_names())
        config = make_engine_config(
            model,
            revision=revision,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            seed=seed,
            load_format=load_format,
            num_threads=num_threads,
            wait_policy=wait_policy,
            max_logprobs=max_logprobs,
            logprobs_mode=logprobs_mode,
        )
        directory = Path(config.load.directory)
        tokenizer_directory = (
            directory if tokenizer is None else resolve_model(tokenizer, revision=revision)
        )
        defaults = read_model_defaults(directory, generation_config)
        client = _start_engine(config, multiprocess, startup_timeout)
        try:
            # The engine starts meanwhile.
            self._set_up(client, Tokenizer.from_directory(tokenizer_directory), defaults)
            self._take_facts(client.wait_ready(on_load_progress))
        except BaseException:
            client.close()
            raise
        self._tokenizer_directory = tokenizer_directory

    @classmethod
    def attach(cls, name: str, *, generation_config: str = "auto") -> LLM:
        """Use an engine that `shmllm engine start NAME` runs. Loads no model and no torch.

        Raises:
            SegmentError: it is not running, still starting, dead, or another user's.
        """
        return AttachedLLM(name, generation_config=generation_config)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts, as one batch.

        Args:
            prompts: a str, a list of token ids, {"prompt": ...}, {"prompt_token_ids":
                [...]}, or a list of these.
            sampling_params: one for all or one for each; None takes the defaults.
            use_tqdm: show a progress bar on stderr.

        Returns:
            One output per prompt, in their order.

        Raises:
            RequestError: a prompt or parameter is wrong; nothing was queued.
            EngineDeadError: the engine died.
        """
        return self._run(self.prepare(as_list(prompts), sampling_params), use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Continue conversations, as `generate` completes prompts.

        Args:
            messages: a list of {"role": ..., "content": ...}, or a list of such lists.
            chat_template: template source or name; None takes the model's.
            tools: JSON schemas of tools, for templates that take them.
            chat_template_kwargs: further variables for the template.
        """
        self._check_open()
        if not isinstance(messages, Sequence) or not messages:
            raise RequestError("messages must be a list of {'role': ..., 'content': ...}")
        is_one = isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if is_one else messages
        prompts = [
            self.chat_prompt(
                conversation,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        return self._run(self.prepare(prompts, sampling_params), use_tqdm)

    def chat_prompt(self, messages: Messages, **template_options: Any) -> TokensPrompt:
        """A conversation as a prompt; the template writes the special tokens itself."""
        text = self._tokenizer.apply_chat_template(messages, **template_options)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return {"prompt": text, "prompt_token_ids": ids}

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer of the model. The engine itself does not need it."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._tokenizer_directory)

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses without `sampling_params`."""
        return SamplingParams(**self.model_defaults)

    def get_metrics(self) -> dict[str, int]:
        """The engine's counters and gauges, read from shared memory without asking it."""
        self._check_open()
        return self._client.stats()

    def health(self) -> str:
        """The engine's state in words: "ready", "stalled 7 s in step 12", "dead"."""
        self._check_open()
        return self._client.health()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False while requests run."""
        self._check_open()
        with self._lock:
            return bool(self._client.call(Method.RESET_PREFIX_CACHE))

    def close(self) -> None:
        """End the engine process. Idempotent; also done at exit and on collection."""
        self._closed = True
        self._client.stop()
        # A thread that generates holds the lock and gets an error now; memory that it still
        # looks at must not go. A generator that nobody runs any more holds it for ever.
        is_locked = self._lock.acquire(timeout=CLOSE_LOCK_S)
        try:
            self._client.close()
        finally:
            if is_locked:
                self._lock.release()

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

    def prepare(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Params | None = None,
        names: Sequence[str] | None = None,
    ) -> list[PreparedRequest]:
        """Check and tokenize prompts for `serve`. Internal."""
        self._check_open()
        default = self.get_default_sampling_params()
        params = match_params(sampling_params, len(prompts), default)
        return self._inputs.prepare(prompts, params, names)

    def serve(
        self,
        requests: Sequence[PreparedRequest],
        *,
        streaming: bool = False,
        time_tokens: bool = False,
    ) -> Iterator[list[RequestState]]:
        """Run requests; yields the states that changed, after every poll. Internal.

        Args:
            requests: as `prepare` returned them.
            streaming: decode tokens as they come, for `state.text.take_delta()`.
            time_tokens: fill `state.token_times`.

        Leaving the iterator early, by an exception too, aborts what still runs.
        """
        with self._lock:
            states: list[RequestState] = []
            num_open = sum(request.params.n for request in requests)
            try:
                for index, request in enumerate(requests):
                    for state in self._outputs.add_all(request, index, streaming, time_tokens):
                        states.append(state)
                        self._submit(state)
                    if index % REQUESTS_PER_POLL == REQUESTS_PER_POLL - 1:
                        changed = self._poll(0)
                        num_open -= sum(state.finish_reason is not None for state in changed)
                        yield changed
                while num_open:
                    changed = self._poll(POLL_S)
                    num_open -= sum(state.finish_reason is not None for state in changed)
                    yield changed
            finally:
                if num_open:
                    self._abandon([state.number for state in states])

    def _set_up(
        self, client: EngineClient, tokenizer: Tokenizer, model_defaults: dict[str, Any]
    ) -> None:
        self._lock = threading.RLock()
        self._closed = False
        self._client = client
        self._tokenizer = tokenizer
        self.model_defaults = model_defaults

    def _take_facts(self, facts: EngineFacts) -> None:
        self.facts = facts
        self._inputs = InputProcessor(self._tokenizer, facts)
        self._outputs = OutputProcessor(self._tokenizer, facts.eos_token_ids)
        logger.info("engine ready: %s", facts)
        for warning in facts.warnings:
            logger.warning("%s", warning)

    def _run(self, requests: list[PreparedRequest], show_progress: bool) -> list[RequestOutput]:
        results: list[RequestOutput | None] = [None] * len(requests)
        with BatchProgress(len(requests), show_progress and bool(requests)) as progress:
            for changed in self.serve(requests):
                progress.update(changed)
                for state in changed:
                    if state.ends_request:
                        results[state.index] = state.output()
        return [result for result in results if result is not None]

    def _submit(self, state: RequestState) -> None:
        self._client.add(state.request.message(state.number))

    def _poll(self, timeout_s: float) -> list[RequestState]:
        try:
            events = self._client.poll(timeout_s)
        except EngineDeadError:
            self._check_open()  # ended by `close` in another thread
            raise
        changed, to_abort = self._outputs.process(events)
        if to_abort:
            self._client.abort(to_abort)
        return changed

    def _abandon(self, numbers: list[int]) -> None:
        unfinished = self._outputs.discard(numbers)
        try:
            self._client.abort(unfinished)
        except ShmLLMError:
            logger.debug("the engine died before its requests could be aborted")

    def _check_open(self) -> None:
        if self._closed:
            raise ShmLLMError("this LLM is closed; make a new one")


class AttachedLLM(LLM):
    """A front end of a named engine; `close` leaves the engine running.

    Args:
        name: of the engine.
        generation_config: as for `LLM`.
    """

    def __init__(self, name: str, *, generation_config: str = "auto") -> None:
        from shmllm.engine.attached import AttachedEngineClient

        client = AttachedEngineClient(name)
        facts = client.wait_ready()
        try:
            self._tokenizer_directory = Path(facts.model_directory)
            defaults = read_model_defaults(self._tokenizer_directory, generation_config)
            self._set_up(client, Tokenizer.from_directory(self._tokenizer_directory), defaults)
            self._take_facts(facts)
        except BaseException:
            client.close()
            raise


def _option_names() -> list[str]:
    names = inspect.signature(LLM.__init__).parameters
    return [name for name in names if name not in ("self", "unknown")]


def _start_engine(config: EngineConfig, multiprocess: bool, startup_timeout: float) -> Any:
    if multiprocess:
        return PrivateEngineClient(config, startup_timeout_s=startup_timeout)
    from shmllm.engine.local import LocalEngineClient

    return LocalEngineClient(config)
