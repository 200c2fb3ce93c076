"""A gated delta net with decays by channel as the owner of its weights. `ops.Ops` computes with
them."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.layers import Linear, NamedWeights, Norm, Storage
from shmllm.models.recurrent_specs import KimiDeltaSpec


class KimiDelta:
    """The weights of one layer's net.

    Attributes:
        layer: the index of the layer.
        spec: what it computes.
        in_proj: the projections to queries, keys, values, and rates.
        convolution: [taps, convolved_width], the weights of the convolution of each channel.
        decay_down, decay_up: the projection to what decays are a projection of, and that; the first
            is None if they are one of the hidden state.
        gate_down, gate_up: the same for the gates of the output.
        logs: [heads] float32, the logarithms of the decays' factors.
        biases: [heads * head_dim] float32, added to the decays' projections.
        norm: the norm of each head of the output.
        out_proj: the output projection.
    """

    def __init__(
        self, config: ModelConfig, layer: int, spec: KimiDeltaSpec, storage: Storage
    ) -> None:
        self.layer = layer
        self.spec = spec
        hidden = config.hidden_size
        self.in_proj = Linear(hidden, [*spec.convolved_parts, spec.heads], False, storage)
        self.convolution = storage.tensor(spec.taps, spec.convolved_parts)
        self.decay_down: Linear | None = None
        self.gate_down: Linear | None = None
        if spec.has_low_rank:
            self.decay_down, self.gate_down = (
                Linear(hidden, [spec.head_dim], False, storage) for _ in range(2)
            )
        rank = spec.head_dim if spec.has_low_rank else hidden
        self.decay_up, self.gate_up = (Linear(rank, [spec.width], False, storage) for _ in range(2))
        self.logs, self.biases = storage.float32(spec.heads), storage.float32(spec.width)
        self.norm = Norm(spec.head_dim, replace(config.norm, offset=0.0), storage)
        self.out_proj = Linear(spec.width, [hidden], False, storage)

    @property
    def norms(self) -> tuple[Norm, ...]:
        """The norm of the output."""
        return (self.norm,)

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``, such as "model.layers.0"."""
        prefix = f"{prefix}.self_attn"
        weights = self.in_proj.named_weights(*(f"{prefix}.{each}_proj" for each in "qkvb"))
        weights[f"{prefix}.conv1d.weight"] = (self.convolution.t().unsqueeze(1),)
        for name, down, up in (
            ("f", self.decay_down, self.decay_up),
            ("g", self.gate_down, self.gate_up),
        ):
            if down is None:
                weights |= up.named_weights(f"{prefix}.{name}_proj")
            else:
                weights |= down.named_weights(f"{prefix}.{name}_a_proj")
                weights |= up.named_weights(f"{prefix}.{name}_b_proj")
        weights |= self.out_proj.named_weights(f"{prefix}.o_proj")
        weights[f"{prefix}.A_log"] = (self.logs.view(1, 1, -1, 1),)
        weights[f"{prefix}.dt_bias"] = (self.biases,)
        return weights | self.norm.named_weights(f"{prefix}.o_norm")
