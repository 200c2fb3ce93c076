"""CPU kernels of Mamba: compared with transformers, and independent of steps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.cpu_kernels import run_kernel
from support.recurrent_kernels import DIVISIONS, States, divided
from torch import Tensor
from transformers.models.jamba.modeling_jamba import JambaRMSNorm
from transformers.models.mamba import modeling_mamba as mamba

from shmllm_kernels.cpu import word_of_float
from shmllm_kernels.cpu.mamba import ACTIVATE, DIVIDE, GATE, SCAN, TIME
from shmllm_kernels.cpu.norms import KINDS
from shmllm_kernels.cpu.simd import LANES


class Mixer:
    """A Mamba and what its kernel reads of some tokens."""

    def __init__(self, channels: int, state_size: int) -> None:
        self.channels, self.state_size = channels, state_size
        self.logs, self.skips = torch.randn(state_size, channels), torch.randn(channels)
        self.block_bytes = 64 + 4 * channels * state_size

    def inputs(self, length: int) -> list[Tensor]:
        """Inputs, time steps, and rows with B, C and others."""
        x, steps = torch.randn(length, self.channels), torch.rand(length, self.channels)
        return [x, steps, torch.randn(length, 3 + 2 * self.state_size)]

    def run(
        self, states: States, steps: list[tuple[int, int, int]], inputs: list[Tensor]
    ) -> Tensor:
        x, out, rows = (each.clone() for each in inputs)
        keys, stride = rows.data_ptr() + 12, 4 * rows.shape[1]
        states.run(
            SCAN, steps, x, self.channels, self.state_size, keys, keys + 4 * self.state_size,
            stride, self.logs, self.skips, out, 64,
        )  # fmt: skip
        return out

    def expected(self, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
        """What transformers computes one token after the other, in float64 but for its state."""
        x, steps, rows = (each.double() for each in inputs)
        keys, queries = rows[:, 3:].split(self.state_size, 1)
        out, state = mamba.mamba_selective_scan(
            x.T[None], steps.T[None], -self.logs.T.double().exp(), keys.T[None], queries.T[None],
            D=self.skips.double(), return_last_state=True,
        )  # fmt: skip
        return out[0].T, state[0].T


@pytest.mark.parametrize("sizes", [(16, 16), (48, 4), (80, 16), (144, 128)])
def test_a_scan_equals_transformers(sizes: tuple[int, int]) -> None:
    mixer = Mixer(*sizes)
    inputs = mixer.inputs(50)
    expected, state = mixer.expected(inputs)
    results = []
    for division in DIVISIONS:
        states = States(1, mixer.block_bytes)
        outs = [
            mixer.run(states, [(0, start, end)], [each[start:end] for each in inputs])
            for start, end in divided(50, [*division])
        ]
        results.append((torch.cat(outs), states.memory[states.table[0, 6].item(), 64:]))
    for out, memory in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(memory, results[0][1])
    torch.testing.assert_close(results[0][0].double(), expected, atol=2e-5, rtol=1e-4)
    found = results[0][1].view(torch.float32).view(-1, sizes[1], LANES)
    found = found.transpose(0, 1).reshape(state.shape)
    torch.testing.assert_close(found.double(), state, atol=2e-5, rtol=1e-4)


def test_requests_of_a_step_do_not_change_each_other() -> None:
    mixer = Mixer(80, 16)
    inputs = [mixer.inputs(30) for _ in range(3)]
    alone = [
        mixer.run(States(3, mixer.block_bytes), [(row, 0, 30)], inputs[row]) for row in range(3)
    ]
    states = States(3, mixer.block_bytes)
    outs: list[list[Tensor]] = [[], [], []]
    for steps in ([(2, 0, 5), (0, 0, 9)], [(1, 0, 30), (2, 5, 6)], [(0, 9, 30), (2, 6, 30)]):
        rows = [
            torch.cat([inputs[row][part][start:end] for row, start, end in steps])
            for part in range(3)
        ]
        parts = mixer.run(states, steps, rows).split([end - start for _, start, end in steps])
        for (row, _, _), part in zip(steps, parts, strict=True):
            outs[row].append(part)
    for row in range(3):
        assert torch.equal(torch.cat(outs[row]), alone[row])


def test_a_state_that_is_shared_is_only_read() -> None:
    mixer = Mixer(16, 16)
    inputs = mixer.inputs(20)
    states = States(2, mixer.block_bytes)
    mixer.run(states, [(0, 0, 8)], [each[:8] for each in inputs])
    shared = states.table[0, 0]
    before = states.memory[shared.item()].clone()
    states.table[1, 0] = shared
    twice = [torch.cat([each[8:], each[8:]]) for each in inputs]
    both = mixer.run(states, [(0, 8, 20), (1, 8, 20)], twice)
    assert torch.equal(both[:12], both[12:])
    assert torch.equal(states.memory[shared.item()], before)


@pytest.mark.parametrize("rows", [0, 1, 40])
def test_activations_equal_torchs(rows: int) -> None:
    x, gate = 10 * torch.randn(rows, 90), 10 * torch.randn(rows, 50)
    out, gated, times = (torch.full((rows, 33), 0.7) for _ in range(3))
    run_kernel(ACTIVATE, rows, x, 360, out, 33)
    torch.testing.assert_close(out, F.silu(x[:, :33]), atol=1e-6, rtol=1e-5)
    run_kernel(GATE, rows, gated, 33, gate, 200)
    torch.testing.assert_close(gated, 0.7 * F.silu(gate[:, :33]), atol=1e-6, rtol=1e-5)
    times.copy_(x[:, :33])
    run_kernel(TIME, rows, times, 33)
    torch.testing.assert_close(times, F.softplus(x[:, :33]), atol=1e-9, rtol=1e-5)


@pytest.mark.parametrize("rows", [0, 1, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_norms_equal_transformers(kind: str, rows: int) -> None:
    rank, size = 20, 16
    norms = [JambaRMSNorm(width, eps=1e-5).to(getattr(torch, kind)) for width in (rank, size, size)]
    weights = [torch.nn.init.normal_(norm.weight).detach() for norm in norms]
    x, steps = torch.randn(rows, rank + 2 * size), torch.empty(rows, rank)
    parts = x.clone().split([rank, size, size], 1)
    expected = [norm.float()(part) for norm, part in zip(norms, parts, strict=True)]
    run_kernel(DIVIDE[kind], rows, x, rank, size, steps, *weights, word_of_float(1e-5), 1)
    torch.testing.assert_close(steps, expected[0].detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        x[:, rank:], torch.cat(expected[1:], 1).detach(), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("is_normed", [False, True])
def test_norms_without_weights(is_normed: bool) -> None:
    x, steps = torch.randn(9, 52), torch.empty(9, 20)
    expected = list(x.clone().split([20, 16, 16], 1))
    if is_normed:
        expected = [F.rms_norm(part, part.shape[1:], eps=1e-5) for part in expected]
    run_kernel(DIVIDE["float32"], 9, x, 20, 16, steps, 0, 0, 0, word_of_float(1e-5), int(is_normed))
    torch.testing.assert_close(steps, expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(x[:, 20:], torch.cat(expected[1:], 1), atol=1e-5, rtol=1e-5)
