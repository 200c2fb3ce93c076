"""Lets a model of transformers attend to keys and values that are rounded to FP8.

Its attention function is torch's, behind a rounding of all keys and values to e4m3 and back. A
cache of transformers keeps numbers that are not rounded yet: rounding each of them again at every
step gives the same numbers.
"""

from __future__ import annotations

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


def round_keys_and_values(model: PreTrainedModel) -> PreTrainedModel:
    """Let a model attend so, and return it."""
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    return model
