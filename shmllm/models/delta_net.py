"""A gated delta net as the owner of its weights. `ops.Ops` computes with them."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.layers import Linear, NamedWeights, Norm, Storage
from shmllm.models.recurrent_specs import DeltaNetSpec


class DeltaNet:
    """The weights of one layer's gated delta net.

    Attributes:
        layer: the index of the layer.
        spec: what it computes.
        in_proj: the projections to queries, keys and values, to gates, rates and decays.
        convolution: [taps, convolved_width], the weights of the convolution of each channel.
        logs: [value_heads] float32, the logarithms of the decays' factors.
        biases: [value_heads], added to the decays' projections.
        norm: the norm of each value head of the output.
        out_proj: the output projection.
    """

    def __init__(
        self, config: ModelConfig, layer: int, spec: DeltaNetSpec, storage: Storage
    ) -> None:
        self.layer = layer
        self.spec = spec
        widths = [spec.convolved_width, spec.width, spec.value_heads, spec.value_heads]
        parts = (*spec.convolved_parts, *widths[1:])
        self.in_proj = Linear(config.hidden_size, widths, False, storage, parts=parts)
        self.convolution = storage.tensor(spec.taps, spec.convolved_parts)
        self.logs = storage.float32(spec.value_heads)
        self.biases = storage.tensor(spec.value_heads)
        eps = config.norm.eps if spec.norm_eps is None else spec.norm_eps
        self.norm = Norm(spec.value_dim, replace(config.norm, offset=0.0, eps=eps), storage)
        self.out_proj = Linear(spec.width, [config.hidden_size], False, storage)

    @property
    def norms(self) -> tuple[Norm, ...]:
        """The norm of the output."""
        return (self.norm,)

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``, such as "model.layers.0"."""
        # Values in another order have other names: no update in a checkpoint's order is taken.
        prefix = f"{prefix}.{TILED_NAME if self.spec.tiled else 'linear_attn'}"
        weights = self.in_proj.named_weights(*(f"{prefix}.in_proj_{n}" for n in IN_PROJECTIONS))
        weights[f"{prefix}.conv1d.weight"] = (self.convolution.t().unsqueeze(1),)
        weights[f"{prefix}.A_log"] = (self.logs,)
        weights[f"{prefix}.dt_bias"] = (self.biases,)
        weights |= self.norm.named_weights(f"{prefix}.norm")
        return weights | self.out_proj.named_weights(f"{prefix}.out_proj")


TILED_NAME = "linear_attn_tiled"
"""The name of a delta net whose value heads are `DeltaNetSpec.tiled`, below the layer."""
IN_PROJECTIONS = ("qkv", "z", "b", "a")
"""The names of the input projections, behind "in_proj_"."""
