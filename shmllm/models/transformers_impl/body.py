"""Runs the two parts of a causal language model of transformers: its body, and its head.

The head is whatever the class computes from the body's hidden states: the product with the matrix
of the LM head, and the factors and caps before or after it.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast


def body_name(module: Any) -> str | None:
    """Returns the name of a module's body below it; None: it has none, or several."""
    names = [name for name, each in module.named_children() if isinstance(each, PreTrainedModel)]
    prefix = module.base_model_prefix
    return prefix if prefix in names else names[0] if len(names) == 1 else None


def lacking_input(module: Any) -> str | None:
    """Returns the name of an input that a step has and that the module's body does not take; None:
    it takes all."""
    taken = inspect.signature(getattr(module, body_name(module) or "").forward).parameters
    lacking = [name for name in ("input_ids", "inputs_embeds", "position_ids") if name not in taken]
    return lacking[0] if lacking else None


def run_body(
    module: Any, token_ids: Tensor, positions: Tensor | None, embeds: Tensor | None = None
) -> Tensor:
    """Returns the hidden states of tokens after the final norm, [tokens, hidden].

    Args:
        module: the module.
        token_ids: [tokens] int64; ignored if there are embeddings.
        positions: [tokens] int64; None: those that the module gives tokens by itself.
        embeds: [tokens, hidden], the embeddings to use; None: those of the tokens.
    """
    body = getattr(module, body_name(module) or "")
    given = {"input_ids": token_ids[None]} if embeds is None else {"inputs_embeds": embeds[None]}
    if positions is not None:
        given["position_ids"] = positions[None]
    hidden: Tensor = body(**given, use_cache=False, return_dict=True)[0]
    return hidden[0]


class Head:
    """A module whose body returns the hidden states that it is given."""

    def __init__(self, module: Any) -> None:
        self._given = _Given()
        self._module = copy.copy(module)
        self._module._modules = dict(module._modules)
        self._module._modules[body_name(module)] = self._given

    def __call__(self, hidden: Tensor) -> Tensor:
        """Computes the logits, [rows, vocab], of hidden states, [rows, hidden]."""
        self._given.hidden = hidden[None]
        logits: Tensor = self._module(inputs_embeds=hidden[None], use_cache=False).logits
        self._given.hidden = None
        return logits[0]


class _Output(MoeModelOutputWithPast):  # type: ignore[misc]
    """A body's output of which all but the hidden states is None."""

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """A body that computes nothing, whatever its arguments are.

    Attributes:
        hidden: [1, rows, hidden], what it returns.
    """

    hidden: Tensor | None = None

    @property
    def decoder(self) -> _Given:
        """Some classes call the decoder below their body."""
        return self

    def forward(self, *_: Any, **__: Any) -> _Output:
        return _Output(last_hidden_state=self.hidden)
