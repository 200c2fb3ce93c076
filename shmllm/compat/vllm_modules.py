"""The modules and names of vLLM that `import vllm` finds, and what stands nearest to the others.

This module is the one list of them: the finder, the errors about absent names and `python -m
shmllm.compat` read it. It imports none of the names.
"""

from __future__ import annotations

from typing import NamedTuple

from shmllm.errors import nearest

VERSION = "0.33.0+shmllm"
"""The version of vLLM whose offline API this package provides; clients compare it."""

_SIMILAR = 0.85


def _at(home: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), home)


_NO_SERVER = "there is no server; put shmllm.AsyncLLM behind your own"
_ADAPTERS = "LLM.add_lora takes an adapter's directory or its tensors"

UNUSABLE = {
    "get_ip": "shmllm opens no ports",
    "trainer_init": "WeightTransferTrainerFactory.trainer_init",
    "packed_nccl_broadcast_producer": "WeightTransferTrainerFactory.trainer_init",
    **dict.fromkeys(("LinearBase", "Fp8Config"), "LLM.apply_model gives the model"),
    **dict.fromkeys(("LoRAModel", "LRUCacheWorkerLoRAManager"), _ADAPTERS),
    "get_adapter_absolute_path": _ADAPTERS,
    **dict.fromkeys(("cmd_init", "run_headless", "build_app", "init_app_state"), _NO_SERVER),
    "get_encoding": "the package openai-harmony",
}
"""Names that clients import whether or not they use them, and the nearest things."""

_OUTPUTS = (
    "CompletionOutput RequestOutput PoolingOutput PoolingRequestOutput EmbeddingOutput "
    "EmbeddingRequestOutput ClassificationOutput ClassificationRequestOutput ScoringOutput "
    "ScoringRequestOutput"
)
_INPUTS = (
    "TextPrompt TokensPrompt EmbedsPrompt ExplicitEncoderDecoderPrompt SingletonPrompt PromptType "
    "MultiModalDataDict MultiModalUUIDDict"
)
_LATE_PARAMS = "LateInteractionParams LateChunkingParams"
_SETTINGS = "AttentionConfig CompilationConfig KernelConfig ProfilerConfig StructuredOutputsConfig"
_TRAINER = "ModuleSource ParamMeta WeightSource TrainerWeightTransferEngine"
_REQUESTS = "TrainerInitInfo WeightTransferInitRequest WeightTransferUpdateRequest"
_NCCL = "NCCLTrainerInitInfo NCCLWeightTransferInitInfo NCCLWeightTransferUpdateInfo"
_IPC = "IPCTrainerInitInfo IPCWeightTransferInitInfo IPCWeightTransferUpdateInfo"
_LOGPROBS = "PromptLogprobs SampleLogprobs"
_CONFIGS = "CacheConfig ModelConfig ParallelConfig SchedulerConfig VllmConfig"
_METRICS = "Counter Gauge Histogram Metric Vector"
_CLEANUP = "destroy_model_parallel destroy_distributed_environment cleanup_dist_env_and_memory"
_ENCODED = "encode_image_base64 encode_image_url encode_audio_base64 encode_audio_url"
_FETCHED = "fetch_image fetch_audio"
_SIZES = "KB_bytes KiB_bytes MB_bytes MiB_bytes GB_bytes GiB_bytes"
_RANK = "LLM.collective_rpc(function), whose worker has a `rank`"

_PROCESSORS = (
    "LogitsProcessor AdapterLogitsProcessor BatchUpdate MoveDirectionality RequestLogitsProcessor"
)

