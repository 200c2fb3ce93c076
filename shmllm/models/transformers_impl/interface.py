"""The attention function that transformers' modules call, and the arguments that it accepts.

transformers looks functions up by name for the whole process. This module registers one name, whose
function passes each call on to whoever runs the module at that time, and a second name for `probe`,
for which transformers also makes masks. It must not know how attention is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

PAGED, PROBED = "shmllm_paged", "shmllm_probed"
"""The names of the function. For the first one transformers makes no masks."""

_WITHOUT_EFFECT = {
    "cache", "cache_position", "deterministic", "max_length_k", "max_length_q",
    "num_items_in_batch", "past_key_values", "position_embeddings", "position_ids", "use_cache",
}  # fmt: skip
"""Arguments that modules pass on and that no attention function computes with."""
_SINKS = ("s_aux", "sinks")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the attention function.

    Attributes:
        module: the module of the layer that calls.
        query: [1, heads, tokens, head_dim].
        key: [1, kv heads, tokens, head_dim].
        value: [1, kv heads, tokens, value_dim].
        mask: what the module got from transformers' function for masks.
        scale: the factor of the scores.
        window: the argument ``sliding_window``.
        soft_cap: scaled scores become ``soft_cap * tanh(score / soft_cap)``; None: they stay.
        sinks: [heads], the scores of keys without values, or None.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: Tensor | None


class UnsupportedCallError(Exception):
    """A module passed an argument that the attention here does not compute."""


class Attend(Protocol):
    """Computes attention for the module that runs now."""

    def __call__(self, call: Call) -> Tensor:
        """Returns [1, tokens, heads, value_dim], in the dtype of the query."""
        ...


MakeMask = Callable[[Callable[..., Any]], Tensor]
"""Returns a mask from transformers' function of (batch, head, query position, key position)."""

_attend: ContextVar[Attend] = ContextVar("attend")
_make_mask: ContextVar[MakeMask] = ContextVar("make_mask")


@contextmanager
def attending(attend: Attend, make_mask: MakeMask | None = None) -> Iterator[None]:
    """Modules that run inside of the block call these functions."""
    token = _attend.set(attend)
    masks = None if make_mask is None else _make_mask.set(make_mask)
    try:
        yield
    finally:
        _attend.reset(token)
        if masks is not None:
            _make_mask.reset(masks)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal:
        raise UnsupportedCallError("its attention is not causal")
    sinks = [others.pop(name) for name in _SINKS if others.get(name) is not None]
    if dropout or len(sinks) > 1:
        raise UnsupportedCallError("its attention has dropout, or two kinds of sinks")
    for name, argument in others.items():
        if name not in _WITHOUT_EFFECT and argument is not None and argument is not False:
            raise UnsupportedCallError(f"its attention has the argument {name!r}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = Call(
        module, query, key, value, attention_mask, scale, sliding_window, softcap,
        sinks[0] if sinks else None,
    )  # fmt: skip
    return _attend.get()(call), None


def _mask(*, mask_function: Callable[..., Any], **_: Any) -> Tensor:
    return _make_mask.get()(mask_function)


AttentionInterface.register(PAGED, _attention)
AttentionInterface.register(PROBED, _attention)
AttentionMaskInterface.register(PROBED, _mask)
