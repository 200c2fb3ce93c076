"""The operations of a mixture of experts on a CPU, and the buffers between their kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shmllm.models.experts import ExpertLinear, MoE
from shmllm.models.layers import Allocator
from shmllm.models.routing import Routing
from shmllm.models.specs import MoESpec, TokenKind
from shmllm.worker.cpu.group import Meetings
from shmllm.worker.cpu.lora import CpuLora
from shmllm.worker.cpu.product_kernels import Kinds
from shmllm.worker.cpu.products import Products, kind_of, weights_of
from shmllm.worker.group import Alone
from shmllm_kernels.cpu import KernelProgram, expert_tiles, word_of_float
from shmllm_kernels.cpu.chosen_experts import LEAVE_OUT, REPORT, SCALE_CHOSEN, TAKE_IDENTITIES
from shmllm_kernels.cpu.expert_tiles import num_rounded_rows
from shmllm_kernels.cpu.experts import (
    ADAPTED_DOWN,
    ADAPTED_GATE_AND_UP,
    DOWN,
    GATE_AND_UP,
    SCRATCH_BYTES,
    PairWeights,
)
from shmllm_kernels.cpu.group_rounding import GROUPINGS
from shmllm_kernels.cpu.pairs import BLOCK_WORDS, COMBINE, SORT, SORT_LISTED, max_blocks
from shmllm_kernels.cpu.routing import (
    MIXER,
    ROUTE,
    ROUTE_BY_TOKEN,
    SIGMOID,
    SIGMOID_OF_TOP,
    SOFTMAX,
    SQRT_SOFTPLUS,
)
from shmllm_kernels.cpu.tile_rounding import row_bytes

_SCORES = {
    "softmax": SOFTMAX,
    "softmax_of_top": SOFTMAX,
    "sigmoid": SIGMOID,
    "sqrt_softplus": SQRT_SOFTPLUS,
    "sigmoid_of_top": SIGMOID_OF_TOP,
    "mixer": MIXER,
}
"""The kernels of choice by `MoESpec.scoring`."""


class ExpertBuffers:
    """The buffers of a mixture of experts. Its pairs are a token and one of its experts.

    Args:
        allocate: returns the memory of a tensor.
        spec: the mixture.
        hidden: the width of hidden states.
        max_tokens: the largest number of tokens in a step.

    Attributes:
        logits: [max_tokens, choices] float32, the router's output; with a shared gate one more.
        ranks: [max_tokens, choices + groups] float32, scratch of the choice; None: logits rank the
            experts.
        ids, weights, shared_gates: see `Routing`.
        places: [max_tokens, top_k] int64, where each pair lies among the sorted ones.
        tokens: [pairs] int64, the token of each sorted pair.
        firsts: [experts] int64, scratch of the sorting.
        blocks: see `pairs.SORT`.
        activated: [pairs, inner] float32, memory for the output of the activation.
        rounded, rounded_inner: memory for what tiles read instead, the inputs of the pairs and
            those outputs, bytes.
        rows: [pairs, width] float32, the outputs of the experts.
        out: [max_tokens, width] float32, their sums.
        identities: [max_tokens, width] float32, what the identities of tokens return, weighted.
    """

    def __init__(self, allocate: Allocator, spec: MoESpec, hidden: int, max_tokens: int) -> None:
        pairs, experts, width = max_tokens * spec.top_k, spec.num_experts, spec.width(hidden)
        choices = spec.num_choices

        def floats(rows: int, width: int) -> Tensor:
            return allocate((rows, width), torch.float32)

        def words(*shape: int) -> Tensor:
            return allocate(shape, torch.int64)

        self.logits = floats(max_tokens, choices + int(spec.shared_gate))
        self.ranks: Tensor | None = None
        if spec.correction_bias or spec.num_groups > 1:
            self.ranks = floats(max_tokens, choices + spec.num_groups)
        self.ids, self.places = words(max_tokens, spec.top_k), words(max_tokens, spec.top_k)
        self.weights = floats(max_tokens, spec.top_k)
        self.tokens, self.firsts = words(pairs), words(experts)
        self.blocks = words(max_blocks(max_tokens, spec.top_k, experts), BLOCK_WORDS)
        self.activated, self.rows = floats(pairs, spec.inner), floats(pairs, width)
        num_rounded = num_rounded_rows(pairs, len(self.blocks))
        self.rounded, self.rounded_inner = (
            allocate((num_rounded, row_bytes(each, "bfloat16")), torch.uint8)
            for each in (width, spec.inner)
        )
        self.out = floats(max_tokens, width)
        self.identities = floats(max_tokens if spec.identities else 0, width)
        self.shared_gates = self.logits[:, choices] if spec.shared_gate else None


class ExpertOps:
    """Records the operations of `models.ops.Ops` on experts in a kernel program.

    Args:
        program: the program to record in.
        products: records other products there.
        num_tokens: the address of an int64, the number of tokens to compute.
        token_ids: the address of the int64 ids of the step's tokens; see `CpuInputs`.
        buffers: the buffers of each mixture.
        lora: records what adapters add to products; None: nothing.
        meetings: records sums over the ranks of a group; None: the process is alone.
        routed: [max_tokens, mixtures, top_k], where the choices of the decoder's layers are kept;
            None: nowhere.
    """

    def __init__(
        self,
        program: KernelProgram,
        products: Products,
        num_tokens: int,
        token_ids: int,
        buffers: dict[MoESpec, ExpertBuffers],
        lora: CpuLora | None = None,
        meetings: Meetings | None = None,
        routed: Tensor | None = None,
    ) -> None:
        self._kernels = program
        self._meetings = meetings or Meetings(program, "", Alone())
        self._products = products
        self._num_tokens = num_tokens
        self._token_ids = token_ids
        self._buffers = buffers
        self._lora = lora
        self._routed = routed
        self._exact: dict[MoESpec, Tensor] = {}  # activations that adapters read
        size = SCRATCH_BYTES if buffers else 0
        self._scratch = torch.empty((program.num_threads, size), dtype=torch.uint8)

    def logits(self, spec: MoESpec) -> Tensor:
        """Return the buffer for the router's output."""
        return self._buffers[spec].logits

    def added_rows(self, moe: MoE, num_tokens: int) -> Tensor | None:
        """Return what is added to the sums over experts, [tokens, width], if there is something."""
        if moe.spec.identities:
            return self._buffers[moe.spec].identities
        return moe.added_rows(num_tokens)

    def route(self, x: Tensor, moe: MoE) -> Routing:
        """Record the choice of experts by the logits in `logits`, or by the ids of tokens.

        Args:
            x: [tokens, width], what the experts read.
            moe: the mixture.
        """
        spec, buffers = moe.spec, self._buffers[moe.spec]
        out = [buffers.ids.data_ptr(), buffers.weights.data_ptr()]
        if moe.table is None:
            self._record_choice(moe, out)
        else:
            source = [buffers.logits.data_ptr(), 4 * buffers.logits.shape[1]]
            numbers = [spec.num_experts, spec.top_k, *out, self._token_ids, moe.table.data_ptr()]
            factors = map(word_of_float, (spec.weight_scale, spec.total_eps))
            operands = [self._num_tokens, *source, *numbers, *factors]
            kernel = ROUTE_BY_TOKEN[_SCORES[spec.scoring]]
            self._kernels.record(kernel, operands, label="route_by_token")
        if moe.scale is not None:
            operands = [self._num_tokens, spec.top_k, *out, moe.scale.data_ptr()]
            kernel = SCALE_CHOSEN[kind_of(moe.scale)]
            self._kernels.record(kernel, operands, label="scale_chosen")
        if spec.tokens is not None:
            self._record_left_out(spec.tokens, spec.top_k, buffers.ids)
        if self._routed is not None and moe.place is not None:
            self._record_report(self._routed[:, moe.place], spec.top_k, buffers.ids)
        if spec.identities:
            numbers = [spec.top_k, spec.num_experts, *out, *_rows(x), *_rows(buffers.identities)]
            operands = [self._num_tokens, *numbers, x.shape[1]]
            self._kernels.record(TAKE_IDENTITIES, operands, label="take_identities")
        gates = buffers.shared_gates
        if moe.fixed_gate is not None:
            gates = moe.fixed_gate.expand(len(buffers.ids))
        return Routing(buffers.ids, buffers.weights, gates)

    def _record_left_out(self, kind: TokenKind, top_k: int, ids: Tensor) -> None:
        """Record that tokens of another kind go to no expert."""
        listed = np.array(kind.ids, np.int64)
        operands = [
            self._num_tokens, top_k, ids.data_ptr(), self._token_ids, listed.ctypes.data,
            len(listed), int(kind.are_listed),
        ]  # fmt: skip
        self._kernels.record(LEAVE_OUT, operands, keep=[listed], label="leave_out")

    def _record_choice(self, moe: MoE, out: Sequence[int]) -> None:
        """Record the choice of experts by logits. out: the addresses of ids and weights."""
        spec, buffers = moe.spec, self._buffers[moe.spec]
        source = [buffers.logits.data_ptr(), 4 * buffers.logits.shape[1]]
        numbers = [spec.num_choices, spec.top_k, int(spec.divides_by_all)]
        extra = [0 if each is None else each.data_ptr() for each in (buffers.ranks, moe.correction)]
        groups = [spec.num_groups, spec.top_groups, spec.best_of_group]
        kernel = ROUTE[_SCORES[spec.scoring]]
        last = spec.mixer_limit if spec.scoring == "mixer" else spec.total_eps
        factors = map(word_of_float, (spec.weight_scale, last))
        operands = [*source, *numbers, *out, *extra, *groups, *factors]
        self._kernels.record(kernel, [self._num_tokens, *operands], label="route")

    def _record_report(self, out: Tensor, top_k: int, ids: Tensor) -> None:
        """Record a copy of a choice, [max_tokens, top_k]."""
        size = out.element_size()
        operands = [
            self._num_tokens, top_k, ids.data_ptr(), out.data_ptr(), size * out.stride(0),
        ]  # fmt: skip
        self._kernels.record(REPORT[size], operands, label="report_experts")

    def experts(self, x: Tensor, routing: Routing, moe: MoE, shared: Tensor | None) -> Tensor:
        """Record the operation `models.ops.Ops.experts`, but for the shared expert.

        Args:
            x, routing, moe: as there.
            shared: the output of the shared expert, [tokens, width], or None.
        """
        spec, buffers, meetings = moe.spec, self._buffers[moe.spec], self._meetings
        is_partial = meetings.is_partial(moe.down_proj.weight)
        out = meetings.part(buffers.out.shape[1]) if is_partial else buffers.out
        has_rest = meetings.has_rest or not is_partial
        # Each layer has its own number: a thread that comes late to a kernel still counts its
        # pieces when others have sorted the pairs of the next layer.
        num_blocks = torch.zeros(2, dtype=torch.int64)
        self._record_sort(routing, spec, num_blocks)
        blocks = [num_blocks.data_ptr(), buffers.blocks.data_ptr()]
        if self._lora is None and self._products.joins_experts(moe):
            self._record_by_tiles(x, moe, blocks, has_rest)
        else:
            kinds, kinds_of_down = self._products.expert_kinds(moe)
            activated, exact = self._record_gate_and_up(x, routing, moe, kinds, blocks)
            if kinds_of_down[0] in GROUPINGS:
                num_pairs = num_blocks[1:].data_ptr()
                rows = self._products.activations(num_pairs, exact, kinds_of_down[0])
            else:
                rows = _rows(activated)
            self._record_down(rows, exact, moe, kinds_of_down, blocks, has_rest)
        self._record_combine(routing, spec, shared if has_rest else None, out)
        return meetings.sum_parts(self._num_tokens, buffers.out) if is_partial else out

    def _record_by_tiles(self, x: Tensor, moe: MoE, blocks: Sequence[int], has_bias: bool) -> None:
        """Record both products by AMX."""
        spec, buffers = moe.spec, self._buffers[moe.spec]
        source, activated = _rows(buffers.rounded), _rows(buffers.rounded_inner)
        listed = [*_rows(x), buffers.tokens.data_ptr(), source[0], x.shape[1], source[1]]
        self._kernels.record(expert_tiles.ROUND_PAIRS, [*blocks, *listed], label="round")
        kinds = self._products.tiled_expert_kinds(moe.gate_up_proj.weight)
        kernel = expert_tiles.GATE_AND_UP[*kinds[:2], spec.activation]
        weights = _weights(moe.gate_up_proj, spec.inner)
        operands = [*blocks, *source, *activated, *weights]
        self._kernels.record(kernel, operands, label=f"gate_and_up {_size(moe)}")
        kernel = expert_tiles.DOWN[self._products.tiled_expert_kinds(moe.down_proj.weight)]
        weights = _weights(moe.down_proj, buffers.rows.shape[1], has_bias)
        operands = [*blocks, *activated, *_rows(buffers.rows), *weights]
        self._kernels.record(kernel, operands, label=f"down {_size(moe)}")

    def _record_gate_and_up(
        self, x: Tensor, routing: Routing, moe: MoE, kinds: Kinds, blocks: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Record the activation; return it as the kernel writes it, and before it is rounded."""
        spec, buffers = moe.spec, self._buffers[moe.spec]
        source = self._products.activations(self._num_tokens, x, kinds[0])
        activated = exact = buffers.activated
        is_rounded = kinds[0] != "float32" and kinds[0] not in GROUPINGS
        if is_rounded:
            activated = activated.view(getattr(torch, kinds[0]))[:, : spec.inner]
        kernel, adapters = GATE_AND_UP[*kinds, spec.activation], [0, 0, 0]
        if self._lora is not None:
            if is_rounded:
                exact = self._exact.setdefault(spec, torch.empty_like(exact))
            kernel = ADAPTED_GATE_AND_UP[*kinds, spec.activation, self._lora.kind]
            listed = x, buffers.tokens, blocks, True
            own = self._lora.record_pairs(self._kernels, moe.gate_up_proj, *listed)
            adapters = [own, *_rows(exact)]
        # With a weight w of its inputs an expert returns down(act(w * gate) * w * up): that is
        # w * down(act(w * gate) * up).
        weights = np.array(
            PairWeights(routing.ids.data_ptr(), routing.weights.data_ptr(), spec.top_k), np.int64
        )
        factors = weights.ctypes.data if spec.weighs_inputs else 0
        extra = [buffers.tokens.data_ptr(), self._scratch.data_ptr(), factors, *adapters]
        extra.append(word_of_float(spec.bound))
        operands = [*blocks, *source, *_rows(activated), *_weights(moe.gate_up_proj, spec.inner)]
        label = f"gate_and_up {_size(moe)}"
        self._kernels.record(kernel, [*operands, *extra], keep=[weights], label=label)
        return activated, exact

    def _record_down(
        self,
        activated: Sequence[int],
        exact: Tensor,
        moe: MoE,
        kinds: Kinds,
        blocks: Sequence[int],
        has_bias: bool,
    ) -> None:
        """Record the product of activations, given by their address and stride, or their exact
        values."""
        buffers = self._buffers[moe.spec]
        rows = buffers.rows
        kernel, adapters = DOWN[kinds], []
        if self._lora is not None:
            kernel = ADAPTED_DOWN[*kinds, self._lora.kind]
            in_order = exact, buffers.tokens, blocks, False
            adapters = [self._lora.record_pairs(self._kernels, moe.down_proj, *in_order)]
        weights = _weights(moe.down_proj, rows.shape[1], has_bias)
        operands = [*blocks, *activated, *_rows(rows), *weights, *adapters]
        self._kernels.record(kernel, operands, label=f"down {_size(moe)}")

    def _record_sort(self, routing: Routing, spec: MoESpec, num_blocks: Tensor) -> None:
        buffers = self._buffers[spec]
        out = [buffers.tokens, buffers.places, buffers.blocks, num_blocks]
        operands = [
            self._num_tokens, routing.ids.data_ptr(), spec.num_experts, spec.top_k,
            buffers.firsts.data_ptr(), *(tensor.data_ptr() for tensor in out),
        ]  # fmt: skip
        kernel = SORT
        if self._lora is not None:
            kernel, operands = SORT_LISTED, [*operands, self._lora.order.ctypes.data]
        self._kernels.record(kernel, operands, keep=[num_blocks], label="sort")

    def _record_combine(
        self, routing: Routing, spec: MoESpec, shared: Tensor | None, out: Tensor
    ) -> None:
        buffers, gates = self._buffers[spec], routing.shared_gates
        sources = [buffers.places, routing.weights, buffers.rows, out]
        factors = [0, 0] if gates is None else [gates.data_ptr(), 4 * gates.stride(0)]
        operands = [
            self._num_tokens, spec.top_k, *(tensor.data_ptr() for tensor in sources),
            out.shape[1], 0 if shared is None else shared.data_ptr(), *factors,
            0 if shared is None else 4 * shared.stride(0),
        ]  # fmt: skip
        self._kernels.record(COMBINE, operands, label="combine")


def _rows(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.element_size() * tensor.stride(0)


def _weights(linear: ExpertLinear, columns: int, has_bias: bool = True) -> Sequence[int]:
    numbers, scales = weights_of(linear.weight)
    bias = 0 if linear.bias is None or not has_bias else linear.bias.data_ptr()
    return numbers.data_ptr(), columns, linear.weight.shape[2], scales, bias


def _size(moe: MoE) -> str:
    return f"{moe.spec.top_k}/{moe.spec.num_experts}x{moe.spec.inner}"
