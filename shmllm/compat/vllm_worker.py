"""Functions of vLLM that trainers' classes call in the engine's workers."""

from __future__ import annotations

from typing import Any


def process_weights_after_loading(model: Any, model_config: Any, target_device: Any) -> None:
    """Checks that `model` is a model of shmllm. Nothing is left to do then: `load_weights` writes
    weights in the form with which the model computes, also quantized ones.

    Raises:
        TypeError: it is another object, whose weights this function would leave unprocessed.
    """
    from shmllm.models.model import Model

    if not isinstance(model, Model):
        raise TypeError(f"process_weights_after_loading takes a model of shmllm, got {model!r}")
