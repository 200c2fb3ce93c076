"""What is computed of hidden states in front of the LM head, as the owner of its weights."""

from __future__ import annotations

from shmllm.models.config import ModelConfig
from shmllm.models.head_specs import TransformSpec
from shmllm.models.layers import Linear, NamedWeights, Norm, Storage


class Transform:
    """The weights of a `TransformSpec`.

    Attributes:
        spec: what it computes.
        dense: the projection.
        norm: the norm of its activated result.
    """

    def __init__(self, config: ModelConfig, spec: TransformSpec, storage: Storage) -> None:
        self.spec = spec
        self.dense = Linear(config.hidden_size, [config.hidden_size], spec.bias, storage)
        self.norm = Norm(config.hidden_size, config.norm, storage)

    def named_weights(self) -> NamedWeights:
        """Returns the destinations of the weights."""
        dense = self.dense.named_weights("model.transform.dense")
        return dense | self.norm.named_weights("model.transform.norm")
