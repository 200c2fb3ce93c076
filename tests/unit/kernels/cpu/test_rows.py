"""CPU kernels of single rows: compared with torch, and independent of the batch."""

from __future__ import annotations

import pytest
import torch
from support.cpu_kernels import run_kernel
from torch import Tensor

from shmllm_kernels.cpu import word_of_float
from shmllm_kernels.cpu.rows import (
    ACTIVATE,
    CLIP,
    EMBED,
    FORBID_BEHIND,
    GATHER,
    NUMBERS_AT_ONCE,
    ROPE_TABLES,
    SCALE_AND_CAP,
)
from shmllm_kernels.reference.activation import activate

KINDS = ["float32", "float16", "bfloat16"]
ROWS = [0, 1, 3, 40]
ONE = word_of_float(1)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_are_looked_up_except_for_negative_ids(kind: str, rows: int) -> None:
    table = torch.randn(50, 20).to(getattr(torch, kind))
    ids = torch.randint(0, 50, (rows,))
    ids[::3] = -1
    out = torch.full((rows, 20), 7.0)
    run_kernel(EMBED[kind], rows, ids, table, out, 20, ONE, ONE, 0, 0, 0, 50, 0, 0)
    expected = torch.where(ids[:, None] < 0, torch.tensor(7.0), table[ids].float())
    assert torch.equal(out, expected)


@pytest.mark.parametrize("embeds_scale", [1.0, 25.25])
@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_are_scaled_and_get_those_of_positions(kind: str, embeds_scale: float) -> None:
    dtype = getattr(torch, kind)
    table, learned = torch.randn(50, 20).to(dtype), torch.randn(9, 20).to(dtype)
    ids, positions = torch.randint(0, 50, (30,)), torch.randint(0, 9, (30,))
    ids[::4] = -1
    given = torch.randn(30, 20)
    out = given.clone()
    scales = word_of_float(25.25), word_of_float(embeds_scale)
    run_kernel(EMBED[kind], 30, ids, table, out, 20, *scales, positions, learned, 0, 50, 0, 0)
    tokens = table[ids].float() * 25.25
    expected = torch.where(ids[:, None] < 0, given * embeds_scale, tokens)
    assert torch.equal(out, expected + learned[positions].float())


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_get_those_of_token_types(kind: str) -> None:
    table, of_types = (torch.randn(rows, 20).to(getattr(torch, kind)) for rows in (50, 2))
    ids, types = torch.randint(0, 50, (30,)), torch.randint(0, 2, (30,))
    out = torch.empty(30, 20)
    run_kernel(EMBED[kind], 30, ids, table, out, 20, ONE, ONE, 0, 0, 0, 50, types, of_types)
    assert torch.equal(out, table[ids].float() + of_types[types].float())


@pytest.mark.parametrize(("first", "end"), [(0, 20), (20, 50)])
def test_a_part_of_a_table_gives_the_embeddings_of_its_tokens(first: int, end: int) -> None:
    table, ids = torch.randn(50, 20), torch.randint(0, 50, (30,))
    ids[::4] = -1
    out, twice = torch.full((30, 20), 7.0), word_of_float(2.0)
    part = table[first:end].clone()
    run_kernel(EMBED["float32"], 30, ids, part, out, 20, ONE, twice, 0, 0, first, end, 0, 0)
    is_own = ((ids >= first) & (ids < end))[:, None]
    given = torch.where((ids[:, None] < 0) & (first == 0), torch.tensor(14.0), torch.tensor(7.0))
    assert torch.equal(out, torch.where(is_own, table[ids], given))


@pytest.mark.parametrize("rows", ROWS)
def test_rows_are_gathered(rows: int) -> None:
    source, out = torch.randn(60, 24), torch.full((41, 24), -1.0)
    indices = torch.randint(0, 60, (rows,))
    run_kernel(GATHER, rows, indices, source, out, 24)
    assert torch.equal(out[:rows], source[indices])
    assert (out[rows:] == -1).all()


def activated(name: str, is_gated: bool, x: Tensor, num_threads: int = 2) -> Tensor:
    width = x.shape[1] // 2 if is_gated else x.shape[1]
    out = torch.full((len(x), width), float("nan"))
    run_kernel(ACTIVATE[name, is_gated], len(x), x, out, width, num_threads=num_threads)
    return out


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [6, 80, 1376])
@pytest.mark.parametrize(("name", "is_gated"), ACTIVATE)
def test_activations_equal_torchs(name: str, is_gated: bool, rows: int, width: int) -> None:
    x = torch.randn(rows, width) * 10
    if rows:
        x[0, :3] = torch.tensor([-1e4, 1e4, 0.0])
    expected = activate(x.double(), name, is_gated)
    torch.testing.assert_close(
        activated(name, is_gated, x).double(), expected, atol=1e-6, rtol=2e-6
    )


