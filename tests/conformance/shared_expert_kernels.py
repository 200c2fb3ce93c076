"""The tests of a shared expert within the launches of other experts: it equals `reference.moe`, and
leaves the bits of the others as they are."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from conformance.expert_kernels import SMALL, placed, tolerances
from conformance.packed_kernels import ONE_RUN, drawn, rows_of, values_of, whole_rows
from support.kernel_helpers import Draw, assert_close, poisoned
from support.variants import each_once, slow
from torch import Tensor

from shmllm.models.quantized import QuantizedMatrix
from shmllm_kernels.gpu.combined_row import combine_products
from shmllm_kernels.gpu.expert_sums import WeightedSum, combine
from shmllm_kernels.gpu.experts import down, gate_and_up
from shmllm_kernels.gpu.packings import Rows
from shmllm_kernels.gpu.pairs import sort_pairs
from shmllm_kernels.gpu.row_configs import SingleRowConfig
from shmllm_kernels.gpu.row_operands import Activation
from shmllm_kernels.gpu.shared_expert import SharedExpert, joined
from shmllm_kernels.gpu.single_row import multiply_row
from shmllm_kernels.reference import moe as plain
from shmllm_kernels.reference.activation import activate

KINDS = [None, "int8", "int4", "w4z-g32-bf16", "q6_k", "fp8"]
"""How weights are stored; None: in the activations' dtype."""
OTHERS = [("silu", 2, True), ("gelu_tanh", 3, False), ("relu_squared", 4, False), ("silu", 1, True)]
"""The activation, the number of parts, and whether there is a gate."""
EXPERTS, TOP_K, HIDDEN, INNER = 5, 3, 70, 40
TILE = SingleRowConfig(32, 64, 2)


@dataclass
class Case:
    """A mixture with a shared expert, and its tokens.

    Attributes:
        matrices: gate and up, and down, of the experts, and of the shared one.
        values: their values in float64.
        shared: the shared expert, as launches take it.
        x: [tokens, hidden].
        ids, weights: the choices.
        gates: [tokens], or None.
        weighs_inputs: whether weights multiply what experts read.
    """

    matrices: list[Rows]
    values: list[Tensor]
    shared: SharedExpert
    activation: str
    x: Tensor
    ids: Tensor
    weights: Tensor
    gates: Tensor | None
    weighs_inputs: bool = False

    @property
    def gate_factors(self) -> Tensor | None:
        return self.weights if self.weighs_inputs else None

    def want(self) -> Tensor:
        x, (gate_up, last, first, own) = self.x.double(), self.values
        out = plain.experts(
            x, self.ids.long(), self.weights.double(), gate_up, last, activation=self.activation,
            weighs_inputs=self.weighs_inputs,
        )  # fmt: skip
        of_shared = activate(x @ first.T, self.activation, self.activation != "relu_squared")
        factor = 1.0 if self.gates is None else self.gates.double().sigmoid()[:, None]
        return out + factor * (of_shared @ own.T)

    def run(self, shared: SharedExpert | None, total: WeightedSum) -> tuple[Tensor, Tensor]:
        """Launch the mixture; return the activated rows and those of its last product."""
        parts = 0 if shared is None else shared.parts
        tokens, device = len(self.x), self.x.device
        inner, dtype = self.values[1].shape[2], self.x.dtype
        num_rows = tokens * (TOP_K + parts)
        activated = poisoned(num_rows, inner, dtype=dtype, device=device)
        rows = poisoned(num_rows, self.x.shape[1], dtype=dtype, device=device)
        if tokens == 1:
            activation = Activation(self.activation, self.activation != "relu_squared")
            multiply_row(
                activated, self.x, self.matrices[0], TILE, None, None, activation,
                ids=self.ids[0], shared=shared, gate_factors=self.gate_factors,
            )  # fmt: skip
            combine_products(total, activated, self.matrices[1], TILE, self.ids[0], shared=shared)
            return activated, total.out
        config = SMALL if isinstance(self.matrices[0], Tensor) else ONE_RUN
        pairs = placed(tokens, TOP_K, EXPERTS, device)
        sort_pairs(pairs, self.ids, EXPERTS, config.block_m)
        gate_and_up(
            activated, self.x, self.matrices[0], None, self.activation, TOP_K, pairs, config,
            shared=shared, gate_factors=self.gate_factors,
        )  # fmt: skip
        down(rows, activated, self.matrices[1], None, TOP_K, pairs, config, shared=shared)
        combine(total, rows, parts=parts)
        return activated, rows


