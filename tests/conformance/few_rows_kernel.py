"""The tests of the product of up to eight rows with its neighbours: it equals the single
operations."""

from __future__ import annotations

import pytest
import torch
from conformance.lora_kernels import PLACES, LoraConformance, units_of
from conformance.packed_kernels import KINDS, drawn, rows_of, values_of, whole_rows
from conformance.single_row_kernel import ACTIVATIONS, EPS, tolerances
from support.kernel_helpers import assert_close, poisoned
from support.variants import diagonal

from shmllm_kernels.gpu.few_rows import MAX_ROWS, config_of, multiply_rows
from shmllm_kernels.gpu.norm import add_normed
from shmllm_kernels.gpu.row_adapters import RowAdapters
from shmllm_kernels.gpu.row_configs import FewRowsConfig
from shmllm_kernels.gpu.row_operands import AddedNorm, RowNorm
from shmllm_kernels.reference.activation import activate

SMALL = FewRowsConfig(16, 16, 2, 2)
NORMS = ("rms", "offset", "layer", "centered")


def normed(x, norm):
    """Return rows as a product reads them, in float64."""
    x = x.double()
    if norm is None:
        return x
    if norm.has_mean:
        x = x - x.mean(1, keepdim=True)
    x = x / (x.square().mean(1, keepdim=True) + norm.eps).sqrt()
    x = x * (norm.weight.double() + norm.offset)
    return x if norm.bias is None else x + norm.bias.double()


class Rows:
    """The random inputs of one launch."""

    def __init__(self, draw, dtype, rows, n, k, activation=None, norm=None, has_bias=False):
        self.draw, self.x = draw, draw.normal(rows, k, dtype=dtype) + 0.5
        self.activation = activation
        height = 2 * n if activation is not None and activation.is_gated else n
        self.weight = draw.normal(height, k + 8, dtype=dtype, scale=k**-0.5)[:, :k]
        self.matrix = self.weight
        self.bias = draw.normal(height, dtype=dtype) if has_bias else None
        self.norm = self._norm(norm, k, dtype)
        self.out = poisoned(rows, n, dtype=dtype, device=draw.device)

    def _norm(self, kind, k, dtype):
        if kind is None:
            return None
        weight, bias = (self.draw.normal(k, dtype=dtype) for _ in range(2))
        has_mean, offset = kind in ("layer", "centered"), float(kind == "offset")
        return RowNorm(weight, EPS, offset, has_mean, bias if kind == "layer" else None)

    def pack(self, kind):
        """Replace the matrix by a packed one."""
        matrix = drawn(self.draw, kind, *self.weight.shape, dtype=self.x.dtype)
        self.weight, self.matrix = values_of(matrix), rows_of(matrix)
        return self

    def run(self, config=SMALL, **options):
        operands = self.bias, self.norm, self.activation
        multiply_rows(self.out, self.x, self.matrix, config, *operands, **options)
        return self.out

    def product(self, added=0.0):
        """Return the product before the activation, in float64."""
        product = normed(self.x, self.norm) @ self.weight.double().T + added
        return product if self.bias is None else product + self.bias

    def want(self, added=0.0):
        product = self.product(added).to(self.x.dtype)
        if self.activation is None:
            return product
        return activate(product, self.activation.name, self.activation.is_gated)