@pytest.mark.parametrize(("name", "is_gated"), ACTIVATE)
def test_a_row_is_activated_to_the_same_bits_in_any_batch(name: str, is_gated: bool) -> None:
    x = torch.randn(33, 202)
    alone = [activated(name, is_gated, row[None], num_threads=1) for row in x]
    assert torch.equal(activated(name, is_gated, x), torch.cat(alone))


@pytest.mark.parametrize("count", [0, 3, 5])
def test_columns_are_forbidden_whatever_they_contain(count: int) -> None:
    x = torch.full((3, 5), torch.nan)
    run_kernel(FORBID_BEHIND, 2, x, 5, count)
    assert x[:2, :count].isnan().all()
    assert (x[:2, count:] == -torch.inf).all()
    assert x[2].isnan().all()


def scaled(x: Tensor, scale: float, cap: float, num_threads: int = 2) -> Tensor:
    out, numbers = x.clone(), (word_of_float(scale), word_of_float(cap))
    run_kernel(SCALE_AND_CAP, len(x), out, x.shape[1], *numbers, num_threads=num_threads)
    return out


@pytest.mark.parametrize(("rows", "width"), [(0, 5), (3, 5000), (4, NUMBERS_AT_ONCE)])
def test_numbers_are_bounded(rows: int, width: int) -> None:
    x = torch.randn(rows, width)
    if rows:
        x[0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    out = x.clone()
    run_kernel(CLIP, len(x), out, width, word_of_float(0.75))
    torch.testing.assert_close(out, x.clamp(-0.75, 0.75), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("cap", [0.0, 30.0])
@pytest.mark.parametrize(("rows", "width"), [(0, 5), (1, 7), (3, 5000), (4, NUMBERS_AT_ONCE)])
def test_logits_are_scaled_and_capped(rows: int, width: int, cap: float) -> None:
    x = torch.randn(rows, width) * 300
    expected = x.double() * 0.25
    if cap:
        expected = cap * torch.tanh(expected / cap)
    torch.testing.assert_close(scaled(x, 0.25, cap).double(), expected, atol=1e-6, rtol=1e-6)


def test_a_capped_row_has_the_same_bits_in_any_batch_and_keeps_a_nan() -> None:
    x = torch.randn(9, 1000) * 30
    x[4, 17] = torch.nan
    alone = [scaled(row[None], 0.5, 10.0, num_threads=1) for row in x]
    whole = scaled(x, 0.5, 10.0)
    assert torch.equal(whole.nan_to_num(nan=99.0), torch.cat(alone).nan_to_num(nan=99.0))
    assert whole.isnan().nonzero().tolist() == [[4, 17]]


@pytest.mark.parametrize("scale", [1.0, 1.25])
def test_rope_tables_are_cosines_and_sines_of_float32_angles(scale: float) -> None:
    positions = torch.tensor([0, 1, 17, 4095, 131071])
    frequencies = 1 / 10000.0 ** (torch.arange(0, 64, 2) / 64)
    cos, sin = torch.empty(5, 32), torch.empty(5, 32)
    run_kernel(ROPE_TABLES[False], 5, positions, frequencies, 32, cos, sin, word_of_float(scale))
    angles = (positions[:, None].float() * frequencies).double()
    torch.testing.assert_close(cos.double(), angles.cos() * scale, atol=2e-7, rtol=0)
    torch.testing.assert_close(sin.double(), angles.sin() * scale, atol=2e-7, rtol=0)


def test_rope_tables_take_the_position_on_the_axis_of_each_pair() -> None:
    positions = torch.randint(0, 4096, (3, 50))
    frequencies = 1 / 10000.0 ** (torch.arange(0, 64, 2) / 64)
    axes = torch.randint(0, 3, (32,))
    cos, sin, *alone = (torch.empty(41, 32) for _ in range(4))
    scale, stride = word_of_float(1.25), 8 * positions.stride(0)
    run_kernel(ROPE_TABLES[True], 41, positions, frequencies, 32, cos, sin, scale, axes, stride)
    for axis in range(3):
        run_kernel(ROPE_TABLES[False], 41, positions[axis], frequencies, 32, *alone, scale)
        for found, wanted in zip((cos, sin), alone, strict=True):
            assert torch.equal(found[:, axes == axis], wanted[:, axes == axis])
