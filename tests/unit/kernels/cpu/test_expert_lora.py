"""CPU adapters of experts: equal to merged weights, and independent of the batch, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, chain, groupby, product

import numpy as np
import pytest
import torch
from support.moe_helpers import Experts, MoERun, address
from support.variants import slow
from torch import Tensor

from shmllm_kernels.cpu import KernelProgram
from shmllm_kernels.cpu.arithmetic import HAS_BFLOAT16
from shmllm_kernels.cpu.expert_lora import SHRINK_PAIRS, ExpertAdapters
from shmllm_kernels.cpu.experts import ADAPTED_DOWN, ADAPTED_GATE_AND_UP, SCRATCH_BYTES
from shmllm_kernels.cpu.lora import Segment, entry_words
from shmllm_kernels.cpu.memory import word_of_float
from shmllm_kernels.cpu.pairs import COMBINE, SORT_LISTED
from shmllm_kernels.cpu.product_tiles import IN_ORDER, LISTED
from shmllm_kernels.cpu.products import ROWS_AT_ONCE
from shmllm_kernels.reference import moe

NUM_EXPERTS, HIDDEN, INNER, TOP_K = 5, 70, 37, 2
RANKS = 12
KINDS = [
    ("float32", "float32", "float32"),
    ("float32", "bfloat16", "bfloat16"),
    ("float32", "float16", "float32"),
    ("bfloat16", "bfloat16", "float32"),
    ("bfloat16", "bfloat16", "bfloat16"),
]
"""The dtype names of activations, weights and adapters."""
COMPUTED = [kinds for kinds in KINDS if kinds[0] == "float32" or HAS_BFLOAT16]
SHOWN = [
    (KINDS[0], "silu_clamped"), (KINDS[2], "relu_squared"), (COMPUTED[-1], "gpt_oss"),
]  # fmt: skip
"""The variants of the default suite; each compiles kernels of its own."""
VARIANTS = [
    each if each in SHOWN else slow(*each)
    for each in product(
        COMPUTED,
        ["silu", "silu_bounded", "silu_clamped", "silu_shifted", "gpt_oss", "relu_squared"],
    )
]


@dataclass(frozen=True)
class Part:
    """What an adapter adds to some columns of one expert's product."""

    a: Tensor  # [rank, k]
    b: Tensor  # [rank, columns]
    column: int
    scale: float


Adapter = list[list[list[Part]]]
"""The parts of gate and up, and of down, of each expert; an expert may have none."""


def random_adapter(kind: str, activation: str) -> Adapter:
    dtype = getattr(torch, kind)

    def part(rank: int, k: int, column: int, size: int, scale: float) -> Part:
        a, b = torch.randn(rank, k) * k**-0.5, torch.randn(rank, size)
        return Part(a.to(dtype), b.to(dtype), column, scale)

    if activation.startswith("silu"):  # gate and up have matrices of their own
        gate_up = [(5, HIDDEN, 0, INNER, 0.5), (7, HIDDEN, INNER, INNER, 0.25)]
    else:
        width = INNER if activation == "relu_squared" else 2 * INNER
        gate_up = [(9, HIDDEN, 0, width, 0.4)]
    sizes = [gate_up, [(3, INNER, 0, HIDDEN, 0.7)]]
    return [
        [[part(*each) for each in some] if expert != 3 else [] for expert in range(NUM_EXPERTS)]
        for some in sizes
    ]


