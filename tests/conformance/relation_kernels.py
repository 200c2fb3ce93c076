"""The kernel of disentangled attention equals `reference`."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from conformance.row_kernels import tolerances
from support.kernel_helpers import assert_close, poisoned
from support.variants import diagonal

from shmllm_kernels.gpu import relations
from shmllm_kernels.reference import relations as plain

SCALE, ROWS, POSITIONS, PADDING = 0.3, 12, 50, 3
LENGTHS = {"one text": (7,), "several": (1, 33, 5), "none": ()}


class RelationConformance:
    @pytest.mark.parametrize(
        ("lengths", "left_out", "shape"),
        diagonal([*LENGTHS], ["", "to_keys", "to_queries"], [(2, 16), (3, 24)]),
    )
    def test_what_is_added_to_scores(self, draw, dtype, lengths, left_out, shape):
        starts = torch.tensor([0, *LENGTHS[lengths]]).cumsum(0)
        tokens, (heads, dim) = int(starts[-1]) + PADDING, shape
        qkv = draw.normal(tokens, 3 * heads * dim, dtype=dtype)
        projected = draw.normal(ROWS, 3 * heads * dim, dtype=dtype)
        query, key, _ = qkv.chunk(3, 1)
        parts = dict(zip(("to_queries", "to_keys"), projected.chunk(3, 1), strict=False))
        parts |= {left_out: None} if left_out else {}
        rows = torch.randint(ROWS, (2 * POSITIONS - 1,), generator=torch.Generator().manual_seed(3))
        rows = rows.to(draw.device, torch.int32)
        positions = torch.zeros(tokens, dtype=torch.int64)
        ends = torch.zeros(tokens, dtype=torch.int32)
        for begin, end in pairwise(starts.tolist()):
            positions[begin:end] = torch.arange(end - begin)
            ends[begin:end] = end - begin
        out = poisoned(tokens, heads, POSITIONS, dtype=torch.float32, device=draw.device)
        of_tokens = positions.to(draw.device), ends.to(draw.device)
        sources = parts["to_keys"], parts["to_queries"]
        relations.relate(out, query, key, *sources, rows, *of_tokens, SCALE)
        wide = (
            None if each is None else each.unflatten(1, (heads, dim))
            for each in (query, key, *sources)
        )
        wanted = plain.relate(*wide, rows, starts, SCALE)
        for (begin, end), want in zip(pairwise(starts.tolist()), wanted, strict=True):
            found = out[begin:end, :, : end - begin]
            assert_close(found, want.float(), *tolerances(torch.float32))
            assert out[begin:end, :, end - begin :].isnan().all()
        assert out[int(starts[-1]) :].isnan().all()
