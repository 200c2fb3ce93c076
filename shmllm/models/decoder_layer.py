"""One layer of the decoder that all families share: which operations, in which order.

It must not know families, whose configuration says what the layer is, nor how an operation is
computed, which is the task of `ops.Ops`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from shmllm.models.altup import AltUpLayer, Laurel
from shmllm.models.config import ModelConfig
from shmllm.models.connections import Connection
from shmllm.models.feed_forward import FEED_FORWARDS, FeedForward
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.layers import NamedWeights, Norm, Storage
from shmllm.models.mixers import MIXERS, make_mixer
from shmllm.models.mlp import MLP
from shmllm.models.ops import Ops
from shmllm.models.per_layer import LayerInput
from shmllm.models.streams import SQRT_HALF, add_laurel, correct_streams, predict_streams


class DecoderLayer:
    """One layer: a mixer and an MLP, or one of them, each with norms before or behind it, or both.

    Attributes:
        spec: what it consists of.
        norms: its norms before and behind mixer and MLP, by the name of the weight.
        gates: what makes gates of the output of some of them, likewise.
        mixer: its attention, or what takes its place, or None.
        mlp: its feed-forward, or None.
        laurel: the branch beside the mixer, or None.
        altup: what predicts and corrects several residual streams, or None.
        connections: what connects its mixer and its MLP to several residual streams, by the names
            of the weights; empty: there is one stream.
        input: what adds its own input, or None.
        scale: [1], the factor of the residual stream behind it, or None.
    """

    def __init__(self, config: ModelConfig, layer: int, storage: Storage) -> None:
        self.spec: LayerSpec = config.loaded_layers[layer]
        names, mixer, mlp = self.spec.norms, self.spec.mixer, self.spec.mlp
        self._residual_scale = config.residual_scale
        self.norms: dict[str, Norm] = {}
        self.gates: dict[str, MLP] = {}

        def norm(name: str | None, eps: float | None = None) -> Norm | None:
            if name is None:
                return None
            spec = config.norm if eps is None else replace(config.norm, eps=eps)
            self.norms[name] = Norm(config.hidden_size, spec, storage)
            if (gate := names.gates.get(name)) is not None:
                self.gates[name] = MLP(config.hidden_size, gate, storage.exact())
            return self.norms[name]

        eps_before = names.eps_before or (None, None)
        eps_behind = names.eps_behind or (None, None)

        self._before_mixer = norm(names.before_mixer, eps_before[0])
        self.mixer = None if mixer is None else make_mixer(config, layer, mixer, storage)
        self.laurel: Laurel | None = None
        own_scale = self.spec.mixed_scale
        self._mixed_scale = config.residual_scale if own_scale is None else own_scale
        if self.spec.laurel_rank is not None:
            self.laurel = Laurel(config, self.spec.laurel_rank, storage)
            self._mixed_scale *= SQRT_HALF
        self._after_mixer = norm(names.after_mixer, eps_behind[0])
        self._before_mlp = norm(names.before_mlp, eps_before[1])
        self.mlp: FeedForward | None = None
        if mlp is not None:
            self.mlp = FEED_FORWARDS[type(mlp)].make(config, mlp, storage)
        self._after_mlp = norm(names.after_mlp, eps_behind[1])
        self.altup: AltUpLayer | None = None
        if config.altup is not None:
            self.altup = AltUpLayer(config, config.altup, storage)
        self.connections: dict[str, Connection] = {}
        if config.connections is not None:
            self.connections = {
                name: Connection(config.hidden_size, config.connections, storage)
                for name in ("attn_hc", "ffn_hc")
            }
        self.input: LayerInput | None = None
        if config.per_layer is not None:
            self.input = LayerInput(config, layer, config.per_layer, storage)
        self.scale = storage.tensor(1) if config.scales_layers else None

    def __call__(
        self, ops: Ops, x: Tensor | None, residual: Tensor, mixed: Tensor | None = None
    ) -> Tensor | None:
        """Runs the layer.

        Args:
            ops: the operations of the device.
            x: [tokens, hidden], the output of the previous layer, which this layer adds to
                ``residual``; None in the first layer.
            residual: [tokens, hidden], the residual stream, changed in place; if there are several
                streams, the layer reads and changes these.
            mixed: [tokens, width], what the mixer reads; None: the stream, behind its norm.

        Returns:
            [tokens, hidden], which the next norm adds to ``residual``; None: nothing is left.
        """
        if self.altup is not None:
            self._run_with_streams(ops, self.altup)
            return None
        if self.connections:
            self._run_with_connections(ops)
            return None
        out = self._run(ops, x, residual, mixed)
        if self.input is None and self.scale is None:
            return out
        ops.add_norm(out, residual, None, self._residual_scale)
        if self.input is not None:
            ops.add_norm(self._project_input(ops, residual, self.input), residual, None, 1.0)
        if self.scale is not None:
            ops.scale(residual, 1.0, self.scale)
        return None

    def _run_with_streams(self, ops: Ops, altup: AltUpLayer) -> None:
        """Runs a layer that reads one of several streams and changes all of them."""
        residual = predict_streams(ops, altup)
        out = self._run(ops, None, residual)
        ops.add_norm(out, residual, None, self._residual_scale)
        corrected = correct_streams(ops, residual, altup)
        if self.input is not None:
            ops.add_to_streams(self._project_input(ops, corrected, self.input))

    def _run_with_connections(self, ops: Ops) -> None:
        """Runs a layer whose mixer and MLP each read a sum of all streams, and change all."""
        mixer, mlp = self.connections.values()
        for connection, norm, run in (
            (mixer, self._before_mixer, self._mix),
            (mlp, self._before_mlp, self._feed_forward),
        ):
            folded = ops.fold_streams(connection)
            out = run(ops, ops.add_norm(None, folded, norm, 1.0), folded)
            assert out is not None, "its mixer is one"
            ops.spread(out, connection)

    def _project_input(self, ops: Ops, x: Tensor, own: LayerInput) -> Tensor:
        """Returns what the layer's own input adds behind it, [tokens, hidden]."""
        gated = ops.gate_layer_input(ops.linear(x, own.gate), own)
        return ops.norm(ops.linear(gated, own.projection), own.norm)

    def _run(
        self, ops: Ops, x: Tensor | None, residual: Tensor, mixed: Tensor | None = None
    ) -> Tensor | None:
        if self.spec.norms.of_sums:
            self._run_with_norms_of_sums(ops, residual)
            return None
        scale, normed = self._residual_scale, mixed
        if self.mixer is not None:
            if normed is None:
                normed = self._first_norm(ops, x, residual)
            if self.laurel is not None:
                add_laurel(ops, normed, residual, self.laurel)
            x, scale = self._mix(ops, normed, residual), self._mixed_scale
            if self._after_mixer is not None:
                assert x is not None, "it is the output of one mixer"
                x = ops.norm(x, self._after_mixer)
        if self.mlp is None:
            return x
        if normed is not None and self.spec.parallel:
            if self._before_mlp is not None:  # else the MLP reads what the mixer read
                normed = ops.add_norm(None, residual, self._before_mlp, scale)
            ops.add_norm(x, residual, None, scale)
        else:
            normed = ops.add_norm(x, residual, self._before_mlp, scale)
            normed = self._open(ops, normed, self.spec.norms.before_mlp)
        if self.spec.mlp_scale != 1:
            normed = ops.scale(normed, self.spec.mlp_scale)
        x = self._feed_forward(ops, normed, residual)
        return x if self._after_mlp is None else ops.norm(x, self._after_mlp)

    def _first_norm(self, ops: Ops, x: Tensor | None, residual: Tensor) -> Tensor:
        """Returns what the mixer reads, [tokens, hidden]."""
        if self.spec.behind_branch:
            assert x is not None, "it is the result of the branch"
            return ops.add_norm(residual, x, self._before_mixer, 1.0)
        normed = ops.add_norm(x, residual, self._before_mixer, self._residual_scale)
        return self._open(ops, normed, self.spec.norms.before_mixer)

    def _open(self, ops: Ops, normed: Tensor, name: str | None) -> Tensor:
        """Multiplies what a norm gives by its gates, if it has some."""
        gate = self.gates.get(name or "")
        return normed if gate is None else ops.open_heads(normed, ops.mlp(normed, gate))

    def _run_with_norms_of_sums(self, ops: Ops, residual: Tensor) -> None:
        """Runs a layer whose norms read the stream and take its place: nothing is left to add."""
        for run, norm, scale in (
            (self._mix, self._after_mixer, self._mixed_scale),
            (self._feed_forward, self._after_mlp, self._residual_scale),
        ):
            if norm is None:
                continue  # the layer has no such part
            out = run(ops, residual, residual)
            assert out is not None, "its mixer is one"
            ops.norm_sum(out, residual, norm, scale)

    def _mix(self, ops: Ops, x: Tensor, residual: Tensor) -> Tensor | None:
        assert self.spec.mixer is not None, "there is a mixer"
        return MIXERS[type(self.spec.mixer)].run(ops, x, residual, self.mixer)

    def _feed_forward(self, ops: Ops, x: Tensor, residual: Tensor) -> Tensor:
        assert self.spec.mlp is not None, "there is a feed-forward"
        if self.spec.adds_shortcut:
            ops.add_norm(ops.aside(), residual, None, self._residual_scale)
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
        for name, gate in self.gates.items():
            weights |= gate.named_weights(f"{prefix}.{name}.gate")
        for name, connection in self.connections.items():
            weights |= connection.named_weights(f"{prefix}.{name}.")
        for part in (self.laurel, self.altup, self.input):
            weights |= {} if part is None else part.named_weights(prefix)
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
        if self.laurel is not None:
            yield self.laurel.norm
        if self.altup is not None:
            yield self.altup.router_norm
        if self.input is not None:
            yield self.input.norm

    def neutral_factors(self) -> Iterator[tuple[Tensor, float]]:
        """Yields its other factors, with the values before training."""
        if self.scale is not None:
            yield self.scale, 1.0
        if self.altup is not None and self.altup.scale is not None:
            yield self.altup.scale, 1.0
        if isinstance(self.mlp, MLP):
            yield from self.mlp.neutral_weights()

    def module_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of the names that differ in transformers' modules."""
        return {} if self.mlp is None else self.mlp.module_weights(f"{prefix}.mlp")
