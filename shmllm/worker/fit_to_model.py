"""What a model's attention, its images and a head that drafts for it ask of an engine's other
options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shmllm.config.engine import EngineConfig
from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.config_file import read_fields
from shmllm.models.pooled import read_config
from shmllm.models.widths import chosen_of, reads_embeds, sets_aside
from shmllm.worker.loading import configured_length, use_of


def fit_to_model(config: EngineConfig) -> EngineConfig:
    """Return the configuration that a model's attention allows: if tokens attend to those behind
    them, a prompt is one step, and its keys and values are of no use to others.

    Raises:
        EngineStartError: the options ask for the keys and values to be used by others.
    """
    load, directory = config.load, Path(config.load.directory)
    if load.model_impl == "transformers":
        return config
    fields = read_fields(directory, load.overrides)
    found = ModelConfig.from_fields(fields, directory)
    if found.num_encoded and config.plugins.kv_connector:
        raise EngineStartError(
            f"kv_connector is not possible with {found.architecture}, whose requests begin with "
            "what an encoder computes: leave it out"
        )
    if config.lora.enable_lora and reads_embeds(found):
        raise EngineStartError(
            f"enable_lora is not possible for {found.architecture}: some of its layers share their "
            "weights, and each of them adds to these"
        )
    _check_blocks(config, found)
    config = _fit_to_head(config, found)
    if not found.whole_prompts:
        return _fit_to_images(config, found)
    options = {
        "shared_kv_cache_bytes": config.shared_kv.num_bytes,
        "kv_connector": config.plugins.kv_connector,
    }
    model = read_config(directory, use_of(load))
    for name, is_asked in options.items():
        if is_asked:
            raise EngineStartError(
                f"{name} is not possible with {model.architecture}, whose tokens attend both ways: "
                "leave it out"
            )
    tokens = max(config.scheduler.max_num_batched_tokens, configured_length(load, model))
    return replace(
        config,
        scheduler=replace(
            config.scheduler, max_num_batched_tokens=tokens, long_prefill_token_threshold=0
        ),
        cache=replace(config.cache, enable_prefix_caching=False),
    )


def _check_blocks(config: EngineConfig, model: ModelConfig) -> None:
    """Raise EngineStartError if the blocks that an indexer chooses are no blocks of the cache."""
    chosen, block_size = chosen_of(model), config.cache.block_size
    if chosen is not None and chosen.size > 1 and chosen.size % block_size:
        raise EngineStartError(
            f"block_size {block_size} does not divide the {chosen.size} keys of the blocks that "
            f"{model.architecture} chooses: set it to a power of two that does"
        )


def _fit_to_head(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Return the configuration that keeps the hidden states that a head reads."""
    options = config.speculative
    if not options.reads_states:
        return config
    directory = Path(options.model_directory)
    head = ModelConfig.from_directory(directory)
    assert head.drafting is not None, "front ends know"
    sizes = head.drafting.source_width, model.hidden_size
    if sizes[0] != sizes[1]:
        raise EngineStartError(
            f"the head {directory} reads hidden states of {sizes[0]:,} numbers, and the "
            f"model's have {sizes[1]:,}: it belongs to another model"
        )
    most = head.drafting.most_drafted
    if most is not None and options.most_drafted > most:
        raise EngineStartError(
            f"the head {directory} drafts at most {most} tokens: set num_speculative_tokens "
            f"(--draft-tokens) to that, or to less, and not to {options.most_drafted}"
        )
    if model.has_streams or model.scales_stream or sets_aside(model):
        raise EngineStartError(
            f"method {options.method!r} is not possible for {model.architecture}, which has "
            "several residual streams, branches beside one, or one that grows by layer"
        )
    levels = head.drafting.levels_of(model.num_layers)
    if not all(0 <= level <= model.num_layers for level in levels):
        raise EngineStartError(
            f"the head {directory} reads the hidden states behind {[*levels]} layers, and "
            f"the model has {model.num_layers}: it belongs to another model"
        )
    return replace(config, load=replace(config.load, kept_levels=levels))


def _fit_to_images(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Return the configuration whose steps have room for all tokens of an image, if these attend to
    each other."""
    scheduler, vision = config.scheduler, model.vision
    if vision is None or not vision.both_ways:
        return config
    tokens = max(scheduler.max_num_batched_tokens, vision.tile_embeddings)
    return replace(config, scheduler=replace(scheduler, max_num_batched_tokens=tokens))
