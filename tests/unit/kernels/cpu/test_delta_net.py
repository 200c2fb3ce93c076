"""CPU kernels of gated delta nets: compared with transformers, and independent of steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.recurrent_kernels import DIVISIONS, States, divided
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from shmllm_kernels.cpu import KernelProgram, word_of_float
from shmllm_kernels.cpu.delta_net import GATED_NORM, PREPARE, delta_rule
from shmllm_kernels.cpu.norms import KINDS
from shmllm_kernels.cpu.row_factors import GATE
from shmllm_kernels.cpu.simd import LANES


class Net:
    """A delta net and some inputs."""

    def __init__(
        self,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        is_tiled: bool = False,
        most: float = 1.0,
    ) -> None:
        self.is_tiled, self.most = is_tiled, most
        self.sizes = key_heads, key_dim, value_heads, value_dim
        self.keys, self.values = key_heads * key_dim, value_heads * value_dim
        self.width = 2 * self.keys + 2 * self.values + 2 * value_heads
        self.logs = torch.randn(value_heads)
        self.biases = torch.randn(value_heads)
        self.block_bytes = 64 + 4 * value_heads * key_dim * value_dim

    def gates(self, x: Tensor) -> list[int]:
        """The addresses of rates and of decays, and the stride of these."""
        rates = x.data_ptr() + 4 * (self.width - 2 * self.sizes[2])
        return [rates, rates + 4 * self.sizes[2], 4 * self.width]

    def prepared(self, x: Tensor, kind: str = "float32") -> Tensor:
        rows, biases = x.clone(), self.biases.to(getattr(torch, kind))
        program, count = KernelProgram(2), np.array([len(x)])
        numbers = [count.ctypes.data, rows.data_ptr(), 4 * self.width, *self.sizes]
        numbers += [self.logs.data_ptr(), biases.data_ptr(), *self.gates(rows)]
        numbers += [word_of_float(self.most), word_of_float(0.0)]
        program.record(PREPARE[kind, False], numbers)
        program.replay()
        return rows

    def run(self, states: States, steps: list[tuple[int, int, int]], x: Tensor) -> Tensor:
        out = torch.full((len(x), self.values), float("nan"))
        states.run(
            delta_rule(self.sizes[3]), steps, x, 4 * self.width, *self.sizes, out, 64,
             1 if self.is_tiled else self.sizes[2] // self.sizes[0], *self.gates(x),
        )  # fmt: skip
        return out

    def expected(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What transformers computes, in float64 but for its state."""
        key_heads, key_dim, value_heads, value_dim = self.sizes
        widths = [self.keys, self.keys, self.values, self.values, value_heads, value_heads]
        q, k, v, _, b, a = x[None].split(widths, -1)
        q, k, v = (F.silu(each) for each in (q, k, v))
        decay = -self.logs.exp() * F.softplus(a + self.biases)
        q, k = (each.view(1, -1, key_heads, key_dim) for each in (q, k))
        if self.is_tiled:
            q, k = (each.repeat(1, 1, value_heads // key_heads, 1) for each in (q, k))
        out, state = qwen.torch_recurrent_gated_delta_rule(
            q, k, v.view(1, -1, value_heads, value_dim), g=decay,
            beta=self.most * b.sigmoid(), initial_state=None, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return out[0].flatten(1), state[0]


NETS = [(1, 1, 16, 16), (2, 4, 32, 32), (2, 6, 16, 48), (1, 2, 128, 128)]


@pytest.mark.parametrize(
    ("sizes", "is_tiled", "most"),
    [
        *((sizes, False, 1.0) for sizes in NETS),
        *(((2, 6, 16, 48), True, 1.0), ((1, 1, 16, 32), False, 2.0)),
    ],
)
def test_a_delta_net_equals_transformers(
    sizes: tuple[int, int, int, int], is_tiled: bool, most: float
) -> None:
    net = Net(*sizes, is_tiled, most)
    x = torch.randn(50, net.width)
    expected, state = net.expected(x)
    prepared, results = net.prepared(x), []
    for division in DIVISIONS:
        states = States(1, net.block_bytes)
        outs = [
            net.run(states, [(0, start, end)], prepared[start:end].contiguous())
            for start, end in divided(50, [*division])
        ]
        results.append((torch.cat(outs), states.memory[states.table[0, 6].item(), 64:]))
    for out, memory in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(memory, results[0][1])
    torch.testing.assert_close(results[0][0], expected, atol=2e-5, rtol=1e-4)
    columns = 2 * LANES if net.sizes[3] % (2 * LANES) == 0 else LANES
    found = results[0][1].view(torch.float32).view(len(state), -1, net.sizes[1], columns)
    found = found.transpose(1, 2).reshape(state.shape)
    torch.testing.assert_close(found, state, atol=2e-5, rtol=1e-4)


def test_requests_of_a_step_do_not_change_each_other() -> None:
    net = Net(2, 4, 32, 32)
    x = [net.prepared(torch.randn(30, net.width)) for _ in range(3)]
    alone = []
    for row in range(3):
        states = States(3, net.block_bytes)
        alone.append(net.run(states, [(row, 0, 30)], x[row]))
    states = States(3, net.block_bytes)
    outs: list[list[Tensor]] = [[], [], []]
    for steps in ([(2, 0, 5), (0, 0, 9)], [(1, 0, 30), (2, 5, 6)], [(0, 9, 30), (2, 6, 30)]):
        rows = torch.cat([x[row][start:end] for row, start, end in steps])
        parts = net.run(states, steps, rows).split([end - start for _, start, end in steps])
        for (row, _, _), part in zip(steps, parts, strict=True):
            outs[row].append(part)
    for row in range(3):
        assert torch.equal(torch.cat(outs[row]), alone[row])


def test_a_state_that_is_shared_is_only_read() -> None:
    net = Net(1, 1, 16, 16)
    x = net.prepared(torch.randn(20, net.width))
    states = States(2, net.block_bytes)
    out = net.run(states, [(0, 0, 8)], x[:8])
    shared = states.table[0, 0]
    before = states.memory[shared.item()].clone()
    states.table[1, 0] = shared
    both = net.run(states, [(0, 8, 20), (1, 8, 20)], torch.cat([x[8:], x[8:]]))
    assert torch.equal(both[:12], both[12:])
    assert torch.equal(states.memory[shared.item()], before)
    assert torch.equal(
        torch.cat([out, both[:12]]), net.run(States(1, net.block_bytes), [(0, 0, 20)], x)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("large", [False, True])
def test_gates_equal_torchs(kind: str, large: bool) -> None:
    net = Net(2, 4, 16, 16)
    x = torch.randn(40, net.width) * (40 if large else 1)
    biases = net.biases.to(getattr(torch, kind)).float()
    rates, decays = x[:, -8:-4].double(), x[:, -4:].double()
    decays = torch.exp(-net.logs.double().exp() * F.softplus(decays + biases.double()))
    found = net.prepared(x, kind)[:, -8:].double()
    torch.testing.assert_close(found[:, :4], rates.sigmoid(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found[:, 4:], decays, atol=1e-6, rtol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [0, 1, 40])
def test_a_gated_norm_equals_transformers(kind: str, rows: int) -> None:
    heads, width = 3, 48
    norm = qwen.Qwen3NextRMSNormGated(width, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    weight = norm.weight.detach().to(getattr(torch, kind))
    norm.weight.data = weight.float()
    x, gate = torch.randn(rows, heads * width), torch.randn(rows, heads * width + 5)
    shape = rows, heads, width
    expected = norm(x.view(shape), gate[:, : heads * width].reshape(shape)).flatten(1)
    program, count = KernelProgram(2), np.array([rows])
    numbers = [count.ctypes.data, x.data_ptr(), 4 * heads * width, gate.data_ptr()]
    numbers += [4 * gate.shape[1], heads, width, weight.data_ptr(), word_of_float(1e-5)]
    program.record(GATED_NORM[kind, "silu"], numbers)
    program.replay()
    torch.testing.assert_close(x, expected.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("columns", [1, 3, 11])
@pytest.mark.parametrize("name", GATE)
@pytest.mark.parametrize("rows", [0, 1, 40])
def test_a_gate_serves_columns(rows: int, name: str, columns: int) -> None:
    x, gate = torch.randn(rows, 33), 20 * torch.randn(rows, 50)
    opened = getattr(torch.nn.functional, name)(gate[:, : 33 // columns])
    expected = x * opened.repeat_interleave(columns, 1)
    program, count = KernelProgram(2), np.array([rows])
    operands = [count.ctypes.data, x.data_ptr(), 33, gate.data_ptr(), 200, columns]
    program.record(GATE[name], operands)
    program.replay()
    torch.testing.assert_close(x, expected, atol=1e-6, rtol=1e-5)


class ChannelNet(Net):
    """A net with as many key heads as value heads, of the same width, and a decay for each channel
    of a key. Its rows are queries, keys, values and rates; decays lie elsewhere."""

    def __init__(self, heads: int, dim: int, least: float | None = None) -> None:
        super().__init__(heads, heads, dim, dim)
        self.least = least
        self.width = 3 * self.keys + heads
        self.biases = torch.randn(self.keys)

    def prepared_with(self, x: Tensor, decays: Tensor) -> tuple[Tensor, Tensor]:
        rows, own = x.clone(), decays.clone()
        program, count = KernelProgram(2), np.array([len(x)])
        numbers = [count.ctypes.data, rows.data_ptr(), 4 * self.width, *self.sizes]
        numbers += [self.logs.data_ptr(), self.biases.data_ptr(), rows.data_ptr() + 12 * self.keys]
        numbers += [own.data_ptr(), 4 * self.keys, word_of_float(1.0)]
        program.record(PREPARE["float32", True], [*numbers, word_of_float(self.least or 0.0)])
        program.replay()
        return rows, own

    def run_with(
        self, states: States, steps: list[tuple[int, int, int]], x: Tensor, decays: Tensor
    ) -> Tensor:
        out = torch.full((len(x), self.values), float("nan"))
        states.run(
            delta_rule(self.sizes[3], True), steps, x, 4 * self.width, *self.sizes, out, 64, 1,
            x.data_ptr() + 12 * self.keys, decays, 4 * self.keys,
        )  # fmt: skip
        return out

    def expected_with(self, x: Tensor, decays: Tensor) -> tuple[Tensor, Tensor]:
        heads, dim, _, _ = self.sizes
        *parts, rates = x[None].split([self.keys] * 3 + [heads], -1)
        q, k, v = (F.silu(each).view(1, -1, heads, dim) for each in parts)
        times, growth = (decays + self.biases).view(1, -1, heads, dim), self.logs.exp()[:, None]
        logs = -growth * F.softplus(times)
        if self.least is not None:
            logs = self.least * torch.sigmoid(growth * times)
        out, state = kimi.recurrent_kimi_delta_attention(
            q, k, v, g=logs, beta=rates.sigmoid(),
            initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return out[0].flatten(1), state[0]


@pytest.mark.parametrize(
    ("sizes", "least"), [((1, 16), None), ((3, 32), -5.0), ((2, 128), None), ((2, 16), -0.1)]
)
def test_a_net_with_decays_by_channel_equals_transformers(
    sizes: tuple[int, int], least: float | None
) -> None:
    net = ChannelNet(*sizes, least)
    x, decays = torch.randn(50, net.width), torch.randn(50, net.keys)
    expected, state = net.expected_with(x, decays)
    rows, factors = net.prepared_with(x, decays)
    results = []
    for division in DIVISIONS:
        states = States(1, net.block_bytes)
        outs = [
            net.run_with(states, [(0, start, end)], rows[start:end], factors[start:end])
            for start, end in divided(50, [*division])
        ]
        results.append((torch.cat(outs), states.memory[states.table[0, 6].item(), 64:]))
    for out, memory in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(memory, results[0][1])
    torch.testing.assert_close(results[0][0], expected, atol=2e-5, rtol=1e-4)
    columns = 2 * LANES if net.sizes[3] % (2 * LANES) == 0 else LANES
    found = results[0][1].view(torch.float32).view(len(state), -1, net.sizes[1], columns)
    torch.testing.assert_close(
        found.transpose(1, 2).reshape(state.shape), state, atol=2e-5, rtol=1e-4
    )


@pytest.mark.parametrize("kind", KINDS)
def test_gates_of_a_norm_may_be_sigmoids(kind: str) -> None:
    heads, width, rows = 3, 48, 40
    norm = kimi.KimiLinearRMSNormGated(width, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    weight = norm.weight.detach().to(getattr(torch, kind))
    norm.weight.data = weight.float()
    x, gate = torch.randn(rows, heads * width), torch.randn(rows, heads * width)
    shape = rows, heads, width
    expected = norm(x.view(shape), gate.view(shape)).flatten(1)
    program, count = KernelProgram(2), np.array([rows])
    numbers = [count.ctypes.data, x.data_ptr(), 4 * heads * width, gate.data_ptr()]
    numbers += [4 * gate.shape[1], heads, width, weight.data_ptr(), word_of_float(1e-5)]
    program.record(GATED_NORM[kind, "sigmoid"], numbers)
    program.replay()
    torch.testing.assert_close(x, expected.detach(), atol=1e-5, rtol=1e-5)
