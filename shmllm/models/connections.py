"""Hyper-connections between residual streams and what reads them, as owners of weights.

`ConnectionSpec` says what is computed, and `stream_ops.StreamOps` computes with them.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from shmllm.models.layers import Linear, NamedWeights, Storage
from shmllm.models.stream_specs import ConnectionSpec


class Connection:
    """What a mixer or an MLP reads of the streams, and what of its output is added to each.

    Attributes:
        spec: what it computes.
        logits: the product of all streams side by side: a logit for each stream, and behind them,
            unless it is the last connection, one for what is added to each, and those of a mixture
            of the streams, if there is one. It is float32 in a model of any dtype, and never
            quantized.
        scale: [1, 2 or 3] float32, the factor of each kind of logits.
        bias: float32, what is added to each of them.
    """

    def __init__(
        self, hidden: int, spec: ConnectionSpec, storage: Storage, *, is_last: bool = False
    ) -> None:
        self.spec = spec
        count = spec.num_streams
        kinds, gates = (1, count) if is_last else (3 if spec.iterations else 2, spec.num_gates)
        exact = replace(storage.exact(), dtype=torch.float32)
        self.logits = Linear(count * hidden, [gates], False, exact)
        self.scale, self.bias = exact.tensor(kinds), exact.tensor(gates)

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names that begin with ``prefix``, such as
        "model.layers.0.attn_hc."."""
        matrix = self.logits.weight
        return {
            f"{prefix}fn": (matrix,),
            f"{prefix}scale": (self.scale,),
            f"{prefix}base": (self.bias,),
        }
