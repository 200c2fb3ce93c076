"""The tests of the tables' tile sizes: attention over long contexts equals torch's in float32."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from conformance.attention_kernels import Case, Launch
from support.variants import slow

from shmllm_kernels.gpu.configs import DECODE, PREFILL, table_entry

DIMS = (64, 128)
TABLES = [
    (key, dim) if dim == DIMS[number % 2] else slow(key, dim)
    for number, key in enumerate(sorted(DECODE.devices | PREFILL.devices, reverse=True))
    for dim in DIMS
]
"""The devices with entries of their own, and head sizes; each device once in the default suite."""
RELATIVE_ERROR = {torch.float32: 1e-5, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}
"""The largest error of an element, relative to the largest element of its row."""

HEADS = 4
STEPS = {
    # name: the most tokens of a request, and the options of the launch.
    "decodes": (1, {"num_splits": 8, "masks_all": True}),
    "decodes in a window": (1, {"num_splits": 4, "masks_all": True, "window": 700}),
    "prompts": (512, {}),
    "prompts in a window": (512, {"window": 300}),
    "short extensions": (40, {"num_splits": 4}),
    "chunks that may vary": (200, {"masks_all": True}),
    "prompts both ways": (512, {"ends": "all"}),
    "local layers both ways": (512, {"ends": 64, "window": 65}),
}


def steps_of(query_len: int, context: int) -> tuple[tuple[int, int], ...]:
    """Return the lengths of a step: a request of the largest context, a decode, and the beginning
    of a prompt."""
    longest, beginning = min(query_len, context // 6), min(query_len, 37)
    return (longest, context), (1, context // 2 + 3), (beginning, beginning)


def torch_attention(launch: Launch) -> torch.Tensor:
    """Compute a launch with torch in float32, on the CPU, from the keys and values in order."""
    case, outs = launch.case, []
    query, starts = launch.query.cpu().float(), launch.starts.tolist()
    for row, (begin, end) in enumerate(pairwise(starts)):
        context = case.lengths[row][1]
        blocks = launch.table[row, : -(-context // case.block_size)].long()
        key, value = (
            half[blocks].flatten(0, 1)[:context].cpu().float().transpose(0, 1)
            for half in launch.cache
        )
        positions = torch.arange(context - (end - begin), context)[:, None]
        ends = positions + 1 if launch.ends is None else launch.ends[begin:end].cpu()[:, None]
        visible = torch.arange(context) < ends
        if case.window is not None:
            visible &= torch.arange(context) > positions - case.window
        out = torch.nn.functional.scaled_dot_product_attention(
            query[begin:end].transpose(0, 1),
            key,
            value,
            attn_mask=visible,
            scale=launch.scale,
            enable_gqa=True,
        )
        outs.append(out.transpose(0, 1))
    return torch.cat(outs)


class AttentionTilesConformance:
    @pytest.mark.parametrize("context", [1024, slow(8192)])
    @pytest.mark.parametrize("step", STEPS)
    @pytest.mark.parametrize(("key", "dim"), TABLES)
    def test_the_tables_entries_equal_torch(self, draw, dtype, key, dim, step, context):
        query_len, options = STEPS[step]
        case = Case(
            steps_of(query_len, context),
            HEADS,
            kv_heads=1,
            dim=dim,
            block_size=16,
            config=table_entry(key, dim, HEADS, query_len, dtype),
        )
        launch = Launch(draw, dtype, replace(case, **options))
        got, want = launch.run().cpu().float(), torch_attention(launch)
        errors = (got - want).abs().amax(-1) / want.abs().amax(-1)
        print(f"largest relative error: {errors.max():.2g}")
        assert errors.max() < RELATIVE_ERROR[dtype]
