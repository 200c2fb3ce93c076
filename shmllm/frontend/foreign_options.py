"""vLLM's options that shmllm does not implement, and how `LLM` treats each of them.

An option in ONLY_VALUES must have a value that describes what this engine does anyway; any other
value is an error. An option in NO_EFFECT is ignored; a value other than None and vLLM's default
causes a warning in the log. An option in TRANSLATED stands for options of ours. An option in no
table is unknown.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shmllm.errors import EngineStartError
from shmllm.frontend.kv_transfer_options import read_kv_transfer_config
from shmllm.frontend.speculative_options import SHORT_NAMES, with_keys_of_short_names

logger = logging.getLogger(__name__)


class OnlyValues(NamedTuple):
    """An option that must have one of a few values.

    Attributes:
        allowed: the values, the default first.
        reason: why other values are errors.
    """

    allowed: tuple[Any, ...]
    reason: str


class NoEffect(NamedTuple):
    """An option that is ignored.

    Attributes:
        default: vLLM's default.
        reason: why the option has no effect.
    """

    default: Any
    reason: str


_WHOLE = "ranks divide each layer, stages the layers"
_KERNELS = "each device has its own kernels"
_ONE_MACHINE = "all processes are on one machine"
_STATES = "recurrent states are float32"
_METRICS = "`get_metrics` and `shmllm top` show what there is"

ONLY_VALUES: dict[str, OnlyValues] = {
    "prefill_context_parallel_size": OnlyValues((1,), _WHOLE),
    "decode_context_parallel_size": OnlyValues((1,), _WHOLE),
    "enable_expert_parallel": OnlyValues((False,), "ranks divide each expert"),
    "cpu_offload_gb": OnlyValues((0,), "weights are never offloaded"),
    "tokenizer_mode": OnlyValues(("auto", "hf"), "tokenizer.json is used"),
    "code_revision": OnlyValues((None,), "no code is downloaded"),
    "config_format": OnlyValues(("auto", "hf"), "config.json is read"),
    "enable_sleep_mode": OnlyValues((False, True), "an engine can always be put to sleep"),
    "disable_sliding_window": OnlyValues((False,), "the model's sliding windows are always used"),
    "enable_mm_embeds": OnlyValues((False,), "images are given as pixels"),
    "disable_chunked_mm_input": OnlyValues((False,), "images are divided where the model allows"),
    "worker_cls": OnlyValues(("auto",), "pass a function to collective_rpc instead"),
    "scheduler_cls": OnlyValues((None,), "there is one scheduler"),
    "nnodes": OnlyValues((1,), _ONE_MACHINE),
    "node_rank": OnlyValues((0,), _ONE_MACHINE),
    "enable_eplb": OnlyValues((False,), "ranks divide each expert"),
    "offload_group_size": OnlyValues((0,), "weights are never offloaded"),
    "kv_offloading_size": OnlyValues((None,), "pass shared_kv_cache_bytes instead"),
    "kv_sharing_fast_prefill": OnlyValues((False,), "all layers compute all tokens"),
    "mamba_cache_dtype": OnlyValues(("auto", "float32"), _STATES),
    "mamba_ssm_cache_dtype": OnlyValues(("auto", "float32"), _STATES),
    "model_loader_extra_config": OnlyValues((None, {}), "weights are loaded in one way"),
    "additional_config": OnlyValues((None, {}), "no device has options of its own"),
    "media_io_kwargs": OnlyValues((None, {}), "pass mm_processor_kwargs instead"),
    "quantization_config": OnlyValues((None,), "config.json describes quantized weights"),
    "lora_target_modules": OnlyValues((None,), "adapters name their modules"),
    "kv_events_config": OnlyValues((None,), "no events are published"),
    "ec_transfer_config": OnlyValues((None,), "an engine encodes its own images"),
    "otlp_traces_endpoint": OnlyValues((None,), "`shmllm trace` records requests and steps"),
}

NO_EFFECT: dict[str, NoEffect] = {
    "enable_chunked_prefill": NoEffect(
        True, "long prompts are always chunked; results are the same"
    ),
    "prefix_caching_hash_algo": NoEffect("sha256", "there is one hash"),
    "enable_trace_replay": NoEffect(False, "trace_decode_token_ids need no option"),
    "fully_sharded_loras": NoEffect(False, "adapters are divided as their layers are"),
    "attention_backend": NoEffect(None, _KERNELS),
    "attention_config": NoEffect(None, _KERNELS),
    "kernel_config": NoEffect(None, _KERNELS),
    "moe_backend": NoEffect("auto", _KERNELS),
    "linear_backend": NoEffect("auto", _KERNELS),
    "enable_flashinfer_autotune": NoEffect(None, _KERNELS),
    "swap_space": NoEffect(4, "preempted requests are recomputed"),
    "optimization_level": NoEffect(None, "nothing is compiled"),
    "disable_custom_all_reduce": NoEffect(False, "ranks add in shared memory"),
    "distributed_executor_backend": NoEffect(None, "processes share memory"),
    "max_parallel_loading_workers": NoEffect(None, "each process loads its own part"),
    "disable_cascade_attn": NoEffect(None, "there is no cascade attention"),
    "trust_remote_code": NoEffect(False, "no code of a model is ever run"),
    "enable_prompt_embeds": NoEffect(False, "prompt_embeds are always accepted"),
    "guided_decoding_backend": NoEffect("auto", "the backend is always llguidance"),
    "served_model_name": NoEffect(None, "there is no server"),
    "mm_processor_cache_type": NoEffect("lru", "a known image is never sent again"),
    "mm_encoder_tp_mode": NoEffect("weights", "one process encodes images"),
    "skip_mm_profiling": NoEffect(False, "nothing is profiled"),
    "interleave_mm_strings": NoEffect(False, "images stay where the message has them"),
    "allowed_media_domains": NoEffect(None, "nothing is fetched"),
    "use_tqdm_on_load": NoEffect(True, "`on_load_progress` is called"),
    "disable_log_stats": NoEffect(False, "`get_metrics` costs nothing"),
    "enable_log_requests": NoEffect(False, "requests are not logged"),
    "renderer_num_workers": NoEffect(1, "the caller's process reads prompts"),
    "data_parallel_backend": NoEffect("mp", "processes share memory"),
    "numa_bind": NoEffect(False, "the operating system places processes"),
    "safetensors_load_strategy": NoEffect(None, "files are memory-mapped"),
    "mm_encoder_attn_backend": NoEffect(None, _KERNELS),
    "gdn_prefill_backend": NoEffect(None, _KERNELS),
    "performance_mode": NoEffect("balanced", "there is one mode"),
    "kv_cache_metrics": NoEffect(False, _METRICS),
    "cudagraph_metrics": NoEffect(False, _METRICS),
    "enable_mfu_metrics": NoEffect(False, _METRICS),
    "enable_logging_iteration_details": NoEffect(False, _METRICS),
    "enable_layerwise_nvtx_tracing": NoEffect(False, "profiler_config has torch's profiler"),
    "collect_detailed_traces": NoEffect(None, "`shmllm trace` records requests and steps"),
}

OTHER_NAMES: dict[str, dict[str, str]] = {"model_impl": {"vllm": "shmllm"}}
"""What values of vLLM's are called here, for options that both have."""