def case_of(
    draw: Draw, dtype: torch.dtype, tokens: int, parts: int, kind: str | None, activation: str,
    is_gated: bool,
) -> Case:  # fmt: skip
    inner = INNER if kind is None else whole_rows(kind, 64)
    hidden = HIDDEN if kind is None else whole_rows(kind, HIDDEN)
    halves = 1 if activation == "relu_squared" else 2
    shapes = [
        (EXPERTS, halves * inner, hidden),
        (EXPERTS, hidden, inner),
        (halves * parts * inner, hidden),
        (hidden, parts * inner),
    ]
    found: list[Tensor | QuantizedMatrix] = []
    for shape in shapes:
        if kind is None:
            found.append(draw.normal(*shape, dtype=dtype, scale=shape[-1] ** -0.5))
        else:
            found.append(drawn(draw, kind, *shape, dtype=dtype))
    matrices = [each if isinstance(each, Tensor) else rows_of(each) for each in found]
    values = [each if isinstance(each, Tensor) else values_of(each) for each in found]
    shared = joined(matrices[2], matrices[3], (matrices[0], matrices[1]))
    assert shared is not None
    assert shared.parts == parts
    chosen = [draw.permutation(EXPERTS)[:TOP_K].sort().values for _ in range(tokens)]
    return Case(
        matrices, [each.double() for each in values], shared, activation,
        draw.normal(tokens, hidden, dtype=dtype), torch.stack(chosen).int().to(draw.device),
        draw.normal(tokens, TOP_K).abs(),
        draw.normal(tokens, 3, dtype=dtype)[:, 1] if is_gated else None,
    )  # fmt: skip


