"""Reads the option `speculative_config`, a mapping with vLLM's keys."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from shmllm.config.speculative import (
    METHODS_OF_MODELS,
    METHODS_WITHOUT_MODEL,
    MOST_DRAFTED,
    SpeculativeConfig,
)
from shmllm.errors import EngineStartError, nearest
from shmllm.frontend.model_catalog import Drafter, check_drafter
from shmllm.frontend.model_files import USUAL_HUB, Hub, resolve_model

logger = logging.getLogger(__name__)

OPTION = "speculative_config"
PARALLEL = "parallel_drafting"
KEYS = tuple(each.name for each in fields(SpeculativeConfig) if each.name != "model_directory")
_ONE = "one process drafts"
_KERNELS = "each device has its own kernels"
_MEASURED = "`adaptive` measures how many drafts pay, for any number of requests"
ONLY_VALUES: dict[str, tuple[Any, str]] = {
    "draft_tensor_parallel_size": (1, _ONE),
    "tensor_parallel_size": (1, _ONE),
    "quantization": (None, "a draft model is quantized as its checkpoint is"),
    "revision": (None, "name the directory of the draft model"),
    "kv_cache_dtype": (None, "the draft model's keys and values lie in the model's cache"),
    "use_heterogeneous_vocab": (False, "a draft model has the model's tokenizer"),
    "num_speculative_tokens_per_batch_size": (None, _MEASURED),
    "synthetic_acceptance_rates": (None, "tools/bench_drafts.py measures given acceptances"),
    "synthetic_acceptance_length": (None, "tools/bench_drafts.py measures given acceptances"),
}
"""vLLM's keys that must have one value, and why."""
NO_EFFECT = {
    "rejection_sample_method": "nothing is rejected that would have been sampled",
    "draft_sample_method": "a draft model samples with the noise of the request",
    "disable_padded_drafter_batch": _KERNELS,
    "enforce_eager": "a draft model runs as the model does",
    "max_model_len": "a draft model has the length of the model",
    "use_local_argmax_reduction": _ONE,
    "moe_backend": _KERNELS,
    "attention_backend": _KERNELS,
    "disable_eagle_block_drop": "nothing is dropped",
    "index_share_for_mtp_iteration": "no model here has such an index",
    "enable_adaptive_verification": _MEASURED,
    "draft_load_config": "a draft model is loaded as the model is",
}
"""vLLM's keys that are ignored, and why."""
SHORT_NAMES = {
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
}
"""vLLM's options that stand for a key each."""


def with_keys_of_short_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an LLM, in which those of `SHORT_NAMES` are keys of `speculative_config`.

    Raises:
        EngineStartError: a key is given twice, or there are keys for what is not a mapping.
    """
    others = {name: value for name, value in options.items() if name not in SHORT_NAMES}
    keys = {
        key: options[name] for name, key in SHORT_NAMES.items() if options.get(name) is not None
    }
    if not keys:
        return others
    config = {} if others.get(OPTION) is None else others[OPTION]
    if not isinstance(config, Mapping):
        _refuse_type(config)
    for name, key in SHORT_NAMES.items():
        if key in keys and config.get(key) is not None:
            raise EngineStartError(f"{name} is given twice, here and as {key!r} of {OPTION}")
    return {**others, OPTION: {**config, **keys}}


def _refuse_type(config: object) -> NoReturn:
    raise EngineStartError(
        f'{OPTION} must be a mapping such as {{"method": "ngram"}}, got {config!r}'
    )


def read_speculative_config(config: Any, hub: Hub = USUAL_HUB) -> SpeculativeConfig:
    """The configuration that the option describes.

    Args:
        config: the option.
        hub: how a model that drafts is fetched.

    Raises:
        EngineStartError: it is not a mapping, has an unknown key, or a value is not valid.
    """
    if config is None:
        return SpeculativeConfig()
    if not isinstance(config, Mapping):
        _refuse_type(config)
    given = _known_keys(config)
    is_parallel = given.pop(PARALLEL, None)
    if not given:
        return SpeculativeConfig()
    drafter = None
    if "model" in given:
        drafter = check_drafter(_find_drafter(str(given["model"]), hub))
        given.setdefault("method", drafter.method)
    method = given.get("method")
    if isinstance(method, str) and method.endswith("_mtp"):  # vLLM's names for each family
        given["method"] = method = "mtp"
    if method is None:
        raise EngineStartError(f"{OPTION} needs a method, or a model that drafts")
    if method in (METHODS_OF_MODELS if drafter is None else METHODS_WITHOUT_MODEL):
        needs = "needs a model" if drafter is None else "takes no model"
        raise EngineStartError(f"{OPTION}: method {method!r} {needs}")
    if drafter is not None:
        given = _fields_of(drafter, method, is_parallel) | given
    elif is_parallel:
        raise EngineStartError(f"{OPTION}: {PARALLEL} is for heads, not for method {method!r}")
    return SpeculativeConfig(**given)


def _fields_of(drafter: Drafter, method: Any, is_parallel: Any) -> dict[str, Any]:
    """The fields that follow from what drafts.

    Raises:
        EngineStartError: it drafts otherwise than the options say.
    """
    directory, usual = drafter.directory, drafter.usual_drafted
    if method != drafter.method:
        raise EngineStartError(
            f"{OPTION}: {directory} drafts by method {drafter.method!r}: leave out {method!r}, "
            "or take another"
        )
    if is_parallel not in (None, drafter.is_parallel):
        raise EngineStartError(
            f"{OPTION}: {PARALLEL} can only be {drafter.is_parallel}: {directory} was trained so"
        )
    count = {} if usual is None else {"num_speculative_tokens": min(usual, MOST_DRAFTED)}
    return {"model_directory": str(directory.absolute()), **count}


def _find_drafter(name: str, hub: Hub) -> Path:
    """The directory of the model that drafts."""
    try:
        return resolve_model(name, hub)
    except EngineStartError as problem:
        near = nearest(name, METHODS_WITHOUT_MODEL, cutoff=0.6)
        hint = f"; the nearest method is {near!r}" if near else ""
        raise EngineStartError(f"{OPTION}: {problem}{hint}") from problem


def _known_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of ours that have a value. Raises EngineStartError as `read_speculative_config`."""
    given = {name: value for name, value in config.items() if value is not None}
    if given.get("method") == "extract_hidden_states":
        raise EngineStartError(
            f"{OPTION}: method 'extract_hidden_states' is not supported: nothing writes the states "
            'of inner layers; encode(..., pooling_task="token_embed") has those behind the last one'
        )
    for name in [name for name in given if name in NO_EFFECT or name in ONLY_VALUES]:
        value = given.pop(name)
        if name in NO_EFFECT:
            logger.warning("%s: %s has no effect: %s", OPTION, name, NO_EFFECT[name])
        elif value != ONLY_VALUES[name][0]:
            allowed, reason = ONLY_VALUES[name]
            raise EngineStartError(f"{OPTION}: {name} can only be {allowed!r}: {reason}")
    for name in given:
        if name not in (*KEYS, PARALLEL):
            near = nearest(name, sorted(KEYS))
            hint = f"; the nearest is {near!r}" if near else ""
            raise EngineStartError(f"{OPTION} has no key {name!r}{hint}")
    return given
