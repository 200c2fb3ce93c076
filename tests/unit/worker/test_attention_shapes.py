"""Shapes of attention calls: padding, and that queries have the same bits in all of them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from shmllm.core.plan import Admission, StepPlan
from shmllm.errors import EngineStartError
from shmllm.models.row_tiles import same_bits
from shmllm.sampling_params import SamplingParams
from shmllm.worker import attention_shapes
from shmllm.worker.attention import PagedAttention
from shmllm.worker.attention_shapes import KEY_TILE, AlikeShapes, find_alike_shapes
from shmllm.worker.batch import InputBatch
from shmllm.worker.slabs import Slabs

HEADS = [(4, 2, 64), (6, 2, 8), (6, 6, 16), (7, 1, 32)]
DTYPES = [torch.float32, torch.bfloat16]


def make_config(heads: int, kv_heads: int, dim: int, windows: tuple[int | None, ...] = (None,)):
    return SimpleNamespace(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        num_layers=len(windows),
        layer_windows=windows,
    )


def test_padding() -> None:
    shapes = AlikeShapes((2, 8, 32), (128, 384, KEY_TILE))
    assert [shapes.padded_query(n) for n in (1, 2, 3, 8, 9, 32)] == [2, 2, 8, 8, 32, 32]
    lengths = (1, 128, 129, 384, 385, 512, 513, 640, 641, 1024, 1025)
    padded = [128, 128, 384, 384, 512, 512, 640, 640, 896, 1024, 1152]
    assert [shapes.padded_context(n) for n in lengths] == padded


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_whole_tiles_are_among_them(heads, dtype) -> None:
    shapes = find_alike_shapes(make_config(*heads), dtype)
    assert shapes.context_lens[-1] == KEY_TILE
    assert shapes.longest_query >= 8


def test_a_call_that_looks_at_its_other_queries_is_refused(monkeypatch) -> None:
    def attend(query, *args, **kwargs):
        return scaled_dot_product_attention(query, *args, **kwargs) + query.mean()

    monkeypatch.setattr(attention_shapes, "scaled_dot_product_attention", attend)
    with pytest.raises(EngineStartError, match=r"deterministic=True.*depends on the place"):
        find_alike_shapes(make_config(4, 2, 16), torch.float32)


def test_lengths_that_add_in_another_order_are_left_out(monkeypatch) -> None:
    """Values of 128 keys added up in two pieces, as libraries do for some lengths."""

    def attend(query, key, value, attn_mask):
        cut = 50 if key.shape[2] % KEY_TILE == 128 else 0
        weights = (query.float() @ key.float().transpose(2, 3) + attn_mask).softmax(-1)
        pieces = (slice(0, cut), slice(cut, None))
        return sum(weights[..., p] @ value[:, :, p].float() for p in pieces).to(query.dtype)

    monkeypatch.setattr(attention_shapes, "scaled_dot_product_attention", attend)
    for dtype in DTYPES:
        shapes = find_alike_shapes(make_config(4, 2, 16), dtype)
        assert 128 not in shapes.context_lens


class Rig:
    """One request per row, with given keys, values and queries, in steps of any shape."""

    def __init__(self, config, dtype, lengths, slab_bytes):
        rng = torch.Generator().manual_seed(4)
        self.config, self.lengths = config, lengths
        shape = (config.num_layers, 2, 400, 16, config.num_kv_heads, config.head_dim)
        shapes = find_alike_shapes(config, dtype)
        longest = shapes.padded_context(max(lengths))
        slabs = Slabs(config, dtype, len(lengths), longest, slab_bytes)
        self.attention = PagedAttention(config, torch.zeros(shape, dtype=dtype), slabs, shapes)
        self.batch = InputBatch(len(lengths), max(lengths), 16, 10)
        self.tensors = [
            [
                torch.randn(length, heads, config.head_dim, generator=rng).to(dtype)
                for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
            ]
            for length in lengths
        ]

    def run(self, steps):
        """steps: lists of (row, start, count). Returns what each token got, by row."""
        outputs = [[None] * length for length in self.lengths]
        for work in steps:
            plan = StepPlan(step=0)
            for row, start, count in work:
                plan.rows.append(row)
                plan.starts.append(start)
                plan.counts.append(count)
                plan.num_tokens += count
                if start == 0:
                    first = 1 + 99 * row
                    blocks = list(range(first, first - (-self.lengths[row] // 16)))
                    params = SamplingParams()
                    plan.admissions.append(Admission(row, [1], blocks, params, 0, 0, ()))
            self.batch.update(plan)
            self.attention.begin_step(self.batch.inputs(plan), self.batch)
            parts = [
                torch.cat([self.tensors[row][i][s : s + n] for row, s, n in work]) for i in range(3)
            ]
            for layer in range(self.config.num_layers):
                got = self.attention(layer, *parts)
            offset = 0
            for row, start, count in work:
                outputs[row][start : start + count] = got[offset : offset + count]
                offset += count
        return [torch.stack(rows) for rows in outputs]


def random_steps(lengths, seed):
    rng = np.random.default_rng(seed)
    done, steps = [0] * len(lengths), []
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        work = []
        for row in rng.permutation(len(lengths)).tolist():
            left = lengths[row] - done[row]
            if left and rng.random() < 0.8:
                count = min(left, int(rng.choice([1, 1, 2, 5, 16, 60, 130, 300])))
                work.append((row, done[row], count))
                done[row] += count
        if work:
            steps.append(work)
    return steps


@pytest.mark.parametrize("slab_bytes", [0, 2**24], ids=["gathered", "slabs"])
@pytest.mark.parametrize("windows", [(None,), (40, None), (700,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_queries_have_the_same_bits_however_they_come(dtype, windows, slab_bytes) -> None:
    """Alone in one piece, or in chunks and decodes beside others, across several key tiles."""
    lengths = [1300, 520, 77, 9]
    config = make_config(4, 2, 16, windows)
    alone = [[(row, 0, length)] for row, length in enumerate(lengths)]
    expected = Rig(config, dtype, lengths, slab_bytes).run(alone)
    for seed in range(2):
        got = Rig(config, dtype, lengths, slab_bytes).run(random_steps(lengths, seed))
        assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))
