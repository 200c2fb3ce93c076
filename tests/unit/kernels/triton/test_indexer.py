"""Tests an indexer's kernels under Triton's interpreter."""

from __future__ import annotations

from conformance.indexer_kernels import BlockIndexerConformance, IndexerKernelsConformance


class TestIndexerKernels(IndexerKernelsConformance):
    pass


class TestBlockIndexer(BlockIndexerConformance):
    pass
