"""The tests of FP8 keys and values: each code and number is converted as by torch, the cache has
the rounded numbers of a cache of the model's dtype, and attention is that over rounded numbers."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl
from conformance import (
    decode_attention_kernel,
    latent_heads_kernels,
    latent_kernels,
    rope_write_kernel,
)
from conformance.attention_kernels import BOTH_WAYS, FEATURES, MIXED, Case, Launch
from conformance.decode_attention_kernel import Decodes
from support.kernel_helpers import assert_close, poisoned
from support.variants import each_once, slow

from shmllm_kernels.gpu.configs import DEVICE_KEYS, table_entry
from shmllm_kernels.gpu.float8 import from_float8, to_float8
from shmllm_kernels.gpu.latent_write import write_latents
from shmllm_kernels.gpu.rope_write import rope_and_write
from shmllm_kernels.reference.attention import paged_attention
from shmllm_kernels.reference.latent_write import write_latents as plain_write_latents
from shmllm_kernels.reference.rope_write import rope_and_write as plain_rope_and_write
from shmllm_kernels.reference.rope_write import to_float8 as rounded

FLOAT8 = torch.float8_e4m3fn
NUM_CODES = 256
LARGEST = 448.0


@triton.jit
def decode_all(out_ptr, code_ptr, COUNT: tl.constexpr):
    places = tl.arange(0, COUNT)
    numbers = from_float8(tl.load(code_ptr + places), out_ptr.dtype.element_ty)
    tl.store(out_ptr + places, numbers)


@triton.jit
def encode(out_ptr, x_ptr, COUNT: tl.constexpr):
    places = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(out_ptr + places, to_float8(tl.load(x_ptr + places)))


def codes_of(x: torch.Tensor) -> torch.Tensor:
    """Return what the kernels store for numbers, whose count is a multiple of 256."""
    out = torch.full((len(x),), 255, dtype=torch.uint8, device=x.device)
    encode[(len(x) // NUM_CODES,)](out, x, NUM_CODES)
    return out


def assert_same_numbers(got: torch.Tensor, want: torch.Tensor) -> None:
    """The same bits, but for the sign of NaN."""
    assert got.dtype is want.dtype is FLOAT8
    got, want = got.float(), want.float()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())
    assert torch.equal(got.nan_to_num().signbit(), want.nan_to_num().signbit())


def numbers() -> torch.Tensor:
    """Return all numbers of e4m3, in order."""
    found = torch.arange(NUM_CODES).to(torch.uint8).view(FLOAT8).float()
    return found[~found.isnan()].sort().values


class Float8ConversionConformance:
    def test_each_code_is_the_number_of_torch(self, device, dtype):
        codes = torch.arange(NUM_CODES).to(device, torch.uint8)
        got = poisoned(NUM_CODES, dtype=dtype, device=device)
        decode_all[(1,)](got, codes, NUM_CODES)
        want = codes.view(FLOAT8).to(dtype)
        assert torch.equal(got.isnan(), want.isnan())
        assert int(got.isnan().sum()) == 2
        assert torch.equal(got.nan_to_num(), want.nan_to_num())
        assert torch.equal(got.nan_to_num().signbit(), want.nan_to_num().signbit())

    def test_each_number_has_its_code(self, device, dtype):
        codes = torch.arange(NUM_CODES).to(device, torch.uint8)
        assert_same_numbers(codes_of(codes.view(FLOAT8).to(dtype)).view(FLOAT8), codes.view(FLOAT8))

    def test_each_float16_number_is_rounded_as_by_torch(self, device):
        x = torch.arange(2**16).to(torch.uint16).view(torch.float16)
        got = codes_of(x.to(device)).view(FLOAT8).cpu()
        assert_same_numbers(got, rounded(x))
        assert (got.float()[x.abs() > LARGEST].abs() == LARGEST).all(), "it saturates"
        assert torch.equal(got.float().isnan(), x.isnan()), "NaN stays NaN"

    def test_ties_are_rounded_to_even_and_their_neighbours_are_not(self, device):
        ties = torch.tensor([(a + b) / 2 for a, b in pairwise(numbers().tolist())])
        ends = torch.tensor(torch.inf)
        x = torch.cat((ties, ties.nextafter(ends), ties.nextafter(-ends)))
        x = torch.nn.functional.pad(x, (0, -len(x) % NUM_CODES), value=1e-40)
        got = codes_of(x.to(device)).view(FLOAT8).cpu()
        assert_same_numbers(got, rounded(x))
        is_even = got[: len(ties)].view(torch.uint8) % 2 == 0
        assert is_even.all()


class Float8WriteConformance:
    @pytest.mark.parametrize("has_norms", [False, True])
    @pytest.mark.parametrize(("kv_heads", "dim"), [(2, 16), (3, 24), (10, 80)])
    def test_the_cache_has_the_rounded_numbers_of_another(
        self, draw, dtype, kv_heads, dim, has_norms
    ):
        step = rope_write_kernel.Step(draw, dtype, 5, 2 * kv_heads, kv_heads, dim, 8, 6, has_norms)
        step.slots[3] = -1
        step.heads[1] *= 1000.0  # some values are too large
        step.heads[2] *= 0.01  # and some are subnormal
        query, cache = step.query.clone(), rounded(step.cache)
        step.run(rope_and_write, query, cache)
        step.run(rope_and_write, step.query, step.cache)
        assert torch.equal(query, step.query)
        assert_same_numbers(cache, rounded(step.cache))
        written = cache.float()[~step.cache.isnan()].abs()
        assert len(written) == 2 * 4 * kv_heads * dim
        assert (written == LARGEST).any()
        assert ((written > 0) & (written < 2**-6)).any()

    def test_values_are_rounded_as_by_the_reference(self, draw, dtype):
        step = rope_write_kernel.Step(draw, dtype, 4, 4, 2, 32)
        cache = [rounded(step.cache) for _ in range(2)]
        for function, own in ((rope_and_write, cache[0]), (plain_rope_and_write, cache[1])):
            step.run(function, step.query, own)
        assert_same_numbers(cache[0][1], cache[1][1])

    def test_nan_stays_nan(self, draw, device):
        step = rope_write_kernel.Step(draw, torch.float32, 2, 2, 1, 16)
        step.heads[0, 3, 5], step.heads[0, 3, 6] = torch.nan, torch.inf
        cache = torch.zeros_like(rounded(step.cache))
        step.run(rope_and_write, step.query, cache)
        values = cache[1].flatten(0, 1)[step.slots].float()
        assert values[0, 0, 5].isnan()
        assert values[0, 0, 6] == LARGEST
        assert int(values.isnan().sum()) == 1

    def test_caches_of_other_dtypes_are_refused(self, draw, dtype):
        step = rope_write_kernel.Step(draw, dtype, 2, 2, 1, 16)
        with pytest.raises(AssertionError, match="FP8"):
            step.run(rope_and_write, step.query, step.cache.to(torch.float8_e5m2))
        with pytest.raises(AssertionError, match="differ in dtype"):
            step.run(rope_and_write, step.query, (step.cache[0], rounded(step.cache[1])))


class Float8AttentionConformance:
    @pytest.mark.parametrize("splits", [1, slow(2)])
    @pytest.mark.parametrize("feature", FEATURES)
    def test_a_mixed_batch(self, draw, dtype, feature, splits):
        case = Case(MIXED, num_splits=splits, has_float8=True, padding=2, **FEATURES[feature])
        Launch(draw, dtype, case).check()

    @pytest.mark.parametrize("dim", [16, 64, 80, 128, slow(256)])
    def test_head_sizes(self, draw, dtype, dim):
        Launch(draw, dtype, Case(((1, 19), (4, 9)), dim=dim, has_float8=True)).check()

    @pytest.mark.parametrize("feature", BOTH_WAYS)
    def test_keys_behind_a_token(self, draw, dtype, feature):
        Launch(draw, dtype, Case(MIXED, has_float8=True, **BOTH_WAYS[feature])).check()

    def test_a_cache_by_head_then_token(self, draw, dtype):
        Launch(draw, dtype, Case(MIXED, heads_first=True, has_float8=True)).check()

    @pytest.mark.parametrize("half", ["keys", "values"])
    def test_all_codes(self, draw, dtype, half):
        """A context has each number once, as a key or as a value. The values beside such keys have
        one sign, and the weights of such values are equal, so that rounded weights do not hide a
        wrong number."""
        case = Case(((3, 254),), 2, 1, block_size=64, has_float8=True)
        launch = Launch(draw, dtype, case)
        blocks = launch.table[0, :4].long()
        keys, values = launch.cache
        codes = keys if half == "keys" else values
        slots = codes[blocks].flatten(0, 1)
        slots[:254] = rounded(numbers()).to(draw.device)[draw.permutation(254)][:, None, None]
        codes[blocks] = slots.view(-1, *codes.shape[1:])
        if half == "keys":
            launch.query *= 2**-6
            values.view(torch.uint8).bitwise_and_(0x7F)
        else:
            launch.query.zero_()
        launch.check()

    @pytest.mark.parametrize(
        ("key", "dim"), [(DEVICE_KEYS[0], 128), *(slow(key, 64) for key in DEVICE_KEYS)]
    )
    @pytest.mark.parametrize("is_split", [False, True])
    def test_the_tables_entries_for_decodes(self, draw, dtype, key, dim, is_split):
        config = table_entry(key, dim, 4, 1, dtype, is_split)
        case = Case(((1, 1024), (1, 515)), 4, 1, dim, 16, config=config, masks_all=True)
        splits = 8 if is_split else 1
        Launch(draw, dtype, replace(case, num_splits=splits, has_float8=True)).check()


def check_decodes(draw, dtype, case: Decodes) -> torch.Tensor:
    """Compare a step with one whose cache is in the model's dtype, and with the reference."""
    step = decode_attention_kernel.Step(draw, dtype, replace(case, has_float8=True))
    plain = copy(step)
    plain.cache, plain.out = step.cache.to(dtype), step.out.clone()
    plain.run()
    got, requests = step.run(), len(case.contexts)
    assert_same_numbers(step.cache, rounded(plain.cache))
    query, unused = torch.empty_like(got), torch.empty_like(step.cache)
    tables = (None, None) if step.cos is None else (step.cos[:, None], step.sin[:, None])
    rotation = *tables, step.slots, step.norms, case.interleaved
    plain_rope_and_write(query, *unused, step.heads, *rotation)
    rules = case.window, case.soft_cap, step.sinks
    tensors = step.table, step.starts, step.contexts
    want = paged_attention(query, *step.cache, *tensors, step.scale, *rules)
    if step.gates is not None:
        want *= step.gates.sigmoid()
    limits = decode_attention_kernel.tolerances(dtype)
    assert_close(got[:requests], want[:requests], *limits)
    assert got[requests:].isnan().all(), "a padded token was written"
    return got


