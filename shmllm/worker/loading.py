"""Loads a model: its configuration, its dtype, and its weights into an arena.

This module owns what a runner of any device does before it can compute. It must not know the
device.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from shmllm.config.engine import UNLIMITED_LOGPROBS, EngineConfig
from shmllm.config.info import EngineInfo
from shmllm.config.items import ItemInfo
from shmllm.config.load import LoadConfig
from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.create import allocate_model, create_model, stored_parts
from shmllm.models.decoder import DecoderModel
from shmllm.models.lengths import for_length
from shmllm.models.matrices import parts_of
from shmllm.models.model import Model
from shmllm.models.peft_config import CONFIG_FILE as ADAPTER_CONFIG
from shmllm.models.pooled import ModelUse, read_config
from shmllm.models.quantized import QuantizedMatrix
from shmllm.models.text.decoder_prompt import read_decoder_prompt
from shmllm.models.tokenizer_end import with_end_of_tokenizer
from shmllm.models.weights import (
    has_own_head,
    load_dummy_weights,
    load_weights,
    stored_kinds,
    tensor_names,
)
from shmllm.worker.arena import Arena, CountingAllocator
from shmllm.worker.memory import CacheShape, CacheSize, MemoryPool, check_weights_fit
from shmllm.worker.pooling_info import pooling_info
from shmllm.worker.routed_experts import routed_info

MOST_EMBEDS = 16_384
"""How many embeddings of images are kept at least, if a request can have so many: those of the
largest image that Qwen's settings make by default."""
MOST_RESULTS = 16
"""How many images a step computes at most whose vectors are results of prompts. Each has one token,
so that without it a step of hundreds would take minutes on a CPU."""

_TIED = "tie_word_embeddings"
_OWN_HEAD = "an LM head that differs from the embeddings"