HOMES = {
    **_at("shmllm", f"SamplingParams RequestOutputKind StructuredOutputsParams {_OUTPUTS}"),
    **_at("shmllm.outputs.flat_logprobs", "FlatLogprobs"),
    **_at("shmllm.outputs.sampling_masks", "SamplingMask"),
    **_at("shmllm.outputs.pooling", "LateChunk LateChunkingMetadata"),
    **_at("shmllm", _LATE_PARAMS),
    **_at("shmllm", "PoolingParams PoolerConfig TextPrompt TokensPrompt EmbedsPrompt Logprob"),
    **_at("shmllm", "EngineDeadError BeamSearchParams RepetitionDetectionParams"),
    "PromptType": "shmllm.frontend.prompts:Prompt",
    "SingletonPrompt": "shmllm.frontend.prompts:Prompt",
    "ExplicitEncoderDecoderPrompt": "shmllm.frontend.prompts:EncoderDecoderPrompt",
    "VLLMClientError": "shmllm:RequestError",
    "VLLMValidationError": "shmllm:RequestError",
    "VLLMError": "shmllm:ShmLLMError",
    **_at("shmllm.compat.vllm_engine", "LLM LLMEngine"),
    **_at("shmllm.compat.vllm_names", "get_tokenizer resolve_chat_template random_uuid"),
    **_at("shmllm.compat.vllm_names", "get_open_port print_embeddings hf_api"),
    **_at("shmllm.compat.vllm_types", f"FinishReason MultiModalDataDict {_LOGPROBS}"),
    **_at("shmllm.compat.vllm_types", f"SamplingType {_SIZES}"),
    "RequestStateStats": "shmllm.outputs.request:RequestMetrics",
    "GenerationTask": "builtins:str",
    "MultiModalUUIDDict": "shmllm.compat.vllm_types:MultiModalDataDict",
    "TokenizerLike": "transformers:PreTrainedTokenizerBase",
    "RayPrometheusStatLogger": "shmllm.compat.vllm_names",
    **_at("shmllm.compat.vllm_engine_args", f"EngineArgs AsyncEngineArgs {_CONFIGS} Executor"),
    **_at("shmllm.compat.vllm_config", f"{_SETTINGS} UsageContext CompilationMode"),
    **_at("shmllm.compat.vllm_config", "KVTransferConfig WeightTransferConfig ReasoningConfig"),
    **_at("shmllm.trainer", f"{_TRAINER} {_REQUESTS} {_NCCL} {_IPC}"),
    "WeightTransferTrainerFactory": "shmllm.trainer",
    "LoRARequest": "shmllm.compat.vllm_lora",
    **_at("shmllm.compat.vllm_media", f"{_ENCODED} {_FETCHED} convert_image_mode"),
    "FlexibleArgumentParser": "shmllm.compat.vllm_cli_args",
    "PoolingTask": "builtins:str",
    "SupportedTask": "builtins:str",
    "POOLING_TASKS": "shmllm.params.pooling_tasks",
    "check_removed_pooling_task": "shmllm.params.pooling_tasks:check_removed_task",
    "ProfilerAlreadyActiveError": "shmllm:RequestError",
    "CUDAGraphMode": "shmllm.config.graphs:CudaGraphMode",
    **_at("shmllm.compat.vllm_metrics", _METRICS),
    **_at("shmllm.compat.vllm_platforms", "current_platform"),
    **_at("shmllm.compat.vllm_version", "__version__ __version_tuple__"),
    **dict.fromkeys(UNUSABLE, "shmllm.compat.vllm_absent"),
    "ModelRegistry": "shmllm.compat.vllm_absent",
    "AsyncLLM": "shmllm.compat.vllm_async",
    "AsyncLLMEngine": "shmllm.compat.vllm_async:AsyncLLM",
    "EngineClient": "shmllm.compat.vllm_async:AsyncLLM",
    "StreamingInput": "shmllm:PromptChunk",
    **_at("shmllm.plugins.logits_processor", f"{_PROCESSORS} process_dict_updates"),
    "NGramPerReqLogitsProcessor": "shmllm.plugins.repeated_ngrams:NoRepeatedNGrams",
    "StatLoggerBase": "shmllm.plugins.stat_logger",
    "SchedulerStats": "shmllm.plugins.stat_logger",
    "IterationStats": "shmllm.plugins.stat_logger",
    "IOProcessor": "shmllm.plugins.io_processor",
    "init_logger": "logging:getLogger",
    **_at("shmllm.compat.vllm_cleanup", _CLEANUP),
    **_at("shmllm.compat.vllm_groups", "PyNcclCommunicator StatelessProcessGroup"),
    "process_weights_after_loading": "shmllm.compat.vllm_worker",
}
"""The module that defines each name, as "module", or "module:name" if the names differ."""

