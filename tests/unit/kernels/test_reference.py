"""Compares the references of attention and of the fused cache write with torch and transformers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from shmllm_kernels.reference.attention import paged_attention
from shmllm_kernels.reference.rope_write import HeadNorms, rope_and_write
from shmllm_kernels.windows import Chunk


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("window", [None, 4, Chunk(3)])
def test_paged_attention_equals_torchs_attention_on_gathered_keys(window):
    cache, query = random(2, 9, 4, 2, 16), random(8, 6, 16, seed=1)
    table = torch.tensor([[3, 8, 1, 99], [7, 2, 99, 99]], dtype=torch.int32)
    starts, contexts = torch.tensor([0, 1, 8]), torch.tensor([11, 7])
    got = paged_attention(query, *cache, table, starts, contexts, 0.2, window)
    for request, (begin, end, context) in enumerate([(0, 1, 11), (1, 8, 7)]):
        blocks = table[request, : -(-context // 4)].long()
        key, value = (
            half[blocks].flatten(0, 1)[:context].transpose(0, 1).repeat_interleave(3, 0)
            for half in cache
        )
        seen = torch.ones(end - begin, context, dtype=torch.bool).tril(context - (end - begin))
        if isinstance(window, Chunk):
            chunks = torch.arange(context) // window.size
            seen &= chunks == chunks[context - (end - begin) :, None]
        elif window is not None:
            seen &= seen.new_ones(seen.shape).triu(context - (end - begin) - window + 1)
        want = F.scaled_dot_product_attention(
            query[begin:end].transpose(0, 1), key, value, attn_mask=seen, scale=0.2
        )
        torch.testing.assert_close(got[begin:end], want.transpose(0, 1), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_paged_attention_up_to_ends_equals_torchs_attention_with_a_mask(window):
    """Two requests: a whole prompt of 7 tokens, and the last 4 tokens of 9."""
    cache, query = random(2, 9, 4, 2, 16), random(11, 6, 16, seed=1)
    table = torch.tensor([[7, 2, 99], [3, 8, 1]], dtype=torch.int32)
    starts, contexts = torch.tensor([0, 7, 11]), torch.tensor([7, 9])
    ends = torch.tensor([7, 2, 3, 6, 6, 6, 7, 6, 9, 9, 9])
    got = paged_attention(query, *cache, table, starts, contexts, 0.2, window, ends=ends)
    for request, (begin, end, context) in enumerate([(0, 7, 7), (7, 11, 9)]):
        key, value = (
            half[table[request, : -(-context // 4)].long()]
            .flatten(0, 1)[:context]
            .transpose(0, 1)
            .repeat_interleave(3, 0)
            for half in cache
        )
        seen = torch.zeros(end - begin, context, dtype=torch.bool)
        for row, last in enumerate(ends[begin:end].tolist()):
            position = context - (end - begin) + row
            first = 0 if window is None else max(0, position - window + 1)
            seen[row, first:last] = True
        want = F.scaled_dot_product_attention(
            query[begin:end].transpose(0, 1), key, value, attn_mask=seen, scale=0.2
        )
        torch.testing.assert_close(got[begin:end], want.transpose(0, 1), atol=1e-6, rtol=1e-5)


def test_rope_and_write_equals_transformers_norm_and_rotary_embedding():
    heads, angles = random(3, 8, 16), random(3, 8, seed=1) * 3
    cos, sin = angles.cos(), angles.sin()
    weights = random(2, 16, seed=2)
    norms = [Qwen3RMSNorm(16, 1e-5) for _ in range(2)]
    for norm, weight in zip(norms, weights, strict=True):
        norm.weight.data.copy_(weight)
    query, cache = torch.empty(3, 4, 16), torch.zeros(2, 3, 4, 2, 16)
    tables = torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
    slots = torch.tensor([9, -1, 2])
    rope_and_write(query, *cache, heads, *tables, slots, HeadNorms(*weights, 1e-5))
    with torch.no_grad():
        parts = norms[0](heads[:, :4]), norms[1](heads[:, 4:6])
    wide = [torch.cat((part, part), -1) for part in (cos, sin)]
    want_query, want_key = apply_rotary_pos_emb(*parts, *wide)
    torch.testing.assert_close(query, want_query)
    keys, values = (half.flatten(0, 1) for half in cache)
    torch.testing.assert_close(keys[[9, 2]], want_key[[0, 2]])
    assert torch.equal(values[[9, 2]], heads[[0, 2], 6:])
    rest = [slot for slot in range(12) if slot not in (9, 2)]
    assert not keys[rest].any()
    assert not values[rest].any()


def test_a_norm_over_all_heads_and_an_offset_apply_before_the_rotation():
    heads, weights = random(3, 8, 16), [random(64, seed=2), random(32, seed=3)]
    query, cache = torch.empty(3, 4, 16), torch.zeros(2, 3, 4, 2, 16)
    slots = torch.tensor([9, 0, 2])
    rope_and_write(query, *cache, heads, None, None, slots, HeadNorms(*weights, 1e-5, 1.0))
    for got, part, weight in zip(
        (query, cache[0].flatten(0, 1)[slots]), (heads[:, :4], heads[:, 4:6]), weights, strict=True
    ):
        row = part.flatten(1)
        want = F.rms_norm(row, weight.shape, weight + 1, 1e-5)
        torch.testing.assert_close(got.flatten(1), want)
    assert torch.equal(cache[1].flatten(0, 1)[slots], heads[:, 6:])