TASKS: dict[str, dict[str, Any]] = {
    "auto": {},
    "generate": {"runner": "generate"},
    "embed": {"runner": "pooling", "convert": "embed"},
    "classify": {"runner": "pooling", "convert": "classify"},
    "reward": {"runner": "pooling"},
    "score": {"runner": "pooling"},
}
"""What vLLM's former option `task` means."""


def _read_task(task: Any) -> dict[str, Any]:
    if task not in TASKS:
        raise EngineStartError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    return TASKS[task]


TRANSLATED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "kv_transfer_config": read_kv_transfer_config,
    "task": _read_task,
}
"""Options that stand for options of ours, which a function returns."""

FOREIGN_NAMES = (*ONLY_VALUES, *NO_EFFECT, *TRANSLATED, *SHORT_NAMES)


def check_foreign_options(callee: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the values of vLLM's options, and log a warning for those without an effect.

    Args:
        callee: the name of the class that has the options, for messages.
        given: the options by name.

    Returns:
        The options that are in no table, with the values that they have here.

    Raises:
        EngineStartError: an option of ONLY_VALUES has another value, or one of TRANSLATED is not
            valid, or stands for an option that is given, too.
    """
    unknown: dict[str, Any] = {}
    for name, value in with_keys_of_short_names(given).items():
        if name in ONLY_VALUES:
            allowed, reason = ONLY_VALUES[name]
            if not any(value == each and type(value) is type(each) for each in allowed):
                values = " or ".join(map(repr, allowed))
                raise EngineStartError(f"{name} can only be {values}: {reason}; got {value!r}")
        elif name in NO_EFFECT:
            default, reason = NO_EFFECT[name]
            if value is not None and value != default:
                logger.warning("%s: %s=%r has no effect: %s", callee, name, value, reason)
        elif name in TRANSLATED:
            found = {} if value is None else TRANSLATED[name](value)
            if twice := [each for each in found if given.get(each) is not None]:
                raise EngineStartError(f"{twice[0]} is given twice, here and in {name}")
            unknown |= found
        else:
            names = OTHER_NAMES.get(name, {})
            unknown[name] = names.get(value, value) if isinstance(value, str) else value
    return unknown
