"""The kernels of several streams, and of sparse activations, equal `reference`."""

from __future__ import annotations

import pytest
import torch
from conformance.row_kernels import tolerances
from support.kernel_helpers import assert_close, poisoned

from shmllm_kernels.gpu import activation, altup
from shmllm_kernels.reference import activation as plain_activation
from shmllm_kernels.reference import altup as plain

FACTOR = 0.5
SHAPES = [(4, 3, 48), (3, 2, 1030), (1, 2, 16), (2, 0, 16)]


def drawn(draw, dtype, shape, num_sums):
    """Return streams, which lie apart, what is routed, and coefficients for that."""
    count, rows, width = shape
    streams = draw.normal(count, rows + 2, width, dtype=dtype)[:, :rows]
    return streams, draw.normal(rows, count, dtype=dtype), draw.normal(num_sums, count, dtype=dtype)


class AltUpConformance:
    @pytest.mark.parametrize("shape", SHAPES)
    def test_streams_are_predicted(self, draw, dtype, shape):
        count, rows, width = shape
        streams, routed, weight = drawn(draw, dtype, shape, count**2)
        out = poisoned(rows, width, dtype=dtype, device=draw.device)
        want = plain.predict(streams.float(), routed.float(), weight.float(), FACTOR)
        altup.predict(streams, routed, weight, FACTOR, count - 1, out)
        assert_close(streams, want.to(dtype), *tolerances(dtype))
        assert torch.equal(out, streams[-1])

    @pytest.mark.parametrize("has_scale", [True, False])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_streams_are_corrected(self, draw, dtype, shape, has_scale):
        (count, rows, width), active = shape, shape[0] // 2
        streams, routed, weight = drawn(draw, dtype, shape, count)
        x, scale = draw.normal(rows, width, dtype=dtype), draw.normal(width, dtype=dtype)
        wide = (each.float() for each in (streams, x, routed, weight))
        want = plain.correct(*wide, FACTOR, active)
        altup.correct(streams, x, routed, weight, FACTOR, active, scale if has_scale else None)
        assert_close(streams, want.to(dtype), *tolerances(dtype))
        of_active = want[active] * (scale.float() if has_scale else 1.0)
        assert_close(x, of_active.to(dtype), *tolerances(dtype))

    @pytest.mark.parametrize(("rows", "width"), [(0, 16), (3, 48), (2, 1030)])
    def test_magnitudes_are_those_of_other_rows(self, draw, dtype, rows, width):
        x, like = draw.normal(rows, width, dtype=dtype), draw.normal(rows, width, dtype=dtype)
        x[:1] *= 1e-3  # below the least mean square
        want = plain.match_magnitude(x.float(), 2 * like.float()).to(dtype)
        out = poisoned(rows, width, dtype=dtype, device=draw.device)
        altup.match_magnitude(x, 2 * like, out)
        assert_close(out, want, *tolerances(dtype))
        altup.match_magnitude(x, 2 * like, x)
        assert torch.equal(x, out)

    @pytest.mark.parametrize("name", ["gelu_tanh", "silu"])
    @pytest.mark.parametrize(("rows", "width"), [(0, 16), (3, 48), (2, 5000)])
    def test_gates_below_the_cut_of_their_row_are_zero(self, draw, dtype, rows, width, name):
        x = draw.normal(rows, 2 * width, dtype=dtype) + 1
        out = poisoned(rows, width, dtype=dtype, device=draw.device)
        activation.activate_sparse(out, x, name, 0.8)
        want = plain_activation.activate_sparse(x.float(), name, 0.8).to(dtype)
        assert_close(out, want, *tolerances(dtype))