MODULES = {
    "vllm": "LLM SamplingParams PoolingParams TextPrompt TokensPrompt PromptType EngineArgs "
    f"AsyncEngineArgs AsyncLLMEngine LLMEngine ModelRegistry {_OUTPUTS} "
    "__version__ __version_tuple__",
    "vllm.config": f"PoolerConfig {_SETTINGS} {_CONFIGS} CUDAGraphMode KVTransferConfig "
    "WeightTransferConfig CompilationMode ReasoningConfig",
    "vllm.config.attention": "AttentionConfig",
    "vllm.config.cache": "CacheConfig",
    "vllm.config.kernel": "KernelConfig",
    "vllm.config.model": "ModelConfig",
    "vllm.config.parallel": "ParallelConfig",
    "vllm.config.profiler": "ProfilerConfig",
    "vllm.config.scheduler": "SchedulerConfig",
    "vllm.config.structured_outputs": "StructuredOutputsConfig",
    "vllm.config.vllm": "VllmConfig",
    "vllm.config.compilation": "CompilationConfig CompilationMode CUDAGraphMode",
    "vllm.distributed": _CLEANUP,
    "vllm.distributed.device_communicators.pynccl": "PyNcclCommunicator",
    "vllm.distributed.parallel_state": _CLEANUP,
    "vllm.distributed.utils": "StatelessProcessGroup",
    "vllm.config.kv_transfer": "KVTransferConfig",
    "vllm.config.pooler": "PoolerConfig",
    "vllm.config.reasoning": "ReasoningConfig",
    "vllm.config.weight_transfer": "WeightTransferConfig",
    "vllm.distributed.weight_transfer": f"{_TRAINER} WeightTransferTrainerFactory",
    "vllm.distributed.weight_transfer.base": f"{_TRAINER} {_REQUESTS}",
    "vllm.distributed.weight_transfer.factory": "WeightTransferTrainerFactory",
    "vllm.distributed.weight_transfer.ipc_engine": _IPC,
    "vllm.distributed.weight_transfer.nccl_common": "trainer_init NCCLWeightTransferInitInfo",
    "vllm.distributed.weight_transfer.nccl_engine": _NCCL,
    "vllm.distributed.weight_transfer.packed_tensor": "packed_nccl_broadcast_producer",
    "vllm.engine.arg_utils": "EngineArgs AsyncEngineArgs",
    "vllm.engine.async_llm_engine": "AsyncLLMEngine",
    "vllm.engine.llm_engine": "LLMEngine",
    "vllm.engine.protocol": "EngineClient StreamingInput",
    "vllm.entrypoints.cli.serve": "cmd_init run_headless",
    "vllm.entrypoints.llm": "LLM",
    "vllm.entrypoints.openai.api_server": "build_app init_app_state",
    "vllm.entrypoints.openai.parser.harmony_utils": "get_encoding",
    "vllm.exceptions": "VLLMError VLLMClientError VLLMValidationError ProfilerAlreadyActiveError",
    "vllm.inputs": _INPUTS,
    "vllm.inputs.llm": _INPUTS,
    "vllm.logger": "init_logger",
    "vllm.logprobs": f"Logprob FlatLogprobs {_LOGPROBS}",
    "vllm.lora.lora_model": "LoRAModel",
    "vllm.lora.request": "LoRARequest",
    "vllm.lora.utils": "get_adapter_absolute_path",
    "vllm.lora.worker_manager": "LRUCacheWorkerLoRAManager",
    "vllm.model_executor.layers.linear": "LinearBase",
    "vllm.model_executor.layers.quantization.fp8": "Fp8Config",
    "vllm.model_executor.model_loader.utils": "process_weights_after_loading",
    "vllm.model_executor.models": "ModelRegistry",
    "vllm.multimodal.image": "convert_image_mode",
    "vllm.multimodal.utils": f"{_ENCODED} {_FETCHED}",
    "vllm.outputs": f"{_OUTPUTS} LateChunk LateChunkingMetadata SamplingMask",
    "vllm.platforms": "current_platform",
    "vllm.plugins.io_processors": "IOProcessor",
    "vllm.plugins.io_processors.interface": "IOProcessor",
    "vllm.pooling_params": f"PoolingParams {_LATE_PARAMS}",
    "vllm.renderers.hf": "resolve_chat_template",
    "vllm.sampling_params": "SamplingParams StructuredOutputsParams RequestOutputKind "
    "BeamSearchParams RepetitionDetectionParams SamplingType",
    "vllm.tasks": "GenerationTask PoolingTask SupportedTask POOLING_TASKS "
    "check_removed_pooling_task",
    "vllm.tokenizers": "get_tokenizer TokenizerLike",
    "vllm.transformers_utils.repo_utils": "hf_api",
    "vllm.usage.usage_lib": "UsageContext",
    "vllm.utils": "random_uuid",
    "vllm.utils.mem_constants": _SIZES,
    "vllm.utils.argparse_utils": "FlexibleArgumentParser",
    "vllm.utils.network_utils": "get_ip get_open_port",
    "vllm.utils.print_utils": "print_embeddings",
    "vllm.v1.engine": "FinishReason",
    "vllm.v1.engine.async_llm": "AsyncLLM AsyncEngineArgs StreamingInput",
    "vllm.v1.engine.exceptions": "EngineDeadError",
    "vllm.v1.engine.llm_engine": "LLMEngine",
    "vllm.v1.executor": "Executor",
    "vllm.v1.executor.abstract": "Executor",
    "vllm.v1.metrics.loggers": "StatLoggerBase",
    "vllm.v1.metrics.stats": "SchedulerStats IterationStats RequestStateStats",
    "vllm.model_executor.models.deepseek_ocr": "NGramPerReqLogitsProcessor",
    "vllm.v1.sample.logits_processor": _PROCESSORS,
    "vllm.v1.sample.logits_processor.builtin": "process_dict_updates",
    "vllm.v1.sample.logits_processor.interface": "LogitsProcessor BatchUpdate MoveDirectionality",
    "vllm.v1.metrics.ray_wrappers": "RayPrometheusStatLogger",
    "vllm.v1.metrics.reader": _METRICS,
    "vllm.version": "__version__ __version_tuple__",
}
"""The names of each module, separated by spaces. A module without names can be imported only."""