class Float8DecodeConformance:
    @pytest.mark.parametrize(
        ("feature", "splits", "loads_first"), each_once(list(FEATURES), [1, 4], [False, True])
    )
    def test_decodes(self, draw, dtype, feature, splits, loads_first):
        options = {"num_splits": splits, "loads_first": loads_first, **FEATURES[feature]}
        check_decodes(draw, dtype, Decodes(padding=1, **options))

    @pytest.mark.parametrize("norm", ["", "offset", "values"])
    @pytest.mark.parametrize(("rotary_dim", "interleaved"), [(None, False), (8, False), (24, True)])
    def test_norms_and_rotations(self, draw, dtype, norm, rotary_dim, interleaved):
        case = Decodes((9, 3), dim=24, norm=norm, rotary_dim=rotary_dim, interleaved=interleaved)
        check_decodes(draw, dtype, case)

    @pytest.mark.parametrize("splits", [1, 4])
    def test_gates_and_norms_of_all_heads(self, draw, dtype, splits):
        case = Decodes(norm="", over_row=True, gated=True, padding=1, num_splits=splits)
        check_decodes(draw, dtype, case)

    def test_a_new_key_counts_as_one_in_the_cache(self, draw, dtype):
        """The output of a request without other keys is its value, rounded; and two decodes whose
        contexts are equal but for a new key that rounds to the same number are equal."""
        case = Decodes((1, 34), has_float8=True, rotary_dim=None)
        step = decode_attention_kernel.Step(draw, dtype, case)
        first = step.run().clone()
        value = rounded(step.heads[0, 6:]).to(dtype).repeat_interleave(2, 0)
        assert torch.equal(first[0], value)
        step.heads[:, 4:] = rounded(step.heads[:, 4:]).to(dtype)
        assert torch.equal(step.run(), first)


