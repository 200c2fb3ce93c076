"""Several residual streams (AltUp), and a branch beside a mixer (LAuReL), as owners of weights.

`streams.py` has the operations that they consist of, and `AltUpSpec` says what is computed.
"""

from __future__ import annotations

from shmllm.models.config import ModelConfig
from shmllm.models.layers import Linear, NamedWeights, Norm, Storage
from shmllm.models.stream_specs import AltUpSpec


class AltUp:
    """What makes the streams, and one of them again.

    Attributes:
        projections: for each stream but the first, its projection of a token's embedding.
        unembeddings: for each of them, the projection that is added to the first stream in the end.
    """

    def __init__(self, config: ModelConfig, spec: AltUpSpec, storage: Storage) -> None:
        hidden, count = config.hidden_size, spec.num_streams
        self.projections, self.unembeddings = (
            [Linear(hidden, [hidden], False, storage) for _ in range(1, count)] for _ in range(2)
        )

    def named_weights(self) -> NamedWeights:
        """Returns the destinations of the weights."""
        weights: NamedWeights = {}
        kinds = {"projections": self.projections, "unembed_projections": self.unembeddings}
        for kind, linears in kinds.items():
            for index, linear in enumerate(linears):
                weights |= linear.named_weights(f"model.altup_{kind}.{index}")
        return weights


class AltUpLayer:
    """What predicts the streams in front of a layer, and corrects them behind it.

    Attributes:
        spec: what it computes.
        router_norm: the norm of what the router reads.
        router: the projection to a number for each stream. It is never quantized.
        router_scale: the factor of these numbers.
        prediction: [streams * streams, streams], the coefficients of predictions.
        correction: [streams, streams], those of corrections.
        scale: [hidden], the factor of what the projection of a layer's own input reads, or None.
    """

    def __init__(self, config: ModelConfig, spec: AltUpSpec, storage: Storage) -> None:
        hidden, count = config.hidden_size, spec.num_streams
        self.spec = spec
        self.router_norm = Norm(hidden, config.norm, storage)
        self.router = Linear(hidden, [count], False, storage.exact())
        self.router_scale = 1 / hidden
        self.prediction = storage.tensor(count * count, count)
        self.correction = storage.tensor(count, count)
        self.scale = storage.tensor(hidden) if spec.scaled else None

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``, such as "model.layers.0"."""
        weights = self.router_norm.named_weights(f"{prefix}.altup.router_norm")
        weights |= self.router.named_weights(f"{prefix}.altup.modality_router")
        weights[f"{prefix}.altup.prediction_coefs.weight"] = (self.prediction,)
        weights[f"{prefix}.altup.correction_coefs.weight"] = (self.correction,)
        if self.scale is not None:
            weights[f"{prefix}.altup.correct_output_scale"] = (self.scale,)
        return weights


class Laurel:
    """A branch of low rank beside a mixer.

    Attributes:
        left: the projection of what the mixer reads to the rank.
        right: the projection back.
        norm: the norm of that.
    """

    def __init__(self, config: ModelConfig, rank: int, storage: Storage) -> None:
        hidden = config.hidden_size
        self.left = Linear(hidden, [rank], False, storage)
        self.right = Linear(rank, [hidden], False, storage)
        self.norm = Norm(hidden, config.norm, storage)

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``, such as "model.layers.0"."""
        weights = self.left.named_weights(f"{prefix}.laurel.linear_left")
        weights |= self.right.named_weights(f"{prefix}.laurel.linear_right")
        return weights | self.norm.named_weights(f"{prefix}.laurel.post_laurel_norm")
