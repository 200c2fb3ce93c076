"""The offline API: `LLM(...).generate(prompts)`, with vLLM's names and meaning.

Owns what users see: names, arguments, documentation. What happens is in `front_end` and
in a module for each way to wait for results.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from shmllm.client.channel_client import LoadProgress, StartProgress
from shmllm.config.engine import (
    DType,
    LoadFormat,
    LogprobsMode,
    Quantization,
    SchedulingPolicy,
    WaitPolicyName,
)
from shmllm.errors import ShmLLMError
from shmllm.frontend.beam_search import BeamSearchMethods
from shmllm.frontend.engine_options import make_engine_config
from shmllm.frontend.enqueued import Enqueued
from shmllm.frontend.foreign_options import FOREIGN_NAMES, check_foreign_options
from shmllm.frontend.front_end import FrontEnd, Messages, RequestMethods
from shmllm.frontend.input_processor import Params, Prompt, TokensPrompt, as_list
from shmllm.frontend.pausing import PauseMethods
from shmllm.frontend.pooling_methods import PoolingMethods
from shmllm.frontend.priorities import Priority, set_priorities
from shmllm.frontend.streaming import OnError, stream
from shmllm.frontend.weight_methods import WeightMethods
from shmllm.frontend.weight_push import WeightPush
from shmllm.frontend.worker_methods import WorkerMethods, read_profiler_config
from shmllm.outputs.request import RequestOutput
from shmllm.params.keywords import reject_unknown_options
from shmllm.params.pooling import PoolerConfig
from shmllm.params.sampling import RequestOutputKind, SamplingParams
from shmllm.wire.messages import Method

if TYPE_CHECKING:
    from shmllm.frontend.engine_args import EngineArgs


class LLM(
    WeightMethods, WorkerMethods, PauseMethods, PoolingMethods, BeamSearchMethods, RequestMethods
):
    """A model and the engine process that runs it.

    Args:
        model: "tiny" (bundled), a Hugging Face model directory, or a hub id.
        tokenizer: directory or hub id of another tokenizer; None takes the model's.
        revision: branch, tag or commit on the hub.
        device: "auto" (a GPU where there is one), "cpu", "cuda", "cuda:1".
        dtype: "auto" (float32, but on a GPU the checkpoint's), "float32", "bfloat16", "float16".
        max_model_len: tokens of prompt and output together, at most what the KV cache holds.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: token budget of a step; longer prompts are chunked.
        block_size: tokens per KV block: 8, 16, 32 or 64.
        enable_prefix_caching: reuse the KV blocks of equal prefixes.
        kv_cache_memory_bytes: for keys and values; None: on a CPU 2 GiB, or a quarter of what is
            free; on a GPU what is left of `gpu_memory_utilization`.
        gpu_memory_utilization: part of a GPU's memory to use in all.
        enforce_eager: capture no CUDA graphs.
        compilation_config: a mapping with `cudagraph_mode`, `cudagraph_capture_sizes`,
            `max_cudagraph_capture_size`; docs/gpu.md. The latter two are options, too.
        async_scheduling: plan a step while the last one runs; None: on a GPU.
        seed: of dummy weights and of requests without a seed of their own.
        load_format: "auto", "safetensors", or "dummy" (random weights).
        quantization: "int8" keeps matrices in 8 bits, rounded per output channel; None: not.
        generation_config: "auto" takes sampling defaults that come with the model, "shmllm" none.
        num_threads: compute threads; None takes the cores this process may use.
        wait_policy: how long either side spins: "latency", "balanced", "idle"; docs/ipc.md.
        scheduling_policy: "fcfs", or "priority": what has the lowest `priority` runs first.
        deterministic: a request's numbers have equal bits whatever runs beside it; docs/rl.md.
        max_logprobs: alternatives that a request may ask for; -1 sets no bound.
        logprobs_mode: what `logprobs` report: "raw_logprobs" of the model, or
            "processed_logprobs" after penalties, temperature and filters; "raw_logits" and
            "processed_logits" are the same before normalisation.
        pooler_config: defaults of `encode`, `embed` and `score`; a PoolerConfig or a dict.
        profiler_config: {"torch_profiler_dir": ...}; None: the working directory.
        others: options of vLLM's; docs/vllm.md says which are taken, and which with a warning.
        multiprocess: False runs the engine in this process, for debugging.
        startup_timeout: seconds until the engine has to be ready.
        on_load_progress: called with (bytes read, bytes in all) while it starts.
        on_capture_progress: called with (sizes captured, sizes in all) while a GPU's graphs are.

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
        device: str = "auto",
        dtype: DType = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        kv_cache_memory_bytes: int | None = None,
        gpu_memory_utilization: float = 0.92,
        enforce_eager: bool = False,
        compilation_config: Any = None,
        cudagraph_capture_sizes: Sequence[int] | None = None,
        max_cudagraph_capture_size: int | None = None,
        async_scheduling: bool | None = None,
        seed: int = 0,
        load_format: LoadFormat = "auto",
        quantization: Quantization | None = None,
        generation_config: str = "auto",
        num_threads: int | None = None,
        wait_policy: WaitPolicyName = "balanced",
        scheduling_policy: SchedulingPolicy = "fcfs",
        deterministic: bool = False,
        max_logprobs: int = 20,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        pooler_config: PoolerConfig | dict[str, Any] | None = None,
        profiler_config: dict[str, Any] | None = None,
        multiprocess: bool = True,
        startup_timeout: float = 600.0,
        on_load_progress: LoadProgress | None = None,
        on_capture_progress: LoadProgress | None = None,
        **others: Any,
    ) -> None:
        unknown = check_foreign_options("LLM", others)
        reject_unknown_options("LLM", unknown, _option_names())
        config = make_engine_config(
            model,
            tokenizer=tokenizer,
            revision=revision,
            device=device,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
            enforce_eager=enforce_eager,
            compilation_config=compilation_config,
            cudagraph_capture_sizes=cudagraph_capture_sizes,
            max_cudagraph_capture_size=max_cudagraph_capture_size,
            async_scheduling=async_scheduling,
            seed=seed,
            load_format=load_format,
            quantization=quantization,
            num_threads=num_threads,
            wait_policy=wait_policy,
            scheduling_policy=scheduling_policy,
            deterministic=deterministic,
            max_logprobs=max_logprobs,
            logprobs_mode=logprobs_mode,
        )
        self.pooler_config = PoolerConfig.make(pooler_config)
        self.profile_directory = read_profiler_config(profiler_config)
        progress = StartProgress(on_load_progress, on_capture_progress)
        self._use(
            FrontEnd.start(config, generation_config, multiprocess, startup_timeout, progress)
        )

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """From options that were put together as an object."""
        return cls(**engine_args.llm_options())

    @classmethod
    def attach(cls, name: str, *, generation_config: str = "auto") -> Self:
        """Use an engine that `shmllm engine start NAME` runs. Loads no model and no torch;
        `close` leaves the engine running.

        Raises:
            SegmentError: it is not running, still starting, dead, or another user's.
        """
        llm = cls.__new__(cls)
        llm.pooler_config = PoolerConfig()
        llm._use(FrontEnd.attach(name, generation_config))
        return llm

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | None = None,
        *,
        use_tqdm: bool = True,
        priority: Priority = None,
    ) -> list[RequestOutput]:
        """Complete prompts, as one batch.

        Args:
            prompts: a str, a list of token ids, {"prompt": ...}, {"prompt_token_ids":
                [...]}, or a list of these.
            sampling_params: one for all or one for each; None takes the defaults.
            use_tqdm: show a progress bar on stderr.
            priority: one for all or one for each, lower going first; for engines with
                `scheduling_policy="priority"`.

        Returns:
            One output per prompt, in their order.

        Raises:
            RequestError: a prompt or parameter is wrong; nothing was queued.
            EngineDeadError: the engine died.
        """
        requests = self.prepare(as_list(prompts), sampling_params)
        return self._front_end.run(set_priorities(requests, priority, self.facts), use_tqdm)

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        ordered: bool = False,
        max_in_flight: int | None = None,
        on_error: OnError = "raise",
        output_kind: RequestOutputKind | None = None,
    ) -> Iterator[RequestOutput]:
        """Complete any number of prompts, and yield each result when it is there.

        Prompts are taken from the iterable as the engine gets through them, so memory does
        not grow with their number. Leaving the iterator early aborts what runs.

        Args:
            prompts: any iterable of what `generate` takes; generators included. It is run in
                the caller's thread, between results.
            sampling_params: one for all, or an iterable aligned with the prompts.
            ordered: yield in the order of the prompts. A slow one holds up those behind it,
                of which at most four times `max_in_flight` are kept.
            max_in_flight: prompts under way at once; None: twice `max_num_seqs`, so that a
                next wave waits in the engine.
            on_error: what to do about a prompt that cannot be served: "raise" ends the
                stream; "yield" makes it an output with finish_reason "error" and the
                message in `error`, and goes on.
            output_kind: what outputs hold: FINAL_ONLY, the whole result when it is there;
                DELTA, what is new, as it comes; CUMULATIVE, all so far, as it comes. None:
                DELTA where the parameters say so, else FINAL_ONLY.

        Yields:
            Outputs; `prompt_index` counts the prompts. Those before the last one of a prompt
            hold one completion, and `finished` is False.

        Raises:
            RequestError: an option or, unless `on_error="yield"`, a prompt is wrong.
            EngineDeadError: the engine died.
        """
        return stream(
            self._front_end,
            prompts,
            sampling_params,
            ordered=ordered,
            max_in_flight=max_in_flight,
            on_error=on_error,
            output_kind=output_kind,
        )

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | None = None,
        *,
        use_tqdm: bool = True,
        priority: Priority = None,
    ) -> list[str]:
        """Queue prompts and return; the engine begins at once. `wait_for_completion` has
        the results. A front end of a named engine has to come for them in time.

        Args:
            use_tqdm: accepted; queueing shows nothing.
            priority: as for `generate`.

        Returns:
            The `request_id` of each prompt's output.
        """
        requests = self.prepare(as_list(prompts), sampling_params)
        return self._enqueued.add(set_priorities(requests, priority, self.facts))

    def wait_for_completion(
        self, output_type: type | tuple[type, ...] | None = None, *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """The outputs of all that was queued by `enqueue`, in that order.

        Args:
            output_type: accepted; what comes is a RequestOutput.
            use_tqdm: show a progress bar on stderr.
        """
        self._dispatcher.check_open()
        return self._enqueued.wait(use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params | None = None,
        *,
        use_tqdm: bool = True,
        priority: Priority = None,
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
        prompts = self._front_end.chat_prompts(
            messages,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            tools=tools,
            **(chat_template_kwargs or {}),
        )
        requests = self.prepare(prompts, sampling_params)
        return self._front_end.run(set_priorities(requests, priority, self.facts), use_tqdm)

    def chat_prompt(self, messages: Messages, **template_options: Any) -> TokensPrompt:
        """A conversation as a prompt. Internal."""
        return self._front_end.chat_prompt(messages, **template_options)

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer of the model. The engine itself does not need it."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._front_end.tokenizer_directory)

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses without `sampling_params`."""
        return self._front_end.default_sampling_params()

    def get_metrics(self) -> dict[str, int]:
        """The engine's counters and gauges, read from shared memory without asking it."""
        self._dispatcher.check_open()
        return self._client.stats()

    def health(self) -> str:
        """The engine's state in words: "ready", "stalled 7 s in step 12", "dead"."""
        self._dispatcher.check_open()
        return self._client.health()

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all cached prefixes. False while requests run.

        Args:
            reset_running_requests: have what runs give its blocks back first, to be recomputed.
            reset_connector: accepted; there is none.
        """
        return bool(self._dispatcher.call(Method.RESET_PREFIX_CACHE, reset_running_requests))

    def close(self) -> None:
        """End the engine process. Idempotent; also done at exit and on collection."""
        self._dispatcher.close()

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
        self._front_end = front_end
        self._client = front_end.client
        self._dispatcher = front_end.dispatcher
        self._enqueued = Enqueued(front_end.dispatcher)
        self._weight_push = WeightPush(front_end.dispatcher)
        self.facts = front_end.facts
        self.model_defaults = front_end.model_defaults


def _option_names() -> list[str]:
    names = inspect.signature(LLM.__init__).parameters
    return [*FOREIGN_NAMES, *(name for name in names if name not in ("self", "others"))]
