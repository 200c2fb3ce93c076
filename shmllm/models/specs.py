"""What norms, MLPs and mixtures of experts are: the values that decide their operations.

`layer_specs.py` has those of whole layers, `mixer_specs.py` those of mixers, `combined_specs.py`
those of experts with something beside them, `stream_specs.py` what reads or makes residual streams
beside layers. A family's module makes them from config.json, `decoder.py` makes layers of them, and
the operations of each device read them. This module must not import torch: front ends import it
too.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

NormKind = Literal["rms", "layer"]
Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu_squared"]
LearnedActivation = Literal["xielu"]
LEARNED: dict[str, dict[str, tuple[tuple[int, ...], float]]] = {
    "xielu": {
        "alpha_p": ((1,), 0.2033823),
        "alpha_n": ((1,), -1.0502256),
        "beta": ((), 0.5),
        "eps": ((), -1e-6),
    }
}
"""The numbers that a model learns of an activation in each layer, in the order in which kernels
read them: by the name in a checkpoint, its shape there, and the value before training."""
ExpertActivation = Literal[
    "silu", "silu_bounded", "silu_clamped", "silu_shifted", "gelu_tanh", "gpt_oss", "relu_squared",
    "gelu",
]  # fmt: skip
Scoring = Literal[
    "softmax", "softmax_of_top", "sigmoid", "sqrt_softplus", "sigmoid_of_top", "mixer"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """A norm of rows.

    Attributes:
        kind: "rms": RMSNorm (Zhang and Sennrich, 2019); "layer": LayerNorm (Ba et al., 2016).
        eps: added to the mean square, or to the variance.
        offset: added to the weights, in float32.
        bias: whether a LayerNorm has a bias.
        weight: whether the norm has a weight; otherwise it multiplies by one.
    """

    kind: NormKind = "rms"
    eps: float = 1e-6
    offset: float = 0.0
    bias: bool = False
    weight: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPSpec:
    """A dense MLP.

    Attributes:
        inner: the width of the activation's output.
        activation: "silu", "gelu" (with the error function), "gelu_tanh", "quick_gelu", "relu",
            "relu_squared", or, without a gate, "xielu", whose numbers a model learns; see LEARNED;
            or, with a bound, "silu_clamped" or "silu_shifted".
        gated: True: ``down(act(gate(x)) * up(x))``; False: ``down(act(up(x)))``.
        bias, up_bias: whether the projections have a bias, and whether those to gate and up, too.
        sparsity: the share of a token's gates that would be zero, were they distributed normally:
            ``max(gate - cut, 0)`` takes the place of a gate; 0: they stay.
        bound: the largest activation of a gate, and the largest magnitude of what it multiplies;
            None: they stay. The MLP is gated then. With "silu_clamped" and "silu_shifted" gates are
            bounded before their activation; the latter is ``g * sigmoid(1.702 * g) * (u + 1)`` of
            bounded gates g and ups u.
        norm: the norm of what the last projection reads; None: there is none.
    """

    inner: int
    activation: Activation | LearnedActivation | Literal["silu_clamped", "silu_shifted"] = "silu"
    gated: bool = True
    bias: bool = False
    up_bias: bool = True
    sparsity: float = 0.0
    bound: float | None = None
    norm: NormSpec | None = None

    @property
    def deviations(self) -> float:
        """By how many standard deviations the cut of a token's gates lies above their mean."""
        return NormalDist().inv_cdf(self.sparsity)

    @property
    def learns_activation(self) -> bool:
        """Whether the activation has numbers that a model learns."""
        return self.activation in LEARNED

    @property
    def up_width(self) -> int:
        """The width of the activation's input: of gate and up side by side, or of up."""
        return 2 * self.inner if self.gated else self.inner

    @property
    def mixtures(self) -> tuple[MoESpec, ...]:
        """None."""
        return ()

    @property
    def dense(self) -> tuple[MLPSpec, ...]:
        """The MLP itself."""
        return (self,)

    def num_elements(self, hidden: int) -> int:
        """The number of elements of all matrices, with hidden states of a width."""
        return (self.up_width + self.inner) * hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenKind:
    """A kind of tokens.

    Attributes:
        ids: token ids. A token whose embedding a prompt's item gives counts as one of these.
        are_listed: whether they are those of the kind, and not those of all other tokens.
    """

    ids: tuple[int, ...]
    are_listed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """A mixture of experts, each an MLP.

    Attributes:
        num_experts: the number of experts.
        top_k: the number of experts that a token goes to.
        inner: the width of an expert's activation's output.
        latent: the width of what the experts read and return; None: that of the hidden state. The
            router reads the hidden state.
        activation: "silu", "silu_bounded", "silu_clamped", "silu_shifted", "gelu_tanh", gpt-oss's
            clamped product, or without a gate "relu_squared" or "gelu".
        bound: with "silu_bounded" and "silu_shifted": see `MLPSpec`; with "silu_clamped" that of
            gates before their activation, and of what they multiply.
        scoring: "softmax" of all experts before the choice, "softmax_of_top" of the chosen ones,
            "sigmoid" of each, "sqrt_softplus", the root of softplus of each, "sigmoid_of_top" of
            those that are chosen by their logits, or "mixer": each chosen expert has a softmax by
            itself, over those that are near to it (SparseMixer, Liu et al., 2024).
        mixer_limit: with "mixer": how far other logits may be below that of a chosen expert, as a
            share.
        renormalize: whether the weights of the chosen experts are divided by their sum.
        total_eps: added to that sum but for a softmax.
        weight_scale: the factor of the weights.
        weighs_inputs: whether weights multiply what experts read, and not what they return
            (Llama 4). The experts have gates and no biases then.
        correction_bias: whether the router has a bias that counts for the choice alone. It is added
            to scores, with "sigmoid_of_top" to logits.
        num_tokens: if a token's id chooses its experts, the number of ids (hash layers; Roller et
            al., 2021); 0: its logits do.
        num_groups: the number of groups of consecutive experts.
        top_groups: the number of groups that a token's experts are chosen from, those with the
            largest scores.
        best_of_group: the score of a group is the sum of this many of its experts' largest scores,
            1 or 2.
        router_float32: whether the router's weight is float32 in a model of any dtype.
        router_bias, bias: whether the router, and the experts' projections, have a bias.
        output_bias: whether the sum of a token's experts has a bias. There is no shared one then.
        whole: whether a checkpoint has the weights of all experts in one tensor, and not one each.
        transposed: whether such a tensor is [experts, in, out], in transformers' modules too, and
            not [experts, out, in].
        two_layouts: whether some checkpoints have the weights of all experts as [experts, out, in],
            as transformers' modules do, and others as [experts, in, out]; then the shape decides.
        identities: how many further choices the router has behind the experts, each of which
            returns what the experts read (LongCat-Flash, 2025, section 2.1). There is no shared
            expert and no `output_bias` then.
        tokens: the tokens that go to its experts, whose sum is 0 for all others; None: all do.
        shared: an MLP that every token goes to as well; None: there is none.
        shared_gate: whether the output of `shared` is multiplied by a sigmoid of its own gate.
        halves_shared: whether the output of `shared` is halved.
        scaled: whether the output of an expert is multiplied by a weight of that expert.
        shared_name: the name of `shared` in checkpoints.
        shared_module: its name in transformers' modules; None: the same one.
    """

    num_experts: int
    top_k: int
    inner: int
    latent: int | None = None
    activation: ExpertActivation = "silu"
    bound: float = 0.0
    scoring: Scoring = "softmax"
    mixer_limit: float = 0.0
    renormalize: bool = False
    total_eps: float = 1e-20
    weight_scale: float = 1.0
    weighs_inputs: bool = False
    correction_bias: bool = False
    num_tokens: int = 0
    num_groups: int = 1
    top_groups: int = 1
    best_of_group: int = 1
    router_float32: bool = False
    router_bias: bool = False
    bias: bool = False
    output_bias: bool = False
    whole: bool = False
    transposed: bool = False
    two_layouts: bool = False
    identities: int = 0
    tokens: TokenKind | None = None
    shared: MLPSpec | None = None
    shared_gate: bool = False
    halves_shared: bool = False
    scaled: bool = False
    shared_name: str = "shared_expert"
    shared_module: str | None = None

    @property
    def num_choices(self) -> int:
        """What the router has a logit for each of: the experts and the identities behind them."""
        return self.num_experts + self.identities

    @property
    def changes_choices(self) -> bool:
        """Whether some choices go to no expert, or are not made by logits alone."""
        return self.identities > 0 or self.reads_ids

    @property
    def reads_ids(self) -> bool:
        """Whether the ids of tokens decide to which experts they go."""
        return self.num_tokens > 0 or self.tokens is not None

    @property
    def divides_by_all(self) -> bool:
        """Whether the sum of the chosen experts' scores does not divide them."""
        return self.scoring != "softmax_of_top" and not self.renormalize

    @property
    def gated(self) -> bool:
        """Whether an expert has a gate."""
        return self.activation not in ("relu_squared", "gelu")

    @property
    def alternating(self) -> bool:
        """Whether the columns of gate and up alternate."""
        return self.activation == "gpt_oss"

    @property
    def mixtures(self) -> tuple[MoESpec, ...]:
        """The mixture itself."""
        return (self,)

    @property
    def dense(self) -> tuple[MLPSpec, ...]:
        """The dense MLPs that it has."""
        return () if self.shared is None else (self.shared,)

    def width(self, hidden: int) -> int:
        """The width of what the experts read and return, with hidden states of a width."""
        return hidden if self.latent is None else self.latent

    def expert_elements(self, hidden: int) -> int:
        """The number of elements of the matrices of an expert, with hidden states of a width."""
        return (3 if self.gated else 2) * self.inner * self.width(hidden)

    def num_elements(self, hidden: int) -> int:
        """About the number of elements of all matrices, with hidden states of a width."""
        own = self.num_experts * (self.expert_elements(hidden) + hidden)
        return own + sum(mlp.num_elements(hidden) for mlp in self.dense)
