"""What mixes the tokens of a layer by a state that has the same size after any number of tokens.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

MambaNorms = Literal["weights", "plain"]
GatedNorm = Literal["behind gates", "before gates"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetSpec:
    """A gated delta net (Yang, Kautz and Hatamizadeh, 2024), which takes the place of attention.

    Attributes:
        key_heads: the number of query heads, and of key heads.
        key_dim: the width of each.
        value_heads: the number of value heads, a multiple of `key_heads`.
        value_dim: the width of each.
        taps: the number of tokens that the convolution of queries, keys and values reads.
        tiled: whether value head i has the key head i modulo `key_heads`, as in GGUF files; else
            value heads that follow each other share one.
        apart: whether a checkpoint of Qwen 3 Next has the projections to queries, keys and values
            in one tensor and those to gates in another, as GGUF files have them.
        most_rate: the factor of the rates' sigmoids; with 2 a state's change may have negative
            eigenvalues (Grazzi et al., 2024).
        norm_eps: added to the mean square by the norm of the output; None: what other norms add.
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    taps: int
    tiled: bool = False
    apart: bool = False
    most_rate: float = 1.0
    norm_eps: float | None = None

    kv = None

    @property
    def width(self) -> int:
        """The width of all value heads, and of the output."""
        return self.value_heads * self.value_dim

    @property
    def convolved_parts(self) -> tuple[int, ...]:
        """The widths of queries, of keys and of values."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.width

    @property
    def convolved_width(self) -> int:
        """The width of queries, keys and values side by side."""
        return sum(self.convolved_parts)

    @property
    def in_width(self) -> int:
        """The width of queries, keys, values, gates, rates and decays side by side."""
        return self.convolved_width + self.width + 2 * self.value_heads

    @property
    def linear_widths(self) -> tuple[int, ...]:
        """The widths of the outputs of the projections before the net."""
        return (self.in_width,)

    @property
    def convolution_bytes(self) -> int:
        """The size of the convolution's state: its last inputs, in float32."""
        return 4 * (self.taps - 1) * self.convolved_width

    @property
    def state_bytes(self) -> int:
        """The size of a request's state in one layer, in float32."""
        return self.convolution_bytes + 4 * self.value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaSpec:
    """A gated delta net with a decay for each channel of the key (Kimi Team, "Kimi Linear", 2025,
    section 4), which takes the place of attention.

    Attributes:
        heads: the number of query heads, of key heads, and of value heads.
        head_dim: the width of each.
        taps: the number of tokens that the convolution of queries, keys and values reads.
        has_low_rank: whether decays and gates are projections of projections to the width of a
            head, and not of the hidden state.
        least_log: the bound of the logarithms of decays, below 0, which are ``least_log *
            sigmoid(exp(log) * (x + bias))`` then; None: they are ``-exp(log) * softplus(x +
            bias)``.
    """

    heads: int
    head_dim: int
    taps: int
    has_low_rank: bool = True
    least_log: float | None = None

    kv = None

    @property
    def width(self) -> int:
        """The width of all heads, and of the output."""
        return self.heads * self.head_dim

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The key heads, the width of a key, the value heads, and the width of a value."""
        return self.heads, self.head_dim, self.heads, self.head_dim

    @property
    def convolved_parts(self) -> tuple[int, ...]:
        """The widths of queries, of keys and of values."""
        return self.width, self.width, self.width

    @property
    def convolved_width(self) -> int:
        """The width of queries, keys and values side by side."""
        return 3 * self.width

    @property
    def linear_widths(self) -> tuple[int, ...]:
        """The widths of the outputs of the projections before the net: of queries, keys, values
        and rates side by side, of decays and of gates."""
        return self.convolved_width + self.heads, self.width

    @property
    def convolution_bytes(self) -> int:
        """The size of the convolution's state: its last inputs, in float32."""
        return 4 * (self.taps - 1) * self.convolved_width

    @property
    def state_bytes(self) -> int:
        """The size of a request's state in one layer, in float32."""
        return self.convolution_bytes + 4 * self.width * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec:
    """A Mamba 2 (Dao and Gu, 2024), which takes the place of attention.

    Attributes:
        heads: the number of heads.
        head_dim: the width of each.
        groups: the number of groups of heads that share B and C.
        state_size: the width of B, and of C.
        taps: the number of tokens that the convolution of inputs, B and C reads.
        convolution_bias: whether the convolution has a bias.
        bias: whether the projection before it has a bias.
        output_bias: whether the projection behind it has a bias.
        limits: the smallest and the largest time step.
        norm: whether the output is normalised "behind gates" or "before gates", which multiply it;
            None: it is not.
        norm_eps: what that norm adds to the mean square; None: what other norms add.
        factors: those of gates, inputs, B, C and time steps behind their projection; None: all
            are 1.
    """

    heads: int
    head_dim: int
    groups: int
    state_size: int
    taps: int
    convolution_bias: bool = True
    bias: bool = False
    output_bias: bool = False
    limits: tuple[float, float] = (0.0, math.inf)
    norm: GatedNorm | None = "behind gates"
    norm_eps: float | None = None
    factors: tuple[float, ...] | None = None

    kv = None

    @property
    def width(self) -> int:
        """The width of all heads, and of the output."""
        return self.heads * self.head_dim

    @property
    def convolved_parts(self) -> tuple[int, ...]:
        """The widths of inputs, of B and of C."""
        keys = self.groups * self.state_size
        return self.width, keys, keys

    @property
    def convolved_width(self) -> int:
        """The width of inputs, B and C side by side."""
        return sum(self.convolved_parts)

    @property
    def in_parts(self) -> tuple[int, ...]:
        """The widths of gates, of inputs, of B, of C and of time steps."""
        return self.width, *self.convolved_parts, self.heads

    @property
    def in_width(self) -> int:
        """The width of gates, inputs, B, C and time steps side by side."""
        return sum(self.in_parts)

    @property
    def linear_widths(self) -> tuple[int, ...]:
        """The widths of the outputs of the projections before it."""
        return (self.in_width,)

    @property
    def convolution_bytes(self) -> int:
        """The size of the convolution's state: its last inputs, in float32."""
        return 4 * (self.taps - 1) * self.convolved_width

    @property
    def state_bytes(self) -> int:
        """The size of a request's state in one layer, in float32."""
        return self.convolution_bytes + 4 * self.width * self.state_size


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningSpec:
    """A lightning attention (MiniMax, "MiniMax-01", 2025, section 2.2), which takes the place of
    attention: the recurrence of Mamba 2 with a decay that is the same for all tokens, without a
    convolution.

    Attributes:
        heads: the number of heads.
        head_dim: the width of a query, of a key and of a value.
        slope: the factor of the decays' exponents ``2 ** (-8 * (head + 1) / heads)``.
        norm_eps: added to the mean square by the norm of the output, which is over all heads.
    """

    heads: int
    head_dim: int
    slope: float
    norm_eps: float = 1e-6

    kv = None

    @property
    def width(self) -> int:
        """The width of all heads, and of the output."""
        return self.heads * self.head_dim

    @property
    def in_width(self) -> int:
        """The width of values, keys, queries and gates side by side."""
        return 4 * self.width

    @property
    def linear_widths(self) -> tuple[int, ...]:
        """The widths of the outputs of the projections before it."""
        return (self.in_width,)

    @property
    def state_bytes(self) -> int:
        """The size of a request's state in one layer, in float32."""
        return 4 * self.width * self.head_dim

    @property
    def logs(self) -> list[float]:
        """The logarithms of the decays' exponents, one for each head."""
        base = math.log(self.slope)
        return [base - 8 * math.log(2) * (head + 1) / self.heads for head in range(self.heads)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec:
    """A Mamba (Gu and Dao, 2023), which takes the place of attention.

    Attributes:
        width: the number of channels.
        state_size: the width of B, of C, and of a channel's state.
        rank: the width of what time steps are projected from.
        taps: the number of tokens that the convolution of the channels reads.
        convolution_bias: whether the convolution has a bias.
        bias: whether the projections before and behind it have a bias.
        norms: whether that of time steps, B and C are normalised: not, with "weights", or "plain".
        norm_eps: added to the mean square.
    """

    width: int
    state_size: int
    rank: int
    taps: int
    convolution_bias: bool = True
    bias: bool = False
    norms: MambaNorms | None = None
    norm_eps: float = 1e-6

    kv = None

    @property
    def linear_widths(self) -> tuple[int, ...]:
        """The widths of the outputs of the projections before it: of inputs and gates side by
        side."""
        return (2 * self.width,)

    @property
    def projected_width(self) -> int:
        """The width of what a channel's input is projected to: time steps' rank, B and C."""
        return self.rank + 2 * self.state_size

    @property
    def convolution_bytes(self) -> int:
        """The size of the convolution's state: its last inputs, in float32."""
        return 4 * (self.taps - 1) * self.width

    @property
    def state_bytes(self) -> int:
        """The size of a request's state in one layer, in float32."""
        return self.convolution_bytes + 4 * self.width * self.state_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolutionSpec:
    """A gated short convolution (Liquid AI, "LFM2 Technical Report", 2025, section 2), which takes
    the place of attention.

    Attributes:
        width: the number of channels.
        taps: the number of tokens that the convolution of a channel reads.
        bias: whether the convolution, and the projections before and behind it, have a bias.
        ahead: how many of these tokens are behind its own; 0: the convolution is causal.
    """

    width: int
    taps: int
    bias: bool = False
    ahead: int = 0

    kv = None

    @property
    def in_width(self) -> int:
        """The width of input gates, output gates and inputs side by side."""
        return 3 * self.width

    @property
    def linear_widths(self) -> tuple[int, ...]:
        """The widths of the outputs of the projections before it."""
        return (self.in_width,)

    @property
    def state_bytes(self) -> int:
        """The size of a request's state in one layer: the last gated inputs, in float32."""
        return 4 * (self.taps - 1) * self.width
