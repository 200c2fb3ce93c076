"""Quantized matrices: the rounding, the logits of a quantized model, and weight updates."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from support.model_helpers import assert_logits_close, load, our_logits, reference_model, save

from shmllm.errors import RequestError
from shmllm.models.config import ModelConfig
from shmllm.models.create import create_model
from shmllm.models.decoder import DecoderModel
from shmllm.models.matrices import QUANTIZATIONS, joined
from shmllm.models.quantized import (
    LARGEST,
    ROUNDED_AT_ONCE,
    QuantizedMatrix,
)
from shmllm.models.weight_staging import StagedWeights
from shmllm.models.weights import load_weights
from shmllm.worker.arena import CountingAllocator
from shmllm.worker.cpu.arena import HostArena

TOKENS = [int(token) for token in torch.randint(0, 97, (40,), generator=torch.manual_seed(3))]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
_M_MMAP_THRESHOLD = -3  # in malloc.h


def weight_of(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(5)
    return (torch.randn(shape) * torch.logspace(-3, 2, shape[0])[:, None]).to(dtype)


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def rounded(weight: torch.Tensor, kind: str = "int8") -> QuantizedMatrix:
    return QUANTIZATIONS[kind].make(tuple(weight.shape), weight.dtype, empty).copy_(weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rounding_error_is_at_most_half_of_each_channels_scale(dtype: torch.dtype) -> None:
    weight = weight_of((33, 64), dtype)
    matrix = rounded(weight)
    error = (matrix.integers * matrix.scales[:, None] - weight.float()).abs()
    assert (error <= matrix.scales[:, None] * 0.5001).all()
    assert (matrix.integers.abs().amax(1) == LARGEST).all()


def test_a_channel_of_zeros_stays_zero() -> None:
    weight = weight_of((33, 64))
    weight[4] = 0
    matrix = rounded(weight)
    assert not matrix.integers[4].any()
    assert torch.isfinite(matrix.scales).all()


def test_new_weights_are_rounded_into_the_same_memory() -> None:
    weight = weight_of((64, 48))
    matrix = rounded(weight)
    address, before = matrix.integers.data_ptr(), matrix.integers.clone()
    matrix.copy_(-weight)
    assert torch.equal(matrix.integers, -before)
    assert matrix.integers.data_ptr() == address


def test_rounding_in_pieces_equals_rounding_at_once() -> None:
    shape = 2 * ROUNDED_AT_ONCE // 1000 + 5, 1000
    weight = weight_of(shape)
    matrix = rounded(weight)
    for row in (0, shape[0] // 2, shape[0] - 1):
        assert torch.equal(matrix.integers[row], rounded(weight[row : row + 1]).integers[0])


@pytest.mark.parametrize("kind", QUANTIZATIONS)
@pytest.mark.parametrize("width", [1, 32, 63, 200])
def test_a_matrix_of_any_width_is_read_as_it_was_rounded(kind: str, width: int) -> None:
    weight = weight_of((33, width))
    error = (rounded(weight, kind).clone() - weight).abs()
    steps = 127 if kind == "int8" else 8
    assert (error <= weight.abs().amax(1, keepdim=True) / steps).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_4_bits_are_those_of_gguf(dtype: torch.dtype) -> None:
    """Compares with the format's reference library, value by value."""
    weight = weight_of((500, 320), dtype)
    weight[3, 32:64], weight[4, 40] = 0, 1e-9
    packed = gguf.quants.quantize(weight.float().numpy(), gguf.GGMLQuantizationType.Q4_0)
    values = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_0)
    matrix = rounded(weight, "int4")
    assert torch.equal(matrix.clone(), torch.from_numpy(values).to(dtype))
    scales = packed.reshape(500, -1, 18)[..., :2].copy().view(np.float16)[..., 0]
    assert np.array_equal(matrix.scales.numpy(), scales)
    assert matrix.integers.nbytes + matrix.scales.nbytes == packed.nbytes


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_writing_another_shape_is_an_error(kind: str) -> None:
    matrix = rounded(weight_of((6, 8)), kind)
    with pytest.raises(ValueError, match=r"cannot write \[1, 8\] to \[6, 8\]"):
        matrix.copy_(torch.ones(1, 8))


