"""Tests the sampler's kernels under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from conformance.sampling_kernels import WIDE, SamplingConformance, Step, short_lists
from support.kernel_helpers import Draw
from support.kernel_reads import elements_read

from shmllm_kernels.gpu.sampling import SamplingScratch
from shmllm_kernels.gpu.scoring import Scores, score

__all__ = ["short_lists"]

CHUNK = 512
VOCAB_SIZE = 12 * CHUNK


class TestSampling(SamplingConformance):
    @pytest.mark.parametrize("name", ["top_p", "all"])
    def test_a_program_reads_two_chunks_of_a_row_that_has_no_list(
        self, draw: Draw, name: str
    ) -> None:
        """Whatever its logits are, no program of the sampler reads the whole row."""
        step = Step(draw, draw.normal(1, VOCAB_SIZE, scale=0.1), WIDE[name], chunk=CHUNK)
        with elements_read(step.scratch.processed_logits) as read:
            step.run()
        assert step.scratch.num_candidates.tolist() == [-1]
        assert {"count_by_distance", "choose_tokens"} < read.keys()
        assert max(read.values()) <= 2 * CHUNK, read

    def test_a_program_reads_one_chunk_for_each_alternative(self, draw: Draw) -> None:
        logits = draw.normal(1, VOCAB_SIZE, scale=0.001)
        tokens, ks = torch.zeros(1, dtype=torch.int64), torch.full((1,), 3, dtype=torch.int32)
        scratch = SamplingScratch.allocate(1, VOCAB_SIZE, "cpu", CHUNK)
        with elements_read(logits) as read:
            score(Scores.allocate(1, 3, "cpu"), logits, tokens, ks, scratch)
        assert max(read.values()) <= 3 * CHUNK + 2, read