class FewRowsConformance:
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    @pytest.mark.parametrize("norm", [None, *NORMS])
    @pytest.mark.parametrize("has_bias", [False, True])
    def test_equals_the_single_operations(self, draw, dtype, activation, norm, has_bias):
        rows = Rows(draw, dtype, 5, 21, 96, ACTIVATIONS[activation], norm, has_bias)
        assert_close(rows.run(), rows.want(), *tolerances(dtype))

    @pytest.mark.parametrize("num_rows", range(MAX_ROWS + 1))
    @pytest.mark.parametrize(("n", "k"), [(1, 64), (16, 64), (7, 100), (33, 33), (0, 16)])
    def test_sizes(self, draw, dtype, num_rows, n, k):
        rows = Rows(draw, dtype, num_rows, n, k, norm="rms")
        assert_close(rows.run(), rows.want(), *tolerances(dtype))

    @pytest.mark.parametrize(
        ("n", "k", "activation"),
        [(16, 8192, "none"), (24, 2048, "gated"), (24, 8192, "gated"), (9000, 64, "none")],
    )
    def test_the_configs_of_production(self, draw, dtype, n, k, activation):
        rows = Rows(draw, dtype, 8, n, k, ACTIVATIONS[activation], "rms")
        assert_close(
            rows.run(config_of(rows.weight, dtype, draw.device)), rows.want(), *tolerances(dtype)
        )

    @pytest.mark.parametrize(
        ("kind", "options"),
        diagonal(
            KINDS,
            [(None, None, False), (ACTIVATIONS["gated"], "rms", True), (None, "layer", False)],
        ),
    )
    def test_packed_matrices(self, draw, dtype, kind, options):
        rows = Rows(draw, dtype, 3, 9, whole_rows(kind, 1300), *options).pack(kind)
        assert_close(
            rows.run(config_of(rows.matrix, dtype, draw.device)), rows.want(), *tolerances(dtype)
        )

    @pytest.mark.parametrize("scale", [1.0, 0.25])
    def test_the_sum_with_the_residual_stream(self, draw, dtype, scale):
        rows = Rows(draw, dtype, 6, 21, 48)
        stream = draw.normal(6, 21, dtype=dtype)
        rows.out.copy_(stream)
        got = rows.run(adds=True, scale=scale)
        wanted = (stream.float() + scale * rows.want().float()).to(dtype)
        assert_close(got, wanted, *tolerances(dtype))

    def test_a_row_does_not_depend_on_the_others(self, draw, dtype):
        rows = Rows(draw, dtype, 8, 40, 160, ACTIVATIONS["gated"], "rms", True)
        together = rows.run().clone()
        for count in (1, 3):
            few = Rows(draw, dtype, count, 40, 160)
            few.__dict__ |= {name: getattr(rows, name) for name in ("matrix", "bias", "norm")}
            few.activation, few.x = rows.activation, rows.x[:count].clone()
            few.run()
            assert torch.equal(few.out, together[:count])

    @pytest.mark.parametrize("norm", [None, "rms", "layer"])
    @pytest.mark.parametrize("offset", [0.0, 1.0])
    def test_what_is_added_to_the_rows_before(self, draw, dtype, norm, offset):
        """The sums are those of a launch of their own, and so is the product of them."""
        rows = Rows(draw, dtype, 5, 40, 100, ACTIVATIONS["gated"], norm)
        weight = draw.normal(100, dtype=dtype)
        other = draw.normal(5, 100, dtype=dtype, scale=3.0)
        kept = poisoned(5, 100, dtype=dtype, device=draw.device)
        added = AddedNorm(other, RowNorm(weight, EPS, offset), 0.5, kept)
        got = rows.run(added=added).clone()
        wanted = rows.x.clone()
        add_normed(other, wanted, weight, EPS, 0.5, offset)
        assert_close(kept, wanted, *tolerances(dtype))
        rows.x = kept
        assert torch.equal(got, rows.run())

    def test_the_factor_of_the_sums_that_are_read(self, draw, dtype):
        rows = Rows(draw, dtype, 5, 40, 100, None, "rms")
        weight, factor = draw.normal(100, dtype=dtype), draw.normal(1, dtype=dtype)
        other = draw.normal(5, 100, dtype=dtype, scale=3.0)
        kept = poisoned(5, 100, dtype=dtype, device=draw.device)
        added = AddedNorm(other, RowNorm(weight, EPS), 0.5, kept, factor)
        got = rows.run(added=added).clone()
        wanted = rows.x.clone()
        add_normed(other, wanted, weight, EPS, 0.5, factor=factor)
        assert_close(kept, wanted, *tolerances(dtype))
        rows.x = kept
        assert torch.equal(got, rows.run())

    @pytest.mark.parametrize("kind", [None, "int4"])
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_what_the_activation_is_multiplied_by(self, draw, dtype, kind, activation):
        rows = Rows(draw, dtype, 5, 21, 256, ACTIVATIONS[activation], "rms")
        config = SMALL
        if kind is not None:
            config = config_of(rows.pack(kind).matrix, dtype, draw.device)
        factors = draw.normal(5, 64, dtype=dtype)[:, 20:41]
        want = rows.want().to(dtype) * factors
        assert_close(rows.run(config, factors=factors), want, *tolerances(dtype))

    def test_rows_whose_norm_alone_is_a_number_of_the_dtype(self, draw, dtype):
        rows = Rows(draw, dtype, 2, 20, 64, norm="rms")
        rows.x *= 4096.0
        rows.norm.weight.mul_(16.0)
        rows.matrix /= 16.0
        assert_close(rows.run(), rows.want(), *tolerances(dtype))

    def test_what_lies_behind_the_rows_stays(self, draw, dtype):
        rows = Rows(draw, dtype, 3, 21, 48)
        memory = poisoned(5, 21, dtype=dtype, device=draw.device)
        rows.out = memory[:3]
        rows.run()
        assert not memory[:3].isnan().any()
        assert memory[3:].isnan().all()


