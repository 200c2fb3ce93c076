"""The tests of the kernels beside latent attention of few tokens: they equal the references, and a
token's bits do not depend on the others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from conformance.attention_kernels import product_of_single_rows, tolerances
from conformance.latent_kernels import Case, Launch
from support.kernel_helpers import assert_close, poisoned

from shmllm_kernels.gpu import latent_heads
from shmllm_kernels.gpu.configs import has_dependent_launches
from shmllm_kernels.gpu.latent_attention import attend_parts
from shmllm_kernels.gpu.latent_heads import absorb_queries, project_values
from shmllm_kernels.reference.latent_attention import paged_latent_attention
from shmllm_kernels.reference.latent_write import write_latents
from shmllm_kernels.reference.rope import rotate

WIDTHS = ((512, 128, 64, 128), (40, 12, 8, 10), (33, 192, 6, 17))
"""rank, nope_dim, rope_dim, value_dim: DeepSeek's, and others that no tile divides."""


class Queries:
    """The tensors of a launch of `absorb_queries`."""

    def __init__(self, draw, dtype, tokens: int, heads: int, widths, interleaved=False) -> None:
        self.rank, self.nope, rope, _ = widths
        self.heads, self.interleaved = heads, interleaved
        self.query = draw.normal(tokens, heads * (self.nope + rope), dtype=dtype)
        self.key_up = draw.normal(heads, self.rank, self.nope, dtype=dtype, scale=self.nope**-0.5)
        self.x = draw.normal(tokens, self.rank + rope + 3, dtype=dtype)[:, : self.rank + rope]
        self.weight = draw.normal(self.rank, dtype=dtype)
        angles = draw.normal(tokens, rope // 2, scale=9.0)
        self.cos = torch.cat([angles.cos()] * 2, -1).to(dtype)
        self.sin = torch.cat([-angles.sin(), angles.sin()], -1).to(dtype)
        slots = [9, 2, -1, 0, 7, 1, 10, -1][:tokens]
        self.slots = torch.tensor(slots, dtype=torch.int64, device=draw.device)
        cache = poisoned(4, 4, self.rank + rope, dtype=dtype, device=draw.device)
        self.cache = cache[:, :3]  # blocks of other layers lie between those of this one

    def run(self, begin: int = 0, end: int = 8):
        """Return latent queries, queries, and the cache after a launch of some tokens."""
        query = self.query[begin:end].clone()
        size = len(query), self.heads, self.rank + 5
        latents = poisoned(*size, dtype=query.dtype, device=query.device)
        cache = self.cache.clone()
        absorb_queries(
            latents[..., : self.rank], query.unflatten(1, (self.heads, -1)), self.key_up, cache,
            self.x[begin:end], self.weight, 1e-6, self.cos[begin:end], self.sin[begin:end],
            self.slots[begin:end], self.interleaved, has_dependent_launches(query.device),
        )  # fmt: skip
        assert latents[..., self.rank :].isnan().all(), "it wrote beside its rows"
        return latents[..., : self.rank], query, cache


class LatentHeadsConformance:
    @pytest.mark.parametrize("interleaved", [True, False])
    @pytest.mark.parametrize("widths", WIDTHS)
    def test_queries_and_latents(self, draw, dtype, widths, interleaved):
        case = Queries(draw, dtype, 5, 3, widths, interleaved)
        latents, query, cache = case.run()
        bounds = tolerances(dtype)
        heads = case.query.unflatten(1, (3, -1))
        nope, rope = heads[..., : case.nope], heads[..., case.nope :]
        want = torch.einsum("thn,hrn->thr", nope.double(), case.key_up.double())
        assert_close(latents, want.to(dtype), *bounds)
        rotated = rotate(rope, case.cos[:, None], case.sin[:, None], interleaved)
        assert_close(
            query.unflatten(1, (3, -1))[..., case.nope :], rotated, 4 * bounds[0], bounds[1]
        )
        assert torch.equal(query.unflatten(1, (3, -1))[..., : case.nope], nope)
        wanted = case.cache.clone()
        tables = case.cos[:, None], case.sin[:, None]
        write_latents(wanted, case.x, case.weight, 1e-6, *tables, case.slots, interleaved)
        torch.testing.assert_close(
            cache.double(), wanted.double(), atol=4 * bounds[0], rtol=2 * bounds[1], equal_nan=True
        )

    @pytest.mark.parametrize("most", [1, 1000])
    def test_some_tokens_in_a_program(self, draw, dtype, monkeypatch, most):
        """All, or one."""
        case = Queries(draw, dtype, 5, 3, WIDTHS[0])
        one_by_one = case.run()
        monkeypatch.setattr(latent_heads, "PER_PROCESSOR", most)
        for mine, other in zip(case.run(), one_by_one, strict=True):
            assert torch.equal(mine.nan_to_num(), other.nan_to_num())

    def test_queries_of_no_token(self, draw, dtype):
        latents, _, cache = Queries(draw, dtype, 0, 2, WIDTHS[1]).run()
        assert len(latents) == 0
        assert cache.isnan().all()

    def test_the_bits_of_a_tokens_queries_do_not_depend_on_others(self, draw, dtype):
        case = Queries(draw, dtype, 8, 2, WIDTHS[0])
        together = case.run()
        for begin, end in ((0, 1), (1, 4), (7, 8)):
            for alone, all_tokens in zip(case.run(begin, end)[:2], together[:2], strict=True):
                assert torch.equal(alone, all_tokens[begin:end])

    @pytest.mark.parametrize("splits", [1, 2, 8])
    @pytest.mark.parametrize("widths", WIDTHS)
    def test_values(self, draw, dtype, widths, splits):
        """Some parts of the contexts have no keys."""
        rank, _, rope, value = widths
        lengths = (1, 21), (2, 90), (1, 1)
        case = Case(lengths, 3, rank, rope, num_splits=splits, padding=2)
        got, want = attended_values(draw, dtype, case, value)
        assert got[case.tokens :].isnan().all(), "a padded token was written"
        assert_close(got[: case.tokens], want[: case.tokens], *tolerances(dtype))

    def test_the_values_of_a_step_without_requests(self, draw, dtype):
        got, _ = attended_values(draw, dtype, Case((), padding=3), 10)
        assert got.isnan().all()

    @pytest.mark.parametrize("splits", [1, 4])
    def test_the_bits_of_a_tokens_values_do_not_depend_on_others(
        self, draw, dtype, splits, monkeypatch
    ):
        monkeypatch.setattr(np, "matmul", product_of_single_rows)
        case = Case(((5, 150),), num_splits=splits)
        launch, value_up = Launch(draw, dtype, case), draw.normal(4, 24, 32, dtype=dtype)
        whole = values_of(launch, value_up)
        for begin, end in ((0, 1), (1, 3), (3, 5)):
            part = Launch(draw, dtype, replace(case, lengths=((end - begin, 145 + end),)))
            part.query, part.rope_query = launch.query[begin:end], launch.rope_query[begin:end]
            part.cache, part.table = launch.cache, launch.table
            got = values_of(part, value_up)
            if splits == 1:  # other parts of a context have other bits
                assert torch.equal(got, whole[begin:end])
            assert_close(got, whole[begin:end], *tolerances(dtype))


def values_of(launch: Launch, value_up: torch.Tensor) -> torch.Tensor:
    """Return the values of an attention, in the launches of few tokens."""
    case, query = launch.case, launch.query
    latents = query.clone()
    tensors = latents, *launch.tensors()[1:]
    is_dependent = has_dependent_launches(query.device)
    parts = case.num_splits, launch.scratch()
    attend_parts(latents, *tensors, case.config, 0.17, *parts, is_dependent=is_dependent)
    width = case.heads * value_up.shape[1]
    out = poisoned(len(query), width, dtype=query.dtype, device=query.device)
    project_values(out, latents, value_up, launch.starts, *parts, is_dependent)
    return out


def attended_values(draw, dtype, case: Case, value: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of an attention, and those of the reference."""
    launch = Launch(draw, dtype, case)
    value_up = draw.normal(case.heads, value, case.rank, dtype=dtype, scale=case.rank**-0.5)
    got = values_of(launch, value_up)
    attended = paged_latent_attention(*launch.tensors(), 0.17).to(dtype).double()
    want = torch.einsum("thr,hvr->thv", attended, value_up.double()).flatten(1)
    return got, want.to(dtype)
