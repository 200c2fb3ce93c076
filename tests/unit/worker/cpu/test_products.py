"""What matrix products on a CPU round activations to."""

from __future__ import annotations

import pytest

from shmllm.config.engine import LoadConfig
from shmllm.errors import EngineStartError
from shmllm.models.quantized import QUANTIZATIONS
from shmllm.worker.cpu import products
from shmllm.worker.cpu.products import activation_dtype

BFLOAT16, FLOAT32 = "bfloat16", "float32"


def chosen(dtype: str, wanted: str = "auto", quantization: str | None = None) -> str:
    load = LoadConfig("m", activation_dtype=wanted, quantization=quantization)
    return activation_dtype(load, dtype)


def has(monkeypatch: pytest.MonkeyPatch, *kinds: str) -> None:
    """Lets the CPU multiply numbers of these dtypes only."""
    found = {
        kind: each._replace(exists=kind in kinds) for kind, each in products.DOT_PRODUCTS.items()
    }
    monkeypatch.setattr(products, "DOT_PRODUCTS", found)


def test_auto_rounds_where_the_cpu_and_the_weights_allow_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has(monkeypatch, "bfloat16", "int8")
    assert chosen(BFLOAT16) == "bfloat16"
    assert chosen(FLOAT32) == chosen("float16") == "float32"
    for quantization in QUANTIZATIONS:
        assert chosen(FLOAT32, quantization=quantization) == "bfloat16"
        assert chosen(BFLOAT16, "float32", quantization) == "float32"
    assert chosen(BFLOAT16, "float32") == "float32"
    assert chosen(FLOAT32, "int8", "int8") == chosen(BFLOAT16, "int8", "int8") == "int8"
    has(monkeypatch)
    assert chosen(BFLOAT16) == chosen(BFLOAT16, quantization="int4") == "float32"


@pytest.mark.parametrize(
    ("dtype", "wanted", "quantization", "message"),
    [
        (FLOAT32, "bfloat16", None, "the weights are float32; start with dtype='bfloat16'"),
        (FLOAT32, "int8", "int4", "the weights are int4; start with quantization='int8'"),
        (FLOAT32, "bfloat16", "int8", "this CPU has no AVX512_BF16"),
        (BFLOAT16, "int8", None, "the weights are bfloat16; start with quantization='int8'"),
        (BFLOAT16, "bfloat16", None, "this CPU has no AVX512_BF16"),
        (FLOAT32, "int8", "int8", "this CPU has no AVX512_VNNI"),
    ],
)
def test_what_is_not_possible_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    wanted: str,
    quantization: str | None,
    message: str,
) -> None:
    has(monkeypatch)
    with pytest.raises(EngineStartError, match=f"'{wanted}' is not possible: {message}"):
        chosen(dtype, wanted, quantization)
