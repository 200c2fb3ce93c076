"""The embeddings of distances between tokens, by which attention adds to scores what depends on
query and key: weights, `bias_specs.RelationBiases`."""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.models.arranged import OrderedRows
from shmllm.models.bias_specs import RelationBiases
from shmllm.models.layers import Linear, NamedWeights, Norm, Storage
from shmllm.models.specs import NormSpec


class Relations:
    """The embeddings as one layer's attention has them. They are in the order in which longer texts
    need them, that of distance 0 first: a step computes those of its longest text.

    Args:
        hidden: the width of an embedding.
        spec: what the attention computes with them.
        norm: the norm of embeddings, if they have one.
        of_tokens: the projections of tokens to queries, keys and values, side by side.
        storage: allocates the weights.

    Attributes:
        spec: as given.
        table: [rows, hidden] float32, the embeddings.
        norm: their norm, or None.
        projections: their projections, each with the first of its columns.
        to_keys, to_queries: the first columns of those to keys and to queries; None: the attention
            needs none.
        rows: [distances] int32, the row of the table for each distance of a token from a key, from
            the farthest ahead of the token on.
        counts: [positions] int64, how many rows a text of one token has, of two, and so on.
    """

    def __init__(
        self,
        hidden: int,
        spec: RelationBiases,
        norm: NormSpec,
        of_tokens: Linear,
        storage: Storage,
    ) -> None:
        self.spec = spec
        self.table = storage.float32(spec.num_rows, hidden)
        self.norm = Norm(hidden, norm, storage) if spec.normed else None
        width = of_tokens.out_features[0]
        self.projections, key = [(of_tokens, 0)], width
        self._named: dict[str, Linear] = {}
        if not spec.shared:
            needed = {"key": spec.of_queries, "query": spec.of_keys}
            self._named = {
                name: Linear(hidden, [width], name == "query" or spec.key_bias, storage)
                for name in needed
                if needed[name]
            }
            self.projections, key = [], 0
            for name, linear in self._named.items():
                self.projections.append((linear, 0 if name == "key" else width))
        self.to_keys = key if spec.of_queries else None
        self.to_queries = width - key if spec.of_keys else None
        rows = rows_of_distances(spec)
        self.rows = storage.constant(rows.to(torch.int32))
        self.counts = storage.constant(_counts(rows))

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``, such as
        "model.layers.0.self_attn"."""
        order = torch.empty(self.spec.num_rows, dtype=torch.int64)
        every = torch.arange(-self.spec.span, self.spec.span)
        order[_places(every, self.spec)] = every + self.spec.span
        weights: NamedWeights = {
            f"{prefix}.rel_embeddings.weight": (OrderedRows(self.table, order),)
        }
        if self.norm is not None:
            weights |= self.norm.named_weights(f"{prefix}.rel_norm")
        for name, linear in self._named.items():
            weights |= linear.named_weights(f"{prefix}.pos_{name}_proj")
        return weights


def rows_of_distances(spec: RelationBiases) -> Tensor:
    """Returns the row of `Relations.table` for each distance of a token from a key, [distances]
    int64, from the farthest ahead of the token on."""
    last = spec.num_positions - 1
    distances = torch.arange(-last, last + 1)
    if spec.furthest is not None:
        distances = _ranges(distances, spec.span, spec.furthest)
    return _places(distances.clamp(-spec.span, spec.span - 1), spec)


def _ranges(distances: Tensor, span: int, furthest: int) -> Tensor:
    """Returns the distance of the embedding for each distance: of those of at most half of `span`
    their own, of longer ones a logarithm, in float32 as transformers does."""
    exact, far = span // 2, distances.abs()
    whole = torch.tensor((furthest - 1) / exact).log()
    steps = ((far.clamp(min=exact) / exact).log() / whole * (exact - 1)).ceil().long()
    return torch.where(far <= exact, distances, distances.sign() * (steps + exact))


def _places(offsets: Tensor, spec: RelationBiases) -> Tensor:
    """Returns the row of the table for each offset of -span to span - 1: 0, 1, -1, 2, -2 and so
    on; that of -span has no counterpart."""
    places = torch.where(offsets > 0, 2 * offsets - 1, -2 * offsets)
    return places.clamp(max=spec.num_rows - 1)


def _counts(rows: Tensor) -> Tensor:
    """Returns how many rows texts of each length have, [positions] int64."""
    middle = len(rows) // 2
    both = torch.maximum(rows[middle:], rows[: middle + 1].flip(0))
    return both.cummax(0).values + 1