class AdaptedRun(MoERun):
    """Computes experts with the adapters of tokens.

    Args:
        adapters: the adapters by their places.
        places: for each token the place of its adapter; -1: it has none.
        top_k, num_threads: as those of `MoERun`.
        kind: the dtype name of the adapters.
    """

    def __init__(
        self, adapters: list[Adapter], places: list[int], num_threads: int, kind: str
    ) -> None:
        super().__init__(NUM_EXPERTS, TOP_K, len(places), num_threads)
        self._kind, self._kept = kind, []
        self._units = np.array([sum(place >= 0 for place in places)])
        self._of_tokens = np.array(places)
        self._order = np.argsort(self._of_tokens, kind="stable")
        self._rows = np.arange(ROWS_AT_ONCE)
        entries = [[self._entry(parts) for parts in chain(*each)] for each in adapters]
        self._table = np.array(entries, np.int64).reshape(len(adapters), 2 * NUM_EXPERTS)

    def _entry(self, parts: list[Part]) -> int:
        if not parts:
            return 0
        a = torch.cat([part.a for part in parts])
        firsts = [0, *accumulate(len(part.a) for part in parts)]
        segments = [
            Segment(address(p.b), first, len(p.b), p.column, p.b.shape[1], p.scale)
            for p, first in zip(parts, firsts, strict=False)
        ]
        entry = np.array(entry_words(address(a), len(a), segments), np.int64)
        self._kept += [a, entry]
        return int(entry.ctypes.data)

    def _adapters(self, first: int, t: Tensor) -> int:
        arrays = self._units, self._table, self._of_tokens, self._rows
        units, table, places, rows = (int(array.ctypes.data) for array in arrays)
        words = np.array(
            ExpertAdapters(
                units, table, 2 * NUM_EXPERTS, first, places, address(self._tokens), address(t),
                4 * RANKS, rows,
            ),
            np.int64,
        )  # fmt: skip
        self._kept.append(words)
        return int(words.ctypes.data)

    def adapted(self, x: Tensor, e: Experts) -> Tensor:
        """Returns [tokens, HIDDEN]."""
        pairs = self.num_tokens * self.top_k
        exact = self._buffer(pairs, INNER)
        activated = exact if e.x_dtype == torch.float32 else self._buffer(pairs, INNER, e.x_dtype)
        rows, out = self._buffer(pairs, HIDDEN), self._buffer(self.num_tokens, HIDDEN)
        t, down_t = self._buffer(pairs, RANKS), self._buffer(pairs, RANKS)
        scratch = torch.full((self.num_threads, SCRATCH_BYTES // 4), torch.nan)
        rounded, size = x.to(e.x_dtype), activated.element_size()
        count, num_blocks = self._count.ctypes.data, self._num_blocks.ctypes.data
        blocks = [num_blocks, address(self._blocks)]
        gate_up, down = self._adapters(0, t), self._adapters(NUM_EXPERTS, down_t)

        def record(program: KernelProgram) -> None:
            program.record(SORT_LISTED, [
                count, address(self._ids), self.num_experts, self.top_k, address(self._firsts),
                address(self._tokens), address(self._places), address(self._blocks), num_blocks,
                self._order.ctypes.data,
            ])  # fmt: skip
            of_x = [address(x), 4 * HIDDEN, HIDDEN, RANKS]
            program.record(SHRINK_PAIRS[self._kind, LISTED], [gate_up, *blocks, *of_x])
            program.record(ADAPTED_GATE_AND_UP[*e.kinds, e.activation, self._kind], [
                *blocks, address(rounded), size * HIDDEN, address(activated), size * INNER,
                address(e.gate_up), INNER, HIDDEN, 0, 0, address(self._tokens), address(scratch),
                0, gate_up, address(exact), 4 * INNER, word_of_float(e.bound),
            ])  # fmt: skip
            of_exact = [address(exact), 4 * INNER, INNER, RANKS]
            program.record(SHRINK_PAIRS[self._kind, IN_ORDER], [down, *blocks, *of_exact])
            program.record(ADAPTED_DOWN[*e.kinds, self._kind], [
                *blocks, address(activated), size * INNER, address(rows), 4 * HIDDEN,
                address(e.down), HIDDEN, INNER, 0, 0, down,
            ])  # fmt: skip
            program.record(COMBINE, [
                count, self.top_k, address(self._places), address(self._weights), address(rows),
                address(out), HIDDEN, 0, 0, 4, 0,
            ])  # fmt: skip

        self._run(record)
        return out[: self.num_tokens]


def merged(experts: Experts, adapter: Adapter | None) -> tuple[Tensor, Tensor]:
    """The weights with those of an adapter, in float64."""
    weights = experts.gate_up.double(), experts.down.double()
    for weight, of_experts in zip(weights, adapter or [[], []], strict=True):
        for expert, parts in enumerate(of_experts):
            for part in parts:
                columns = slice(part.column, part.column + part.b.shape[1])
                weight[expert, columns] += part.scale * part.b.double().T @ part.a.double()
    return weights


def compute(
    adapters: list[Adapter],
    places: list[int],
    x: Tensor,
    experts: Experts,
    ids: Tensor,
    weights: Tensor,
    num_threads: int = 2,
) -> Tensor:
    kind = str(adapters[0][0][0][0].a.dtype).removeprefix("torch.")
    run = AdaptedRun(adapters, places, num_threads, kind)
    run.route_to(ids, weights)
    return run.adapted(x, experts)


def drawn(kinds: tuple[str, str, str], activation: str, num_tokens: int) -> tuple:
    """Random experts, inputs and a routing that gives most tokens to few experts."""
    x_dtype, dtype = (getattr(torch, kind) for kind in kinds[:2])
    experts = Experts.random(NUM_EXPERTS, HIDDEN, INNER, dtype, activation)
    experts = replace(experts, x_dtype=x_dtype, bound=0.5)
    ids = torch.rand(num_tokens, NUM_EXPERTS).argsort(-1)[:, :TOP_K].sort(-1).values
    ids[::2] = torch.tensor([1, 4])
    return torch.randn(num_tokens, HIDDEN), experts, ids, torch.rand(num_tokens, TOP_K)


def places_of(num_tokens: int) -> list[int]:
    """Adapters in turn, in stretches of different sizes, and none."""
    return [[0, -1, 1, 1, 2, 0, -1][token % 7] for token in range(num_tokens)]


@pytest.mark.parametrize(("kinds", "activation"), VARIANTS)
def test_each_token_has_the_merged_weights_of_its_adapter(
    kinds: tuple[str, str, str], activation: str
) -> None:
    adapters = [random_adapter(kinds[2], activation) for _ in range(3)]
    for num_tokens in (0, 1, 33):
        x, experts, ids, weights = drawn(kinds, activation, num_tokens)
        places = places_of(num_tokens)
        found = compute(adapters, places, x, experts, ids, weights)
        for token, place in enumerate(places):
            one = slice(token, token + 1)
            own = merged(experts, adapters[place] if place >= 0 else None)
            want = moe.experts(
                x[one].double(), ids[one], weights[one].double(), *own, activation=activation,
                bound=experts.bound,
            )  # fmt: skip
            # Activations that are rounded to 8 bits move each term by 2**-8 at most.
            relative = 2e-5 if kinds[0] == "float32" else 2**-6
            largest = float(want.abs().max())
            torch.testing.assert_close(
                found[one].double(), want, atol=relative * (1 + largest), rtol=relative
            )


@pytest.mark.parametrize(("kinds", "activation"), VARIANTS)
def test_a_token_has_the_same_bits_alone_and_in_any_batch(
    kinds: tuple[str, str, str], activation: str
) -> None:
    adapters = [random_adapter(kinds[2], activation) for _ in range(3)]
    num_tokens = ROWS_AT_ONCE + 60
    x, experts, ids, weights = drawn(kinds, activation, num_tokens)
    places = places_of(num_tokens)
    whole = compute(adapters, places, x, experts, ids, weights)
    for num_threads, size in ((1, 1), (3, 2), (2, 50)):
        for begin in range(0, num_tokens - size, 5 * size):
            rows = slice(begin, begin + size)
            part = x[rows].clone(), experts, ids[rows], weights[rows]
            assert torch.equal(compute(adapters, places[rows], *part, num_threads), whole[rows])


@pytest.mark.parametrize(("kinds", "activation"), VARIANTS)
def test_tokens_without_an_adapter_and_a_b_of_zeros_have_the_base_s_bits(
    kinds: tuple[str, str, str], activation: str
) -> None:
    adapters = [random_adapter(kinds[2], activation) for _ in range(3)]
    for parts in chain(*adapters[1]):
        for part in parts:
            part.b.zero_()
    x, experts, ids, weights = drawn(kinds, activation, 40)
    base = MoERun(NUM_EXPERTS, TOP_K, 40)
    base.route_to(ids, weights)
    expected = base.experts(x, experts)
    places = places_of(40)
    found = compute(adapters, places, x, experts, ids, weights)
    for place, group in groupby(sorted(range(40), key=places.__getitem__), places.__getitem__):
        rows = list(group)
        assert torch.equal(found[rows], expected[rows]) == (place in (-1, 1))
    none = compute(adapters, [-1] * 40, x, experts, ids, weights)
    assert torch.equal(none, expected)


def test_an_adapter_of_some_experts_leaves_the_others() -> None:
    adapter = random_adapter("float32", "silu")
    x, experts, ids, weights = drawn(("float32",) * 3, "silu", 6)
    ids[:] = torch.tensor([3, 4])  # 3 has none
    only = [[[] if expert == 4 else parts for expert, parts in enumerate(e)] for e in adapter]
    found = compute([adapter, only], [0, 1] * 3, x, experts, ids, weights)
    base = MoERun(NUM_EXPERTS, TOP_K, 6)
    base.route_to(ids, weights)
    expected = base.experts(x, experts)
    assert torch.equal(found[1::2], expected[1::2])
    assert not torch.isclose(found[::2], expected[::2]).all()
