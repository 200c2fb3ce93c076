"""Runs a module once, on weights that are all zeros, to see what its layers ask of attention.

The weights need no values for that: heads, windows and scales do not depend on them. Tokens must
not influence each other but through attention, since a step has tokens of several requests side by
side, and a request's earlier tokens are not there again. To see that they do not, one token's
embedding is NaN, which every operation that mixes tokens spreads. This module must not know
families.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.transformers_impl.body import Head, body_name, lacking_input, run_body
from shmllm.models.transformers_impl.interface import (
    PAGED,
    Call,
    UnsupportedCallError,
    attending,
)
from shmllm.models.transformers_impl.lookups import Lookups
from shmllm.models.transformers_impl.windows import find_window

NUM_TOKENS = 6
TAINTED = 2
"""The token whose embedding is NaN, and its place among the tokens."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What a probe found.

    Attributes:
        layers: what the layers ask of attention.
        hidden_size: the width of the hidden states behind the final norm.
        vocab_size: the width of the logits.
    """

    layers: Layers
    hidden_size: int
    vocab_size: int


@dataclass
class Layers:
    """What a probed module's layers ask of attention.

    Args:
        length: the number of positions for which windows matter.
        device: the device of the module.

    Attributes:
        specs: the attention of each layer, in the order of their calls.
        modules: the modules that called, in that order.
    """

    length: int
    device: torch.device
    specs: list[AttentionSpec] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    _masks: list[tuple[Tensor, int | None]] = field(default_factory=list)

    def make_mask(self, function: Callable[..., Any]) -> Tensor:
        """Returns a mask that stands for a function of positions.

        Raises:
            UnsupportedCallError: it is neither causal nor a causal window.
        """
        shape = (1, 1, NUM_TOKENS, NUM_TOKENS)
        mask = torch.ones(shape, dtype=torch.bool, device=self.device).tril()
        self._masks.append((mask, find_window(function, self.length)))
        return mask

    def attend(self, call: Call) -> Tensor:
        """Records a call, and returns something that only mixes what one token has.

        Raises:
            UnsupportedCallError: no kernel computes it.
        """
        if any(call.module is module for module in self.modules):
            raise UnsupportedCallError("a layer calls its attention twice in a forward pass")
        heads, count, head_dim = call.query.shape[1:]
        kv_heads, value_dim = call.value.shape[1], call.value.shape[3]
        if call.key.shape != (1, kv_heads, count, head_dim) or heads % kv_heads:
            raise UnsupportedCallError(
                f"its queries are {list(call.query.shape)}, its keys {list(call.key.shape)}, its "
                f"values {list(call.value.shape)}"
            )
        widest = max(head_dim, value_dim)
        self.modules.append(call.module)
        self.specs.append(
            AttentionSpec(
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=widest + widest % 2,
                window=self._window_of(call),
                scale=call.scale,
                soft_cap=call.soft_cap,
                sinks=call.sinks is not None,
            )
        )
        seen = call.key.sum((1, 3)) + call.query.sum((1, 3))
        mixed = (call.value + 0 * seen[:, None, :, None]).repeat_interleave(heads // kv_heads, 1)
        return mixed.transpose(1, 2).contiguous()

    def _window_of(self, call: Call) -> int | None:
        given = None if call.window is None or call.window >= self.length else call.window
        if call.mask is None:
            return given
        windows = [window for mask, window in self._masks if mask is call.mask]
        if not windows:
            raise UnsupportedCallError("it changes the masks that transformers makes")
        return windows[0]


@torch.inference_mode()
def probe(module: Any, length: int) -> Findings:
    """Runs a module whose weights are zeros and whose attention function is `interface.PROBED`,
    which becomes `interface.PAGED`. The weights are zeros again afterwards.

    Args:
        module: the module.
        length: the number of positions for which windows matter.

    Raises:
        UnsupportedCallError: a step of several requests on a paged cache would compute something
            else than the module; the message says what.
    """
    if body_name(module) is None:
        raise UnsupportedCallError("it has no part of its own below its LM head")
    if (lacking := lacking_input(module)) is not None:
        raise UnsupportedCallError(f"it takes no {lacking}")
    table = module.get_input_embeddings().weight
    table[TAINTED] = torch.nan
    layers, again = Layers(length, table.device), Layers(length, table.device)
    token_ids = torch.arange(NUM_TOKENS, device=table.device) % (TAINTED + 1)
    token_ids[TAINTED + 1 :] = 0
    with attending(layers.attend, layers.make_mask), Lookups() as lookups:
        hidden = run_body(module, token_ids, None)
    module.set_attn_implementation(PAGED)
    positions = torch.arange(NUM_TOKENS, device=table.device)
    with attending(again.attend), Lookups(layers.modules) as lookups_again:
        hidden_again = run_body(module, token_ids, positions)
    table[TAINTED] = 0.0
    for each in (hidden, hidden_again):
        if each.isnan().any(1).nonzero().flatten().tolist() != [TAINTED]:
            raise UnsupportedCallError("its tokens influence each other outside of attention")
    if not layers.specs or len(layers.specs) != len(again.specs):
        raise UnsupportedCallError("its layers call no attention function")
    if not lookups.equals(lookups_again):
        raise UnsupportedCallError("the position of its first token is not 0")
    if lookups_again.counts_tokens:
        raise UnsupportedCallError("its attention counts tokens instead of taking their positions")
    logits = Head(module)(torch.zeros_like(hidden))
    return Findings(layers, hidden.shape[1], logits.shape[1])
