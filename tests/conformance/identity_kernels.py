"""The kernel of choices that are no experts equals `reference`."""

from __future__ import annotations

import pytest
import torch
from conformance.row_kernels import tolerances
from support.kernel_helpers import assert_close, poisoned

from shmllm_kernels.gpu.identities import COLUMNS_AT_ONCE, take_identities
from shmllm_kernels.reference import moe as plain

EXPERTS = 6
CASES = [
    (5, 4, 64, EXPERTS + 4),
    (3, 12, COLUMNS_AT_ONCE + 10, 3 * EXPERTS),  # top_k is no power of two
    (2, 5, 2 * COLUMNS_AT_ONCE, 2 * EXPERTS),
    (4, 3, 48, EXPERTS),  # all choices are experts
    (2, 1, 33, 2 * EXPERTS),
    (0, 4, 64, 2 * EXPERTS),
]
"""Tokens, choices of each, the width of rows, and how many there are to choose from."""


def chosen(draw, tokens: int, top_k: int, choices: int) -> torch.Tensor:
    """Return the choices of each token in ascending order, int32."""
    rows = [draw.permutation(choices)[:top_k].sort().values for _ in range(tokens)]
    ids = torch.stack(rows) if rows else draw.permutation(choices)[:0].new_empty(0, top_k)
    return ids.int()


class IdentityConformance:
    def check(self, draw, dtype, width: int, ids: torch.Tensor) -> None:
        tokens, top_k = ids.shape
        x = draw.normal(tokens, width + 3, dtype=dtype)[:, :width]
        weights = draw.uniform(tokens, top_k)
        want, of_experts, kept = plain.take_identities(x, ids, weights, EXPERTS)
        wide = poisoned(tokens, width + 5, dtype=dtype, device=draw.device)
        take_identities(wide[:, :width], x, ids, weights, EXPERTS)
        assert_close(wide[:, :width], want, *tolerances(dtype))
        assert wide[:, width:].isnan().all(), "a column behind the row was written"
        assert torch.equal(ids, of_experts)
        assert torch.equal(weights, kept)

    @pytest.mark.parametrize("case", CASES)
    def test_weights_of_identities_multiply_what_experts_read(self, draw, dtype, case):
        tokens, top_k, width, choices = case
        self.check(draw, dtype, width, chosen(draw, tokens, top_k, choices))

    def test_tokens_of_identities_alone(self, draw, dtype):
        self.check(draw, dtype, 100, chosen(draw, 3, 5, 8) + EXPERTS)

    def test_padded_tokens_and_an_expert_alone(self, draw, dtype):
        """The ids of padded tokens are -1, and stay so."""
        ids = chosen(draw, 4, 3, 5) + EXPERTS
        ids[1, 0] = EXPERTS - 1
        ids[2:] = -1
        self.check(draw, dtype, 70, ids)
        assert (ids[1] == EXPERTS - 1).all()
        assert (ids[2:] == -1).all()

    def test_the_bits_of_a_token_do_not_depend_on_others(self, draw, dtype):
        ids, weights = chosen(draw, 4, 6, 2 * EXPERTS), draw.uniform(4, 6)
        x = draw.normal(4, 70, dtype=dtype)
        outs = []
        for rows in (slice(0, 4), slice(2, 3)):
            out = torch.empty_like(x[rows])
            take_identities(out, x[rows], ids[rows].clone(), weights[rows].clone(), EXPERTS)
            outs.append(out)
        assert torch.equal(outs[0][2:3], outs[1])
