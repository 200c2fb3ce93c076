"""A layer of a decoder: which operations it consists of, in which order.

It must not know families, whose configuration says what each layer is, nor how an operation is
computed, which is the task of `ops.Ops`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from shmllm.models.config import ModelConfig
from shmllm.models.feed_forward import FEED_FORWARDS, FeedForward
from shmllm.models.layers import Linear, NamedWeights, Norm, Storage, TokenEmbedding
from shmllm.models.mixers import MIXERS, Mixer
from shmllm.models.mlp import MLP
from shmllm.models.ops import Ops
from shmllm.models.per_layer import LayerInput
from shmllm.models.specs import LayerSpec


class DecoderLayer:
    """One layer: a mixer and an MLP, or one of them, each with norms before or behind it, or both.

    Attributes:
        spec: what it consists of.
        norms: its norms before and behind mixer and MLP, by the name of the weight.
        mixer: its attention, or what takes its place, or None.
        mlp: its feed-forward, or None.
        input: what adds its own input, or None.
        scale: [1], the factor of the residual stream behind it, or None.
    """

    def __init__(self, config: ModelConfig, layer: int, storage: Storage) -> None:
        self.spec: LayerSpec = config.loaded_layers[layer]
        names, mixer, mlp = self.spec.norms, self.spec.mixer, self.spec.mlp
        self._residual_scale = config.residual_scale
        self.norms: dict[str, Norm] = {}

        def norm(name: str | None) -> Norm | None:
            if name is None:
                return None
            self.norms[name] = Norm(config.hidden_size, config.norm, storage)
            return self.norms[name]

        self._before_mixer = norm(names.before_mixer)
        self.mixer: Mixer | None = None
        if mixer is not None:
            self.mixer = MIXERS[type(mixer)].make(config, layer, mixer, storage)
        self._after_mixer = norm(names.after_mixer)
        self._before_mlp = norm(names.before_mlp)
        self.mlp: FeedForward | None = None
        if mlp is not None:
            self.mlp = FEED_FORWARDS[type(mlp)].make(config, mlp, storage)
        self._after_mlp = norm(names.after_mlp)
        self.input: LayerInput | None = None
        if config.per_layer is not None:
            self.input = LayerInput(config, layer, config.per_layer, storage)
        self.scale = storage.tensor(1) if config.scales_layers else None

    def __call__(self, ops: Ops, x: Tensor | None, residual: Tensor) -> Tensor | None:
        """Runs the layer.

        Args:
            ops: the operations of the device.
            x: [tokens, hidden], the output of the previous layer, which this layer adds to
                ``residual``; None in the first layer.
            residual: [tokens, hidden], the residual stream, changed in place.

        Returns:
            [tokens, hidden], which the next norm adds to ``residual``; None: nothing is left.
        """
        out = self._run(ops, x, residual)
        if self.input is None and self.scale is None:
            return out
        ops.add_norm(out, residual, None, self._residual_scale)
        if self.input is not None:
            gated = ops.gate_layer_input(ops.linear(residual, self.input.gate), self.input)
            out = ops.norm(ops.linear(gated, self.input.projection), self.input.norm)
            ops.add_norm(out, residual, None, 1.0)
        if self.scale is not None:
            ops.scale(residual, 1.0, self.scale)
        return None

    def _run(self, ops: Ops, x: Tensor | None, residual: Tensor) -> Tensor | None:
        if self.spec.norms.of_sums:
            self._run_with_norms_of_sums(ops, residual)
            return None
        scale, normed = self._residual_scale, None
        if self.mixer is not None:
            normed = ops.add_norm(x, residual, self._before_mixer, scale)
            x = self._mix(ops, normed, residual)
            if self._after_mixer is not None:
                x = ops.norm(x, self._after_mixer)
        if self.mlp is None:
            assert x is not None, "a layer has a mixer or an MLP"
            return x
        if normed is not None and self.spec.parallel:
            if self._before_mlp is not None:  # else the MLP reads what the mixer read
                normed = ops.add_norm(None, residual, self._before_mlp, scale)
            ops.add_norm(x, residual, None, scale)
        else:
            normed = ops.add_norm(x, residual, self._before_mlp, scale)
        x = self._feed_forward(ops, normed, residual)
        return x if self._after_mlp is None else ops.norm(x, self._after_mlp)

    def _run_with_norms_of_sums(self, ops: Ops, residual: Tensor) -> None:
        """Runs a layer whose norms read the stream and take its place: nothing is left to add."""
        for run, norm in ((self._mix, self._after_mixer), (self._feed_forward, self._after_mlp)):
            assert norm is not None, "the layer has both norms"
            ops.norm_sum(run(ops, residual, residual), residual, norm, self._residual_scale)

    def _mix(self, ops: Ops, x: Tensor, residual: Tensor) -> Tensor:
        assert self.spec.mixer is not None, "there is a mixer"
        return MIXERS[type(self.spec.mixer)].run(ops, x, self.mixer)

    def _feed_forward(self, ops: Ops, x: Tensor, residual: Tensor) -> Tensor:
        assert self.spec.mlp is not None, "there is a feed-forward"
        return FEED_FORWARDS[type(self.spec.mlp)].run(ops, x, residual, self.mlp)

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``, such as "model.layers.0"."""
        weights: NamedWeights = {}
        if self.mixer is not None:
            weights |= self.mixer.named_weights(prefix)
        if self.mlp is not None:
            weights |= self.mlp.named_weights(f"{prefix}.mlp")
        for name, norm in self.norms.items():
            weights |= norm.named_weights(f"{prefix}.{name}")
        if self.input is not None:
            weights |= self.input.named_weights(prefix)
        if self.scale is not None:
            weights[f"{prefix}.layer_scalar"] = (self.scale,)
        return weights

    def all_norms(self) -> Iterator[Norm]:
        """Yields its norms and those of its parts."""
        yield from self.norms.values()
        if self.mixer is not None:
            yield from self.mixer.norms
        if self.mlp is not None:
            yield from self.mlp.norms
        if self.input is not None:
            yield self.input.norm

    def neutral_factors(self) -> Iterator[tuple[Tensor, float]]:
        """Yields its other factors, with the values before training."""
        if self.scale is not None:
            yield self.scale, 1.0
        if isinstance(self.mlp, MLP):
            yield from self.mlp.neutral_weights()

    def module_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of the names that differ in transformers' modules."""
        return {} if self.mlp is None else self.mlp.module_weights(f"{prefix}.mlp")


