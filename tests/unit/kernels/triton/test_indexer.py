"""Tests the kernels of indexers and of compressed attention under Triton's interpreter."""

from __future__ import annotations

from conformance.compression_kernels import CompressionConformance
from conformance.indexer_kernels import BlockIndexerConformance, IndexerKernelsConformance


class TestIndexerKernels(IndexerKernelsConformance):
    pass


class TestBlockIndexer(BlockIndexerConformance):
    pass


class TestCompression(CompressionConformance):
    pass
