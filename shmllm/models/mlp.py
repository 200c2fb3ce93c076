"""The weights of a dense MLP."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from shmllm.models.layers import Linear, NamedWeights, Norm, Storage
from shmllm.models.specs import LEARNED, MLPSpec


class MLP:
    """The weights of a dense MLP.

    Attributes:
        spec: what it computes.
        gate_up_proj: gate and up fused, or up alone.
        down_proj: the projection of the activation's output.
        behind: a projection of the result, or None.
        norm: the norm of what `down_proj` reads, or None.
        learned: [numbers] float32, what the activation learns, in the order of `specs.LEARNED`, or
            None.
    """

    def __init__(self, hidden_size: int, spec: MLPSpec, storage: Storage) -> None:
        self.spec = spec
        widths = [spec.inner, spec.inner] if spec.gated else [spec.inner]
        self.gate_up_proj = Linear(hidden_size, widths, spec.bias and spec.up_bias, storage)
        self.down_proj = Linear(spec.inner, [hidden_size], spec.bias, storage)
        self.behind: Linear | None = None
        self.norm = None if spec.norm is None else Norm(spec.inner, spec.norm, storage)
        self.learned: Tensor | None = None
        if spec.learns_activation:
            assert not spec.gated, "no family has a gate besides"
            self.learned = storage.float32(len(LEARNED[spec.activation]))

    @property
    def norms(self) -> tuple[Norm, ...]:
        """Its own norm; empty if it has none."""
        return () if self.norm is None else (self.norm,)

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``, such as "model.layers.0.mlp"."""
        names = ("gate_proj", "up_proj") if self.spec.gated else ("up_proj",)
        weights = self.gate_up_proj.named_weights(*(f"{prefix}.{name}" for name in names))
        weights |= self.down_proj.named_weights(f"{prefix}.down_proj")
        for norm in self.norms:
            weights |= norm.named_weights(f"{prefix}.ffn_sub_norm")
        for name, (number, _) in self._learned_numbers().items():
            weights[f"{prefix}.act_fn.{name}"] = (number,)
        return weights

    def neutral_weights(self) -> Iterator[tuple[Tensor, float]]:
        """Yields what its activation learns, with the values before training."""
        yield from self._learned_numbers().values()

    def _learned_numbers(self) -> dict[str, tuple[Tensor, float]]:
        """Returns each of these by its name, in a checkpoint's shape, and its value."""
        if self.learned is None:
            return {}
        numbers = zip(self.learned, LEARNED[self.spec.activation].items(), strict=True)
        return {name: (number.view(shape), value) for number, (name, (shape, value)) in numbers}

    def module_weights(self, prefix: str) -> NamedWeights:
        """Returns nothing: transformers' modules have the same names."""
        return {}