class FurtherLayer:
    """A layer that predicts a token further ahead (DeepSeek-AI, "DeepSeek-V3", 2024, section 2.2).

    Embedding table and LM head are those of the model.

    Attributes:
        embedding_norm, hidden_norm: the norms of what is projected, side by side.
        projection: the projection to the residual stream.
        layer: the layer itself.
        norm: the norm of its output.
    """

    def __init__(self, config: ModelConfig, layer: int, storage: Storage) -> None:
        hidden = config.hidden_size
        self.embedding_norm = Norm(hidden, config.norm, storage)
        self.hidden_norm = Norm(hidden, config.norm, storage)
        self.projection = Linear(2 * hidden, [hidden], False, storage)
        self.layer = DecoderLayer(config, layer, storage)
        self.norm = Norm(hidden, config.norm, storage)
        self._residual_scale = config.residual_scale

    def __call__(self, ops: Ops, hidden: Tensor, embedding: TokenEmbedding) -> Tensor:
        """Runs one step's tokens, each of which follows the token of its hidden state.

        Args:
            ops: the operations of the device.
            hidden: [tokens, hidden], what `DecoderModel.forward`, or the layer before, returned for
                the tokens before these; may be overwritten.
            embedding: the model's table.

        Returns:
            [tokens, hidden], the input of `DecoderModel.logits` for the tokens after the next ones.
        """
        norms = self.embedding_norm, self.hidden_norm
        residual = ops.join(ops.embed(embedding), hidden, norms, self.projection)
        x = self.layer(ops, None, residual)
        return ops.add_norm(x, residual, self.norm, self._residual_scale)

    @property
    def norms(self) -> tuple[Norm, ...]:
        """Its own norms."""
        return self.embedding_norm, self.hidden_norm, self.norm

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``, such as "model.layers.61"."""
        weights = self.layer.named_weights(prefix)
        weights |= self.projection.named_weights(f"{prefix}.eh_proj")
        for name, norm in zip(("enorm", "hnorm", "shared_head.norm"), self.norms, strict=True):
            weights |= norm.named_weights(f"{prefix}.{name}")
        return weights
