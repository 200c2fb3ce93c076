"""The kinds of feed-forwards: which class owns the weights of each, and which operations it has.

A feed-forward computes each token by itself: an MLP, or a mixture of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from shmllm.models.combined_specs import (
    DenseAndExpertsSpec,
    ExpertsByTokensSpec,
    FeedForwardSpec,
    LatentExpertsSpec,
    ShortcutExpertsSpec,
)
from shmllm.models.config import ModelConfig
from shmllm.models.experts import (
    DenseAndExperts,
    ExpertsByTokens,
    LatentExperts,
    MoE,
    ShortcutExperts,
)
from shmllm.models.layers import NamedWeights, Norm, Storage
from shmllm.models.mlp import MLP
from shmllm.models.ops import Ops
from shmllm.models.specs import MLPSpec, MoESpec


class FeedForward(Protocol):
    """The weights of a layer's feed-forward."""

    @property
    def norms(self) -> tuple[Norm, ...]:
        """Its own norms."""

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``, such as "model.layers.0.mlp"."""

    def module_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of the names that differ in transformers' modules."""


@dataclass(frozen=True, slots=True)
class FeedForwardKind:
    """A kind of feed-forwards.

    Attributes:
        make: (config, spec, storage) -> the weights of a layer's feed-forward.
        run: (ops, x, residual, feed_forward) -> its output, or the part of it that it has not
            added to the stream. x is the normalised residual stream, residual the stream itself;
            all are [tokens, hidden].
    """

    make: Callable[[ModelConfig, Any, Storage], FeedForward]
    run: Callable[[Ops, Tensor, Tensor, Any], Tensor]


def _make_mlp(config: ModelConfig, spec: MLPSpec, storage: Storage) -> MLP:
    return MLP(config.hidden_size, spec, storage)


def _make_experts(config: ModelConfig, spec: MoESpec, storage: Storage) -> MoE:
    return MoE(config.hidden_size, spec, storage)


def _run_mlp(ops: Ops, x: Tensor, residual: Tensor, mlp: MLP) -> Tensor:
    return ops.mlp(x, mlp)


def _run_experts(ops: Ops, x: Tensor, residual: Tensor, moe: MoE) -> Tensor:
    return ops.experts(x, ops.route(x, moe), moe)


def _run_both(ops: Ops, x: Tensor, residual: Tensor, both: DenseAndExperts) -> Tensor:
    out = ops.norm(_run_mlp(ops, x, residual, both.mlp), both.after_mlp)
    read = ops.add_norm(None, residual, both.router_norm, 1.0)
    routing = ops.route(ops.scale(read, both.spec.router_scale), both.experts)
    read = ops.add_norm(None, residual, both.before_experts, 1.0)
    of_experts = ops.norm(ops.experts(read, routing, both.experts), both.after_experts)
    return ops.add_norm(of_experts, out, None, 1.0)


def _run_latent_experts(ops: Ops, x: Tensor, residual: Tensor, latent: LatentExperts) -> Tensor:
    ops.add_norm(ops.mlp(x, latent.shared), residual, None, latent.residual_scale)
    routing = ops.route(x, latent.experts)
    of_experts = ops.experts(ops.linear(x, latent.latent_down), routing, latent.experts)
    return ops.linear(of_experts, latent.latent_up)


def _run_with_shortcut(ops: Ops, x: Tensor, residual: Tensor, both: ShortcutExperts) -> Tensor:
    ops.set_aside(_run_experts(ops, x, residual, both.experts))
    return ops.mlp(x, both.mlp)


def _run_by_tokens(ops: Ops, x: Tensor, residual: Tensor, both: ExpertsByTokens) -> Tensor:
    out = _run_experts(ops, x, residual, both.first)
    return ops.add_norm(_run_experts(ops, x, residual, both.second), out, None, 1.0)


FEED_FORWARDS: dict[type[FeedForwardSpec], FeedForwardKind] = {
    MLPSpec: FeedForwardKind(_make_mlp, _run_mlp),
    MoESpec: FeedForwardKind(_make_experts, _run_experts),
    DenseAndExpertsSpec: FeedForwardKind(DenseAndExperts, _run_both),
    LatentExpertsSpec: FeedForwardKind(LatentExperts, _run_latent_experts),
    ShortcutExpertsSpec: FeedForwardKind(ShortcutExperts, _run_with_shortcut),
    ExpertsByTokensSpec: FeedForwardKind(ExpertsByTokens, _run_by_tokens),
}
