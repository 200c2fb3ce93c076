"""The tables of vLLM's options that shmllm does not implement; `foreign_options` applies them."""

from __future__ import annotations

from typing import Any, NamedTuple


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
_NOT_OFFLOADED = "weights are never offloaded"
_SHARED = "one front end shares requests among engines: pass data_parallel_size"
_METRICS = "`get_metrics` and `shmllm top` show what there is"

ONLY_VALUES: dict[str, OnlyValues] = {
    "prefill_context_parallel_size": OnlyValues((1,), _WHOLE),
    "decode_context_parallel_size": OnlyValues((1,), _WHOLE),
    "cpu_offload_gb": OnlyValues((0,), _NOT_OFFLOADED),
    "tokenizer_mode": OnlyValues(("auto", "hf"), "tokenizer.json is used"),
    "code_revision": OnlyValues((None,), "no code is downloaded"),
    "config_format": OnlyValues(("auto", "hf"), "config.json is read"),
    "enable_sleep_mode": OnlyValues((False, True), "an engine can always be put to sleep"),
    "worker_cls": OnlyValues(("auto",), "pass a function to collective_rpc instead"),
    "scheduler_cls": OnlyValues((None,), "there is one scheduler"),
    "nnodes": OnlyValues((1,), _ONE_MACHINE),
    "node_rank": OnlyValues((0,), _ONE_MACHINE),
    "enable_eplb": OnlyValues((False,), "ranks divide each expert"),
    "offload_group_size": OnlyValues((0,), _NOT_OFFLOADED),
    "kv_offloading_size": OnlyValues((None,), "pass shared_kv_cache_bytes instead"),
    "kv_sharing_fast_prefill": OnlyValues((False,), "all layers compute all tokens"),
    "mamba_cache_dtype": OnlyValues(("auto", "float32"), _STATES),
    "mamba_ssm_cache_dtype": OnlyValues(("auto", "float32"), _STATES),
    "model_loader_extra_config": OnlyValues((None, {}), "weights are loaded in one way"),
    "additional_config": OnlyValues((None, {}), "no device has options of its own"),
    "quantization_config": OnlyValues((None,), "config.json describes quantized weights"),
    "kv_events_config": OnlyValues((None,), "no events are published"),
    "ec_transfer_config": OnlyValues((None,), "an engine encodes its own images"),
    "dcp_kv_cache_interleave_size": OnlyValues((1,), _WHOLE),
    "enable_elastic_ep": OnlyValues((False,), "ranks divide each expert"),
    "enable_dbo": OnlyValues((False,), "a step is computed as a whole"),
    "ubatch_size": OnlyValues((0,), "a step is computed as a whole"),
    "device_ids": OnlyValues((None,), "pass device, or set CUDA_VISIBLE_DEVICES"),
    "hf_config_path": OnlyValues((None,), "config.json is beside the weights; see hf_overrides"),
    "model_class_overrides": OnlyValues((None, {}), "plugins register classes of models"),
    "max_num_scheduled_tokens": OnlyValues((None,), "pass max_num_batched_tokens instead"),
    "max_num_active_seqs": OnlyValues((None,), "pass max_num_seqs instead"),
    "long_prefill_token_threshold_adaptive": OnlyValues((False,), "the threshold is fixed"),
    "prefill_schedule_interval": OnlyValues((1,), "each step takes prompts"),
    "prefix_match_unit": OnlyValues((None,), "a hit ends with a block: pass block_size"),
    "prefix_cache_retention_interval": OnlyValues((0, None), "pass mamba_block_size instead"),
    "kv_cache_dtype_skip_layers": OnlyValues((None, []), "all layers have one kv_cache_dtype"),
    "watermark_config": OnlyValues((None,), "texts have no watermarks"),
    "diffusion_config": OnlyValues((None,), "no model generates by diffusion"),
    "engram_config": OnlyValues((None,), "no model has such embeddings"),
    "mm_encoder_only": OnlyValues((False,), "an engine has the whole model"),
    "mm_encoder_attn_dtype": OnlyValues((None,), "towers have the dtype of the model"),
    "video_pruning_rate": OnlyValues((None, 0), "videos keep all of their tokens"),
    "enable_tower_connector_lora": OnlyValues((False,), "adapters are for the language model"),
    "max_lora_cls_labels": OnlyValues((None,), "adapters are for the language model"),
    "sleep_preserve_parameter_names": OnlyValues((None, []), "level 2 frees all weights"),
    "enable_mamba_cache_stochastic_rounding": OnlyValues((False,), _STATES),
    "shutdown_timeout": OnlyValues((0,), "`close` ends requests at once"),
    "tokens_only": OnlyValues((False,), "pass skip_tokenizer_init instead"),
    "cp_kv_cache_interleave_size": OnlyValues((None, 1), _WHOLE),
    "data_parallel_rank": OnlyValues((None, 0), _SHARED),
    "data_parallel_start_rank": OnlyValues((None, 0), _SHARED),
    "data_parallel_hybrid_lb": OnlyValues((False,), _SHARED),
    "data_parallel_external_lb": OnlyValues((False,), _SHARED),
    "data_parallel_multi_port_external_lb": OnlyValues((False,), _SHARED),
    "elastic_ep_max_dp_size": OnlyValues((None,), "ranks divide each expert"),
    "enable_fault_tolerance": OnlyValues((False,), "docs/pool.md says what a pool does"),
    "fault_tolerance_config": OnlyValues((None, {}), "docs/pool.md says what a pool does"),
    "mm_encoder_fp8_scale_path": OnlyValues((None,), "towers have the dtype of the model"),
    "mm_encoder_fp8_scale_save_path": OnlyValues((None,), "towers have the dtype of the model"),
    "enable_moe_shared_loras": OnlyValues((False,), "an adapter has matrices of each expert"),
    "aux_output_config": OnlyValues((None, {}), "pass enable_return_routed_experts instead"),
    "reasoning_parser_plugin": OnlyValues((None, ""), "reasoning_parser names one of shmllm's"),
    "ec_manager_config": OnlyValues((None, {}), "an engine keeps embeddings of items in one way"),
    "otlp_traces_endpoint": OnlyValues((None,), "`shmllm trace` records requests and steps"),
}

