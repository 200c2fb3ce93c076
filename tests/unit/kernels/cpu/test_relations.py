"""What disentangled attention adds to scores on a CPU: compared with the reference."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from support.cpu_kernels import run_kernel

from shmllm_kernels.cpu import word_of_float
from shmllm_kernels.cpu.relations import COUNT_ROWS, RELATE
from shmllm_kernels.reference.relations import relate

ROWS, POSITIONS, SCALE = 12, 50, 0.3


@pytest.mark.parametrize("left_out", ["", "to_keys", "to_queries"])
def test_what_is_added_to_scores(left_out: str) -> None:
    starts = torch.tensor([0, 1, 34, 39])
    tokens, heads, dim = 39, 3, 24
    qkv = torch.randn(tokens, 3 * heads * dim)
    projected = torch.randn(ROWS, 2 * heads * dim)
    query, key, _ = (part.unflatten(1, (heads, dim)) for part in qkv.chunk(3, 1))
    parts = dict(zip(("to_queries", "to_keys"), projected.chunk(2, 1), strict=True))
    rows = torch.randint(ROWS, (2 * POSITIONS - 1,), dtype=torch.int32)
    bounds = [*pairwise(starts.tolist())]
    positions = torch.cat([torch.arange(end - begin) for begin, end in bounds])
    ends = torch.cat([torch.full((end - begin,), end - begin) for begin, end in bounds])
    out = torch.full((tokens, heads, POSITIONS), torch.nan)
    addresses = {name: part.data_ptr() for name, part in parts.items()} | {left_out: 0}
    operands = [
        qkv, 4 * qkv.stride(0), heads, dim, addresses["to_keys"], addresses["to_queries"],
        4 * projected.stride(0), rows[POSITIONS - 1 :].data_ptr(), positions, ends, out, POSITIONS,
        word_of_float(SCALE),
    ]  # fmt: skip
    run_kernel(RELATE, tokens, *operands)
    sources = (
        None if name == left_out else parts[name].unflatten(1, (heads, dim))
        for name in ("to_keys", "to_queries")
    )
    wanted = relate(query, key, *sources, rows, starts, SCALE)
    for (begin, end), want in zip(bounds, wanted, strict=True):
        torch.testing.assert_close(out[begin:end, :, : end - begin], want.float())
        assert out[begin:end, :, end - begin :].isnan().all()


def test_the_longest_text_decides_how_many_embeddings_there_are() -> None:
    lengths, counts = torch.tensor([3, 7, 2, 99]), torch.tensor([1, 3, 5, 7, 8, 9, 9, 100])
    found = torch.zeros(1, dtype=torch.int64)
    run_kernel(COUNT_ROWS, 3, lengths, counts, found)
    assert found.item() == 9
