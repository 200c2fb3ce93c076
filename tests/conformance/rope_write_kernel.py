"""The tests of the kernel that normalises, rotates and writes heads: it equals torch."""

from __future__ import annotations

import pytest
import torch
from support.kernel_helpers import assert_close, poisoned
from support.variants import diagonal

from shmllm_kernels.gpu.rope_write import rope_and_write
from shmllm_kernels.reference import rope_write as plain
from shmllm_kernels.reference.rope_write import HeadNorms, QueryGrowth

EPS = 1e-6


def tolerances(dtype: torch.dtype) -> tuple[float, float]:
    """Return the absolute and the relative tolerance: torch rounds each product of half-precision
    numbers, and the kernel does not."""
    return {
        torch.float32: (2e-6, 2e-6),
        torch.float16: (4e-3, 2e-3),
        torch.bfloat16: (1.6e-2, 1.6e-2),
    }[dtype]


class Step:
    """The random inputs of one launch, and a poisoned cache."""

    def __init__(
        self,
        draw,
        dtype,
        tokens,
        heads,
        kv_heads,
        dim,
        block_size=8,
        blocks=6,
        has_norms=False,
        offset=0.0,
        rotary_dim=None,
        interleaved=False,
        value_dim=None,
    ):
        self.heads, self.values = draw.normal(tokens, heads + 2 * kv_heads, dim, dtype=dtype), None
        angles = draw.normal(tokens, 1, (rotary_dim or dim) // 2, scale=3.0)
        self.cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
        self.sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
        self.slots = draw.permutation(blocks * block_size)[:tokens].clone()
        shape = (2, blocks, block_size, kv_heads, dim)
        self.cache = poisoned(*shape, dtype=dtype, device=draw.device)
        if value_dim is not None:
            self.heads = self.heads[:, : heads + kv_heads]
            self.values = draw.normal(tokens, kv_heads + 1, value_dim, dtype=dtype)[:, :kv_heads]
            both = poisoned(*shape[1:-1], dim + value_dim, dtype=dtype, device=draw.device)
            self.cache = both.split_with_sizes([dim, value_dim], dim=-1)
        self.query = poisoned(tokens, heads, dim, dtype=dtype, device=draw.device)
        self.norms, self.interleaved = None, interleaved
        self.growth = None
        self.positions = torch.arange(tokens, device=draw.device) * 7
        if has_norms:
            weights = draw.normal(dim, dtype=dtype), draw.normal(dim, dtype=dtype)
            self.norms = HeadNorms(*weights, EPS, offset)

    def run(self, function, query, cache):
        function(
            query, *cache, self.heads, self.cos, self.sin, self.slots, self.norms,
            self.interleaved, self.growth, self.positions, self.values,
        )  # fmt: skip

    def check(self, tolerances):
        query, cache = self.query.clone(), [half.clone() for half in self.cache]
        self.run(plain.rope_and_write, query, cache)
        self.run(rope_and_write, self.query, self.cache)
        assert_close(self.query, query, *tolerances)
        for half, want in zip(self.cache, cache, strict=True):
            assert torch.equal(half.isnan(), want.isnan())
            assert_close(half.nan_to_num(), want.nan_to_num(), *tolerances)


class RopeWriteConformance:
    @pytest.mark.parametrize("has_norms", [False, True])
    @pytest.mark.parametrize(
        ("tokens", "heads", "kv_heads", "dim"),
        [
            (0, 4, 2, 16),
            (1, 4, 2, 16),
            (5, 6, 2, 24),
            (3, 9, 3, 64),
            (2, 10, 10, 80),
            (3, 0, 3, 16),
        ],
    )
    def test_equals_the_reference(self, draw, dtype, tokens, heads, kv_heads, dim, has_norms):
        Step(draw, dtype, tokens, heads, kv_heads, dim, has_norms=has_norms).check(
            tolerances(dtype)
        )

    def test_norms_with_an_offset_of_their_weights(self, draw, dtype):
        Step(draw, dtype, 3, 4, 2, 24, has_norms=True, offset=1.0).check(tolerances(dtype))

    @pytest.mark.parametrize(("rotary_dim", "interleaved"), [(24, False), (8, True)])
    def test_norms_with_a_bias(self, draw, dtype, rotary_dim, interleaved):
        step = Step(draw, dtype, 3, 9, 3, 24, 8, 6, True, 0.0, rotary_dim, interleaved)
        both = [draw.normal(2, 24, dtype=dtype) for _ in range(2)]
        step.norms = HeadNorms(*both, EPS, is_centered=True, has_bias=True)
        step.heads += 0.5
        step.check(tolerances(dtype))

    def test_values_with_a_norm(self, draw, dtype):
        step = Step(draw, dtype, 3, 4, 2, 24, has_norms=True)
        step.norms = step.norms._replace(has_values=True)
        step.check(tolerances(dtype))

    @pytest.mark.parametrize(
        ("dim", "value_dim", "has_norm"), [(24, 16, True), (16, 30, True), (192, 128, False)]
    )
    def test_values_of_another_width(self, draw, dtype, dim, value_dim, has_norm):
        step = Step(draw, dtype, 5, 9, 3, dim, has_norms=True, rotary_dim=8, value_dim=value_dim)
        step.norms = step.norms._replace(has_values=has_norm)
        step.slots[1] = -1
        step.check(tolerances(dtype))

    @pytest.mark.parametrize("offset", [0.0, 1.0])
    @pytest.mark.parametrize(("rotary_dim", "interleaved"), [(24, False), (8, True)])
    def test_norms_behind_the_rotation(self, draw, dtype, rotary_dim, interleaved, offset):
        step = Step(draw, dtype, 3, 4, 2, 24, 8, 6, True, offset, rotary_dim, interleaved)
        step.norms = step.norms._replace(is_behind=True)
        step.cos *= 1.5  # as a rotation does that extends the context
        step.sin *= 1.5
        step.check(tolerances(dtype))

    @pytest.mark.parametrize("power", [0.0, 0.3])
    @pytest.mark.parametrize("is_rotated", [False, True])
    def test_queries_that_grow_with_their_position(self, draw, dtype, is_rotated, power):
        step = Step(draw, dtype, 5, 4, 2, 24, has_norms=True)
        step.growth = QueryGrowth(0.5, 10, power=power)
        if not is_rotated:
            step.cos = step.sin = None
        step.check(tolerances(dtype))

    def test_a_step_without_keys_and_values_writes_nothing(self, draw, dtype):
        step = Step(draw, dtype, 3, 4, 2, 24, has_norms=True)
        step.heads = step.heads[:, :4]
        step.norms = step.norms._replace(key=None)
        step.check(tolerances(dtype))
        assert step.cache.isnan().all()

    @pytest.mark.parametrize(
        ("rotation", "is_behind", "is_centered"),
        diagonal([(24, False), (8, True)], [False, True], [True, False]),
    )
    def test_weights_of_each_head(self, draw, dtype, rotation, is_behind, is_centered):
        step = Step(draw, dtype, 3, 9, 3, 24, 8, 6, True, 0.0, *rotation)
        weights = {"query": draw.normal(9, 24, dtype=dtype), "key": draw.normal(3, 24, dtype=dtype)}
        kinds = {"is_behind": is_behind, "is_centered": is_centered}
        step.norms = step.norms._replace(**weights, **kinds)
        step.heads += 0.5
        step.check(tolerances(dtype))

    @pytest.mark.parametrize("offset", [0.0, 1.0])
    def test_layer_norms(self, draw, dtype, offset):
        step = Step(draw, dtype, 3, 4, 2, 24, has_norms=True, offset=offset, rotary_dim=8)
        step.norms = step.norms._replace(is_centered=True, has_values=True)
        step.heads += 0.5
        step.check(tolerances(dtype))

    @pytest.mark.parametrize(("rotary_dim", "interleaved"), [(8, False), (24, True), (8, True)])
    def test_a_part_of_each_head_and_neighbours(self, draw, dtype, rotary_dim, interleaved):
        step = Step(
            draw, dtype, 3, 4, 2, 24, has_norms=True, rotary_dim=rotary_dim, interleaved=interleaved
        )
        step.check(tolerances(dtype))

    @pytest.mark.parametrize("has_norms", [False, True])
    def test_heads_that_are_not_rotated(self, draw, dtype, has_norms):
        step = Step(draw, dtype, 3, 4, 2, 24, has_norms=has_norms)
        step.cos = step.sin = None
        step.check(tolerances(dtype))

    def test_values_are_copied_bit_for_bit(self, draw, dtype):
        step = Step(draw, dtype, 4, 4, 2, 32)
        step.run(rope_and_write, step.query, step.cache)
        stored = step.cache[1].flatten(0, 1)[step.slots]
        assert torch.equal(stored, step.heads[:, 6:])

    def test_padded_tokens_write_nothing(self, draw, dtype):
        step = Step(draw, dtype, 5, 4, 2, 16, block_size=16)
        step.slots[1:3] = -1
        step.heads[1:3] = torch.nan
        query, cache = step.query.clone(), step.cache.clone()
        step.run(plain.rope_and_write, query, cache)
        step.run(rope_and_write, step.query, step.cache)
        real = step.slots >= 0
        assert torch.equal(step.cache.isnan(), cache.isnan())
        assert_close(step.query[real], query[real], *tolerances(dtype))

    def test_the_query_may_be_rotated_in_place(self, draw, dtype):
        step = Step(draw, dtype, 3, 6, 2, 32, has_norms=True)
        query, cache = step.query.clone(), step.cache.clone()
        step.run(plain.rope_and_write, query, cache)
        key_values = step.heads[:, 6:].clone()
        step.run(rope_and_write, step.heads[:, :6], step.cache)
        assert_close(step.heads[:, :6], query, *tolerances(dtype))
        assert torch.equal(step.heads[:, 6:], key_values)

    def test_a_cache_by_head_then_token(self, draw, dtype):
        step = Step(draw, dtype, 5, 4, 2, 16)
        step.cache = step.cache.transpose(2, 3).contiguous().transpose(2, 3)
        step.check(tolerances(dtype))

    def test_float16_saturates(self, draw, device):
        step = Step(draw, torch.float16, 2, 2, 1, 16)
        step.heads[0, 2:] = 6e4
        step.heads[1, 3, 0], step.heads[1, 3, 1] = torch.inf, torch.nan
        step.cos[0], step.sin[0] = 1.0, 1.0
        step.sin[0, :, :8] = -1.0
        step.check(tolerances(torch.float16))
        key, value = (half.flatten(0, 1)[step.slots] for half in step.cache)
        assert (key[0, 0, 8:] == 65504).all()
        assert value[1, 0, :2].tolist() == [65504, 0]

    def test_wrong_arguments_are_refused(self, draw, dtype):
        step = Step(draw, dtype, 2, 4, 2, 16)
        step.slots = step.slots.int()
        with pytest.raises(AssertionError, match="int64"):
            step.run(rope_and_write, step.query, step.cache)
        step = Step(draw, dtype, 2, 4, 2, 16)
        with pytest.raises(AssertionError, match="strides"):
            step.run(
                rope_and_write,
                step.query,
                (step.cache[0], step.cache[1].transpose(1, 2).contiguous().transpose(1, 2)),
            )
