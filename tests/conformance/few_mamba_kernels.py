"""The tests of the kernels of Mamba 1 of few tokens: outputs and states equal `reference`, and have
the same bits whatever the steps."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from conformance.recurrent_steps import LENGTH, Run, put, rows_of, tolerances
from support.kernel_helpers import assert_close
from support.variants import each_once, slow
from torch import Tensor

from shmllm_kernels.gpu import few_mamba_inputs, few_mamba_scan
from shmllm_kernels.gpu.configs import has_dependent_launches
from shmllm_kernels.reference import convolution, mamba
from shmllm_kernels.reference.norm import rms_norm

SIZES = [(600, 16, 40, 2), (40, 3, 20, 4), (530, 20, 7, 3), (40, 64, 70, 3), (4200, 2, 130, 4)]
"""Channels, state_size, rank and taps. The last one has more parts than are added at a time."""
STEPS = [
    [[(0, 0, 8)], [(1, 0, 8)], [(0, 8, 11), (1, 8, 11)]],
    [[(0, 0, 3), (1, 0, 5)], [(1, 5, 9), None, (0, 3, 7)], [None, (1, 9, 11), (0, 7, 11)]],
    [[(0, 0, 4)], [(1, 0, 1), (0, 4, 5)], [(0, 5, 8), (1, 1, 2)], [(1, 2, 10)], [(0, 8, 11)]],
]
"""Steps of two requests, see `recurrent_steps.STEPS`, of at most eight tokens. The last ones end
before the last token of a request."""
NORMS_AND_BIASES = [("weights", True), ("plain", False), (None, True)]


@dataclass
class Layer:
    """A Mamba with random weights, and the inputs and gates of two requests."""

    x: Tensor
    taps: Tensor
    bias: Tensor | None
    x_proj: Tensor
    dt_proj: Tensor
    dt_bias: Tensor
    norms: list[Tensor] | None
    eps: float | None
    logs: Tensor
    skips: Tensor

    @staticmethod
    def draw(draw, dtype, sizes, norms, has_bias):
        """Draw one. The norms are "weights", "plain" or None, as in `MambaSpec`."""
        channels, state_size, rank, taps = sizes
        parts = [rank, state_size, state_size]
        return Layer(
            draw.normal(2, LENGTH, 2 * channels, dtype=dtype),
            draw.normal(taps, channels, dtype=dtype),
            draw.normal(channels, dtype=dtype) if has_bias else None,
            draw.normal(sum(parts), channels, dtype=dtype) / channels**0.5,
            draw.normal(channels, rank, dtype=dtype) / rank**0.5,
            draw.normal(channels, dtype=dtype),
            [1 + draw.normal(size, dtype=dtype) for size in parts] if norms == "weights" else None,
            None if norms is None else 1e-5,
            draw.normal(state_size, channels),
            draw.normal(channels),
        )

    @property
    def channels(self):
        return len(self.skips)

    def run(self, draw, steps):
        """Run the kernels. Returns the steps' `Run`, outputs, and projections."""
        x, width = self.x, len(self.x_proj)
        run = Run((len(self.taps) - 1 + len(self.logs)) * self.channels + 5, x.device)
        out = torch.full_like(x[..., : self.channels], float("nan"))
        projections = torch.full((2, LENGTH, width), float("nan")).to(x)
        counters = torch.zeros(few_mamba_inputs.num_row_blocks(width), dtype=torch.int32).to(
            x.device
        )
        is_dependent = has_dependent_launches(x.device)
        for step in steps:
            rows = rows_of(x, step)
            rows = torch.cat([rows, torch.full_like(x[0, : len(rows) < 8], float("nan"))])
            own = torch.full_like(rows[:, : self.channels], float("nan"))
            projected = torch.full((len(rows), width), float("nan")).to(x)
            parts = draw.normal(len(rows), few_mamba_inputs.num_parts(self.channels), width)
            shared = self.taps, self.bias
            few_mamba_inputs.project_inputs(
                projected, parts, rows, *shared, self.x_proj, run.states, counters,
                run.requests(step), is_dependent,
            )  # fmt: skip
            assert not counters.any(), "a counter is not 0 behind the launch"
            few_mamba_scan.scan_inputs(
                own, rows, projected, *shared, self.dt_proj, self.dt_bias, self.norms, self.eps,
                self.logs, self.skips, run.states, run.requests(step), is_dependent,
            )  # fmt: skip
            count = sum(end - start for _, start, end in filter(None, step))
            assert own[count:].isnan().all(), "it wrote behind the last token"
            assert projected[count:].isnan().all()
            put(projections, projected, step)
            put(out, own, step)
        return run, out, projections

    def expected(self, x, projections):
        """Return what the reference computes of a request, each part from the kernels' result of
        the one before, and the sums of the terms' sizes.

        Args:
            x: [tokens, 2 * channels], the request's rows.
            projections: [tokens, width], the kernels' projections.

        Returns:
            outputs, the convolution's state, the other state; then the sizes of the outputs' terms
            and of that state's.
        """
        mixed, gates = x.split(self.channels, -1)
        zeros = torch.zeros(len(self.taps) - 1, self.channels, device=x.device)
        mixed, inputs = convolution.convolve(mixed, self.taps, self.bias, zeros)
        wanted = (mixed.float() @ self.x_proj.float().T).to(x.dtype)
        assert_close(projections, wanted, *tolerances(x.dtype))
        rank, state_size = self.dt_proj.shape[1], len(self.logs)
        parts = projections.float().split([rank, state_size, state_size], -1)
        if self.eps is not None:
            weights = self.norms or [torch.ones_like(part[0]) for part in parts]
            pairs = zip(parts, weights, strict=True)
            parts = [rms_norm(part, weight.float(), self.eps) for part, weight in pairs]
        low, key, query = (part.to(x.dtype).float() for part in parts)
        times = (low @ self.dt_proj.float().T + self.dt_bias.float()).to(x.dtype)
        of_channels = F.softplus(times.float()), self.logs
        zeros = torch.zeros_like(self.logs)
        out, state = mamba.selective_scan(mixed, key, query, *of_channels, self.skips, zeros)
        terms = mixed.abs(), key.abs(), query.abs(), *of_channels, self.skips.abs(), zeros
        out_size, state_size = mamba.selective_scan(*terms)
        return out * F.silu(gates), inputs, state, out_size * F.silu(gates).abs(), state_size


