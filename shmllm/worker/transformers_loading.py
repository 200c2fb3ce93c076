"""Loads a module of transformers as a model, for `model_impl="transformers"`.

This module owns the order in which such a model is made and checked: what cannot run is refused
before its weights are read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shmllm.config.load import LoadConfig
from shmllm.errors import EngineStartError
from shmllm.models.config_file import stored_dtype
from shmllm.models.fields import Fields, read_json_object
from shmllm.models.tokenizer_end import with_end_of_tokenizer
from shmllm.models.transformers_impl.config import describe, find_length
from shmllm.models.transformers_impl.interface import PROBED, UnsupportedCallError
from shmllm.models.transformers_impl.model import TransformersModel
from shmllm.models.transformers_impl.module import OPTION, error_words, make_module, refusal
from shmllm.models.transformers_impl.probe import Findings, probe
from shmllm.models.transformers_impl.storage import count_memory, give_memory
from shmllm.worker.arena import CountingAllocator
from shmllm.worker.loading import Check, LoadedModel, Progress, configured_length, first_source
from shmllm.worker.memory import MemoryPool, check_weights_fit

_ONLY_VALUES: dict[str, tuple[Any, ...]] = {
    "quantization": (None,),
    "activation_dtype": ("auto",),
    "cpu_instructions": ("auto",),
    "hf_overrides": (None, {}),
    "convert": ("auto", "none", "embed"),
}
"""The values that do not change our own implementations, of options that do."""


def load_module(
    load: LoadConfig,
    pool: MemoryPool,
    auto_dtype: Callable[[str | None], str],
    check: Check,
    on_progress: Progress | None = None,
) -> LoadedModel:
    """Load a model into an arena of its own; the arguments and errors are those of
    `loading.load_model`."""
    for name, values in _ONLY_VALUES.items():
        if (value := getattr(load, name)) not in values:
            raise EngineStartError(f"{name}={value!r} is not supported with {OPTION}")
    directory = Path(load.directory)
    path = directory / "config.json"
    stored_as = stored_dtype(Fields(read_json_object(path), str(path)))
    dtype_name = auto_dtype(stored_as) if load.dtype == "auto" else load.dtype
    dtype: torch.dtype = getattr(torch, dtype_name)
    module = make_module(directory, dtype, PROBED)
    length = find_length(module.config, directory, load.max_model_len)
    counter = CountingAllocator()
    count_memory(module, counter.allocate)
    check_weights_fit(counter.num_bytes, dtype_name, pool)
    weights = pool.make_arena(counter.num_bytes, "the weights")
    stored = give_memory(module, weights.allocate)
    findings = _probe(module, length, directory)
    config = with_end_of_tokenizer(
        describe(module, findings, directory, length), Path(load.tokenizer_directory or directory)
    )
    max_model_len = configured_length(load, config)
    check(config, load, dtype_name, ())
    model = TransformersModel(module, stored, findings.layers, config, dtype)

    def fill(source: Path | None, progress: Progress | None) -> None:
        if source is None:
            model.load_random(load.seed)
        else:
            model.load(source, progress)

    fill(first_source(load), on_progress)
    return LoadedModel(
        model, config, weights, dtype_name, max_model_len, "", frozenset(), load, fill
    )


def _probe(module: object, length: int, directory: Path) -> Findings:
    name = type(module).__name__
    try:
        return probe(module, length)
    except UnsupportedCallError as problem:
        raise refusal(directory, f"{name} cannot run on a paged cache: {problem}") from problem
    except Exception as error:
        raise refusal(
            directory, f"{name} cannot run on a paged cache ({error_words(error)})"
        ) from error
