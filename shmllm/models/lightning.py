"""A lightning attention as the owner of its weights. `ops.Ops` computes with them."""

from __future__ import annotations

from dataclasses import replace

import torch

from shmllm.models.config import ModelConfig
from shmllm.models.layers import Linear, NamedWeights, Norm, Storage
from shmllm.models.mamba2_mixer import Mamba2
from shmllm.models.matrices import joined, matrix_of
from shmllm.models.recurrent_specs import LightningSpec


class Lightning:
    """The weights of one layer's lightning attention.

    Attributes:
        layer: the index of the layer.
        spec: what it computes.
        in_proj: the projection to values, keys, queries and gates.
        logs: [heads] float32, the logarithms of the decays' exponents, a constant.
        ones, zeros: [heads] float32, constants: the time steps, which are all 1, and what Mamba 2
            adds to them and to the output.
        norm: the norm of the output, over all heads.
        out_proj: the output projection.
    """

    def __init__(
        self, config: ModelConfig, layer: int, spec: LightningSpec, storage: Storage
    ) -> None:
        self.layer = layer
        self.spec = spec
        self.in_proj = Linear(config.hidden_size, [spec.width] * 4, False, storage)
        self.logs, self.ones, self.zeros = (
            storage.constant(torch.tensor(values, dtype=torch.float32))
            for values in (spec.logs, [1.0] * spec.heads, [0.0] * spec.heads)
        )
        self.norm = Norm(spec.width, replace(config.norm, eps=spec.norm_eps), storage)
        self.out_proj = Linear(spec.width, [config.hidden_size], False, storage)

    @property
    def norms(self) -> tuple[Norm, ...]:
        """The norm of the output."""
        return (self.norm,)

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``, such as "model.layers.0". Queries,
        keys and values have one tensor, in which those of a head follow each other."""
        prefix, sizes = f"{prefix}.self_attn", [self.spec.head_dim] * self.spec.heads
        weights = self.in_proj.named_weights("v", "k", "q", f"{prefix}.output_gate")
        parts = [matrix_of(weights.pop(f"{each}.weight")).split_with_sizes(sizes) for each in "qkv"]
        every = [part for of_head in zip(*parts, strict=True) for part in of_head]
        weights[f"{prefix}.qkv_proj.weight"] = (joined(every),)
        weights |= self.norm.named_weights(f"{prefix}.norm")
        return weights | self.out_proj.named_weights(f"{prefix}.out_proj")


Mamba2Like = Mamba2 | Lightning
"""What `ops.Ops.mamba2` computes."""