Progress = Callable[[int, int], None]
Fill = Callable[[Path | None, Progress | None], None]
"""Overwrites a model's weights with those of a directory, or, for None, with random ones. Calls
back with (bytes read, bytes in all)."""
Check = Callable[[ModelConfig, LoadConfig, str, Collection[str]], None]
"""Raises EngineStartError if a device cannot run a model, from its configuration, the options, the
dtype name of its weights and the kinds of the packed ones."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """
    Attributes:
        model: the model, with its weights.
        config: the configuration from the model's directory.
        weights: the arena of the weights.
        dtype_name: the dtype of weights and activations.
        max_model_len: the configured length, in tokens; the KV cache may hold fewer.
        quantization: the format of most of the matrices; empty: floating numbers.
        packed: the kinds of the matrices that the checkpoint has packed and that stay so.
        load: the options that it was loaded with.
        warning: what is unusual about the checkpoint; empty: nothing.
    """

    model: Model
    config: ModelConfig
    weights: Arena
    dtype_name: str
    max_model_len: int
    quantization: str
    packed: frozenset[str]
    load: LoadConfig
    _fill: Fill
    warning: str = ""

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def reload(self, directory: str | None) -> str:
        """Load the weights again, from where they were loaded first or from another directory.

        Returns:
            What was loaded, in words.

        Raises:
            RequestError: the weights are asleep.
            EngineStartError: the weights cannot be read. No weight changed, or all are missing,
                because some were written already.
        """
        self.model.check_awake()
        is_random = directory is None and self.load.load_format == "dummy"
        source = None if is_random else Path(directory or self.load.directory)
        if source is not None and _has_own_head(source, self.config, self.load):
            raise EngineStartError(
                f"{source} has {_OWN_HEAD}, and this engine's model has one matrix for both: "
                "start another engine with it"
            )
        self._fill(source, None)
        self.model.weights_changed(self.model.named_weights())
        if is_random:
            return f"random weights of seed {self.load.seed} (load_format dummy)"
        return f"the weights in {directory or self.load.directory}"


def _has_own_head(directory: Path, model: ModelConfig, load: LoadConfig) -> bool:
    """Return whether the checkpoint has an LM head of its own, and no option ties it."""
    return not (load.overrides or {}).get(_TIED) and has_own_head(directory, model)


def load_model(
    load: LoadConfig,
    pool: MemoryPool,
    auto_dtype: Callable[[str | None], str],
    check: Check,
    on_progress: Progress | None = None,
    divide: Callable[[ModelConfig], ModelConfig] | None = None,
) -> LoadedModel:
    """Load a model, or a process's part of it, into an arena of its own.

    Args:
        load: the model's directory, and the dtype and quantization of its weights.
        pool: the memory that the weights go into.
        auto_dtype: returns the meaning of the dtype "auto" for the dtype name of a checkpoint, or
            for None if it names none.
        check: called before weights are read, with the dtype name of the weights and the kinds of
            the packed ones; raises EngineStartError if the device cannot run that model.
        on_progress: called with (bytes read, bytes in all) while weights are read.
        divide: returns the configuration of the part; None: the whole model is loaded.

    Raises:
        EngineStartError: the model cannot be loaded or divided, or its weights do not fit into the
            memory.
    """
    if load.model_impl == "transformers":
        from shmllm.worker.transformers_loading import load_module

        return load_module(load, pool, auto_dtype, check, on_progress)
    source, warning = first_source(load), ""
    config = model_config(load)
    if source is not None and _has_own_head(source, config, load):
        config = replace(config, tie_word_embeddings=False)
        warning = (
            f"{source} has {_OWN_HEAD}, although its config.json says {_TIED}: it is used, as by "
            f"transformers; {_TIED}=false says so, and true, as one of hf_overrides, ties them"
        )
    if source is not None and config.drafting is not None:
        own = config.drafting.with_tensors(tensor_names(source), config.vocab_size)
        config = replace(config, drafting=own)
    max_model_len = configured_length(load, config)
    if divide is not None:
        config = divide(config)
    dtype_name = auto_dtype(config.dtype) if load.dtype == "auto" else load.dtype
    kinds: dict[str, str] = {}
    if load.rounding is None and load.load_format != "dummy":
        kinds = stored_kinds(Path(load.directory), config.tie_word_embeddings)
    packed = frozenset(kinds.values())
    check(config, load, dtype_name, packed)
    dtype: torch.dtype = getattr(torch, dtype_name)
    counter = CountingAllocator()
    stored = stored_parts(config, kinds)
    allocate_model(config, dtype, counter.allocate, load.rounding, stored)
    check_weights_fit(counter.num_bytes, load.rounding or dtype_name, pool)
    weights = pool.make_arena(counter.num_bytes, "the weights")
    model = create_model(config, dtype, weights.allocate, load.rounding, stored)
    fill = partial(_fill, model, load.seed)
    fill(source, on_progress)
    quantization = load.rounding or _most_common_format(model)
    return LoadedModel(
        model, config, weights, dtype_name, max_model_len, quantization, packed, load, fill, warning
    )


def model_config(load: LoadConfig) -> ModelConfig:
    """Return the configuration of a whole model as the options change it.

    Raises:
        EngineStartError: it cannot be read, or does not suit the options.
    """
    config = read_config(Path(load.directory), use_of(load))
    config = with_end_of_tokenizer(config, Path(load.tokenizer_directory or load.directory))
    config = for_length(config, configured_length(load, config))
    kept, returned = load.kept_levels, load.returns_experts
    config = config.with_further(load.further_layers)
    return replace(config, kept_levels=kept, returns_experts=returned)


def use_of(load: LoadConfig) -> ModelUse:
    return ModelUse(runner=load.runner, convert=load.convert, overrides=load.overrides)


def first_source(load: LoadConfig) -> Path | None:
    """Return the directory of the weights; None: they are random."""
    return None if load.load_format == "dummy" else Path(load.directory)


def make_info(
    config: EngineConfig,
    loaded: LoadedModel,
    size: CacheSize,
    shape: CacheShape,
    *,
    weight_bytes: int,
    num_threads: int,
    load_seconds: float,
    deterministic: bool,
    activation_dtype: str,
    kv_cache_dtype: str,
    instructions: str = "",
    device: str = "cpu",
    device_uuid: str = "",
    num_ranks: int = 1,
    num_stages: int = 1,
    async_scheduling: bool = False,
    graphs: str = "",
    warnings: Sequence[str] = (),
) -> EngineInfo:
    """Return what an engine with this model and this KV cache reports about itself.

    Args:
        config, loaded, size, shape: those of the process, or of rank 0 of a group.
        weight_bytes: the size of the weights of all processes of the group.
        num_ranks: the number of those that divide each layer.
        num_stages: the number of those that divide the layers.
    """
    model, max_logprobs = loaded.config, config.logprobs.max_logprobs
    return EngineInfo(
        model_directory=config.load.directory,
        model_type=model.architecture,
        dtype=loaded.dtype_name,
        num_parameters=sum(views[0].numel() for views in loaded.model.named_weights().values()),
        vocab_size=model.vocab_size,
        eos_token_ids=tuple(model.eos_token_ids),
        max_model_len=size.max_model_len - model.num_encoded,
        block_size=config.cache.block_size,
        num_blocks=size.num_blocks - 1,
        num_states=size.num_states - 1,
        max_states_per_request=shape.states_held(size.max_model_len),
        max_blocks_per_request=shape.blocks_for(size.max_model_len) if shape.num_buffers else 0,
        kv_cache_bytes=size.num_bytes * num_ranks,
        weight_bytes=weight_bytes,
        tensor_parallel_size=num_ranks,
        pipeline_parallel_size=num_stages,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        seed=config.load.seed,
        num_threads=num_threads,
        wait_policy=config.client.wait_policy,
        load_seconds=load_seconds,
        max_logprobs=(
            model.vocab_size
            if max_logprobs == UNLIMITED_LOGPROBS
            else min(max_logprobs, model.vocab_size)
        ),
        scheduling_policy=config.scheduler.policy,
        hidden_size=model.hidden_size,
        embeds_width=model.embedding_width,
        logprobs_mode=config.logprobs.mode,
        model_options=_model_options(config),
        num_outputs=model.num_outputs,
        routed=routed_info(model),
        sampling_masks=config.logprobs.returns_masks,
        deterministic=deterministic,
        activation_dtype=activation_dtype,
        kv_cache_dtype=kv_cache_dtype,
        instructions=instructions,
        quantization=loaded.quantization,
        device=device,
        device_uuid=device_uuid,
        async_scheduling=async_scheduling,
        graphs=graphs,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        gpu_memory_utilization=config.cache.gpu_memory_utilization,
        max_loras=config.lora.most_in_step,
        speculative_method=config.speculative.method or "",
        speculative_model=config.speculative.model or "",
        num_speculative_tokens=config.speculative.most_drafted,
        role=config.shared_kv.role,
        shared_kv_cache_bytes=config.shared_kv.num_bytes or 0,
        items=item_info(config, model, size.max_model_len),
        pooling=pooling_info(model, Path(config.load.directory), use_of(config.load)),
        warnings=(*filter(None, (loaded.warning, size.warning)), *warnings),
    )


def _model_options(config: EngineConfig) -> str:
    load = config.load
    options = {
        "seed of random weights": load.seed if load.load_format == "dummy" else None,
        "model_impl": load.model_impl,
        "hf_overrides": load.overrides or None,
        "lora_dtype": config.lora.lora_dtype if config.lora.enable_lora else None,
    }
    return json.dumps({name: value for name, value in options.items() if value is not None})


def item_info(config: EngineConfig, model: ModelConfig, max_model_len: int) -> ItemInfo:
    """Return which items prompts may have.

    Raises:
        EngineStartError: the KV cache has no room for the positions of an encoder and a text.
    """
    if model.num_encoded and max_model_len < model.num_encoded + 2:
        raise EngineStartError(
            f"the KV cache has room for {max_model_len:,} positions, and a request begins with "
            f"{model.num_encoded:,} of the encoder: raise kv_cache_memory_bytes"
        )
    if not model.towers:
        return ItemInfo()
    vision, most = model.vision, config.scheduler.max_num_batched_tokens
    most_embeds = max(most, min(max_model_len, MOST_EMBEDS))
    if model.pooled_width:
        most_embeds = MOST_RESULTS
    elif model.text is not None:
        most_embeds = model.text.tower.most_tokens
    elif model.num_encoded and model.audio is not None:
        most_embeds = model.audio.tower.num_embeddings(model.audio.tower.most_frames)
    return ItemInfo(
        modalities=tuple(model.towers),
        width=model.item_width,
        most_embeds=most_embeds,
        num_encoded=model.num_encoded,
        decoder_prompt=_decoder_prompt(config, model),
        longest_span=min(vision.longest_span, most) if vision else 0,
        cache_bytes=config.client.item_cache_bytes,
        sound_adapter=_sound_adapter(model, config.load.directory),
    )


def _decoder_prompt(config: EngineConfig, model: ModelConfig) -> tuple[int, ...]:
    """Return the tokens that a decoder begins with, unless a prompt says otherwise."""
    heard = model.audio if model.audio is not None and model.audio.has_start else None
    spec, directory = model.text or heard, Path(config.load.directory)
    if spec is None:
        return ()
    overrides = config.load.overrides
    return read_decoder_prompt(directory, spec.decoder_start, model.vocab_size, overrides)


def _sound_adapter(model: ModelConfig, directory: str) -> str:
    """Return the directory of the adapter that prompts with sounds have; empty: there is none."""
    is_there = model.audio is not None and model.audio.has_adapter
    return directory if is_there and Path(directory, ADAPTER_CONFIG).is_file() else ""


def _most_common_format(model: DecoderModel) -> str:
    """Return the format of most elements of packed matrices; empty if there are none."""
    sizes: Counter[str] = Counter()
    for views in model.named_weights().values():
        for part in parts_of(views[0]):
            if isinstance(part, QuantizedMatrix):
                sizes[part.kind] += part.numel()
    return sizes.most_common(1)[0][0] if sizes else ""


def configured_length(load: LoadConfig, model: ModelConfig) -> int:
    """Return the most tokens of a request that the options and the model allow, with the positions
    that an encoder computes."""
    num_encoded = model.num_encoded
    longest = model.max_position_embeddings - num_encoded
    windows = [each for each in model.layer_windows if isinstance(each, int)]
    if load.disable_sliding_window and windows:
        shortest, longest = min(windows), min(longest, *windows)
        if (load.max_model_len or 0) > longest == shortest:
            raise EngineStartError(
                f"disable_sliding_window bounds max_model_len by the smallest sliding window, "
                f"{shortest:,}: pass at most that instead of {load.max_model_len:,}, or leave the "
                "option out"
            )
    length = load.max_model_len or min(model.usual_length or longest, longest)
    if length > longest:
        raise EngineStartError(
            f"max_model_len {length:,} exceeds the {longest:,} positions "
            f"that the model was made for, by the config.json in {load.directory}"
        )
    return num_encoded + length


def _fill(
    model: DecoderModel, seed: int, directory: Path | None, on_progress: Progress | None
) -> None:
    if directory is None:
        load_dummy_weights(model, seed)
    else:
        load_weights(model, directory, on_progress)
