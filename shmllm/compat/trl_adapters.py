"""Sends the adapter of a policy that TRL trains with peft, in place of all weights.

TRL merges the adapter into the weights and sends these at each step. `sends_adapters` changes its
`VLLMGeneration.sync_weights`: the base's weights are sent once, and then the adapter alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from typing import Any

from shmllm.errors import RequestError

_PREFIX = "base_model.model."


def sends_adapters(sync_weights: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wraps TRL's `sync_weights`, which still runs for models without an adapter.

    The engine is a `shmllm.compat.trl.LLM` with `enable_lora=True`.
    """

    @wraps(sync_weights)
    def sync(generation: Any) -> None:
        if generation.mode != "colocate" or not hasattr(generation.model, "peft_config"):
            sync_weights(generation)
            return
        if generation._dist.is_fsdp:
            raise RequestError("under FSDP adapters are merged: leave enable_lora=True out")
        llm = generation.llm
        if generation.enable_sleep_mode:
            llm.wake_up(tags=["weights"])
            generation._llm_weights_sleeping = False
        if not llm.has_base:
            llm.update_weights(_base_of(generation))
            llm.has_base = True
        llm.send_adapter(_tensors_of(generation), _config_of(generation.model))

    return sync


def _base_of(generation: Any) -> Iterator[tuple[str, Any]]:
    """The weights under the adapter, by the names of the checkpoint."""
    for name, parameter in generation.model.named_parameters():
        if generation.model.prefix not in name:
            with generation._dist.gather_params([parameter]):
                yield name.removeprefix(_PREFIX).replace(".base_layer", ""), parameter.data


def _tensors_of(generation: Any) -> dict[str, Any]:
    """The adapter's tensors, by the names of adapter_model.safetensors."""
    peft: Any = import_module("peft")
    model = generation.model
    adapted = [each for name, each in model.named_parameters() if model.prefix in name]
    with generation._dist.gather_params(adapted):
        state = peft.get_peft_model_state_dict(
            model, adapter_name=model.active_adapter, save_embedding_layers=False
        )
        return {name: tensor.detach().cpu() for name, tensor in state.items()}


def _config_of(model: Any) -> dict[str, Any]:
    """The fields of adapter_config.json."""
    fields = model.peft_config[model.active_adapter].to_dict()
    plain: dict[str, Any] = json.loads(json.dumps(fields, default=list))
    return plain
