"""The kernel that leaves tokens out of a mixture of experts equals `reference`."""

from __future__ import annotations

import pytest
import torch

from shmllm_kernels.gpu.expert_sums import WeightedSum, combine
from shmllm_kernels.gpu.left_out import leave_out
from shmllm_kernels.reference import moe as plain

LISTED = [7, 300, 2]


class LeftOutConformance:
    @pytest.mark.parametrize("are_listed", [False, True])
    @pytest.mark.parametrize("top_k", [1, 6, 8])
    def test_tokens_of_the_other_kind_have_no_experts(self, draw, are_listed, top_k):
        """Token ids are listed or not, sampled for a row, or stand for an embedding."""
        given = [7, 8, 300, -1, -2, -4, 2]
        known = [7, 8, 300, -1, 300, 9, 2]  # rows 0 and 2 have sampled 300 and 9
        last, tokens, listed = (
            draw.permutation(1)[:1].new_tensor(each) for each in ([300, 5, 9], given, LISTED)
        )
        ids = draw.permutation(len(given) * top_k).view(-1, top_k).int()
        weights = draw.uniform(len(given), top_k)
        want = plain.leave_out(ids, weights, tokens.new_tensor(known), LISTED, are_listed)
        leave_out(ids, weights, tokens, last, listed, are_listed)
        assert torch.equal(ids, want[0])
        assert torch.equal(weights, want[1])

    def test_sums_do_not_read_rows_of_pairs_that_are_left_out(self, draw, dtype):
        rows, weights = draw.normal(6, 20, dtype=dtype), draw.uniform(3, 2)
        weights[1] = 0
        want = torch.einsum("tk,tkd->td", weights, rows.float().view(3, 2, 20))
        rows[2:4] = float("nan")
        out = draw.normal(3, 20, dtype=dtype)
        combine(WeightedSum(out, weights, skips=True), rows)
        assert not out[1].any()
        want[1] = 0
        torch.testing.assert_close(out.float(), want.to(dtype).float(), rtol=1e-2, atol=1e-2)
