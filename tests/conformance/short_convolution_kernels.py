"""The tests of the kernel of gated short convolutions: outputs and states equal `reference`,
whatever the steps."""

from __future__ import annotations

import pytest
import torch
from conformance.recurrent_steps import LENGTH, STEPS, Run, put, rows_of, tolerances
from support.kernel_helpers import assert_close
from support.variants import each_once

from shmllm_kernels.gpu import short_convolution
from shmllm_kernels.gpu.configs import has_dependent_launches
from shmllm_kernels.reference.convolution import convolve_gated, convolve_gated_ahead


class ShortConvolutionConformance:
    @pytest.mark.parametrize(
        ("sizes", "steps"),
        each_once([(2, False, 32), (3, False, 4), (4, True, 3), (7, False, 6)], STEPS),
    )
    def test_outputs_and_states(self, draw, dtype, monkeypatch, sizes, steps) -> None:
        """Also where the tokens of a request are those of several programs."""
        taps, has_bias, most_rows = sizes
        monkeypatch.setattr(short_convolution, "ROWS", most_rows)
        channels = 150
        x = draw.normal(2, LENGTH, 3 * channels, dtype=dtype)
        weights = draw.normal(taps, channels, dtype=dtype)
        bias = draw.normal(channels, dtype=dtype) if has_bias else None
        run = Run((taps - 1) * channels + 3, draw.device)
        out = torch.full_like(x[..., :channels], float("nan"))
        for step in steps:
            rows = rows_of(x, step)
            own, given = torch.full_like(rows[:, :channels], float("nan")), rows.clone()
            short_convolution.short_convolution(
                own, rows, weights, bias, run.states, run.requests(step),
                max(end - start for _, start, end in filter(None, step)),
                has_dependent_launches(draw.device),
            )  # fmt: skip
            put(out, own, step)
            assert torch.equal(rows, given)
        zeros = torch.zeros(taps - 1, channels, device=draw.device)
        for request in range(2):
            want, _ = convolve_gated(x[request], weights, bias, zeros)
            assert_close(out[request], want, *tolerances(dtype))
            for end in (4, 8, LENGTH):
                _, state = convolve_gated(x[request, :end], weights, bias, zeros)
                found = run.state(request, end)
                assert torch.equal(found[: state.numel()].view_as(state), state)
                assert found[state.numel() :].isnan().all(), "it wrote beside"

    @pytest.mark.parametrize(("taps", "ahead", "most_rows"), [(3, 1, 4), (4, 1, 32), (7, 5, 6)])
    def test_outputs_of_convolutions_that_look_ahead(
        self, draw, dtype, monkeypatch, taps, ahead, most_rows
    ) -> None:
        monkeypatch.setattr(short_convolution, "ROWS", most_rows)
        channels, step = 150, [(0, 0, 2), None, (1, 0, LENGTH)]
        x = rows_of(draw.normal(2, LENGTH, 3 * channels, dtype=dtype), step)
        weights = draw.normal(taps, channels, dtype=dtype)
        bias = draw.normal(channels, dtype=dtype)
        run, out = (
            Run((taps - 1) * channels, draw.device),
            torch.full_like(x[:, :channels], float("nan")),
        )
        short_convolution.short_convolution(
            out, x, weights, bias, run.states, run.requests(step), LENGTH,
            has_dependent_launches(draw.device), ahead,
        )  # fmt: skip
        wanted = [convolve_gated_ahead(each, weights, bias, ahead) for each in x.split([2, LENGTH])]
        assert_close(out, torch.cat(wanted), *tolerances(dtype))
        assert run.states.isnan().all()
