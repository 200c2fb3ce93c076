"""Embeddings of distances: which row each distance has, and what is written to whom."""

from __future__ import annotations

import pytest
import torch
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

from shmllm.models.arranged import OrderedRows
from shmllm.models.bias_specs import RelationBiases
from shmllm.models.layers import Linear, Storage
from shmllm.models.relations import Relations
from shmllm.models.specs import NormSpec


def made(positions: int, span: int, furthest: int | None, *, shared: bool = True) -> Relations:
    spec = RelationBiases(
        num_positions=positions,
        span=span,
        furthest=furthest,
        of_queries=True,
        of_keys=True,
        shared=shared,
        normed=True,
    )
    storage = Storage(lambda shape, dtype: torch.zeros(shape, dtype=dtype), torch.float32)
    of_tokens = Linear(16, [8, 8, 8], True, storage)
    return Relations(16, spec, NormSpec(kind="layer", bias=True), of_tokens, storage)


@pytest.mark.parametrize(
    ("positions", "span", "furthest"),
    [(512, 256, 512), (700, 256, 512), (100, 16, 32), (60, 33, 50), (40, 64, None), (90, 20, None)],
)
def test_each_distance_has_the_embedding_that_transformers_takes(
    positions: int, span: int, furthest: int | None
) -> None:
    relations = made(positions, span, furthest)
    learned = torch.randn(2 * span, 16)
    (named,) = relations.named_weights("x")["x.rel_embeddings.weight"]
    assert isinstance(named, OrderedRows)
    named.copy_(learned)
    assert torch.equal(named.clone(), learned)
    rows = torch.zeros(1, positions, 1)
    buckets = (span, furthest) if furthest is not None else (-1, -1)
    offsets = build_relative_position(rows, rows, *buckets)[0]
    wanted = (offsets + span).clamp(0, 2 * span - 1)
    places = torch.arange(positions)
    found = relations.rows[positions - 1 + places[:, None] - places].long()
    assert torch.equal(relations.table[found], learned[wanted])


@pytest.mark.parametrize(("span", "furthest"), [(256, 512), (8, None), (256, 200)])
def test_a_text_has_the_first_rows(span: int, furthest: int | None) -> None:
    relations = made(300, span, furthest)
    rows = relations.rows
    for length in (1, 2, 9, 300):
        own = rows[300 - length : 299 + length]
        assert int(own.max()) + 1 == int(relations.counts[length - 1]) <= 2 * span


def test_projections_have_the_names_of_files() -> None:
    assert [name for name in made(9, 8, None).named_weights("x") if "proj" in name] == []
    names = made(9, 8, None, shared=False).named_weights("x")
    projections = ["pos_key_proj", "pos_query_proj"]
    for kind in ("weight", "bias"):
        assert [name for name in names if name.endswith(f"proj.{kind}")] == [
            f"x.{each}.{kind}" for each in projections
        ]
