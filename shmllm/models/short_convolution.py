"""A gated short convolution as the owner of its weights. `ops.Ops` computes with them."""

from __future__ import annotations

from shmllm.models.config import ModelConfig
from shmllm.models.layers import Linear, NamedWeights, Norm, Storage
from shmllm.models.recurrent_specs import ShortConvolutionSpec


class ShortConvolution:
    """The weights of one layer's gated short convolution.

    Attributes:
        layer: the index of the layer.
        spec: what it computes.
        in_proj: the projection to input gates, output gates and inputs.
        convolution: [taps, width], the weights of the convolution of each channel.
        convolution_bias: [width] or None.
        out_proj: the output projection.
    """

    norms: tuple[Norm, ...] = ()

    def __init__(
        self, config: ModelConfig, layer: int, spec: ShortConvolutionSpec, storage: Storage
    ) -> None:
        self.layer = layer
        self.spec = spec
        parts = (spec.width,) * 3
        self.in_proj = Linear(config.hidden_size, [spec.in_width], spec.bias, storage, parts=parts)
        self.convolution = storage.tensor(spec.taps, spec.width)
        self.convolution_bias = storage.tensor(spec.width) if spec.bias else None
        self.out_proj = Linear(spec.width, [config.hidden_size], spec.bias, storage)

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``, such as "model.layers.0"."""
        prefix = f"{prefix}.conv"
        weights = self.in_proj.named_weights(f"{prefix}.in_proj")
        weights[f"{prefix}.conv.weight"] = (self.convolution.t().unsqueeze(1),)
        if self.convolution_bias is not None:
            weights[f"{prefix}.conv.bias"] = (self.convolution_bias,)
        return weights | self.out_proj.named_weights(f"{prefix}.out_proj")
