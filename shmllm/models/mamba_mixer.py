"""A Mamba as the owner of its weights. `ops.Ops` computes with them."""

from __future__ import annotations

from shmllm.models.config import ModelConfig
from shmllm.models.layers import Linear, NamedWeights, Norm, Storage
from shmllm.models.recurrent_specs import MambaSpec
from shmllm.models.specs import NormSpec


class Mamba:
    """The weights of one layer's Mamba.

    Attributes:
        layer: the index of the layer.
        spec: what it computes.
        in_proj: the projection to inputs and gates.
        convolution: [taps, width], the weights of the convolution of each channel.
        convolution_bias: [width] or None.
        x_proj: the projection of inputs to the rank of time steps, B and C; as `dt_proj` it is
            never rounded, because time steps are exponents.
        dt_proj: the projection of that rank to a time step for each channel.
        norms: those of time steps' rank, of B and of C, if they have weights.
        logs: [state_size, width] float32, the logarithms of the decays' factors.
        skips: [width] float32, the factors of the inputs in the output.
        out_proj: the output projection.
    """

    def __init__(self, config: ModelConfig, layer: int, spec: MambaSpec, storage: Storage) -> None:
        self.layer = layer
        self.spec = spec
        width, exact = spec.width, storage.exact()
        self.in_proj = Linear(config.hidden_size, [2 * width], spec.bias, storage)
        self.convolution = storage.tensor(spec.taps, width)
        self.convolution_bias = storage.tensor(width) if spec.convolution_bias else None
        self.x_proj = Linear(width, [spec.projected_width], False, exact)
        self.dt_proj = Linear(spec.rank, [width], True, exact)
        self.norms: tuple[Norm, ...] = ()
        if spec.norms == "weights":
            kind, sizes = NormSpec(eps=spec.norm_eps), (spec.rank, spec.state_size, spec.state_size)
            self.norms = tuple(Norm(size, kind, storage) for size in sizes)
        self.logs = storage.float32(spec.state_size, width)
        self.skips = storage.float32(width)
        self.out_proj = Linear(width, [config.hidden_size], spec.bias, storage)

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``, such as "model.layers.0"."""
        prefix = f"{prefix}.mamba"
        weights: NamedWeights = {}
        for name in ("in_proj", "x_proj", "dt_proj", "out_proj"):
            weights |= getattr(self, name).named_weights(f"{prefix}.{name}")
        weights[f"{prefix}.conv1d.weight"] = (self.convolution.t().unsqueeze(1),)
        if self.convolution_bias is not None:
            weights[f"{prefix}.conv1d.bias"] = (self.convolution_bias,)
        weights[f"{prefix}.A_log"] = (self.logs.t(),)
        weights[f"{prefix}.D"] = (self.skips,)
        for part, norm in zip(("dt", "b", "c"), self.norms, strict=False):
            weights |= norm.named_weights(f"{prefix}.{part}_layernorm")
        return weights
