"""The operations that a decoder calls. Each kind of device implements them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from shmllm.models.attention import AttentionHeads
from shmllm.models.compressed_ops import CompressedOps
from shmllm.models.delta_net import DeltaNet
from shmllm.models.experts import MoE
from shmllm.models.kimi_delta import KimiDelta
from shmllm.models.latent_attention import LatentAttention
from shmllm.models.layers import Linear, Norm, TokenEmbedding
from shmllm.models.lightning import Mamba2Like
from shmllm.models.logits_ops import LinearOps
from shmllm.models.mamba_mixer import Mamba
from shmllm.models.mlp import MLP
from shmllm.models.per_layer import LayerInput, PerLayerInputs
from shmllm.models.routing import Routing
from shmllm.models.short_convolution import ShortConvolution
from shmllm.models.stream_ops import StreamOps


class Ops(LinearOps, StreamOps, CompressedOps, Protocol):
    """The operations of one forward pass. Activations are [tokens, ...], for any number of tokens.

    The implementation knows the step's tokens, their positions and the cache slots of their keys
    and values; the model does not. A result may be a buffer that the next call of the same
    operation overwrites.
    """

    def embed(self, embedding: TokenEmbedding) -> Tensor:
        """Looks up the step's tokens in the table; returns [tokens, hidden].

        It multiplies tokens' embeddings by ``embedding.scale``, those that a prompt gave itself by
        ``embedding.embeds_scale``, and adds the embeddings of the tokens' positions if the model
        has them.
        """

    def project(self, x: Tensor, projection: Linear) -> Tensor:
        """Begins the residual stream, [tokens, hidden], with the projection of what `norm` or
        `beside` made of the result of `embed`, ``x`` [tokens, width]."""

    def receive(self) -> Tensor:
        """Returns the residual stream, [tokens, hidden], that the stage of the pipeline before this
        one has computed."""

    def add_norm(
        self, x: Tensor | None, residual: Tensor, norm: Norm | None, scale: float
    ) -> Tensor:
        """Adds ``scale * x``, unless it is None, to the residual stream in place, and normalises
        the sum.

        RMSNorm is ``(weight + offset) * (r / sqrt(mean(r**2) + eps))``, LayerNorm
        ``(weight + offset) * (r - mean(r)) / sqrt(var(r) + eps) + bias``, over the last dimension.

        Args:
            x: [tokens, hidden] or None.
            residual: [tokens, hidden].
            norm: the norm; None: the result is ``residual`` itself, and the results of earlier
                calls stay.
            scale: the factor of ``x``.

        Returns:
            [tokens, hidden].
        """

    def add_level(self, residual: Tensor, level: int) -> None:
        """Adds a level of the step's images to the residual stream [tokens, hidden], in place; see
        `VisionSpec.num_levels`. Tokens that are no image's stay."""

    def norm_sum(self, x: Tensor, residual: Tensor, norm: Norm, scale: float) -> Tensor:
        """Adds ``scale * x`` to the residual stream and normalises the sum, both in place.

        Args:
            x: [tokens, hidden].
            residual: [tokens, hidden].
            norm: the norm; see `add_norm`.
            scale: the factor of ``x``.

        Returns:
            ``residual``.
        """

    def join(
        self, embeds: Tensor, hidden: Tensor, norms: tuple[Norm, Norm], projection: Linear
    ) -> Tensor:
        """Begins the residual stream of a layer that predicts a token further ahead.

        Args:
            embeds: the result of `embed`; may be overwritten.
            hidden: [tokens, hidden], the hidden states of the tokens before; may be overwritten.
            norms: the norms of both.
            projection: reads the normalised embeddings and hidden states, side by side.

        Returns:
            [tokens, hidden].
        """

    def given(self) -> Tensor:
        """Returns the hidden states that a model reads which drafts for another one, [tokens,
        hidden]; may be overwritten. See `EagleSpec`."""

    def beside(self, first: Tensor, second: Tensor) -> Tensor:
        """Returns [tokens, 2 * width]: the rows of ``first`` [tokens, width], and the first columns
        of ``second``, as many, side by side."""

    def set_aside(self, residual: Tensor) -> None:
        """Copies what layers read beside the residual stream, [tokens, hidden], for `aside`: that
        stream as it begins, or the output of a layer's experts."""

    def aside(self) -> Tensor:
        """Returns the last copy that `set_aside` made, [tokens, hidden]."""

    def keep(self, residual: Tensor, place: int) -> None:
        """Copies the residual stream [tokens, hidden] for a model that drafts, as the part of its
        rows with index ``place``; see `ModelConfig.kept_levels`."""

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Normalises rows, in place, or elsewhere if they have more columns than the norm.

        Args:
            x: [tokens, columns]; the first columns are normalised, as many as the norm has.
            norm: the norm; see `add_norm`.

        Returns:
            [tokens, columns of the norm].
        """

    def scale(self, x: Tensor, factor: float, weight: Tensor | None = None) -> Tensor:
        """Multiplies ``x`` [tokens, width], in place, by a number, and, unless it is None, by a
        weight, [1] or [width] float32, one for each column. Returns ``x``."""

    def clip(self, x: Tensor, bound: float) -> Tensor:
        """Makes numbers of ``x`` [tokens, width] that are above a bound, or below its negative,
        equal to it, in place. Returns ``x``."""

    def embed_per_layer(self, hidden: Tensor, inputs: PerLayerInputs) -> None:
        """Computes the inputs that each layer has of its own, for `gate_layer_input`.

        They are ``(norm(projection_scale * projection(hidden)) + scale * table[token]) /
        sqrt(2)``, with a norm of each layer's part; see `PerLayerSpec`.

        Args:
            hidden: [tokens, hidden], the result of `embed`.
            inputs: the weights.
        """

    def gate_layer_input(self, x: Tensor, layer: LayerInput) -> Tensor:
        """Returns ``act(x)`` times the input of a layer, which may be overwritten.

        Args:
            x: [tokens, width].
            layer: the weights.

        Returns:
            [tokens, width], no result of `linear`.
        """

    def attend(self, qkv: Tensor, attention: AttentionHeads) -> Tensor:
        """Computes the attention of one layer, over the step's tokens and those before them.

        It normalises queries and keys if the layer has norms for that, rotates them (rotary
        embedding), and stores the keys and values in the cache. `AttentionSpec` says what it does
        with the scores.

        Args:
            qkv: [tokens, in_width], queries, keys, values and, if there are any, gates, side by
                side; may be overwritten.
            attention: the layer.

        Returns:
            [tokens, num_heads * value_head_dim].
        """

    def store_heads(self, qkv: Tensor, attention: AttentionHeads) -> None:
        """Stores the keys and values of the step's tokens in the cache, as `attend` does, for the
        tokens of later steps. Arguments: see there."""

    def store_latents(self, x: Tensor, attention: LatentAttention) -> Tensor:
        """Normalises the latents of the step's tokens, rotates their key parts, and stores both in
        the cache.

        Args:
            x: [tokens, in_width], the output of ``in_proj``: latents and key parts are its last
                columns, and may be overwritten.
            attention: the layer.

        Returns:
            ``x``.
        """

    def choose_tokens(self, x: Tensor, latent: Tensor, attention: LatentAttention) -> None:
        """Stores the index keys of the step's tokens, and chooses the tokens that each attends to
        in this layer and in those behind it that have no indexer; of equal ones the first.

        Args:
            x: [tokens, hidden], which keys and the weights of heads are projections of.
            latent: [tokens, query_rank], which queries are a projection of.
            attention: the layer, which has an indexer.
        """

    def choose_blocks(self, x: Tensor, attention: AttentionHeads) -> None:
        """Stores the index keys of the step's tokens, and chooses the blocks of keys that each
        attends to in this layer, of equal ones the first, for `attend`; see `BlockIndexerSpec`.

        Args:
            x: [tokens, hidden], which queries and keys are projections of.
            attention: the layer, which has an indexer.
        """

    def attend_to_latents(self, query: Tensor, attention: LatentAttention) -> Tensor:
        """Computes the latent attention of one layer, over the step's tokens, whose latents are
        stored, and those before them.

        Each head's query consists of a part that ``key_up`` projects to the width of a latent and a
        part that is rotated. Its scores are the products of both with latents and key parts, its
        output the weighted sum of latents, which ``value_up`` projects, times the sigmoids of gates
        if the layer has gates of elements.

        Args:
            query: [tokens, columns], of which the first heads * (nope_dim + rope_dim) are queries,
                and the last ones gates of elements; may be overwritten.
            attention: the layer.

        Returns:
            [tokens, heads * value_dim].
        """

    def open_heads(self, x: Tensor, gates: Tensor) -> Tensor:
        """Multiplies each head of ``x`` [tokens, heads * width] by the sigmoid of its gate, in
        place. Returns ``x``. The gates, [tokens, heads], may be overwritten."""

    def delta_net(self, x: Tensor, net: DeltaNet) -> Tensor:
        """Computes a gated delta net over the step's tokens, from the states of their requests on,
        which it brings up to date.

        Queries, keys and values are convolved over time and go through SiLU; queries and keys are
        divided by their lengths, and queries by sqrt(key_dim). With them, the decay ``a =
        exp(-exp(log) * softplus(decay + bias))`` and ``b = sigmoid(rate)`` each token changes the
        state S [key_dim, value_dim] of its value head to ``a S + k (b (v - a S'k))'``. The result
        is ``rms_norm(S'q) * silu(gate)``.

        Args:
            x: [tokens, in_width], queries, keys, values, gates, rates and decays side by side; may
                be overwritten.
            net: the layer.

        Returns:
            [tokens, value_heads * value_dim].
        """

    def low_rank(self, x: Tensor, down: Linear, up: Linear) -> Tensor:
        """Returns a projection of a projection of ``x`` [tokens, hidden]."""

    def kimi_delta(self, x: Tensor, decays: Tensor, net: KimiDelta) -> Tensor:
        """Computes a gated delta net with a decay for each channel of the key, as `delta_net` but
        for the norm and its gates. The state of a head becomes ``diag(a) S`` and then ``S + k (b (v
        - S'k))'``, with the decays a that `KimiDeltaSpec` says; the result is ``S'q``.

        Args:
            x: [tokens, 3 * heads * head_dim + heads], queries, keys, values and rates side by side;
                may be overwritten.
            decays: [tokens, heads * head_dim]; may be overwritten.
            net: the layer.

        Returns:
            [tokens, heads * head_dim].
        """

    def gate_heads(self, x: Tensor, gates: Tensor, net: KimiDelta) -> Tensor:
        """Returns ``rms_norm(x) * sigmoid(gates)``, with a norm over each head, in the place of
        ``x``, the result of `kimi_delta`; both are [tokens, heads * head_dim]."""

    def mamba2(self, x: Tensor, mixer: Mamba2Like) -> Tensor:
        """Computes a Mamba 2 over the step's tokens, from the states of their requests on, which it
        brings up to date.

        Inputs, B and C are convolved over time and go through SiLU; a time step becomes
        ``softplus(step + bias)``, within limits. With the step d each token changes the state H
        [state_size, head_dim] of its head to ``exp(-exp(log) d) H + B (d x)'``. The result is
        ``rms_norm((H'C + D x) * silu(gate))``, with a norm over each group of heads, unless
        `Mamba2Spec.norm` says that gates are behind that norm, or that there is none. A `Lightning`
        has no convolution and no D, steps of 1, one norm, and sigmoids of gates behind it.

        Args:
            x: [tokens, in_width], gates, inputs, B, C and time steps side by side, or values, keys,
                queries and gates; may be overwritten.
            mixer: the layer.

        Returns:
            [tokens, heads * head_dim].
        """

    def mamba(self, x: Tensor, mixer: Mamba) -> Tensor:
        """Computes a Mamba over the step's tokens, from the states of their requests on, which it
        brings up to date.

        Inputs are convolved over time and go through SiLU. `Mamba.x_proj` projects them to the rank
        of time steps, B and C, which have norms in some models, and `Mamba.dt_proj` that rank to
        time steps, which become ``d = softplus(step)``. Each token changes the state h [state_size]
        of a channel to ``exp(-exp(log) d) h + B d x``. The result is ``(C'h + D x) * silu(gate)``.

        Args:
            x: [tokens, 2 * width], inputs and gates side by side; may be overwritten.
            mixer: the layer.

        Returns:
            [tokens, width].
        """

    def short_convolution(self, x: Tensor, mixer: ShortConvolution) -> Tensor:
        """Computes a gated short convolution over the step's tokens, from the states of their
        requests on, which it brings up to date.

        The products of input gates and inputs are convolved over time; output gates multiply the
        result. If convolutions look ahead, the step has all tokens of its requests, and there are
        no states.

        Args:
            x: [tokens, 3 * width], input gates, output gates and inputs side by side; may be
                overwritten.
            mixer: the layer.

        Returns:
            [tokens, width].
        """

    def mlp(self, x: Tensor, mlp: MLP) -> Tensor:
        """Computes an MLP: [tokens, hidden] -> [tokens, hidden].

        The result is ``down(act(gate(x)) * up(x))`` if it is gated, else ``down(act(up(x)))``. The
        activation may have numbers, `MLP.learned`, and its output a norm. A sparse one has
        ``max(gate(x) - cut, 0)``, with the cut ``mean + deviations * deviation`` of all gates.
        """

    def route(self, x: Tensor, moe: MoE) -> Routing:
        """Chooses the experts of each token of ``x`` [tokens, hidden].

        They are those with the largest logits; of equal ones the lower expert. `MoESpec` says how
        logits become weights, which are multiplied by ``moe.scale`` if it is not None. A token with
        a logit that is NaN has weights that are NaN.
        """

    def experts(self, x: Tensor, routing: Routing, moe: MoE) -> Tensor:
        """Returns the weighted sum of each token's experts, and of the shared one if there is one.

        A token's sum is added in ascending order of the experts, the shared one last: it does not
        depend on the other tokens.

        Args:
            x: [tokens, hidden].
            routing: the result of `route` for these tokens.
            moe: the layer.

        Returns:
            [tokens, hidden].
        """
