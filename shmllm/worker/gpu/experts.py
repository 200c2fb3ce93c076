"""The operations of a mixture of experts on a GPU, and the buffers between their kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.models.experts import ExpertLinear, MoE
from shmllm.models.layers import Allocator, Norm
from shmllm.models.matrices import MixedMatrix
from shmllm.models.routing import Routing
from shmllm.models.specs import MoESpec
from shmllm.worker.gpu.expert_choice import TokenKinds, choice_of
from shmllm.worker.gpu.group import NoMeetings
from shmllm.worker.gpu.inputs import GpuInputs
from shmllm.worker.gpu.lora import GpuLora
from shmllm.worker.gpu.pending import Shared
from shmllm.worker.gpu.products import GpuProducts, rows_of
from shmllm.worker.gpu.row_products import norm_of_rows
from shmllm_kernels.gpu.combined_row import combine_products
from shmllm_kernels.gpu.configs import (
    LARGEST_BLOCK,
    SMALLEST_BLOCK,
    ProductConfig,
)
from shmllm_kernels.gpu.expert_lora import PairAdapters, shrink_pairs
from shmllm_kernels.gpu.expert_sums import WeightedSum, combine
from shmllm_kernels.gpu.experts import down, gate_and_up
from shmllm_kernels.gpu.few_routing import route_rows, takes
from shmllm_kernels.gpu.few_rows import MAX_ROWS
from shmllm_kernels.gpu.identities import take_identities
from shmllm_kernels.gpu.packings import Rows
from shmllm_kernels.gpu.pair_layout import LayoutScratch, PairLayout, lays_out
from shmllm_kernels.gpu.pairs import SortedPairs, sort_pairs
from shmllm_kernels.gpu.routing import route
from shmllm_kernels.gpu.row_operands import Activation
from shmllm_kernels.gpu.shared_expert import SharedExpert, joined, parts_of
from shmllm_kernels.gpu.single_row import config_of, multiply_row


class ExpertBuffers:
    """The buffers of a mixture of experts. Its pairs are a token and one of its experts.

    Args:
        allocate: returns the memory of a tensor.
        spec: the mixture.
        hidden: the width of hidden states.
        dtype: the model's dtype.
        max_tokens: the largest number of tokens in a step.

    Attributes:
        logits: [max_tokens, choices], the router's output, in the dtype of its weight; with a
            shared gate one more.
        exact_x: [max_tokens, hidden] float32, the input of a router in float32, or None.
        ids: [max_tokens, top_k] int32; see `Routing`.
        weights: [max_tokens, top_k] float32; see `Routing`.
        sorted: the pairs by their experts.
        scratch: what `route` needs to sort them.
        activated: [pairs and parts, inner], the output of the activation, by expert; the parts are
            those of a shared expert, for few tokens.
        rows: [pairs and parts, width], the outputs of the experts.
        out: [max_tokens, width], their sums.
        identities: [max_tokens, width], what the identities of tokens return, weighted.
    """

    def __init__(
        self,
        allocate: Allocator,
        spec: MoESpec,
        hidden: int,
        dtype: torch.dtype,
        max_tokens: int,
    ) -> None:
        top_k, experts, width = spec.top_k, spec.num_experts, spec.width(hidden)
        pairs = max_tokens * top_k

        def integers(*shape: int) -> Tensor:
            return allocate(shape, torch.int32)

        is_exact = spec.router_float32 and dtype != torch.float32
        self.exact_x = allocate((max_tokens, hidden), torch.float32) if is_exact else None
        of_router = torch.float32 if is_exact else dtype
        self.logits = allocate((max_tokens, spec.num_choices + int(spec.shared_gate)), of_router)
        self.ids = integers(max_tokens, top_k)
        self.weights = allocate((max_tokens, top_k), torch.float32)
        sizes = pairs, experts, SMALLEST_BLOCK, LARGEST_BLOCK
        self.sorted = SortedPairs.allocate(*sizes, integers)
        self.scratch = LayoutScratch.allocate(experts, top_k, integers)
        shared = 0 if spec.shared is None else spec.shared.inner // spec.inner
        rows = pairs + shared * min(max_tokens, MAX_ROWS)
        self.activated = allocate((rows, spec.inner), dtype)
        self.rows = allocate((rows, width), dtype)
        self.out = allocate((max_tokens, width), dtype)
        self.identities = allocate((max_tokens if spec.identities else 0, width), dtype)


class ExpertOps:
    """Launches the operations of `models.ops.Ops` on experts.

    Args:
        inputs: the step's inputs.
        buffers: the buffers of each mixture.
        products: chooses tile sizes.
        lora: the adapters of the step; None: there are none.
        meetings: launches sums over the ranks of a group; None: the process is alone.
        routed: [max_tokens, mixtures, top_k], where the choices of the decoder's layers are kept;
            None: nowhere.
    """

    def __init__(
        self,
        inputs: GpuInputs,
        buffers: dict[MoESpec, ExpertBuffers],
        products: GpuProducts,
        lora: GpuLora | None = None,
        meetings: NoMeetings | None = None,
        routed: Tensor | None = None,
    ) -> None:
        self._routed = routed
        self._kinds = TokenKinds(inputs, buffers)
        self._meetings = meetings or NoMeetings()
        self._buffers = buffers
        self._products = products
        self._lora = lora

    def rows_of_experts(self, num_tokens: int) -> list[int]:
        """Return the number of rows of an expert of each mixture, were the tokens spread evenly."""
        return [_rows(spec, num_tokens) for spec in self._buffers]

    def sorts_apart(self, num_tokens: int) -> list[bool]:
        """Return whether the pairs of each mixture are sorted by a launch of their own."""
        return [not _lays_out(spec, num_tokens) for spec in self._buffers]

    def route(self, x: Tensor, query_starts: Tensor, moe: MoE) -> Routing:
        """See `models.ops.Ops.route`. The pairs of a step of few tokens are laid out, unless they
        are those of one token.

        Args:
            x: [tokens, hidden].
            query_starts: those of the step.
            moe: the mixture.
        """
        logits, routing, layout = self._routing(moe, len(x))
        self._multiply_router(logits, x, moe)
        of_choices = logits[:, : moe.spec.num_choices]
        routed = routing.ids, routing.weights, of_choices, query_starts, choice_of(moe.spec)
        if moe.table is None:
            route(*routed, moe.correction, moe.scale, layout)
        else:
            self._kinds.route(*routed, moe.table)
        if moe.spec.tokens is not None:
            self._kinds.leave_out(moe.spec.tokens, routing)
        self._report(moe, routing.ids)
        if moe.spec.identities:
            out = self._buffers[moe.spec].identities[: len(x)]
            take_identities(out, x, routing.ids, routing.weights, moe.spec.num_experts)
        return routing

    def added_rows(self, moe: MoE, num_tokens: int) -> Tensor | None:
        """Return what is added to the sums over experts, [tokens, width], if there is something."""
        own = self._buffers[moe.spec].identities[:num_tokens]
        return own if moe.spec.identities else moe.added_rows(num_tokens)

    def can_route_few(self, moe: MoE) -> bool:
        """Return whether one launch chooses the experts of few tokens."""
        is_adapted = self._lora is not None and self._lora.adapts(moe.router)
        return takes(moe.spec.num_experts) and not is_adapted and not moe.spec.changes_choices

    def route_few(
        self,
        x: Tensor,
        normed: Tensor,
        norm: Norm | None,
        query_starts: Tensor,
        moe: MoE,
        factor: float = 1.0,
        experts_norm: Norm | None = None,
    ) -> Routing:
        """Do what `route` does, for few tokens, in one launch.

        Args:
            x: [tokens, hidden].
            normed: as ``x``, where the norm is written that the experts read.
            norm: the RMSNorm of ``x`` that the router reads; None: it reads ``x``.
            query_starts, moe: see `route`.
            factor: what the router's rows are multiplied by.
            experts_norm: the RMSNorm of ``x`` that the experts read; None: the router's.
        """
        logits, routing, layout = self._routing(moe, len(x))
        router = moe.router
        assert isinstance(router.weight, Tensor), "a router is never packed"
        route_rows(
            routing.ids, routing.weights, logits, moe.spec.num_experts, normed, x,
            norm_of_rows(norm), router.weight, router.bias, query_starts,
            self._buffers[moe.spec].scratch.num_done, choice_of(moe.spec), moe.correction,
            moe.scale, layout, self._products.is_dependent, factor, norm_of_rows(experts_norm),
        )  # fmt: skip
        self._report(moe, routing.ids)
        return routing

    def _report(self, moe: MoE, ids: Tensor) -> None:
        """Keep a choice, [tokens, top_k], where callers ask for it."""
        if self._routed is None or moe.place is None:
            return
        kept, top_k = self._routed[: len(ids), moe.place], moe.spec.top_k
        kept[:, :top_k].copy_(ids)
        if top_k < kept.shape[1]:
            kept[:, top_k:].zero_()

    def _routing(self, moe: MoE, num_tokens: int) -> tuple[Tensor, Routing, PairLayout | None]:
        """Return where the router's output goes, [tokens, experts] or one column more, where the
        choice goes, and where pairs are laid out, if they are."""
        spec, buffers = moe.spec, self._buffers[moe.spec]
        logits = buffers.logits[:num_tokens]
        gates = logits[:, spec.num_choices] if spec.shared_gate else None
        if moe.fixed_gate is not None:
            gates = moe.fixed_gate.expand(num_tokens)
        routing = Routing(buffers.ids[:num_tokens], buffers.weights[:num_tokens], gates)
        if self._reads_choices(num_tokens, spec) or spec.changes_choices:
            return logits, routing, None
        block_m = self._configs(moe, num_tokens)[0].block_m
        return logits, routing, PairLayout(buffers.sorted, buffers.scratch, block_m)

    def _multiply_router(self, logits: Tensor, x: Tensor, moe: MoE) -> None:
        """Compute the router's output, in the dtype of its weight."""
        exact_x, read = self._buffers[moe.spec].exact_x, x
        if exact_x is not None:
            read = exact_x[: len(x)].copy_(x)
        self._products.linear(logits, read, moe.router)
        if self._lora is not None:
            self._lora.add(logits, x, moe.router)

    def joined_shared(self, moe: MoE) -> SharedExpert | None:
        """Return the shared expert of a mixture, if the launches of few tokens can compute it with
        the others. With adapters they cannot. Where those are parts of sums over ranks, its own
        must be, too."""
        spec, shared = moe.spec, moe.shared
        if shared is None or self._lora is not None:
            return None
        downs = moe.down_proj, shared.down_proj
        if len({self._meetings.is_partial(each.weight) for each in downs}) > 1:
            return None
        kinds = (shared.spec.activation, shared.spec.gated), (spec.activation, spec.gated)
        linears = moe.gate_up_proj, moe.down_proj, shared.gate_up_proj, shared.down_proj
        if kinds[0] != kinds[1] or any(linear.bias is not None for linear in linears):
            return None
        if shared.spec.bound is not None:
            return None
        first, last = shared.gate_up_proj.weight, shared.down_proj.weight
        if isinstance(first, MixedMatrix) or isinstance(last, MixedMatrix):
            return None
        gate_up, down = _weights(moe)
        return joined(rows_of(first), rows_of(last), (gate_up, down))

    def experts(self, x: Tensor, routing: Routing, moe: MoE, shared: Shared) -> Tensor:
        """See `models.ops.Ops.experts`."""
        out = self._buffers[moe.spec].out[: len(x)]
        if self._meetings.is_partial(moe.down_proj.weight):
            self._sum_part(x, routing, moe, shared)
            return self._meetings.sum_parts(out)
        total = WeightedSum(
            out, routing.weights, _output_of(shared), routing.shared_gates,
            skips=moe.spec.tokens is not None,
        )  # fmt: skip
        self._sum(total, x, routing, moe, shared)
        return out

    def add_experts(
        self,
        x: Tensor,
        routing: Routing,
        moe: MoE,
        shared: Shared,
        residual: Tensor,
        scale: float,
    ) -> None:
        """Add ``scale`` times the result of `experts` to the residual stream, in place."""
        if self._meetings.is_partial(moe.down_proj.weight):
            self._sum_part(x, routing, moe, shared)
            self._meetings.add_parts(residual, scale)
            return
        added, gates, skips = _output_of(shared), routing.shared_gates, moe.spec.tokens is not None
        total = WeightedSum(residual, routing.weights, added, gates, True, scale, skips)
        self._sum(total, x, routing, moe, shared)

    def _sum_part(self, x: Tensor, routing: Routing, moe: MoE, shared: Shared) -> None:
        """Launch this rank's part of the sums."""
        meetings = self._meetings
        added = _output_of(shared) if meetings.has_rest else None
        out = meetings.part(len(x), self._buffers[moe.spec].out.shape[1])
        skips = moe.spec.tokens is not None
        part = WeightedSum(out, routing.weights, added, routing.shared_gates, skips=skips)
        self._sum(part, x, routing, moe, shared, has_bias=meetings.has_rest)

    def _sum(
        self,
        total: WeightedSum,
        x: Tensor,
        routing: Routing,
        moe: MoE,
        given: Shared,
        has_bias: bool = True,
    ) -> None:
        """Launch the products of each token's experts, and of a shared one that is given as its
        weights, and their sums."""
        shared = given if isinstance(given, SharedExpert) else None
        if self._reads_choices(len(x), moe.spec):
            self._sum_of_one(total, x, routing, moe, shared)
            return
        spec, buffers, num_tokens = moe.spec, self._buffers[moe.spec], len(x)
        parts, pairs = parts_of(shared), buffers.sorted
        num_rows = num_tokens * (spec.top_k + parts)
        weights, configs = _weights(moe), self._configs(moe, num_tokens)
        block_m = configs[0].block_m
        if not _lays_out(spec, num_tokens):
            sort_pairs(pairs, routing.ids, spec.num_experts, block_m)
        activated, rows = buffers.activated[:num_rows], buffers.rows[:num_rows]
        is_dependent = self._products.is_dependent
        first = self._shrink(moe.gate_up_proj, x, spec, block_m, by_token=True)
        gate_and_up(
            activated, x, weights[0], moe.gate_up_proj.bias, spec.activation, spec.top_k, pairs,
            configs[0], first, is_dependent, shared, _gate_factors(spec, routing), spec.bound,
        )  # fmt: skip
        last = self._shrink(moe.down_proj, activated, spec, block_m, by_token=False)
        bias = moe.down_proj.bias if has_bias else None
        down(
            rows, activated, weights[1], bias, spec.top_k, pairs, configs[1], last, is_dependent,
            shared,
        )  # fmt: skip
        combine(total, rows, is_dependent, parts)

    def _reads_choices(self, num_tokens: int, spec: MoESpec) -> bool:
        """Return whether products read on the device which experts were chosen, unsorted: those of
        one token, without adapters, other ranks, tokens that are left out and a bound."""
        is_alone = self._lora is None and not self._meetings.are_needed
        is_whole = spec.tokens is None
        return num_tokens == 1 and is_alone and is_whole and not spec.bound

    def _sum_of_one(
        self,
        total: WeightedSum,
        x: Tensor,
        routing: Routing,
        moe: MoE,
        shared: SharedExpert | None,
    ) -> None:
        spec, ids, first, last = moe.spec, routing.ids[0], moe.gate_up_proj, moe.down_proj
        activated = self._buffers[spec].activated[: spec.top_k + parts_of(shared)]
        activation = Activation(spec.activation, spec.gated)
        weights, is_dependent = _weights(moe), self._products.is_dependent
        configs = [config_of(weight, self._products.device) for weight in weights]
        multiply_row(
            activated, x, weights[0], configs[0], first.bias, None, activation,
            is_dependent=is_dependent, ids=ids, shared=shared,
            gate_factors=_gate_factors(spec, routing),
        )  # fmt: skip
        combine_products(
            total, activated, weights[1], configs[1], ids, last.bias, is_dependent, shared
        )

    def _configs(self, moe: MoE, num_tokens: int) -> list[ProductConfig]:
        """Return the tile sizes of both products of a step of so many tokens."""
        rows, dtype = _rows(moe.spec, num_tokens), self._buffers[moe.spec].out.dtype
        configs = [self._products.config(rows, weight, dtype) for weight in _weights(moe)]
        assert configs[0].block_m == configs[1].block_m, "both read the same blocks of pairs"
        return configs

    def _shrink(
        self, linear: ExpertLinear, x: Tensor, spec: MoESpec, block_m: int, by_token: bool
    ) -> PairAdapters | None:
        """Launch the products with the adapters' A; return what the product itself adds."""
        if self._lora is None:
            return None
        adapters = self._lora.of_experts(linear, spec.top_k)
        shrink_pairs(adapters, x, self._buffers[spec].sorted, block_m, by_token)
        return adapters


def _output_of(shared: Shared) -> Tensor | None:
    return shared if isinstance(shared, Tensor) else None


def _gate_factors(spec: MoESpec, routing: Routing) -> Tensor | None:
    """Return what gates are multiplied by. With a weight w of its inputs an expert returns
    ``down(act(w * gate) * w * up)``: that is ``w * down(act(w * gate) * up)``."""
    return routing.weights if spec.weighs_inputs else None


def _weights(moe: MoE) -> list[Rows]:
    return [rows_of(linear.weight) for linear in (moe.gate_up_proj, moe.down_proj)]


def _lays_out(spec: MoESpec, num_tokens: int) -> bool:
    """Return whether the launch that chooses experts lays their pairs out, too."""
    return not spec.changes_choices and lays_out(num_tokens, spec.num_experts)


def _rows(spec: MoESpec, num_tokens: int) -> int:
    return -(-num_tokens * spec.top_k // spec.num_experts)
