"""Tests the sampler's kernels under Triton's interpreter."""

from __future__ import annotations

import torch
from conformance.sampling_kernels import SamplingConformance
from support.kernel_helpers import Draw
from support.kernel_reads import elements_read

from shmllm_kernels.gpu.sampling import SamplingScratch
from shmllm_kernels.gpu.scoring import Scores, score

CHUNK = 512
VOCAB_SIZE = 12 * CHUNK


class TestSampling(SamplingConformance):
    def test_a_program_reads_one_chunk_for_each_alternative(self, draw: Draw) -> None:
        logits = draw.normal(1, VOCAB_SIZE, scale=0.001)
        tokens, ks = torch.zeros(1, dtype=torch.int64), torch.full((1,), 3, dtype=torch.int32)
        scratch = SamplingScratch.allocate(1, VOCAB_SIZE, "cpu", CHUNK)
        with elements_read(logits) as read:
            score(Scores.allocate(1, 3, "cpu"), logits, tokens, ks, scratch)
        assert max(read.values()) <= 3 * CHUNK + 2, read
