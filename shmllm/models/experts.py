"""Mixtures of experts as the owners of their weights. `ops.Ops` computes with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shmllm.models.combined_specs import (
    DenseAndExpertsSpec,
    ExpertsByTokensSpec,
    LatentExpertsSpec,
    ShortcutExpertsSpec,
)
from shmllm.models.config import ModelConfig
from shmllm.models.layers import Linear, NamedWeights, Norm, Storage
from shmllm.models.matrices import Destination, TransposedMatrix, WholeMatrix
from shmllm.models.mlp import MLP
from shmllm.models.specs import MoESpec
from shmllm.models.weight_names import OTHER_LAYOUT


class ExpertLinear:
    """The same projections of every expert.

    Args:
        num_experts: the number of experts.
        in_features: the width of the input.
        out_features: the widths of the projections, which lie side by side.
        bias: whether they have biases.
        storage: allocates the weights.

    Attributes:
        weight: [experts, out, in].
        bias: [experts, out] or None.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: tuple[int, ...],
        bias: bool,
        storage: Storage,
    ) -> None:
        self.weight = storage.whole(num_experts, out_features, in_features)
        self.bias = storage.tensor(num_experts, out_features) if bias else None

    def named_weights(self, *names: str) -> NamedWeights:
        """Returns views of each expert's projections, by their names.

        Args:
            names: the names of projections of equal widths, which lie side by side, with "{}" in
                place of the expert's number.
        """
        num_experts, out_features, in_features = self.weight.shape
        width = out_features // len(names)
        every = [name.format(expert) for expert in range(num_experts) for name in names]
        rows: WholeMatrix = self.weight.view(-1, in_features)
        parts: Sequence[WholeMatrix] = rows.split_with_sizes([width] * len(every))
        weights: NamedWeights = {
            f"{name}.weight": (part,) for name, part in zip(every, parts, strict=True)
        }
        if self.bias is not None:
            biases = self.bias.view(-1).split_with_sizes([width] * len(every))
            weights |= {f"{name}.bias": (part,) for name, part in zip(every, biases, strict=True)}
        return weights

    def whole(self, name: str, transposed: bool = False) -> NamedWeights:
        """Returns the weight and bias of all experts, by the name of the weight.

        Args:
            name: the name.
            transposed: whether the weight's shape is [experts, in, out].
        """
        own = self.weight
        weight: Destination = own
        if transposed:
            weight = own.transpose(1, 2) if isinstance(own, Tensor) else TransposedMatrix(own)
        weights: NamedWeights = {name: (weight,)}
        return weights if self.bias is None else weights | {f"{name}_bias": (self.bias,)}


