"""Lets a model of transformers attend to keys and values that are rounded to FP8.

Its attention function is torch's, behind a rounding of all keys and values to e4m3 and back. A
cache of transformers keeps numbers that are not rounded yet: rounding each of them again at every
step gives the same numbers. A latent attention keeps latents and rotated key parts: they are
rounded before they become keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "rounded_to_float8"
LARGEST = 448.0


def rounded(x: Tensor) -> Tensor:
    """Return the nearest numbers of e4m3, at most 448, in the dtype of `x`."""
    return x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(x.dtype)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any
) -> Any:
    return sdpa_attention_forward(module, query, rounded(key), rounded(value), *rest, **named)


def _expand(expand: Callable[[Tensor, Tensor], Any], latents: Tensor, keys: Tensor) -> Any:
    return expand(rounded(latents), rounded(keys))


def round_keys_and_values(model: PreTrainedModel) -> PreTrainedModel:
    """Let a model attend so, and return it."""
    latent: list[Any] = [each for each in model.modules() if hasattr(each, "expand_kv")]
    for module in latent:
        module.expand_kv = partial(_expand, module.expand_kv)
    if latent:
        return model
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    return model
