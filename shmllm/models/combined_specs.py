"""What a layer's feed-forward is that has experts beside something else.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from dataclasses import dataclass

from shmllm.models.specs import MLPSpec, MoESpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPAndExpertsSpec:
    """A dense MLP and a mixture of experts.

    Attributes:
        mlp: the dense MLP.
        experts: the mixture.
    """

    mlp: MLPSpec
    experts: MoESpec

    @property
    def mixtures(self) -> tuple[MoESpec, ...]:
        """The mixture."""
        return (self.experts,)

    @property
    def dense(self) -> tuple[MLPSpec, ...]:
        """The dense MLPs."""
        return (self.mlp, *self.experts.dense)

    def num_elements(self, hidden: int) -> int:
        """The number of elements of all matrices, with hidden states of a width."""
        return self.mlp.num_elements(hidden) + self.experts.num_elements(hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseAndExpertsSpec(MLPAndExpertsSpec):
    """A dense MLP and a mixture of experts side by side, whose outputs are added (Gemma 4).

    The MLP reads what the layer's norm gives. The router and the experts read the residual stream,
    each through a norm of its own. Both outputs have a norm.

    Attributes:
        router_scale: the factor of what the router reads.
    """

    router_scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentExpertsSpec:
    """A mixture of experts that read a projection of the hidden state, a latent, and whose sum is
    projected back, beside a shared expert as wide as the hidden state (Nemotron 3 Super).

    The shared expert's output is added to the residual stream first: its layer has norms of what
    both read, and no others.

    Attributes:
        experts: the mixture, with a latent and no shared expert.
        shared: the shared expert.
        bias: whether both projections have a bias.
    """

    experts: MoESpec
    shared: MLPSpec
    bias: bool = False

    @property
    def mixtures(self) -> tuple[MoESpec, ...]:
        """The mixture."""
        return (self.experts,)

    @property
    def dense(self) -> tuple[MLPSpec, ...]:
        """The shared expert."""
        return (self.shared,)

    def num_elements(self, hidden: int) -> int:
        """The number of elements of all matrices, with hidden states of a width."""
        projections = 2 * self.experts.width(hidden) * hidden
        return projections + self.experts.num_elements(hidden) + self.shared.num_elements(hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortcutExpertsSpec(MLPAndExpertsSpec):
    """A dense MLP, and a mixture of experts that reads what the MLP reads, whose output the next
    layer adds behind its mixer (LongCat-Flash, 2025, section 2.2); see `LayerSpec`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsByTokensSpec:
    """Two mixtures of experts, each of which computes a kind of tokens (ERNIE 4.5, 2025, section
    2.1); see `MoESpec.tokens`. All tokens go to a shared expert of the first one.

    Attributes:
        first, second: the mixtures.
    """

    first: MoESpec
    second: MoESpec

    @property
    def mixtures(self) -> tuple[MoESpec, ...]:
        """Both mixtures."""
        return (self.first, self.second)

    @property
    def dense(self) -> tuple[MLPSpec, ...]:
        """The shared expert, if there is one."""
        return self.first.dense

    def num_elements(self, hidden: int) -> int:
        """The number of elements of all matrices, with hidden states of a width."""
        return self.first.num_elements(hidden) + self.second.num_elements(hidden)


FeedForwardSpec = (
    MLPSpec
    | MoESpec
    | DenseAndExpertsSpec
    | LatentExpertsSpec
    | ShortcutExpertsSpec
    | ExpertsByTokensSpec
)
"""What computes each token by itself. Each has `mixtures` and `dense`, the mixtures of experts and
the dense MLPs that it has, and `num_elements`."""
