"""The tests of the choice of the experts of few tokens in one launch: it equals the launches for
norm, router, choice and layout."""

from __future__ import annotations

import pytest
import torch
from conformance.expert_kernels import (
    check_pairs,
    layout_of,
    run_programs_in_order,
    starts,
    tolerances,
)
from support.kernel_helpers import assert_close, poisoned

from shmllm_kernels.gpu import few_routing
from shmllm_kernels.gpu.configs import has_dependent_launches
from shmllm_kernels.gpu.few_routing import route_rows, takes
from shmllm_kernels.gpu.norm import rms_norm
from shmllm_kernels.gpu.row_operands import RowNorm
from shmllm_kernels.reference import moe as plain

BY_SOFTMAX = plain.Choice(divides_by_all=True)
IN_GROUPS = plain.Choice(
    divides_by_all=False, is_sigmoid=True, num_groups=4, top_groups=2, num_best=2, scale=2.5
)
BY_LOGITS = plain.Choice(divides_by_all=True, is_sigmoid=True, ranks_logits=True)
CASES = [
    (1, 8, 2, 64, 1, BY_SOFTMAX),
    (8, 16, 3, 2049, 0, IN_GROUPS),
    (5, 60, 4, 100, 1, BY_SOFTMAX),
    (3, 512, 10, 64, 0, IN_GROUPS),
    (2, 12, 3, 9000, 0, IN_GROUPS),
    (5, 24, 6, 64, 0, BY_LOGITS),
]
"""Tokens, experts, the number that each token goes to, the width of rows, further columns of the
router, and how experts are chosen."""


class Routed:
    """What a launch reads, and what it has written."""

    def __init__(self, draw, dtype, tokens, experts, top_k, hidden, more, *, exact=False) -> None:
        device, of_router = draw.device, torch.float32 if exact else dtype
        self.experts, self.device, columns = experts, device, experts + more
        self.x = draw.normal(tokens, hidden + 3, dtype=dtype, scale=2.0)[:, :hidden]
        self.norm = RowNorm(draw.normal(hidden, dtype=dtype), 1e-5)
        self.router = draw.normal(columns, hidden, dtype=of_router, scale=hidden**-0.5)
        self.router_bias = draw.normal(columns, dtype=of_router)
        self.bias = draw.normal(experts)
        self.scales = draw.normal(experts, dtype=dtype)
        self.normed = poisoned(tokens, hidden, dtype=dtype, device=device)
        self.logits = poisoned(tokens, columns, dtype=of_router, device=device)
        self.ids = torch.full((tokens, top_k), -7, dtype=torch.int32, device=device)
        self.weights = poisoned(tokens, top_k, dtype=torch.float32, device=device)
        self.counter = torch.zeros(1, dtype=torch.int32, device=device)

    def run(self, choice, existing=None, **options) -> None:
        """Launch, with what is not among the options."""
        tokens = len(self.x)
        options = {"norm": self.norm, "router_bias": self.router_bias, "bias": self.bias} | options
        options = {"scales": self.scales, "layout": None} | options
        route_rows(
            self.ids, self.weights, self.logits, self.experts, self.normed, self.x,
            router=self.router, counter=self.counter, choice=choice,
            query_starts=starts(tokens if existing is None else existing, self.device),
            is_dependent=has_dependent_launches(self.device), **options,
        )  # fmt: skip
        assert self.counter.item() == 0, "the counter is not 0 behind the launch"

    def check(self, choice, dtype, *, has_norm=True, existing=None, factor=1.0, other=None) -> None:
        """Compare what a launch with all options has written."""
        read, existing = self.x, len(self.x) if existing is None else existing
        if has_norm:
            read, stored = (torch.empty_like(self.normed) for _ in range(2))
            rms_norm(read, self.x, self.norm.weight, self.norm.eps, self.norm.offset)
            of_experts = self.norm if other is None else other
            rms_norm(stored, self.x, of_experts.weight, of_experts.eps, of_experts.offset)
            assert_close(self.normed, stored, *tolerances(dtype))
            read = read * factor if other is not None else self.normed
        else:
            assert self.normed.isnan().all(), "there was no norm to store"
        logits = read.double() @ self.router.double().T + self.router_bias.double()
        assert_close(self.logits, logits.to(self.logits.dtype), *tolerances(dtype))
        own = self.logits[:existing, : self.experts].float()
        top_k = self.ids.shape[1]
        ids, weights = plain.route(own, top_k, choice, self.bias)
        assert torch.equal(self.ids[:existing].long(), ids)
        assert (self.ids[existing:] == -1).all()
        assert_close(self.weights[:existing], weights * self.scales.float()[ids], 1e-5, 1e-5)