class RowAdaptersConformance:
    """Some rows have adapters: at place 0 or 2, or at place 1, which changes nothing here."""

    @staticmethod
    def adapters(draw, dtype, of_rows, ranks, k, columns):
        step = units_of(of_rows, draw.device, MAX_ROWS)
        step.places[: len(of_rows)] = torch.tensor(of_rows, dtype=torch.int32)
        if not int(step.num_units[0]):
            step.places.fill_(2**30)  # garbage if there are no units
        return RowAdapters(
            poisoned(MAX_ROWS, ranks + 2, dtype=dtype, device=draw.device),
            torch.zeros(2, dtype=torch.int32, device=draw.device),
            LoraConformance.drawn(draw, dtype, ranks, k, columns),
            step,
        )

    @staticmethod
    def added(rows, places, of_rows):
        read = normed(rows.x, rows.norm)
        total = torch.zeros(len(read), len(rows.weight), dtype=torch.float64).to(read.device)
        for row, place in enumerate(of_rows):
            if place in (0, 2):
                a = places.a[place].double() * places.scales[place].double()[:, None]
                total[row] = places.b[place].double() @ (a @ read[row])
        return total

    @pytest.mark.parametrize("of_rows", [[2], [-1, 2, 0, 1, 0, 2, -1, 0], [-1, -1], [1]])
    @pytest.mark.parametrize("ranks", [16, 3, 40])
    @pytest.mark.parametrize(("activation", "norm"), [("none", None), ("gated", "rms")])
    def test_rows_with_and_without_adapters(self, draw, dtype, of_rows, ranks, activation, norm):
        assert max(of_rows) < PLACES
        rows = Rows(draw, dtype, len(of_rows), 21, 96, ACTIVATIONS[activation], norm, True)
        adapters = self.adapters(draw, dtype, of_rows, ranks, 96, len(rows.weight))
        added = self.added(rows, adapters.places, of_rows)
        want, most = rows.want(added).double(), self.most_error(rows.product(added), rows, dtype)
        for _ in range(2):  # the counters are 0 again
            rows.out.fill_(float("nan"))
            assert ((rows.run(adapters=adapters).double() - want).abs() <= most).all()
            assert not adapters.counters.any()

    def most_error(self, product, rows, dtype):
        """Return how far results may be from the activation of a product: an error of a gate counts
        as often as what it is multiplied by, and no activation is steeper than 1.1."""
        atol, rtol = self.tolerances(dtype)
        error = atol + rtol * product.abs()
        if rows.activation is None:
            return error
        (gate, up), (of_gate, of_up) = product.chunk(2, 1), error.chunk(2, 1)
        return atol + 1.1 * of_gate * up.abs() + gate.abs() * of_up

    def test_rows_to_which_a_norm_is_added(self, draw, dtype):
        of_rows = [0, -1, 2]
        rows = Rows(draw, dtype, 3, 21, 96, None, "rms")
        adapters = self.adapters(draw, dtype, of_rows, 16, 96, 21)
        kept = poisoned(3, 96, dtype=dtype, device=draw.device)
        norm = RowNorm(draw.normal(96, dtype=dtype), EPS)
        added = AddedNorm(draw.normal(3, 96, dtype=dtype), norm, 1.0, kept)
        got = rows.run(adapters=adapters, added=added).clone()
        rows.x = kept
        assert torch.equal(got, rows.run(adapters=adapters))

    def test_packed_weights(self, draw, dtype):
        of_rows = [0, -1, 2]
        rows = Rows(draw, dtype, 3, 21, 256, None, "layer").pack("int4")
        adapters = self.adapters(draw, dtype, of_rows, 16, 256, 21)
        want = rows.want(self.added(rows, adapters.places, of_rows))
        got = rows.run(config_of(rows.matrix, dtype, draw.device), adapters=adapters)
        assert_close(got, want, *self.tolerances(dtype))

    @staticmethod
    def tolerances(dtype):
        """What rounding of the product with A changes, too."""
        return {
            torch.float32: (1e-4, 1e-5),
            torch.float16: (3e-2, 3e-3),
            torch.bfloat16: (2e-1, 2e-2),
        }[dtype]