class MoE:
    """The weights of a mixture of experts.

    Attributes:
        spec: what it computes.
        router: the projection to a logit for each expert and identity, followed by the gate of
            `shared` if there is one. It is never quantized: a small error may choose other experts.
        correction: [experts and identities] float32, added to scores for the choice alone, or
            None.
        table: [num_tokens, top_k] float32, the experts of each token's id, or None.
        gate_up_proj: gate and up of each expert, or up.
        down_proj: the projection of the activation's output of each expert.
        shared: the MLP that every token goes to, or None.
        scale: [experts], the factor of each expert's output, or None.
        bias: [width] float32, what is added to the sum of each token's experts, or None.
        fixed_gate: [1], a zero in the place of each token's gate of `shared`: its sigmoid is a
            half; None: the router computes the gates, or there are none.
        place: its place among the mixtures of the decoder's layers; None: it is not one of them,
            but predicts further tokens, or it has only some of the tokens.
    """

    norms: tuple[Norm, ...] = ()

    def __init__(self, hidden_size: int, spec: MoESpec, storage: Storage) -> None:
        self.spec = spec
        outputs = [spec.num_choices, 1] if spec.shared_gate else [spec.num_choices]
        exact = storage.exact()
        if spec.router_float32:
            exact = replace(exact, dtype=torch.float32)
        self.router = Linear(hidden_size, outputs, spec.router_bias, exact)
        self.correction: Tensor | None = None
        if spec.correction_bias:
            self.correction = storage.float32(spec.num_choices)
        self.table: Tensor | None = None
        if spec.num_tokens:
            self.table = storage.float32(spec.num_tokens, spec.top_k)
        experts, inner, bias = spec.num_experts, spec.inner, spec.bias
        width = spec.width(hidden_size)
        widths = (2 * inner,) if spec.alternating else (inner, inner) if spec.gated else (inner,)
        self.gate_up_proj = ExpertLinear(experts, width, widths, bias, storage)
        self.down_proj = ExpertLinear(experts, inner, (width,), bias, storage)
        self.shared = None if spec.shared is None else MLP(hidden_size, spec.shared, storage)
        self.scale = storage.tensor(experts) if spec.scaled else None
        self.bias = storage.float32(width) if spec.output_bias else None
        self.fixed_gate = storage.zero() if spec.halves_shared else None
        self.place: int | None = None

    def added_rows(self, count: int) -> Tensor | None:
        """Returns what is added to the sums of so many tokens, [count, width], if they have a bias;
        each row is the same memory."""
        return None if self.bias is None else self.bias.expand(count, -1)

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``, such as "model.layers.0.mlp", with
        a tensor for each expert, as in most files."""
        weights = self._router_weights(prefix)
        weights |= self._whole(prefix) if self.spec.whole else self.each(prefix)
        if self.shared is not None:
            weights |= self.shared.named_weights(f"{prefix}.{self.spec.shared_name}")
        if self.bias is not None:
            weights[f"{prefix}.experts.bias"] = (self.bias,)
        return weights

    def each(self, prefix: str) -> NamedWeights:
        """Returns the destinations of a tensor for each expert."""
        one = f"{prefix}.experts.{{}}"
        names = ("gate_proj", "up_proj") if self.spec.gated else ("up_proj",)
        weights = self.gate_up_proj.named_weights(*(f"{one}.{name}" for name in names))
        return weights | self.down_proj.named_weights(f"{one}.down_proj")

    def module_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of the names that differ in transformers' modules, which have
        the experts' weights in one tensor; trainers send these."""
        weights = self._router_weights(prefix) | self._whole(prefix)
        if self.shared is not None and self.spec.shared_module is not None:
            weights |= self.shared.named_weights(f"{prefix}.{self.spec.shared_module}")
        return weights | (self._whole(prefix, OTHER_LAYOUT) if self.spec.two_layouts else {})

    def _whole(self, prefix: str, suffix: str = "") -> NamedWeights:
        is_transposed = self.spec.transposed or suffix == OTHER_LAYOUT
        name = "gate_up_proj" if self.spec.gated else "up_proj"
        weights = self.gate_up_proj.whole(f"{prefix}.experts.{name}{suffix}", is_transposed)
        return weights | self.down_proj.whole(f"{prefix}.experts.down_proj{suffix}", is_transposed)

    def _router_weights(self, prefix: str) -> NamedWeights:
        names = ("gate", "shared_expert_gate") if self.spec.shared_gate else ("gate",)
        weights = self.router.named_weights(*(f"{prefix}.{name}" for name in names))
        if self.correction is not None:
            weights[f"{prefix}.gate.e_score_correction_bias"] = (self.correction,)
        if self.table is not None:
            weights[f"{prefix}.gate.tid2eid"] = (self.table,)
        return weights


def mixture_of(feed_forward: object) -> MoE | None:
    """Returns the mixture of experts that a layer's feed-forward is or contains, if it does."""
    found = getattr(feed_forward, "experts", feed_forward)
    return found if isinstance(found, MoE) else None


