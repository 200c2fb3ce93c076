"""The experts that the routers of a model of transformers choose."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def chosen_experts(
    model: Any, token_ids: list[int], num_layers: int, top_k: int
) -> npt.NDArray[Any]:
    """(tokens, num_layers, top_k) int64, each choice in ascending order; zeros where a layer has no
    router."""
    found = np.zeros((len(token_ids), num_layers, top_k), np.int64)

    def hook_of(layer: int) -> Any:
        def hook(module: Any, given: Any, output: Any) -> None:
            chosen = output[-1].reshape(len(token_ids), -1)
            assert not chosen.is_floating_point()
            found[:, layer, : chosen.shape[1]] = chosen.sort(-1).values.numpy()

        return hook

    handles = []
    for name, module in model.named_modules():
        layer = re.search(r"layers\.(\d+)\.", name)
        if layer and re.search("Top[kK]Router$", type(module).__name__):
            handles.append(module.register_forward_hook(hook_of(int(layer[1]))))
    assert handles, "the model has routers"
    with torch.inference_mode():
        model(torch.tensor([token_ids]))
    for handle in handles:
        handle.remove()
    return found
