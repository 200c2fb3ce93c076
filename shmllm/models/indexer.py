"""An indexer as the owner of its weights: it chooses the tokens that a latent attention reads."""

from __future__ import annotations

from shmllm.models.layers import Linear, NamedWeights, Norm, Storage
from shmllm.models.mixer_specs import IndexerSpec
from shmllm.models.specs import NormSpec


class Indexer:
    """The weights of one layer's indexer.

    The positive factors that the paper gives to scores and weights change no order, and are left
    out.

    Args:
        hidden: the width of the hidden state.
        query_rank: the width of what queries are a projection of.
        spec: what it computes.
        storage: allocates the weights.

    Attributes:
        spec: as given.
        key: the projection of the hidden state to a key.
        key_norm: the norm of keys.
        head_weights: the projection of the hidden state to a weight for each head.
        query: the projection to all heads' queries.
    """

    def __init__(self, hidden: int, query_rank: int, spec: IndexerSpec, storage: Storage) -> None:
        self.spec = spec
        heads, dim = spec.num_heads, spec.head_dim
        self.key = Linear(hidden, [dim], False, storage)
        self.key_norm = Norm(dim, NormSpec(kind="layer", bias=True, eps=1e-6), storage)
        self.head_weights = Linear(hidden, [heads], False, storage)
        self.query = Linear(query_rank, [heads * dim], False, storage)

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``."""
        return (
            self.key.named_weights(f"{prefix}.wk")
            | self.key_norm.named_weights(f"{prefix}.k_norm")
            | self.head_weights.named_weights(f"{prefix}.weights_proj")
            | self.query.named_weights(f"{prefix}.wq_b")
        )