class DenseAndExperts:
    """The weights of a dense MLP and a mixture of experts side by side.

    Attributes:
        spec: what it computes.
        mlp: the dense MLP.
        experts: the mixture.
        router_norm: the norm of what the router reads.
        before_experts: the norm of what the experts read.
        after_mlp, after_experts: the norms of the outputs.
    """

    def __init__(self, config: ModelConfig, spec: DenseAndExpertsSpec, storage: Storage) -> None:
        self.spec = spec
        self.mlp = MLP(config.hidden_size, spec.mlp, storage)
        self.experts = MoE(config.hidden_size, spec.experts, storage)
        self.router_norm, self.before_experts, self.after_mlp, self.after_experts = self.norms = (
            *(Norm(config.hidden_size, config.norm, storage) for _ in range(4)),
        )

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``, such as "model.layers.0.mlp"."""
        weights = self.mlp.named_weights(prefix) | self.experts.module_weights(prefix)
        weights[f"{prefix}.router.scale"] = (self.router_norm.weight,)
        if self.experts.scale is not None:
            weights[f"{prefix}.router.per_expert_scale"] = (self.experts.scale,)
        names = ("before_experts", "after_mlp", "after_experts")
        for name, norm in zip(names, self.norms[1:], strict=True):
            weights |= norm.named_weights(f"{prefix}.{name}")
        return weights

    def module_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of a tensor for each expert, as quantized checkpoints have them;
        transformers' modules have the same names."""
        return self.experts.each(prefix)


class ShortcutExperts:
    """The weights of a dense MLP, and of a mixture of experts whose output the next layer adds.

    Attributes:
        mlp: the dense MLP.
        experts: the mixture.
    """

    norms: tuple[Norm, ...] = ()

    def __init__(self, config: ModelConfig, spec: ShortcutExpertsSpec, storage: Storage) -> None:
        self.mlp = MLP(config.hidden_size, spec.mlp, storage)
        self.experts = MoE(config.hidden_size, spec.experts, storage)

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``, such as "model.layers.0.mlp"."""
        return self.mlp.named_weights(prefix) | self.experts.named_weights(prefix)

    def module_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of the names that differ in transformers' modules."""
        return self.experts.module_weights(prefix)


class ExpertsByTokens:
    """The weights of two mixtures of experts, each of which computes a kind of tokens.

    Attributes:
        first, second: the mixtures.
    """

    norms: tuple[Norm, ...] = ()

    def __init__(self, config: ModelConfig, spec: ExpertsByTokensSpec, storage: Storage) -> None:
        self.first, self.second = (MoE(config.hidden_size, each, storage) for each in spec.mixtures)

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``, such as "model.layers.0.mlp", of the
        second mixture with "second" behind it."""
        return self.first.named_weights(prefix) | self.second.named_weights(f"{prefix}.second")

    def module_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of the names that differ in transformers' modules, likewise."""
        return self.first.module_weights(prefix) | self.second.module_weights(f"{prefix}.second")


class LatentExperts:
    """The weights of a mixture of experts that read a latent, and of a shared expert that does not.

    Attributes:
        spec: what it computes.
        residual_scale: the factor of what is added to the residual stream.
        experts: the mixture.
        latent_down: the projection of the hidden state to what the experts read.
        latent_up: the projection of their sum to the width of the hidden state.
        shared: the shared expert.
    """

    norms: tuple[Norm, ...] = ()

    def __init__(self, config: ModelConfig, spec: LatentExpertsSpec, storage: Storage) -> None:
        self.spec = spec
        self.residual_scale = config.residual_scale
        hidden, latent = config.hidden_size, spec.experts.width(config.hidden_size)
        self.experts = MoE(hidden, spec.experts, storage)
        self.latent_down = Linear(hidden, [latent], spec.bias, storage)
        self.latent_up = Linear(latent, [hidden], spec.bias, storage)
        self.shared = MLP(hidden, spec.shared, storage)

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``, such as "model.layers.0.mlp"."""
        weights = self.experts.named_weights(prefix)
        weights |= self.latent_down.named_weights(f"{prefix}.fc1_latent_proj")
        weights |= self.latent_up.named_weights(f"{prefix}.fc2_latent_proj")
        return weights | self.shared.named_weights(f"{prefix}.{self.spec.experts.shared_name}")

    def module_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of the names that differ in transformers' modules."""
        return self.experts.module_weights(prefix)