NO_EFFECT: dict[str, NoEffect] = {
    "enable_chunked_prefill": NoEffect(
        True, "long prompts are always chunked; results are the same"
    ),
    "enable_expert_parallel": NoEffect(False, "ranks divide each expert; results are the same"),
    "disable_chunked_mm_input": NoEffect(False, "images are divided where the model allows"),
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
    "ir_op_priority": NoEffect(None, _KERNELS),
    "monokernel": NoEffect(False, _KERNELS),
    "sparse_indexer_topk_backend": NoEffect("auto", _KERNELS),
    "kda_prefill_backend": NoEffect(None, _KERNELS),
    "kda_decode_backend": NoEffect(None, _KERNELS),
    "mamba_backend": NoEffect("triton", _KERNELS),
    "jit_monitor_mode": NoEffect("warn", "a step compiles nothing after the start"),
    "jit_monitor_verbose": NoEffect(False, "a step compiles nothing after the start"),
    "mamba_cache_mode": NoEffect(None, "states are cached as enable_prefix_caching says"),
    "use_replayssm": NoEffect(False, "states are computed once"),
    "swa_bounded_replay": NoEffect(True, "windows are cached with their prefix"),
    "use_fp64_gumbel": NoEffect(False, "draws are a hash of seed, position and token"),
    "enable_cumem_allocator": NoEffect(False, "a sleeping engine gives its memory back"),
    "sleep_mode_backend": NoEffect("cumem", "a sleeping engine gives its memory back"),
    "sleep_mode_offload_cudagraph": NoEffect(False, "graphs stay where they are"),
    "enable_nccl_comm_suspend": NoEffect(False, "ranks add in shared memory"),
    "disable_nccl_for_dp_synchronization": NoEffect(None, "engines of a pool are independent"),
    "distributed_timeout_seconds": NoEffect(None, "`startup_timeout` is the limit of a start"),
    "cpu_distributed_timeout_seconds": NoEffect(None, "`startup_timeout` is the limit of a start"),
    "master_addr": NoEffect("127.0.0.1", _ONE_MACHINE),
    "master_port": NoEffect(29501, _ONE_MACHINE),
    "numa_bind_nodes": NoEffect(None, "the operating system places processes"),
    "numa_bind_cpus": NoEffect(None, "the operating system places processes"),
    "specialize_active_lora": NoEffect(False, _KERNELS),
    "mm_processor_device": NoEffect("auto", "the caller's process prepares images"),
    "mm_device_do_normalize": NoEffect(None, "the caller's process prepares images"),
    "mm_tensor_ipc": NoEffect("direct_rpc", "images travel in slots of shared memory"),
    "enable_shm_tensor_arena": NoEffect(False, "tensors travel in slots of shared memory"),
    "mm_shm_cache_max_object_size_mb": NoEffect(128, "images travel in slots of shared memory"),
    "mm_hasher_algorithm": NoEffect("blake3", "there is one hash"),
    "safetensors_prefetch_num_threads": NoEffect(None, "files are memory-mapped"),
    "safetensors_prefetch_block_size": NoEffect(None, "files are memory-mapped"),
    "pt_load_map_location": NoEffect("cpu", "files are read on the CPU"),
    "ignore_patterns": NoEffect(None, "only files that the model needs are fetched"),
    "model_weights": NoEffect("", "`model` has the weights"),
    "max_num_queued_reqs": NoEffect(None, "there is no server"),
    "max_num_queued_tokens": NoEffect(None, "there is no server"),
    "log_level": NoEffect(None, "set the level of the logger shmllm"),
    "log_config_file": NoEffect(None, "set up the logger shmllm"),
    "logging_config": NoEffect(None, "set up the logger shmllm"),
    "aggregate_engine_logging": NoEffect(False, "engines log alone"),
    "watchdog_config": NoEffect(None, "front ends see a dead or stuck engine"),
    "per_request_spec_decode_metrics": NoEffect("none", _METRICS),
    "kv_cache_metrics_sample": NoEffect(0.01, _METRICS),
    "enable_mm_processor_stats": NoEffect(False, _METRICS),
    "show_hidden_metrics_for_version": NoEffect(None, _METRICS),
    "custom_histogram_buckets": NoEffect(None, _METRICS),
    "allow_deprecated_quantization": NoEffect(False, "no stored method is deprecated here"),
    "data_parallel_size_local": NoEffect(None, _ONE_MACHINE),
    "data_parallel_address": NoEffect(None, _ONE_MACHINE),
    "data_parallel_rpc_port": NoEffect(None, _ONE_MACHINE),
    "dp_sync_interval": NoEffect(16, "engines of a pool are independent"),
    "dcp_comm_backend": NoEffect(None, _WHOLE),
    "dcp_q_replicate": NoEffect(None, _WHOLE),
    "enable_hc_sp": NoEffect(False, _WHOLE),
    "enable_batch_sharded_sampling": NoEffect(None, "rank 0 samples; results are the same"),
    "enable_ep_weight_filter": NoEffect(False, "each process loads its own part"),
    "all2all_backend": NoEffect("allgather_reducescatter", "ranks divide each expert"),
    "eplb_config": NoEffect(None, "ranks divide each expert"),
    "expert_placement_strategy": NoEffect("linear", "ranks divide each expert"),
    "dbo_decode_token_threshold": NoEffect(32, "a step is computed as a whole"),
    "dbo_prefill_token_threshold": NoEffect(512, "a step is computed as a whole"),
    "offload_backend": NoEffect("auto", _NOT_OFFLOADED),
    "cpu_offload_params": NoEffect(frozenset(), _NOT_OFFLOADED),
    "offload_num_in_group": NoEffect(1, _NOT_OFFLOADED),
    "offload_prefetch_step": NoEffect(1, _NOT_OFFLOADED),
    "offload_params": NoEffect(frozenset(), _NOT_OFFLOADED),
    "kv_offloading_backend": NoEffect("native", "pass shared_kv_cache_bytes instead"),
    "mm_encoder_fp8_scale_save_margin": NoEffect(1.5, "towers have the dtype of the model"),
    "mm_ipc_gpu_memory_gb": NoEffect(0, "the caller's process prepares images"),
    "video_pruning_method": NoEffect("evs", "videos keep all of their tokens"),
    "enable_mixed_moe_lora_format": NoEffect(False, "adapters of both forms are always read"),
    "ray_workers_use_nsight": NoEffect(False, "profiler_config has torch's profiler"),
    "mamba_config": NoEffect(None, _STATES),
    "mamba_ssu_algorithm": NoEffect(None, _KERNELS),
    "mamba_cache_philox_rounds": NoEffect(0, _STATES),
    "replayssm_buffer_len": NoEffect(16, "states are computed once"),
    "enable_mamba_shared_prefix_checkpoint": NoEffect(
        False, "states are cached as enable_prefix_caching says"
    ),
    "fail_on_environ_validation": NoEffect(False, "no environment variables of vLLM are read"),
}
