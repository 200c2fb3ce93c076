"""A part of gpu_check: measures transformers' `generate` with the engine's weights.

The weights come from the function that an engine with random weights uses, from the same seed and
in the same order, so on the same kind of device they are equal, and the outputs differ only by
rounding. The cache is static. "eager" runs transformers' forward uncompiled; "compiled" is the
default of `generate` with a static cache on a GPU.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gpu.clock import synchronize
from gpu.figures import Figures
from gpu.settings import Settings
from shmllm.models.config import ModelConfig
from shmllm.models.create import create_model
from shmllm.models.weights import load_dummy_weights
from shmllm.worker.arena import CountingAllocator

COMPILED = "compiled"


class Destinations:
    """The weights of a transformers model, in the order of the engine's model."""

    def __init__(self, model: Any, directory: Path, dtype: torch.dtype) -> None:
        ours = create_model(
            ModelConfig.from_directory(directory), dtype, CountingAllocator().allocate
        )
        theirs = dict(model.named_parameters())
        names = list(ours.named_weights())
        assert set(names) == set(theirs), set(names) ^ set(theirs)
        self._weights = {name: (theirs[name].data,) for name in names}
        values = {id(weight): value for weight, value in ours.neutral_weights()}
        self._neutral = [
            (theirs[name].data, values[id(view)])
            for name, (view, *_) in ours.named_weights().items()
            if id(view) in values
        ]
        assert len(self._neutral) == len(values), "each norm has a name"

    def named_weights(self) -> dict[str, tuple[torch.Tensor]]:
        return self._weights

    def neutral_weights(self) -> list[tuple[torch.Tensor, float]]:
        return self._neutral


def run(settings: Settings, figures: Figures, size: str, mode: str) -> None:
    device, directory = torch.device(settings.device), settings.directory(size)
    model = make_model(directory, getattr(torch, settings.dtype), device)
    figures.put("attention", model.config._attn_implementation)
    found: dict[str, Any] = {}
    for batch in settings.compare_batches:
        found[str(batch)] = _generate(settings, model, batch, mode)
        figures.put("generate", found)


def make_model(directory: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Returns a model with the weights of an engine with load_format="dummy"."""
    auto_model: Any = AutoModelForCausalLM  # without annotations
    with device:
        config = AutoConfig.from_pretrained(directory)
        model = auto_model.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.eval().requires_grad_(False)
    destinations: Any = Destinations(model, directory, dtype)
    load_dummy_weights(destinations)
    return model


def _generate(settings: Settings, model: Any, batch: int, mode: str) -> dict[str, Any]:
    vocab, tokens = model.config.vocab_size, settings.compare_tokens
    prompts = settings.prompts(batch, settings.compare_prompt, vocab, 0)
    ids = torch.tensor(prompts, device=settings.device)
    found: dict[str, Any] = {}
    # transformers compiles again for a cache of another size, so the warm-up has the full length.
    for name, count in (("warm_up_s", tokens), ("one_s", 1), ("all_s", tokens)):
        synchronize(ids.device)
        began = time.perf_counter()
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            cache_implementation="static",
            disable_compile=mode != COMPILED,
        )
        synchronize(ids.device)
        found[name] = time.perf_counter() - began
        assert output.shape == (batch, settings.compare_prompt + count), output.shape
    found["first_tokens"] = output[:, settings.compare_prompt].tolist()
    return found
