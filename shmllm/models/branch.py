"""A layer beside the residual stream: its weights, which other layers share, and its operations."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy

from torch import Tensor

from shmllm.models.attention import Attention
from shmllm.models.config import ModelConfig
from shmllm.models.decoder_layer import DecoderLayer
from shmllm.models.layers import Linear, NamedWeights, Norm, Storage
from shmllm.models.mlp import MLP
from shmllm.models.ops import Ops


class BranchLayer(DecoderLayer):
    """A layer beside the residual stream; see `BranchSpec`.

    Args:
        config: the configuration.
        layer: the index of the layer.
        storage: allocates the weights.
        shared: the layer whose weights it has, or None.

    Attributes:
        norm_of_both: the norm of the stream and embeddings side by side.
        adapters: the projections to low ranks and back, by their names in `named_weights`.
        projection: the projection of the result.
    """

    def __init__(
        self, config: ModelConfig, layer: int, storage: Storage, shared: BranchLayer | None
    ) -> None:
        if shared is None:
            super().__init__(config, layer, storage)
            self.norm_of_both = Norm(2 * config.hidden_size, config.norm, storage)
        else:
            vars(self).update(vars(shared))
            self.spec = config.layers[layer]
        self._is_shared = shared is not None
        attention, mlp = copy(self.mixer), copy(self.mlp)
        assert isinstance(attention, Attention), "`LayerSpec` says so"
        assert isinstance(mlp, MLP), "likewise"
        self.adapters: dict[str, tuple[Linear, Linear]] = {}
        attention.layer, attention.qkv_proj = layer, copy(attention.qkv_proj)
        mlp.gate_up_proj = copy(mlp.gate_up_proj)
        attention.qkv_proj.adapters = mlp.gate_up_proj.adapters = ()
        self._adapt(attention, mlp, storage.exact())
        self.projection = Linear(config.hidden_size, [config.hidden_size], False, storage)
        self.mixer, self.mlp, mlp.behind = attention, mlp, self.projection

    def _adapt(self, attention: Attention, mlp: MLP, storage: Storage) -> None:
        """Allocates the adapters and gives them to the projections that they are for."""
        spec = self.spec.branch
        assert spec is not None, "it is a branch"
        adapted = {"mlp.adapter": (mlp.gate_up_proj, mlp.gate_up_proj.out_features)}
        if spec.adapts_attention:
            qkv = attention.qkv_proj
            for part, width in zip("qkv", qkv.out_features, strict=True):
                adapted[f"self_attn.{part}_adapter"] = qkv, (width,)
        for name, (linear, widths) in adapted.items():
            down = Linear(linear.weight.shape[1], [spec.adapter_rank], False, storage)
            up = Linear(spec.adapter_rank, widths, False, storage)
            self.adapters[name] = down, up
            parts = zip(widths, up.weight.split_with_sizes(widths), strict=True)
            linear.adapters += tuple(
                (down, Linear(spec.adapter_rank, [width], False, storage, weight=part))
                for width, part in parts
            )

    def __call__(
        self, ops: Ops, x: Tensor | None, residual: Tensor, mixed: Tensor | None = None
    ) -> Tensor | None:
        """Runs the layer; see `DecoderLayer`. The result is for the norm of the next layer."""
        ops.add_norm(x, residual, None, self._residual_scale)
        both = ops.norm(ops.beside(residual, ops.aside()), self.norm_of_both)
        out = self._mix(ops, both, residual)
        assert out is not None, "it has attention alone"
        return self._feed_forward(ops, ops.add_norm(None, out, self._before_mlp, 1.0), residual)

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of its own weights, and of those that others share with it."""
        weights: NamedWeights = {}
        if not self._is_shared:
            weights = super().named_weights(prefix)
            weights |= self.norm_of_both.named_weights(f"{prefix}.input_layernorm")
        for name, (down, up) in self.adapters.items():
            weights |= down.named_weights(f"{prefix}.{name}.0")
            weights[f"{prefix}.{name}.1.weight"] = (up.weight,)
        return weights | self.projection.named_weights(f"{prefix}.linear")

    def all_norms(self) -> Iterator[Norm]:
        """Yields its norms."""
        yield from super().all_norms()
        yield self.norm_of_both