class FewRoutingConformance:
    @pytest.mark.parametrize("exact", [True, False])
    @pytest.mark.parametrize("case", CASES)
    def test_norm_router_and_choice(self, draw, dtype, case, exact):
        *sizes, choice = case
        routed = Routed(draw, dtype, *sizes, exact=exact)
        for _ in range(2):  # nothing is left of the first launch that the second one may not find
            routed.run(choice)
            routed.check(choice, dtype)

    def test_a_choice_as_sparse_mixer(self, draw, dtype):
        choice = plain.Choice(divides_by_all=True, mixer_limit=0.4)
        routed = Routed(draw, dtype, 5, 16, 2, 64, 0, exact=True)
        routed.bias = None
        routed.run(choice)
        routed.check(choice, dtype)

    def test_a_norm_with_an_offset(self, draw, dtype):
        routed = Routed(draw, dtype, 4, 8, 2, 64, 0)
        routed.norm = RowNorm(routed.norm.weight, 1e-5, offset=1.0)
        routed.run(BY_SOFTMAX)
        routed.check(BY_SOFTMAX, dtype)

    @pytest.mark.parametrize("tokens", [1, 4])
    @pytest.mark.parametrize("offset", [0.0, 1.0])
    def test_experts_that_read_another_norm(self, draw, dtype, tokens, offset):
        """The router's rows have a factor."""
        routed = Routed(draw, dtype, tokens, 8, 2, 100, 1)
        routed.norm = RowNorm(routed.norm.weight, 1e-5, offset=offset)
        other = RowNorm(draw.normal(100, dtype=dtype), 1e-5, offset=offset)
        for _ in range(2):
            routed.run(BY_SOFTMAX, factor=0.1, experts_norm=other)
            routed.check(BY_SOFTMAX, dtype, factor=0.1, other=other)

    def test_rows_that_have_been_normalised(self, draw, dtype):
        routed = Routed(draw, dtype, 4, 8, 2, 64, 0)
        routed.run(BY_SOFTMAX, norm=None)
        routed.check(BY_SOFTMAX, dtype, has_norm=False)

    def test_without_biases_and_scales(self, draw, dtype):
        routed = Routed(draw, dtype, 4, 8, 2, 64, 0)
        routed.run(BY_SOFTMAX, router_bias=None, bias=None, scales=None)
        routed.router_bias, routed.bias = routed.router_bias * 0, None
        routed.scales = torch.ones_like(routed.scales)
        routed.check(BY_SOFTMAX, dtype)

    @pytest.mark.parametrize("most", [1, 1000])
    def test_some_tokens_in_a_program(self, draw, dtype, monkeypatch, most):
        """All seven in each program, or one."""
        monkeypatch.setattr(few_routing, "PER_PROCESSOR", most)
        routed = Routed(draw, dtype, 7, 8, 2, 4000, 0)
        routed.run(BY_SOFTMAX)
        routed.check(BY_SOFTMAX, dtype)

    @pytest.mark.parametrize("tokens", [1, 2, 8])
    def test_pairs_are_laid_out(self, draw, dtype, tokens):
        """Those of padded tokens are not, whatever their rows are."""
        existing = max(tokens - 1, 1)
        routed = Routed(draw, dtype, tokens, 20, 4, 64, 1)
        routed.x[existing:] = torch.nan
        layout = layout_of(tokens, 4, 20, 16, draw.device)
        for _ in range(2):
            layout.pairs.pairs.fill_(-99)
            routed.run(BY_SOFTMAX, existing, layout=layout)
            check_pairs(layout.pairs, routed.ids, 20, 16)
            assert (routed.ids[existing:] == -1).all()

    def test_the_bits_of_a_token_do_not_depend_on_others(self, draw, dtype):
        routed = Routed(draw, dtype, 8, 20, 4, 100, 0)
        routed.run(BY_SOFTMAX)
        names = "x", "normed", "logits", "ids", "weights"
        whole = {name: getattr(routed, name).clone() for name in names}
        for begin, end in ((0, 1), (2, 5), (7, 8)):
            for name in names:
                setattr(routed, name, whole[name][begin:end].clone())
            routed.run(BY_SOFTMAX)
            for name in names:
                assert torch.equal(getattr(routed, name), whole[name][begin:end]), name

    def test_a_step_without_tokens(self, draw, dtype):
        routed = Routed(draw, dtype, 0, 8, 2, 64, 0)
        layout = layout_of(0, 2, 8, 16, draw.device)
        routed.run(BY_SOFTMAX, layout=layout)
        assert layout.pairs.num_blocks.item() == 0

    def test_the_choice_does_not_depend_on_which_program_is_the_last(
        self, draw, dtype, monkeypatch
    ):
        """Only the interpreter has programs in a certain order: here five with logits, and one with
        rows, of each token."""
        routed = Routed(draw, dtype, 4, 20, 4, 2000, 0)
        for order in (lambda x: x, lambda x: 5 - x, lambda x: (x + 4) % 6):
            with monkeypatch.context() as patch:
                run_programs_in_order(patch, order)
                routed.run(BY_SOFTMAX)
            routed.check(BY_SOFTMAX, dtype)

    def test_what_it_takes(self):
        assert takes(512)
        assert not takes(513)
