"""What matrix products on a CPU round activations to."""

from __future__ import annotations

import pytest
import torch

from shmllm.config.engine import LoadConfig
from shmllm.errors import EngineStartError
from shmllm.worker.cpu import products
from shmllm.worker.cpu.products import activation_dtype

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


def chosen(dtype: torch.dtype, wanted: str = "auto", quantization: str | None = None) -> str:
    load = LoadConfig("m", activation_dtype=wanted, quantization=quantization)
    return activation_dtype(load, dtype)


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_auto_rounds_where_the_cpu_and_the_weights_allow_it(
    monkeypatch: pytest.MonkeyPatch, has_bfloat16: bool
) -> None:
    monkeypatch.setattr(products, "HAS_BFLOAT16", has_bfloat16)
    assert chosen(BFLOAT16) == ("bfloat16" if has_bfloat16 else "float32")
    assert chosen(FLOAT32) == chosen(torch.float16) == "float32"
    assert chosen(BFLOAT16, quantization="int8") == "float32"
    assert chosen(BFLOAT16, "float32") == "float32"


@pytest.mark.parametrize(
    ("has_bfloat16", "dtype", "quantization", "message"),
    [
        (True, FLOAT32, None, "the weights are float32: start with dtype='bfloat16'"),
        (True, BFLOAT16, "int8", "quantization='int8' multiplies with float32"),
        (False, BFLOAT16, None, "this CPU has no AVX512_BF16"),
    ],
)
def test_what_is_not_possible_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
    has_bfloat16: bool,
    dtype: torch.dtype,
    quantization: str | None,
    message: str,
) -> None:
    monkeypatch.setattr(products, "HAS_BFLOAT16", has_bfloat16)
    with pytest.raises(EngineStartError, match=f"'bfloat16' is not possible: {message}"):
        chosen(dtype, "bfloat16", quantization)
