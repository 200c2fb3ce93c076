"""A Mamba 2 as the owner of its weights. `ops.Ops` computes with them."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from shmllm.models.config import ModelConfig
from shmllm.models.layers import Linear, NamedWeights, Norm, Storage
from shmllm.models.recurrent_specs import Mamba2Spec


class Mamba2:
    """The weights of one layer's Mamba 2.

    Attributes:
        layer: the index of the layer.
        spec: what it computes.
        in_proj: the projection to gates, inputs, B, C and time steps.
        factors: [in_width] float32, those of its outputs, or None: they are 1.
        convolution: [taps, convolved_width], the weights of the convolution of each channel.
        convolution_bias: [convolved_width] or None.
        logs: [heads] float32, the logarithms of the decays' factors.
        biases: [heads] float32, added to time steps.
        skips: [heads] float32, the factors of the inputs in the output.
        norm: the norm of the output, or None.
        out_proj: the output projection.
    """

    def __init__(self, config: ModelConfig, layer: int, spec: Mamba2Spec, storage: Storage) -> None:
        self.layer = layer
        self.spec = spec
        parts = spec.convolved_parts
        every = spec.in_parts
        self.in_proj = Linear(config.hidden_size, [spec.in_width], spec.bias, storage, parts=every)
        self.factors: Tensor | None = None
        if spec.factors is not None:
            self.factors = storage.factors(spec.factors, every)
        self.convolution = storage.tensor(spec.taps, parts)
        self.convolution_bias = storage.tensor(parts) if spec.convolution_bias else None
        self.logs, self.biases, self.skips = (storage.float32(spec.heads) for _ in range(3))
        norm = replace(config.norm, eps=spec.norm_eps or config.norm.eps)
        self.norm = Norm(spec.width, norm, storage) if spec.norm is not None else None
        self.out_proj = Linear(spec.width, [config.hidden_size], spec.output_bias, storage)

    @property
    def norms(self) -> tuple[Norm, ...]:
        """The norm of the output; empty if there is none."""
        return () if self.norm is None else (self.norm,)

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``, such as "model.layers.0"."""
        prefix = f"{prefix}.mamba"
        weights = self.in_proj.named_weights(f"{prefix}.in_proj")
        weights[f"{prefix}.conv1d.weight"] = (self.convolution.t().unsqueeze(1),)
        if self.convolution_bias is not None:
            weights[f"{prefix}.conv1d.bias"] = (self.convolution_bias,)
        weights[f"{prefix}.A_log"] = (self.logs,)
        weights[f"{prefix}.dt_bias"] = (self.biases,)
        weights[f"{prefix}.D"] = (self.skips,)
        if self.norm is not None:
            weights |= self.norm.named_weights(f"{prefix}.norm")
        return weights | self.out_proj.named_weights(f"{prefix}.out_proj")