_MEDIA = "prompts take PIL images, arrays and encoded files; see MultiModalPrompt"
_OWN_PROCESSES = "an engine starts its processes by itself; see tensor_parallel_size"

_GROUPS = (
    "world_group tp_group pp_group dp_group ep_group tensor_model_parallel_rank "
    "tensor_model_parallel_world_size"
)

ABSENT = {
    "vllm.assets": _MEDIA,
    "vllm.attention": "each device has its own attention; `attention_config` is accepted",
    "vllm.benchmarks": "`shmllm bench` measures generation and startup",
    "vllm.compilation": "nothing is compiled; `compilation_config` sets CUDA graphs",
    "vllm.distributed.kv_transfer": "shmllm.plugins.kv_connector:KVConnector, which has vLLM's "
    "methods; see docs/plugins.md",
    **{f"vllm.distributed.get_{name}": _RANK for name in _GROUPS.split()},
    "vllm.entrypoints.chat_utils": "a message is a dict with `role` and `content`",
    "vllm.entrypoints.openai": _NO_SERVER,
    "vllm.entrypoints.pooling": "LLM.encode, embed, classify and score",
    "vllm.config.SpeculativeConfig": "the option `speculative_config` takes a dict",
    "vllm.config.LoRAConfig": "the options `enable_lora`, `max_loras` and so on",
    "vllm.inputs.data": "vllm.inputs, as in vLLM 0.32 and later",
    "vllm.beam_search": "vllm.sampling_params.BeamSearchParams",
    "vllm.transformers_utils.tokenizer": "vllm.tokenizers.get_tokenizer",
    "vllm.envs": "the options of LLM; no environment variables of vLLM are read",
    "vllm.forward_context": "LLM.collective_rpc and LLM.apply_model run code in the engine",
    "vllm.initialize_ray_cluster": _OWN_PROCESSES,
    "vllm.model_executor.layers": "LLM.apply_model gives the model, whose class is shmllm's own",
    "vllm.model_executor.model_loader": "LLM.update_weights replaces weights",
    "vllm.multimodal": _MEDIA,
    "vllm.outputs.RequestError": '`finish_reason` "error" and `error` of an output of LLM.stream',
    "vllm.plugins.load_general_plugins": "engines and front ends load plugins by themselves",
    "vllm.reasoning": "read `outputs[0].reasoning` of a chat; see docs/tools.md",
    "vllm.sampling_params.GuidedDecodingParams": "StructuredOutputsParams",
    "vllm.tool_parsers": "read `outputs[0].tool_calls` of a chat with tools; see docs/tools.md",
    "vllm.transformers_utils": "transformers.AutoConfig and AutoTokenizer",
    "vllm.usage": "no usage is reported",
    "vllm.v1.core": "the one scheduler has no interface; LLM.get_metrics shows its state",
    "vllm.v1.executor.multiproc_executor": _OWN_PROCESSES,
    "vllm.v1.executor.ray_executor": _OWN_PROCESSES,
    "vllm.v1.metrics.loggers.PrometheusStatLogger": "`shmllm engine start --metrics-port`",
    "vllm.v1.worker": "LLM.collective_rpc(function), whose first argument is the worker",
    "vllm.worker": "LLM.collective_rpc(function), whose first argument is the worker",
}
"""Modules and names that do not exist, and the nearest thing that shmllm has."""