@pytest.mark.parametrize("kind", QUANTIZATIONS)
@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_writing_a_clone_back_changes_no_bit(
    dtype: torch.dtype, source: torch.dtype, kind: str
) -> None:
    torch.manual_seed(1)
    largest = 0.99 * min(torch.finfo(dtype).max, torch.finfo(source).max)
    weight = torch.randn(3000, 84) * torch.logspace(-46, 38, 3000)[:, None]
    weight[7] = 0
    weight = weight.clamp(-largest, largest).to(source)
    matrix = QUANTIZATIONS[kind].make((3000, 84), dtype, empty).copy_(weight)
    integers, scales = matrix.integers.clone(), matrix.scales.clone()
    read = matrix.clone()
    assert read.dtype == dtype
    matrix.copy_(read)
    assert torch.equal(matrix.integers, integers)
    assert torch.equal(matrix.scales, scales)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "int8"), ("qwen2", "int8"), ("qwen3", "int8"), ("qwen2", "int4"),
     ("llama", "int4-g64"), ("phi", "int8")],
)  # fmt: skip
def test_logits_are_those_of_the_rounded_matrices(
    family: str, kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Compares with the same model in float32 whose matrices were rounded beforehand."""
    tied = family == "qwen2"
    directory = save(reference_model(family, 4.0, tie_word_embeddings=tied), tmp_path)
    model, plain = load(directory, dtype, kind), load(directory)
    for linear, other in zip(linears(model), linears(plain), strict=True):
        weight = values_of(linear.weight)
        if tied and other is plain.embedding.head:
            other.weight = weight
        else:
            other.weight.copy_(weight)
    for name, views in model.named_weights().items():
        if "norm" in name or "bias" in name or "embed" in name:
            plain.named_weights()[name][0].copy_(views[0])
    bound = 2e-5 if dtype is torch.float32 else 0.02  # keys and values are rounded
    assert_logits_close(our_logits(model, TOKENS), our_logits(plain, TOKENS), bound)


def values_of(matrix: QuantizedMatrix) -> torch.Tensor:
    """The rounded values, in float32."""
    same = matrix.of_parts(matrix.integers, matrix.scales)
    same.dtype = torch.float32
    return same.clone()


def linears(model: DecoderModel) -> list:
    blocks = [(b.mixer, b.mlp) for b in model.layers]
    found = [
        (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
        for attention, mlp in blocks
    ]
    return [linear for four in found for linear in four] + [model.embedding.head]


def bits(model: DecoderModel) -> dict[str, list[torch.Tensor]]:
    """Returns copies of everything that the model stores of each weight."""
    return {
        name: [
            part.clone()
            for view in views
            for part in (
                [view.integers, view.scales] if isinstance(view, QuantizedMatrix) else [view]
            )
        ]
        for name, views in model.named_weights().items()
    }


def changed(model: DecoderModel, before: dict[str, list[torch.Tensor]]) -> set[str]:
    return {
        name
        for name, parts in bits(model).items()
        if not all(torch.equal(a, b) for a, b in zip(parts, before[name], strict=True))
    }


@pytest.fixture(
    params=[("llama", "int8"), ("qwen2", "int8"), ("qwen3", "int8"), ("qwen2", "int4")],
    ids="-".join,
)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[DecoderModel, DecoderModel, list]:
    """Two models of the same shape, and the weights of the second; qwen2 is tied."""
    family, kind = request.param
    options = {"tie_word_embeddings": family == "qwen2"}
    first = load(save(reference_model(family, **options), tmp_path / "a"), quantization=kind)
    other = reference_model(family, scale=2.0, **options)
    second = load(save(other, tmp_path / "b"), quantization=kind)
    return first, second, list(other.named_parameters())


def test_loading_needs_no_more_memory_than_the_loaded_weights(tmp_path: Path) -> None:
    # glibc raises this limit when large blocks are freed, as other tests do, and keeps what is
    # below it instead of giving it back.
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**17) == 1

    def anonymous_bytes() -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("RssAnon:")[1].split()[0])

    reference = reference_model(
        "llama", hidden_size=1024, intermediate_size=2048, vocab_size=8192, num_attention_heads=8
    )
    config = ModelConfig.from_directory(save(reference, tmp_path))
    counter = CountingAllocator()
    create_model(config, torch.float32, counter.allocate, "int8")
    matrices = sum(w.numel() for n, w in reference.named_parameters() if w.ndim == 2)
    assert counter.num_bytes < 1.01 * (matrices + 3 * reference.model.embed_tokens.weight.numel())
    arena = HostArena(counter.num_bytes, "the weights")
    model = create_model(config, torch.float32, arena.allocate, "int8")
    before, most = anonymous_bytes(), 0

    def measure(_done: int, _total: int) -> None:
        nonlocal most
        most = max(most, anonymous_bytes() - before)

    load_weights(model, tmp_path, measure)
    assert most < counter.num_bytes + 12 * 2**20


def test_each_weight_can_be_updated_alone(pair: tuple) -> None:
    model, other, weights = pair
    random.Random(1).shuffle(weights)
    for name, tensor in weights:
        before = bits(model)
        model.load_weights([(name, tensor)])
        # Both models have the same norms.
        assert changed(model, before) == (set() if "norm" in name else {name})
    assert not changed(model, bits(other))
    assert model.weights_version == len(weights)
    assert torch.equal(our_logits(model, TOKENS), our_logits(other, TOKENS))


def test_a_staged_update_equals_a_loaded_model(pair: tuple) -> None:
    model, other, weights = pair
    staged = StagedWeights(model)
    for name, tensor in weights:
        flat = tensor.detach().flatten()
        half = len(flat) // 2
        staged.put(name, tensor.shape, 0, flat[:half])
        staged.put(name, tensor.shape, half, flat[half:])
    staged.check_complete(model.named_weights())
    staged.copy_into_place()
    assert not changed(model, bits(other))


def test_an_update_with_one_wrong_tensor_changes_no_bit(pair: tuple) -> None:
    model, _, weights = pair
    before = bits(model)
    wrong = "model.layers.1.self_attn.k_proj.weight", torch.full((32, 48), float("inf"))
    with pytest.raises(RequestError, match="k_proj"):
        model.load_weights([*weights, wrong])
    assert not changed(model, before)
    assert model.weights_version == 0


def test_loading_clones_of_all_weights_changes_no_bit(pair: tuple) -> None:
    model, *_ = pair
    before = bits(model)
    model.load_weights([(name, views[0].clone()) for name, views in model.named_weights().items()])
    assert not changed(model, before)


@pytest.mark.parametrize("quantization", [None, *QUANTIZATIONS])
def test_rows_of_one_matrix_join_to_one_destination(
    quantization: str | None, tmp_path: Path
) -> None:
    """A checkpoint may have several projections in one tensor."""
    model = load(save(reference_model("qwen2"), tmp_path), quantization=quantization)
    weights, attention = model.named_weights(), model.layers[1].mixer
    names = [f"model.layers.1.self_attn.{name}_proj" for name in "qkv"]
    whole = joined([weights[f"{name}.weight"][0] for name in names])
    assert whole.shape == attention.qkv_proj.weight.shape
    values = torch.randn(whole.shape, generator=torch.manual_seed(1))
    whole.copy_(values)
    for name, part in zip(names, whole.clone().split(attention.qkv_proj.out_features), strict=True):
        assert torch.equal(weights[f"{name}.weight"][0].clone(), part)
    bias = joined([weights[f"{name}.bias"][0] for name in names])
    assert torch.equal(bias, attention.qkv_proj.bias)
    mixed = joined([weights[f"{name}.weight"][0] for name in reversed(names)])
    widths = attention.qkv_proj.out_features[::-1]
    mixed.copy_(torch.cat(values.flip(0).split(widths)))
    found = [weights[f"{name}.weight"][0].clone() for name in reversed(names)]
    assert torch.equal(mixed.clone(), torch.cat(found))
    assert mixed.shape == whole.shape
