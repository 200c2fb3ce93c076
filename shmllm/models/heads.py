"""Heads as owners of weights. A `HeadOps` computes with them.

The rows of a head are pooled hidden states, or the hidden states of tokens, after the model's final
norm.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from shmllm.models.head_specs import DenseSpec, HeadActivation, HeadSpec
from shmllm.models.layers import Linear, NamedWeights, Norm, Storage
from shmllm.models.table_rows import RowsOfTable


class HeadOps(Protocol):
    """The operations of heads, for any number of rows. Each may overwrite its argument."""

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """Returns ``x @ weight.T + bias``: [rows, in] -> [rows, out]."""

    def activate_rows(self, x: Tensor, activation: HeadActivation) -> Tensor:
        """Returns the activation of each element of ``x`` [rows, width]."""

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Returns ``x`` [rows, width], normalised."""


class Head:
    """The weights of a head.

    Attributes:
        spec: what it computes.
        steps: a projection or a norm for each step of `spec`.
    """

    def __init__(self, spec: HeadSpec, vocab_size: int, storage: Storage) -> None:
        self.spec = spec
        self._vocab_size = vocab_size
        exact = storage.exact()
        self.steps: list[Linear | Norm] = [
            Linear(step.inputs, widths_of(step), step.bias, exact)
            if isinstance(step, DenseSpec)
            else Norm(step.width, step.norm, exact)
            for step in spec.steps
        ]

    def __call__(self, ops: HeadOps, x: Tensor) -> Tensor:
        """Computes the results, [rows, width], of rows [rows, hidden]."""
        for spec, step in zip(self.spec.steps, self.steps, strict=True):
            if isinstance(step, Norm):
                x = ops.norm(x, step)
                continue
            assert isinstance(spec, DenseSpec), "a projection has its spec"
            x = ops.linear(x, step)
            if spec.activation != "none":
                x = ops.activate_rows(x, spec.activation)
        return x

    def named_weights(self, lm_head: str) -> NamedWeights:
        """Returns the destinations of the weights.

        Args:
            lm_head: the name of the LM head's weight in checkpoints.
        """
        weights: NamedWeights = {}
        for spec, step in zip(self.spec.steps, self.steps, strict=True):
            if isinstance(spec, DenseSpec) and spec.tokens:
                assert isinstance(step, Linear), "a projection has its spec"
                assert isinstance(step.weight, Tensor), "nothing rounds heads"
                weights[lm_head] = (RowsOfTable(step.weight, spec.tokens, self._vocab_size),)
            elif isinstance(spec, DenseSpec) and spec.tied:
                own = step.named_weights(spec.name)
                weights |= {lm_head: own.pop(f"{spec.name}.weight"), **own}
            elif isinstance(spec, DenseSpec) and spec.parts:
                assert isinstance(step, Linear), "a projection has its spec"
                weights |= step.named_weights(*(name for name, _ in spec.parts))
            else:
                weights |= step.named_weights(spec.name)
        return weights


def widths_of(spec: DenseSpec) -> list[int]:
    """Returns the widths of the projections that lie side by side."""
    return [width for _, width in spec.parts] or [spec.outputs]
