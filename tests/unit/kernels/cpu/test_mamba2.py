"""CPU kernels of Mamba 2: compared with transformers, and independent of steps."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from support.cpu_kernels import run_kernel
from support.recurrent_kernels import DIVISIONS, States, divided
from torch import Tensor
from transformers.models.falcon_h1 import modeling_falcon_h1
from transformers.models.mamba2 import modeling_mamba2 as mamba2

from shmllm_kernels.cpu import word_of_float
from shmllm_kernels.cpu.mamba2 import GATED_NORM, MOST_TOKENS, PREPARE, scan
from shmllm_kernels.cpu.norms import KINDS
from shmllm_kernels.cpu.simd import LANES

NO_LIMITS = (0.0, math.inf)


class Mixer:
    """A Mamba 2 and some inputs."""

    def __init__(self, heads: int, head_dim: int, groups: int, state_size: int) -> None:
        self.sizes = heads, head_dim, groups, state_size
        self.inner, self.keys = heads * head_dim, groups * state_size
        self.convolved = self.inner + 2 * self.keys
        self.width = self.convolved + heads + 3
        self.logs, self.biases, self.skips = (torch.randn(heads) for _ in range(3))
        self.block_bytes = 64 + 4 * self.inner * state_size

    def prepared(self, x: Tensor, limits: tuple[float, float] = NO_LIMITS) -> Tensor:
        rows = x.clone()
        steps = rows.data_ptr() + 4 * self.convolved
        run_kernel(
            PREPARE, len(x), rows, 4 * self.width, self.convolved, steps, self.sizes[0],
            self.biases, *map(word_of_float, limits),
        )  # fmt: skip
        return rows

    def run(self, states: States, steps: list[tuple[int, int, int]], x: Tensor) -> Tensor:
        out = torch.full((len(x), self.inner + 5), float("nan"))
        states.run(
            scan(self.sizes[1]), steps, x, 4 * self.width, *self.sizes,
            x.data_ptr() + 4 * self.convolved, self.logs, self.skips, out, 4 * out.shape[1], 64,
        )  # fmt: skip
        return out[:, : self.inner]

    def expected(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What transformers computes one token after the other, in float64 but for the decays."""
        heads, head_dim, groups, state_size = self.sizes
        mixed, steps = F.silu(x[:, : self.convolved].double()), x[:, self.convolved :].double()
        inputs, keys, queries = mixed.split([self.inner, self.keys, self.keys], 1)
        state, out = torch.zeros(1, heads, head_dim, state_size, dtype=torch.float64), []

        def wide(values: Tensor) -> Tensor:
            return values.double()[:, None].expand(-1, head_dim)

        factors = wide(-self.logs.exp())[..., None].expand(-1, -1, state_size)
        for token in range(len(x)):
            result = mamba2.mamba2_selective_state_update(
                state, inputs[token].view(1, heads, head_dim), wide(steps[token, :heads])[None],
                factors, keys[token].view(1, groups, -1), queries[token].view(1, groups, -1),
                D=wide(self.skips), dt_bias=wide(self.biases), dt_softplus=True,
            )  # fmt: skip
            out.append(result)
        return torch.cat(out).flatten(1), state[0].transpose(1, 2)


MIXERS = [(1, 16, 1, 16), (4, 32, 2, 16), (3, 48, 1, 20), (2, 64, 1, 128)]


@pytest.mark.parametrize("sizes", MIXERS)
def test_a_scan_equals_transformers(sizes: tuple[int, int, int, int]) -> None:
    mixer = Mixer(*sizes)
    x = torch.randn(50, mixer.width)
    expected, state = mixer.expected(x)
    prepared, results = mixer.prepared(x), []
    for division in DIVISIONS:
        states = States(1, mixer.block_bytes)
        outs = [
            mixer.run(states, [(0, start, end)], prepared[start:end].contiguous())
            for start, end in divided(50, [*division])
        ]
        results.append((torch.cat(outs), states.memory[states.table[0, 6].item(), 64:]))
    for out, memory in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(memory, results[0][1])
    torch.testing.assert_close(results[0][0].double(), expected, atol=2e-5, rtol=1e-4)
    columns = 2 * LANES if sizes[1] % (2 * LANES) == 0 else LANES
    found = results[0][1].view(torch.float32).view(len(state), -1, sizes[3], columns)
    found = found.transpose(1, 2).reshape(state.shape)
    torch.testing.assert_close(found.double(), state, atol=2e-5, rtol=1e-4)