class SharedExpertConformance:
    @pytest.mark.parametrize(("kind", "others", "tokens"), each_once(KINDS, OTHERS, [1, 8]))
    def test_equals_the_reference(self, draw, dtype, tokens, kind, others):
        activation, parts, is_gated = others
        case = case_of(draw, dtype, tokens, parts, kind, activation, is_gated)
        want = case.want()
        before = draw.normal(*want.shape, dtype=dtype)
        atol, rtol = tolerances(dtype)
        atol *= float(want.abs().max().clamp(min=1.0))
        for adds in (False, True):
            out = before.clone()
            case.run(case.shared, WeightedSum(out, case.weights, None, case.gates, adds, 0.5))
            expected = before.double() + 0.5 * want if adds else want
            assert_close(out, expected.to(dtype), atol, rtol)

    @pytest.mark.parametrize("tokens", [1, 8])
    @pytest.mark.parametrize("kind", [None, "int4"])
    def test_weights_of_inputs_leave_the_shared_expert_out(self, draw, dtype, tokens, kind):
        case = case_of(draw, dtype, tokens, 1, kind, "silu", False)
        plainly, case.weighs_inputs = case.want(), True
        out, want = poisoned(*plainly.shape, dtype=dtype, device=draw.device), case.want()
        atol, rtol = tolerances(dtype)
        atol *= float(want.abs().max().clamp(min=1.0))
        case.run(case.shared, WeightedSum(out, case.weights))
        assert_close(out, want.to(dtype), atol, rtol)
        assert (want - plainly).abs().max() > 5 * atol

    @pytest.mark.parametrize("tokens", [1, 3])
    @pytest.mark.parametrize("kind", [None, "int4"])
    def test_leaves_the_bits_of_the_experts(self, draw, dtype, tokens, kind):
        case = case_of(draw, dtype, tokens, 2, kind, "silu", False)
        out = poisoned(2, *case.x.shape, dtype=dtype, device=draw.device)
        apart = case.run(None, WeightedSum(out[0], case.weights))
        beside = case.run(case.shared, WeightedSum(out[1], case.weights))
        of_experts = tokens * TOP_K
        assert torch.equal(beside[0][:of_experts], apart[0])
        if tokens > 1:
            assert torch.equal(beside[1][:of_experts], apart[1])

    @pytest.mark.parametrize("kind", [None, "int4", slow("q6_k")])
    def test_a_token_that_is_nan_leaves_the_bits_of_the_others(self, draw, dtype, kind):
        case = case_of(draw, dtype, 5, 2, kind, "silu", True)
        out = poisoned(2, *case.x.shape, dtype=dtype, device=draw.device)
        case.run(case.shared, WeightedSum(out[0], case.weights, None, case.gates))
        case.x[3] = torch.nan
        case.run(case.shared, WeightedSum(out[1], case.weights, None, case.gates))
        others = [0, 1, 2, 4]
        assert torch.equal(out[0][others], out[1][others])
        assert out[1][3].isnan().all()

    def test_padded_tokens_have_no_pairs(self, draw, dtype):
        """The routing leaves their choices out; the shared expert computes them for nobody."""
        case = case_of(draw, dtype, 4, 1, None, "silu", False)
        out = poisoned(2, *case.x.shape, dtype=dtype, device=draw.device)
        case.run(case.shared, WeightedSum(out[0], case.weights))
        case.ids[2:] = -1
        case.run(case.shared, WeightedSum(out[1], case.weights))
        assert torch.equal(out[0][:2], out[1][:2])

    def test_experts_that_cannot_be_joined(self, draw, dtype):
        def weights(*shape: int) -> Tensor:
            return draw.normal(*shape, dtype=dtype)

        of_experts = weights(3, 80, 16), weights(3, 16, 40)
        assert joined(weights(160, 16), weights(16, 80), of_experts) is not None
        assert joined(weights(120, 16), weights(16, 60), of_experts) is None  # one and a half
        assert joined(weights(40, 16), weights(16, 20), of_experts) is None  # half an expert
        assert joined(weights(40, 16), weights(16, 40), of_experts) is None  # without a gate
        other = torch.float32 if dtype is not torch.float32 else torch.float16
        assert joined(weights(80, 16).to(other), weights(16, 40), of_experts) is None
        assert joined(weights(80, 16), weights(16, 40).to(other), of_experts) is None
        assert joined(weights(80 * 16, 16), weights(16, 40 * 16), of_experts) is not None
        assert joined(weights(80 * 17, 16), weights(16, 40 * 17), of_experts) is None
        packed = [rows_of(drawn(draw, "int4", *size, dtype=dtype)) for size in ((80, 16), (16, 80))]
        assert joined(packed[0], weights(16, 40), of_experts) is None
        wide = weights(80, 16), rows_of(drawn(draw, "int4", 3, 16, 40, dtype=dtype))
        assert joined(weights(160, 16), packed[1], wide) is None  # a part begins within a run

    def test_wrong_arguments_are_refused(self, draw, dtype):
        case = case_of(draw, dtype, 2, 1, None, "silu", False)
        out = poisoned(*case.x.shape, dtype=dtype, device=draw.device)
        twice = WeightedSum(out, case.weights, out.clone())
        with pytest.raises(AssertionError, match="computed once"):
            case.run(case.shared, twice)
        pairs = placed(17, TOP_K, EXPERTS, draw.device)
        (first, _, *_), rows = (
            case.matrices,
            poisoned(17 * 4, INNER, dtype=dtype, device=draw.device),
        )
        x = draw.normal(17, HIDDEN, dtype=dtype)
        with pytest.raises(AssertionError, match="all tokens of a part"):
            gate_and_up(rows, x, first, None, "silu", TOP_K, pairs, SMALL, shared=case.shared)
        assert isinstance(first, Tensor)
        with pytest.raises(AssertionError, match="no bias"):
            gate_and_up(
                rows[:8], x[:2], first, first[:, :, 0].contiguous(), "silu", TOP_K, pairs, SMALL,
                shared=case.shared,
            )  # fmt: skip
        case.x, case.ids = case.x[:1], case.ids[:1]
        of_one = WeightedSum(out[:1], case.weights[:1], out[1:])
        with pytest.raises(AssertionError, match="computed once"):
            case.run(case.shared, of_one)
