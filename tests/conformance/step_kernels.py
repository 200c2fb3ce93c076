"""The tests of the kernels before and after the layers: they equal torch and transformers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.kernel_helpers import assert_close, poisoned
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from shmllm.models.fields import Fields
from shmllm.models.rope import attention_factor, axes, inverse_frequencies
from shmllm.models.rope_config import RopeConfig
from shmllm_kernels.gpu.rope_write import rope_and_write
from shmllm_kernels.gpu.row_copies import TableShare, embed, gather_rows
from shmllm_kernels.gpu.step import rope_tables, unpack_step
from shmllm_kernels.reference import step as plain
from shmllm_kernels.reference.step import LearnedRows, StepSizes, StepTensors

MAX_POSITION = 131_072
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
STEPS = [
    # sizes and padded sizes
    ((1, 1, 1), (1, 1, 1)),
    ((3, 3, 3), (8, 8, 8)),
    ((0, 0, 0), (4, 2, 0)),
    ((9, 2, 1), (16, 7, 7)),
    ((40, 5, 0), (1100, 5, 3)),
    ((7, 2, 2), (7, 1024, 1030)),
]


def tables(frequencies, positions, scale=1.0, dtype=torch.float32, axes=None):
    shape = positions.shape[-1], 2 * len(frequencies)
    cos, sin = (poisoned(*shape, dtype=dtype, device=positions.device) for _ in range(2))
    rope_tables(cos, sin, positions, frequencies, scale, axes)
    return cos, sin


def exact(angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = angles.cpu().double()
    return wide.cos(), wide.sin()


class StepConformance:
    @pytest.mark.parametrize(
        ("tokens", "hidden"), [(0, 64), (1, 64), (5, 48), (70, 16), (3, 1025), (2, 1)]
    )
    def test_embed(self, draw, dtype, tokens, hidden):
        vocab, rows = 37, 6
        table, last = draw.normal(vocab, hidden, dtype=dtype), draw.integers(0, vocab, rows)
        ids = draw.integers(-2 - rows + 1, vocab, tokens)
        before = draw.normal(tokens, hidden, dtype=dtype)
        out, want = before.clone(), before.clone()
        embed(out, table, ids, last)
        for index, token in enumerate(ids.tolist()):
            if token != -1:
                want[index] = table[token if token >= 0 else last[-2 - token]]
        assert torch.equal(out, want)
        plain.embed(before, table, ids, last)
        assert torch.equal(before, want)

    def test_embed_with_a_factor(self, draw, dtype):
        table, last = draw.normal(7, 40, dtype=dtype), draw.integers(0, 7, 2)
        ids = torch.tensor([3, -1, -2, 6], device=draw.device)
        out = draw.normal(4, 40, dtype=dtype)
        want = out.clone()
        embed(out, table, ids, last, 1.7)
        plain.embed(want, table, ids, last, 1.7)
        assert torch.equal(out, want)
        assert torch.equal(out[0], (table[3].float() * 1.7).to(dtype))

    def test_embed_with_learned_rows(self, draw, dtype):
        table, last = draw.normal(7, 40, dtype=dtype), draw.integers(0, 7, 2)
        ids = torch.tensor([3, -1, -2, 6, 7, -1], device=draw.device)
        places = torch.tensor([0, 3, 3, 1, 2, 8], device=draw.device)
        positions = LearnedRows(draw.normal(9, 40, dtype=dtype), places)
        kinds = torch.tensor([0, 1, 0, 1, 1, 0], device=draw.device)
        types = LearnedRows(draw.normal(2, 40, dtype=dtype), kinds)
        before = draw.normal(6, 40, dtype=dtype)
        for learned in ([positions], [types], [positions, types]):
            out, want = before.clone(), before.clone()
            embed(out, table, ids, last, 1.5, learned)
            plain.embed(want, table, ids, last, 1.5, learned)
            assert torch.equal(out, want)
            total = before[1].double()
            for each in learned:
                total += each.table[each.indices[1]].double()
            assert_close(out[1], total.to(dtype), 1e-6, 2 * torch.finfo(dtype).eps)
            assert torch.equal(out[4], before[4])

    def test_tokens_with_negative_ids_keep_their_embeddings(self, draw, dtype):
        table, last = draw.normal(5, 8, dtype=dtype), torch.tensor([-1, 5, 4])
        ids = torch.tensor([-1, 5, 2**40, -2, -3, -4], device=draw.device)
        out = poisoned(6, 8, dtype=dtype, device=draw.device)
        embed(out, table, ids, last.to(draw.device))
        assert out[:5].isnan().all()
        assert torch.equal(out[5], table[4])

    @pytest.mark.parametrize("has_positions", [False, True])
    def test_the_shares_of_a_table_give_the_embeddings_once(self, draw, dtype, has_positions):
        """Also those that a prompt gave, which the first rank has, and those of positions."""
        table, last = draw.normal(9, 40, dtype=dtype), torch.tensor([6, 2], device=draw.device)
        ids = torch.tensor([0, -1, -2, 8, -3, 5, 4], device=draw.device)
        learned = []
        if has_positions:
            learned = [LearnedRows(draw.normal(9, 40, dtype=dtype), draw.integers(0, 9, 7))]
        given = draw.normal(7, 40, dtype=dtype)
        want = given.clone()
        embed(want, table, ids, last, 1.7, learned)
        first, second = given.clone(), poisoned(7, 40, dtype=dtype, device=draw.device)
        embed(first, table[:5], ids, last, 1.7, learned, TableShare(0, keeps=True))
        embed(second, table[5:], ids, last, 1.7, (), TableShare(5, keeps=False))
        assert not second[[0, 1, 4, 6]].any(), "what this rank does not have"
        if has_positions:
            assert_close(first + second, want, 2e-3, 2e-3)
        else:
            assert torch.equal(first + second, want)

    def test_embed_from_and_into_strided_rows(self, draw, dtype):
        wide, out = draw.normal(9, 40, dtype=dtype), draw.normal(4, 50, dtype=dtype)
        rest, ids = out[:, 30:].clone(), draw.integers(0, 9, 4)
        embed(out[:, :30], wide[:, 7:37], ids, ids)
        assert torch.equal(out[:, :30], wide[ids, 7:37])
        assert torch.equal(out[:, 30:], rest)

    @pytest.mark.parametrize(("count", "dim"), [(0, 8), (1, 64), (9, 100), (2, 2049)])
    def test_gather_rows(self, draw, dtype, count, dim):
        source, indices = draw.normal(11, dim, dtype=dtype), draw.integers(0, 11, count)
        out, same = (poisoned(count, dim, dtype=dtype, device=draw.device) for _ in range(2))
        gather_rows(out, source, indices)
        plain.gather_rows(same, source, indices)
        assert torch.equal(out, source[indices])
        assert torch.equal(same, out)

    @pytest.mark.parametrize(
        ("tokens", "dim", "is_reversed"),
        [(0, 16, False), (1, 128, False), (70, 16, False), (5, 80, True), (3, 256, False)],
    )
    def test_rope_tables(self, draw, dtype, tokens, dim, is_reversed):
        positions = draw.integers(0, MAX_POSITION, tokens)
        rope = RopeConfig(rotary_dim=dim, reversed=is_reversed)
        frequencies = inverse_frequencies(rope).to(draw.device)
        got = tables(frequencies, positions, 0.8, dtype)
        want = [torch.empty_like(got[0]) for _ in range(2)]
        plain.rope_tables(*want, positions, frequencies, 0.8)
        last_bit = {torch.float32: 3e-7, torch.float16: 5e-4, torch.bfloat16: 4e-3}[dtype]
        for ours, torchs in zip(got, want, strict=True):
            assert_close(ours, torchs, last_bit, 0)
        half = dim // 2
        assert torch.equal(got[0][:, :half], got[0][:, half:])
        assert torch.equal(got[1][:, :half], -got[1][:, half:])

    def test_rope_tables_of_the_first_positions_of_windows(self, draw):
        positions, frequencies = draw.integers(0, MAX_POSITION, 9), draw.normal(8)
        want = tables(frequencies, positions // 6 * 6)
        for launch in (rope_tables, plain.rope_tables):
            got = [torch.empty_like(each) for each in want]
            launch(*got, positions, frequencies, 1.0, rate=6)
            for ours, expected in zip(got, want, strict=True):
                assert_close(ours, expected, 3e-7, 0)

    @pytest.mark.parametrize(
        ("tokens", "sections", "mixed"),
        [
            (0, (2, 3, 3), False),
            (1, (16, 24, 24), False),
            (1, (24, 20, 20), True),
            (70, (2, 3, 3), True),
            (37, (11, 11, 10), True),
            (9, (3, 9, 1), False),
        ],
    )
    def test_rope_tables_of_positions_on_axes(self, draw, dtype, tokens, sections, mixed):
        rope = RopeConfig(rotary_dim=2 * sum(sections), sections=sections, mixes_axes=mixed)
        frequencies = inverse_frequencies(rope).to(draw.device)
        of_pairs = torch.tensor(axes(rope), device=draw.device)
        positions = draw.integers(0, MAX_POSITION, 3, tokens + 5)[:, :tokens]
        got = tables(frequencies, positions, 0.8, dtype, of_pairs)
        want = [torch.empty_like(got[0]) for _ in range(2)]
        plain.rope_tables(*want, positions, frequencies, 0.8, of_pairs)
        for pair, axis in enumerate(axes(rope)):
            alone = tables(frequencies, positions[axis].contiguous(), 0.8, dtype)
            for ours, others in zip(got, alone, strict=True):
                places = [pair, pair + len(of_pairs)]
                assert torch.equal(ours[:, places], others[:, places])
        last_bit = {torch.float32: 3e-7, torch.float16: 5e-4, torch.bfloat16: 4e-3}[dtype]
        for ours, torchs in zip(got, want, strict=True):
            assert_close(ours, torchs, last_bit, 0)

    def test_cosines_and_sines_are_exact_to_the_last_bits_of_float32(self, draw):
        """Each angle is a float32, and its rounding matters most near multiples of pi / 2."""
        whole = torch.arange(0, 83_000, 1, dtype=torch.float64) * (math.pi / 2)
        angles = torch.cat(
            (
                whole.float(),
                torch.nextafter(whole.float(), torch.tensor(math.inf)),
                torch.rand(20_000, generator=draw.generator) * MAX_POSITION,
                torch.rand(20_000, generator=draw.generator) * 7,
                torch.rand(2_000, generator=draw.generator) * 2**24,
                2.0 ** -torch.arange(0.0, 150.0),
            )
        )
        angles = torch.nn.functional.pad(angles, (0, -len(angles) % 1024)).view(-1, 1024)
        positions = torch.ones(1, dtype=torch.int64, device=draw.device)
        for some in angles:
            cos, sin = tables(some.to(draw.device), positions)
            for ours, true in zip((cos, sin), exact(some), strict=True):
                found = ours[0, 1024:].cpu().double()
                assert (found - true).abs().max() < 2e-7

    @pytest.mark.parametrize(
        "parameters",
        [{"rope_type": "default", "rope_theta": 500_000.0}, YARN | {"rope_theta": 1e6}],
    )
    def test_rope_tables_equal_transformers(self, draw, parameters):
        dim = 128
        config = LlamaConfig(
            hidden_size=4 * dim,
            num_attention_heads=4,
            max_position_embeddings=MAX_POSITION,
            rope_parameters=dict(parameters),
        )
        rope = RopeConfig.from_fields(
            Fields({"rope_parameters": parameters}, ""), MAX_POSITION, dim
        )
        positions = draw.integers(0, MAX_POSITION, 40)
        positions[:2] = torch.tensor([0, MAX_POSITION - 1])
        theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None].cpu())
        frequencies = inverse_frequencies(rope)
        ours = tables(frequencies.to(draw.device), positions, attention_factor(rope))
        # A difference in the last bit of a frequency changes the largest angle by 131,072 * 2**-24.
        atol = 0.02 if parameters["rope_type"] == "yarn" else 3e-7
        for mine, their in zip(ours, theirs, strict=True):
            torch.testing.assert_close(
                mine[:, dim // 2 :].cpu(), their[0, :, dim // 2 :], atol=atol, rtol=0
            )

    def test_rope_and_write_accepts_the_tables(self, draw, dtype):
        """The tables have the halves and signs that `rope_and_write` expects."""
        heads, cache = draw.normal(3, 4, 16, dtype=dtype), draw.normal(2, 1, 8, 1, 16, dtype=dtype)
        positions = draw.integers(0, 50, 3)
        cos, sin = tables(
            inverse_frequencies(RopeConfig(rotary_dim=16)).to(draw.device), positions, 1, dtype
        )
        query = poisoned(3, 2, 16, dtype=dtype, device=draw.device)
        slots = torch.full_like(positions, -1)
        rope_and_write(query, *cache, heads, cos, sin, slots)
        angles = positions[:, None].cpu().double() * inverse_frequencies(RopeConfig(rotary_dim=16))
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        x = heads[:, :2].cpu().double()
        turned = torch.complex(x[..., :8], x[..., 8:]) * turn
        want = torch.cat((turned.real, turned.imag), -1)
        atol = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        torch.testing.assert_close(query.cpu().double(), want, atol=atol, rtol=0)

    @pytest.mark.parametrize(
        ("groups", "ends", "types", "axes"),
        [(1, 0, False, 0), (3, 0, False, 3), (1, 1, True, 0), (2, 3, False, 0), (1, 2, True, 3)],
    )
    @pytest.mark.parametrize(("sizes", "padded"), STEPS)
    def test_unpack_step(self, draw, sizes, padded, groups, ends, types, axes):
        sizes, padded = StepSizes(*sizes), StepSizes(*padded)
        tokens, requests, samples = sizes
        per_token = 2 + groups + types + axes + ends
        lengths = [tokens] * per_token + [requests] * 3 + [samples] * 3
        given = [np.random.default_rng(i).integers(0, 2**31, n) for i, n in enumerate(lengths)]
        packed = torch.from_numpy(np.concatenate([*given, [77]])).to(draw.device)
        options = groups, ends, types, axes
        ours, same = (self.used(padded, draw.device, *options) for _ in range(2))
        assert ours.num_packed(sizes) == len(packed) - 1
        unpack_step(ours, packed, sizes, padded)
        plain.unpack_step(same, packed[:-1], sizes, padded)
        paddings = [-1, 0, *[-1] * groups, *[0] * (types + axes + ends), tokens, 0, 0, 0, -1, 0]
        limits = [padded[0]] * per_token + [padded[1] + 1, *padded[1:2] * 2, *padded[2:] * 3]
        fields = zip(self.fields(ours), self.fields(same), strict=True)
        for (found, equal), numbers, padding, end in zip(
            fields, given, paddings, limits, strict=True
        ):
            want = [*numbers.tolist(), *[padding] * (end - len(numbers)), *[-77] * 3]
            assert found.tolist() == equal.tolist() == want

    @staticmethod
    def fields(step):
        """Return the tensors in the order of the packed numbers."""
        tensors = (getattr(step, name) for name in StepTensors.__slots__)
        return [part for tensor in tensors for part in (tensor if tensor.dim() > 1 else [tensor])]

    @staticmethod
    def used(padded, device, *options):
        """Return larger tensors that contain the values of an earlier step."""
        step = StepTensors.allocate(StepSizes(*(size + 3 for size in padded)), device, *options)
        for name in StepTensors.__slots__:
            getattr(step, name).fill_(-77)
        return step

    def test_new_tensors_contain_only_padding(self, draw):
        sizes = StepSizes(5, 3, 2)
        step, unpacked = (
            StepTensors.allocate(sizes, draw.device, 2, 1, has_types=True, num_axes=3)
            for _ in range(2)
        )
        unpack_step(unpacked, step.positions[:0], StepSizes(0, 0, 0), sizes)
        for name in StepTensors.__slots__:
            assert torch.equal(getattr(step, name), getattr(unpacked, name)), name

    def test_wrong_arguments_are_refused(self, draw, dtype):
        x, ids = draw.normal(4, 8, dtype=dtype), draw.integers(0, 4, 4)
        with pytest.raises(AssertionError, match="length"):
            embed(x[:, :4], x, ids, ids)
        with pytest.raises(AssertionError, match="int64"):
            embed(x, x, ids.int(), ids)
        with pytest.raises(AssertionError, match="each row"):
            gather_rows(x, x, ids[:2])
        with pytest.raises(AssertionError, match="pair"):
            rope_tables(x, x, ids, draw.normal(8), 1.0)
        with pytest.raises(AssertionError, match="axes: one for each pair"):
            rope_tables(x, x, ids, draw.normal(4), 1.0, ids[:3])
        with pytest.raises(AssertionError, match="a row for each axis"):
            rope_tables(x, x, ids, draw.normal(4), 1.0, ids)
        step = StepTensors.allocate(StepSizes(4, 2, 2), draw.device)
        with pytest.raises(AssertionError, match="shorter"):
            unpack_step(step, ids, StepSizes(4, 1, 1), StepSizes(4, 1, 1))
        with pytest.raises(AssertionError, match="num_requests: 1 padded to 3, of 2"):
            unpack_step(step, ids, StepSizes(0, 1, 0), StepSizes(4, 3, 1))