class Float8LatentConformance:
    @pytest.mark.parametrize("splits", [1, 2])
    def test_a_mixed_batch(self, draw, dtype, splits):
        case = latent_kernels.Case(latent_kernels.MIXED, num_splits=splits, padding=2)
        latent_kernels.Launch(draw, dtype, replace(case, has_float8=True)).check()

    @pytest.mark.parametrize(("rank", "rope_dim"), [(512, 64), (40, 8), (33, 6)])
    def test_widths(self, draw, dtype, rank, rope_dim):
        case = latent_kernels.Case(((1, 19), (4, 9)), 20, rank, rope_dim, has_float8=True)
        latent_kernels.Launch(draw, dtype, case).check()

    def test_more_rows_in_a_program(self, draw, dtype):
        config = replace(latent_kernels.SMALL, block_m=64)
        case = latent_kernels.Case(((40, 47), (1, 9)), 12, block_size=32, config=config)
        latent_kernels.Launch(draw, dtype, replace(case, has_float8=True)).check()

    def test_all_codes(self, draw, dtype):
        """Latents and key parts have each number once. The latents' weights are equal, so that
        rounded weights do not hide a wrong number; those of key parts are not."""
        case = latent_kernels.Case(((3, 254),), 2, 16, 16, block_size=64, has_float8=True)
        launch = latent_kernels.Launch(draw, dtype, case)
        blocks = launch.table[0, :4].long()
        slots = launch.cache[blocks].flatten(0, 1)
        slots[:254] = rounded(numbers()).to(draw.device)[draw.permutation(254)][:, None]
        launch.cache[blocks] = slots.view(-1, *launch.cache.shape[1:])
        launch.query.zero_()
        launch.rope_query[:2] = 0
        launch.rope_query[2] *= 2**-6
        launch.check()

    @pytest.mark.parametrize("interleaved", [True, False])
    @pytest.mark.parametrize("widths", latent_heads_kernels.WIDTHS)
    def test_the_cache_has_the_rounded_numbers_of_another(self, draw, dtype, widths, interleaved):
        """Some are too large, and some are subnormal. Both launches that write latents do so."""
        case = latent_heads_kernels.Queries(draw, dtype, 5, 3, widths, interleaved)
        case.weight[: case.rank // 2] *= 1000.0
        case.weight[case.rank // 2 :] *= 0.01
        caches = [case.cache.clone() for _ in range(2)]
        rest = case.x, case.weight, 1e-6, case.cos, case.sin, case.slots, interleaved
        write_latents(caches[0], *rest)
        _, _, caches[1] = case.run()
        for plain in caches:
            kept = rounded(case.cache)
            write_latents(kept, *rest)
            assert_same_numbers(kept, rounded(plain))
        assert (kept.float().abs() == LARGEST).any()
        case.cache = rounded(case.cache)
        assert_same_numbers(case.run()[2], kept)

    def test_the_reference_rounds_alike(self, draw, dtype):
        case = latent_heads_kernels.Queries(draw, dtype, 4, 2, (32, 8, 8, 8))
        kept = [rounded(case.cache) for _ in range(2)]
        rest = case.x, case.weight, 1e-6
        write_latents(kept[0], *rest, case.cos, case.sin, case.slots)
        plain_write_latents(kept[1], *rest, case.cos[:, None], case.sin[:, None], case.slots)
        assert (kept[0].float() - kept[1].float()).abs().nan_to_num().max() <= 0.25
        share = (kept[0].view(torch.uint8) == kept[1].view(torch.uint8)).float().mean()
        assert share > 0.9

    def test_caches_of_other_dtypes_are_refused(self, draw, dtype):
        launch = latent_kernels.Launch(draw, dtype, latent_kernels.Case(((1, 3),)))
        launch.cache = launch.cache.to(torch.float8_e5m2)
        with pytest.raises(AssertionError, match="FP8"):
            launch.run()
