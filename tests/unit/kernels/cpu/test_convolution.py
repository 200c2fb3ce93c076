"""CPU kernels of convolutions: compared with torch and transformers, and independent of steps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.recurrent_kernels import DIVISIONS, States, divided
from support.variants import diagonal
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from shmllm_kernels.cpu.convolution import CONVOLVE, CONVOLVE_AHEAD, CONVOLVE_GATED, MOST_TAPS
from shmllm_kernels.cpu.norms import KINDS
from shmllm_kernels.reference.convolution import convolve_gated_ahead


@pytest.mark.parametrize(
    ("taps", "kind", "has_bias"), diagonal(range(2, MOST_TAPS + 1), KINDS, [False, True])
)
def test_a_convolution_equals_torchs(taps: int, kind: str, has_bias: bool) -> None:
    channels, length = 304, 50
    x, weights = torch.randn(length, channels), torch.randn(taps, channels)
    weights = weights.to(getattr(torch, kind))
    bias = torch.randn(channels).to(weights.dtype) if has_bias else None
    expected = F.conv1d(
        F.pad(x.T.double(), (taps - 1, 0)), weights.T.double().unsqueeze(1),
        None if bias is None else bias.double(), groups=channels,
    ).T  # fmt: skip
    results = []
    for division in DIVISIONS:
        states = States(1, 4 * (taps - 1) * channels)
        out = torch.empty(length, channels)
        for start, end in divided(length, [*division]):
            part = torch.full((end - start, channels + 7), float("nan"))
            part[:, :channels] = x[start:end]
            states.run(
                CONVOLVE[kind, taps], [(0, start, end)], part, 4 * (channels + 7), channels,
                weights, 0 if bias is None else bias,
            )  # fmt: skip
            out[start:end] = part[:, :channels]
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
        results.append((out, states.memory.view(torch.float32)[states.table[0, 6].item()]))
    for out, state in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(state, results[0][1])
    assert torch.equal(results[0][1].view(taps - 1, channels), x[-taps + 1 :])


@pytest.mark.parametrize(("taps", "kind", "has_bias"), diagonal([2, 3, 4, 7], KINDS, [False, True]))
def test_a_gated_convolution_equals_transformers(taps: int, kind: str, has_bias: bool) -> None:
    channels, length = 304, 50
    config = Lfm2Config(
        hidden_size=channels, conv_L_cache=taps, conv_bias=has_bias, layer_types=["conv"],
        num_hidden_layers=1,
    )  # fmt: skip
    module = Lfm2ShortConv(config, 0).double()
    given: list[torch.Tensor] = []
    module.in_proj.register_forward_hook(lambda *call: given.append(call[2][0]))
    module.out_proj = torch.nn.Identity()
    for parameter in module.conv.parameters():
        torch.nn.init.normal_(parameter)
        parameter.data = parameter.data.to(getattr(torch, kind)).double()
    expected = module(torch.randn(1, length, channels).double())[0]
    x = given[0].float()
    weights = module.conv.weight[:, 0].T.to(getattr(torch, kind)).contiguous()
    bias = module.conv.bias.to(weights.dtype) if has_bias else 0
    results = []
    for division in DIVISIONS:
        states = States(1, 4 * (taps - 1) * channels)
        out = torch.full((length, channels + 5), 0.5)
        for start, end in divided(length, [*division]):
            states.run(
                CONVOLVE_GATED[kind, taps], [(0, start, end)], x[start:end], 12 * channels,
                channels, weights, bias, out[start:end], 4 * out.shape[1],
            )  # fmt: skip
        torch.testing.assert_close(out[:, :channels].double(), expected, atol=1e-5, rtol=1e-5)
        assert torch.all(out[:, channels:] == 0.5)
        results.append((out, states.memory.view(torch.float32)[states.table[0, 6].item()]))
    for out, state in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(state, results[0][1])
    gated = x[:, :channels] * x[:, 2 * channels :]
    assert torch.equal(results[0][1].view(taps - 1, channels), gated[-taps + 1 :])


@pytest.mark.parametrize(("taps", "ahead", "kind"), [(3, 1, "bfloat16"), (4, 1, "float32"),
                                                     (7, 6, "float16")])  # fmt: skip
def test_a_gated_convolution_looks_ahead(taps: int, ahead: int, kind: str) -> None:
    channels, lengths = 304, [1, 2, 9, 17]
    ends = [sum(lengths[: row + 1]) for row in range(len(lengths))]
    x = torch.randn(ends[-1], 3 * channels)
    weights, bias = torch.randn(taps + 1, channels).to(getattr(torch, kind)).split([taps, 1])
    states = States(len(lengths), 4 * (taps - 1) * channels)
    given, out = states.memory.clone(), torch.full((ends[-1], channels + 5), 0.5)
    states.run(
        CONVOLVE_AHEAD[kind, taps], [(row, 0, length) for row, length in enumerate(lengths)], x,
        12 * channels, channels, weights, bias, out, 4 * out.shape[1], ahead,
    )  # fmt: skip
    parts = zip(x.split(lengths), out.split(lengths), strict=True)
    for inputs, found in parts:
        wanted = convolve_gated_ahead(inputs.double(), weights, bias[0], ahead)
        torch.testing.assert_close(found[:, :channels].double(), wanted, atol=1e-5, rtol=1e-5)
    assert torch.all(out[:, channels:] == 0.5)
    assert torch.equal(states.memory, given)