class Found(NamedTuple):
    """A name of a module.

    Attributes:
        home: the module that defines it.
        name: the name there.
    """

    home: str
    name: str


def _with_parents() -> set[str]:
    parts = (name.split(".") for name in MODULES)
    return {".".join(p[: i + 1]) for p in parts for i in range(len(p))}


ALL_MODULES = _with_parents()
"""The names of all modules, with those packages that have no names of their own."""


def names_of(module: str) -> list[str]:
    """The names of a module."""
    return MODULES.get(module, "").split()


def find_name(module: str, name: str) -> Found | None:
    """Where the name of a module is defined; None if the module does not have it."""
    if name not in names_of(module):
        return None
    home, _, other_name = HOMES[name].partition(":")
    return Found(home, other_name or name)


def describe_absent(full_name: str) -> str:
    """An error message for a module or name that does not exist, with the nearest thing."""
    return (
        f"shmllm's replacement for vLLM has no {full_name}; {_advice(full_name)}. "
        "`python -m shmllm.compat` lists what exists"
    )


def _advice(full_name: str) -> str:
    found = next((text for name, text in ABSENT.items() if _is_within(full_name, name)), None)
    if found is not None:
        return f"the nearest thing is: {found}"
    name = full_name.rpartition(".")[2]
    other = next((text for each, text in ABSENT.items() if each.endswith(f".{name}")), None)
    if other is not None:
        return f"the nearest thing is: {other}"
    owners = [module for module in MODULES if name in names_of(module)]
    if owners:
        return f"the nearest name is {owners[0]}.{name}"
    near = nearest(name, HOMES, _SIMILAR)
    if near is not None:
        owner = next(module for module in MODULES if near in names_of(module))
        return f"the nearest name is {owner}.{near}"
    return "nothing here corresponds to it"


def _is_within(full_name: str, package: str) -> bool:
    return full_name == package or full_name.startswith(f"{package}.")