def test_a_scan_of_many_tokens_equals_single_ones() -> None:
    """Whatever the decays that are computed at once."""
    mixer, length = Mixer(2, 16, 1, 16), 2 * MOST_TOKENS + 3
    x = mixer.prepared(torch.randn(length, mixer.width))
    states, alone = (States(1, mixer.block_bytes, interval=1000) for _ in range(2))
    out = mixer.run(states, [(0, 0, length)], x)
    single = [mixer.run(alone, [(0, at, at + 1)], x[at : at + 1]) for at in range(length)]
    assert torch.equal(out, torch.cat(single))


def test_requests_of_a_step_do_not_change_each_other() -> None:
    mixer = Mixer(4, 32, 2, 16)
    x = [mixer.prepared(torch.randn(30, mixer.width)) for _ in range(3)]
    alone = [mixer.run(States(3, mixer.block_bytes), [(row, 0, 30)], x[row]) for row in range(3)]
    states = States(3, mixer.block_bytes)
    outs: list[list[Tensor]] = [[], [], []]
    for steps in ([(2, 0, 5), (0, 0, 9)], [(1, 0, 30), (2, 5, 6)], [(0, 9, 30), (2, 6, 30)]):
        rows = torch.cat([x[row][start:end] for row, start, end in steps])
        parts = mixer.run(states, steps, rows).split([end - start for _, start, end in steps])
        for (row, _, _), part in zip(steps, parts, strict=True):
            outs[row].append(part)
    for row in range(3):
        assert torch.equal(torch.cat(outs[row]), alone[row])


def test_a_state_that_is_shared_is_only_read() -> None:
    mixer = Mixer(1, 16, 1, 16)
    x = mixer.prepared(torch.randn(20, mixer.width))
    states = States(2, mixer.block_bytes)
    mixer.run(states, [(0, 0, 8)], x[:8])
    shared = states.table[0, 0]
    before = states.memory[shared.item()].clone()
    states.table[1, 0] = shared
    both = mixer.run(states, [(0, 8, 20), (1, 8, 20)], torch.cat([x[8:], x[8:]]))
    assert torch.equal(both[:12], both[12:])
    assert torch.equal(states.memory[shared.item()], before)


@pytest.mark.parametrize("limits", [NO_LIMITS, (0.25, 0.75)])
@pytest.mark.parametrize("large", [False, True])
def test_time_steps_equal_torchs(large: bool, limits: tuple[float, float]) -> None:
    mixer = Mixer(8, 16, 1, 16)
    x = torch.randn(40, mixer.width) * (40 if large else 1)
    steps = slice(mixer.convolved, mixer.convolved + 8)
    expected = F.softplus((x[:, steps] + mixer.biases).double()).clamp(*limits)
    found = mixer.prepared(x, limits)
    torch.testing.assert_close(found[:, steps].double(), expected, atol=1e-37, rtol=2e-6)
    assert torch.equal(found[:, steps.stop :], x[:, steps.stop :])


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [0, 1, 40])
def test_a_gated_norm_equals_transformers(kind: str, rows: int, groups: int) -> None:
    width = 48
    norm = mamba2.MambaRMSNormGated(groups * width, group_size=width, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    weight = norm.weight.detach().to(getattr(torch, kind))
    norm.weight.data = weight.float()
    x, gate = torch.randn(rows, groups * width), torch.randn(rows, groups * width + 5)
    expected = norm(x, gate[:, : groups * width])
    run_kernel(
        GATED_NORM[kind, True], rows, x, 4 * groups * width, gate, 4 * gate.shape[1], groups, width,
        weight, word_of_float(1e-5),
    )  # fmt: skip
    torch.testing.assert_close(x, expected.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_may_be_before_its_gates(kind: str, groups: int) -> None:
    width, rows = 48, 40
    norm = modeling_falcon_h1.FalconH1RMSNormGated(groups * width, 1e-5, groups, True)
    torch.nn.init.normal_(norm.weight)
    weight = norm.weight.detach().to(getattr(torch, kind))
    norm.weight.data = weight.float()
    x, gate = torch.randn(rows, groups * width), torch.randn(rows, groups * width + 5)
    expected = norm(x.unsqueeze(0), gate[:, : groups * width].unsqueeze(0))[0]
    run_kernel(
        GATED_NORM[kind, False], rows, x, 4 * groups * width, gate, 4 * gate.shape[1], groups,
        width, weight, word_of_float(1e-5),
    )  # fmt: skip
    torch.testing.assert_close(x, expected.detach(), atol=1e-5, rtol=1e-5)
