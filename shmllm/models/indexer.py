"""Indexers as the owners of their weights: they choose the tokens, or the blocks of keys, that an
attention reads."""

from __future__ import annotations

from torch import Tensor

from shmllm.models.indexer_specs import IndexerSpec
from shmllm.models.layers import HeadNorm, Linear, NamedWeights, Norm, Storage
from shmllm.models.matrices import Destination, MixedMatrix, joined
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.quantized import QuantizedMatrix
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
        self.key_norm = Norm(dim, NormSpec(kind="layer", bias=True, eps=spec.norm_eps), storage)
        self.head_weights = Linear(hidden, [heads], False, storage)
        self.query = Linear(query_rank, [heads * dim], False, storage)

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``."""
        of_elements = self.key.named_weights(f"{prefix}.wk")
        of_elements |= self.key_norm.named_weights(f"{prefix}.k_norm")
        of_elements |= self.query.named_weights(f"{prefix}.wq_b")
        if self.spec.rotates_last:
            of_elements = {
                name: tuple(map(self._reordered, views)) for name, views in of_elements.items()
            }
        return of_elements | self.head_weights.named_weights(f"{prefix}.weights_proj")

    def _reordered(self, view: Destination) -> Destination:
        """Returns a view of queries or of a key, [heads * head_dim, ...], in whose heads the
        elements that rotate are the last ones: in memory they are the first."""
        assert isinstance(view, Tensor | QuantizedMatrix | MixedMatrix), "they are rows in memory"
        dim, last = self.spec.head_dim, self.spec.rotates_last
        sizes = [last, dim - last] * (view.shape[0] // dim)
        parts = view.split_with_sizes(sizes)
        pairs = zip(parts[::2], parts[1::2], strict=True)
        return joined([part for rotated, fixed in pairs for part in (fixed, rotated)])


class BlockIndexer:
    """The weights of an indexer of an attention of heads.

    Args:
        hidden: the width of the hidden state.
        spec: the attention, which has an indexer.
        norm: the norms of heads.
        storage: allocates the weights.

    Attributes:
        in_proj: the projection of the hidden state to all heads' queries and to a key.
        q_norm, k_norm: the norms of each query and of a key.
    """

    def __init__(self, hidden: int, spec: AttentionSpec, norm: NormSpec, storage: Storage) -> None:
        dim = spec.index_widths[1]
        self.in_proj = Linear(hidden, spec.index_widths, False, storage)
        self.q_norm, self.k_norm = (HeadNorm(dim, norm, storage) for _ in range(2))

    @classmethod
    def of(
        cls, hidden: int, spec: AttentionSpec, norm: NormSpec, storage: Storage
    ) -> BlockIndexer | None:
        """Returns that of an attention, or None: it has none."""
        return None if spec.indexer is None else cls(hidden, spec, norm, storage)

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``."""
        weights = self.in_proj.named_weights(f"{prefix}.q_proj", f"{prefix}.k_proj")
        weights |= self.q_norm.named_weights(f"{prefix}.q_norm")
        return weights | self.k_norm.named_weights(f"{prefix}.k_norm")