def check_sums(got, want, size, dtype):
    """Check sums that may cancel out: rounding a term errs by a share of the term.

    Args:
        got, want: the sums.
        size: those of the sizes of the terms.
        dtype: of what was rounded.
    """
    size = size.float().clamp(min=1)
    assert_close(got.float() / size, want.float() / size, *tolerances(dtype))


class FewMambaConformance:
    @pytest.mark.parametrize(
        ("sizes", "steps", "norms_and_bias"),
        each_once(SIZES[:3], STEPS[:2], NORMS_AND_BIASES)
        + [slow(*each) for each in itertools.product(SIZES[3:], STEPS[:2], NORMS_AND_BIASES)],
    )
    def test_outputs_and_states_equal_the_reference(
        self, draw, dtype, sizes, steps, norms_and_bias
    ):
        norms, has_bias = norms_and_bias
        layer = Layer.draw(draw, dtype, sizes, norms, has_bias)
        run, out, projections = layer.run(draw, steps)
        assert out.dtype is dtype
        for request, end in itertools.product(range(2), (4, 8, LENGTH)):
            x, projected = layer.x[request, :end], projections[request, :end]
            wanted, inputs, state, out_size, state_size = layer.expected(x, projected)
            check_sums(out[request, :end], wanted, out_size, dtype)
            found, rest = run.state(request, end).split([inputs.numel(), state.numel() + 5])
            assert torch.equal(found.view_as(inputs), inputs)
            check_sums(rest[:-5].view_as(state), state, state_size, dtype)
            assert rest[-5:].isnan().all(), "it wrote beside"

    @pytest.mark.parametrize("sizes", [SIZES[1], SIZES[3], slow(SIZES[4])])
    def test_no_bit_depends_on_the_steps(self, draw, dtype, sizes):
        layer = Layer.draw(draw, dtype, sizes, "weights", True)
        run, out, projections = layer.run(draw, STEPS[0])
        for steps in STEPS[1:]:
            other, *found = layer.run(draw, steps)
            for got, want in zip(found, (out, projections), strict=True):
                is_there = ~got.isnan()
                assert is_there[0].all()
                assert torch.equal(got[is_there], want[is_there])
            for end in (4, 8, LENGTH):
                got, want = (each.state(0, end)[:-5] for each in (other, run))
                assert torch.equal(got, want)

    def test_what_fits_into_registers(self):
        assert few_mamba_scan.takes(512, 64)
        assert not few_mamba_scan.takes(513, 16)
        assert not few_mamba_scan.takes(256, 65)

    @pytest.mark.parametrize("step", [[], [None, None]])
    def test_a_step_without_requests(self, draw, dtype, step):
        layer = Layer.draw(draw, dtype, SIZES[1], None, False)
        run, *_ = layer.run(draw, [step])
        assert run.states.isnan().all()
