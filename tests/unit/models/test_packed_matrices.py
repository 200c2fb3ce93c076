"""Packed matrices: the formats' values, their rounding, and matrices of several formats."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from support.gguf_models import KINDS, random_blocks, write_model
from support.model_helpers import (
    allocate,
    assert_logits_close,
    our_logits,
    reference_model,
    save,
)
from support.packed_matrices import drawn_matrix, values_of
from support.variants import slow

from shmllm.formats.gguf_directory import LINK
from shmllm.models.config import ModelConfig
from shmllm.models.create import create_model, stored_parts
from shmllm.models.decoder import DecoderModel
from shmllm.models.gguf_blocks import BLOCK_TYPES
from shmllm.models.matrices import MixedMatrix, joined
from shmllm.models.packed import PACKINGS, PackedMatrix
from shmllm.models.stored_matrix import Part, make_matrix
from shmllm.models.weights import load_weights, stored_kinds

ROUNDED_BY_GGUF = {
    "int4": "Q4_0", "q4_1": "Q4_1", "q5_0": "Q5_0", "q5_1": "Q5_1", "q8_0": "Q8_0",
    "mxfp4": "MXFP4",
}  # fmt: skip
LARGEST_ERROR = {"1": 0.6, "2": 0.45, "3": 0.25, "4": 0.14, "5": 0.06, "6": 0.03, "8": 0.03}
"""Relative to the norm of a row of normally distributed numbers, by the bits of a number."""
BITS = {"nf4": "4", "mxfp4": "4", "nvfp4": "4", "fp8": "8", "ternary": "1", "ternary-f32": "1"}
USUAL_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K", "MXFP4", "Q2_K", "Q3_K", "IQ2_S")
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 64,
}
TOKENS = [int(token) for token in torch.randint(0, 97, (40,), generator=torch.manual_seed(3))]


def made(kind: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> PackedMatrix:
    return PACKINGS[kind].make(shape, dtype, allocate)


def rows_of(num_rows: int, width: int) -> torch.Tensor:
    torch.manual_seed(1)
    rows = torch.randn(num_rows, width) * torch.logspace(-3, 2, num_rows)[:, None]
    rows[3, 32:64], rows[4] = 0, 0
    return rows


@pytest.mark.parametrize("kind", ROUNDED_BY_GGUF)
def test_the_rounding_is_that_of_the_gguf_package(kind: str) -> None:
    rows, number = rows_of(200, 512), KINDS[ROUNDED_BY_GGUF[kind]]
    packed = gguf.quants.quantize(rows.numpy(), number)
    expected = torch.from_numpy(gguf.quants.dequantize(packed, number))
    assert torch.equal(made(kind, (200, 512)).copy_(rows).clone(), expected)


@pytest.mark.parametrize("kind", PACKINGS)
def test_a_matrix_of_another_device_needs_no_tensor_of_the_host(kind: str) -> None:
    """Torch refuses a mixture, also where tensors have no memory."""
    matrix = PACKINGS[kind].make(
        (4, 512),
        torch.bfloat16,
        lambda shape, dtype: torch.empty(shape, dtype=dtype, device="meta"),
    )
    matrix.copy_(torch.empty(4, 512, device="meta"))
    assert matrix.clone().device.type == "meta"


@pytest.mark.parametrize("kind", PACKINGS)
def test_rounding_changes_little_and_zeros_stay(kind: str) -> None:
    rows = rows_of(100, 512)
    values = made(kind, (100, 512)).copy_(rows).clone()
    bits = BITS.get(kind) or next(letter for letter in kind if letter.isdecimal())
    errors = (values - rows).norm(dim=1) / rows.norm(dim=1).clamp_min(1e-30)
    assert float(errors.max()) < LARGEST_ERROR[bits]
    assert not values[4].any()


@pytest.mark.parametrize("kind", PACKINGS)
def test_values_are_those_of_the_definition(kind: str) -> None:
    drawn, matrix = drawn_matrix(40, 512, kind), made(kind, (40, 512))
    integers = drawn.integers.contiguous().view(matrix.integers.dtype)
    scales = drawn.scales.contiguous().view(matrix.scales.dtype)
    assert (integers.shape, scales.shape) == (matrix.integers.shape, matrix.scales.shape)
    matrix.write(lambda some: (integers[some], scales[some]))
    assert torch.equal(matrix.clone(), values_of(drawn))


@pytest.mark.parametrize("kind", PACKINGS)
def test_views_are_rows_of_the_same_memory(kind: str) -> None:
    matrix = made(kind, (3, 40, 256)).copy_(torch.randn(3, 40, 256))
    parts = matrix.view(-1, 256).split_with_sizes([50, 70])
    assert torch.equal(torch.cat([part.clone() for part in parts]), matrix.clone().view(-1, 256))
    parts[1].copy_(torch.zeros(70, 256))
    assert not matrix.clone().view(-1, 256)[50:].any()
    whole = joined(parts)
    assert isinstance(whole, PackedMatrix)
    assert whole.shape == (120, 256)


@pytest.mark.parametrize("name", BLOCK_TYPES)
@pytest.mark.parametrize("width", [160, 768])
def test_blocks_have_the_values_of_the_gguf_package(name: str, width: int) -> None:
    number = KINDS[name]
    num_elements, _ = gguf.GGML_QUANT_SIZES[number]
    if width % num_elements:
        pytest.skip("rows have whole blocks")
    blocks = random_blocks(name, (70, width // num_elements), np.random.default_rng(5))
    expected = torch.from_numpy(gguf.quants.dequantize(blocks.reshape(70, -1), number))
    matrix, stored = made(BLOCK_TYPES[name].kind, (70, width)), torch.from_numpy(blocks)
    matrix.write(lambda some: BLOCK_TYPES[name].repack(stored[some]))
    assert torch.equal(matrix.clone(), expected)


def mixed() -> MixedMatrix:
    parts = [Part(20, "q4_k"), Part(12, None), Part(30, "q6_k")]
    matrix = make_matrix((62, 256), parts, torch.float32, allocate)
    assert isinstance(matrix, MixedMatrix)
    matrix.copy_(torch.randn(62, 256))
    return matrix


def test_a_mixed_matrix_is_split_anywhere_and_joined_again() -> None:
    matrix = mixed()
    values = matrix.clone()
    assert values.shape == matrix.shape == (62, 256)
    views = matrix.split_with_sizes([7, 20, 35])
    assert [type(view) for view in views] == [PackedMatrix, MixedMatrix, MixedMatrix]
    assert torch.equal(torch.cat([view.clone() for view in views]), values)
    whole = joined(views)
    assert isinstance(whole, MixedMatrix)
    assert [part.shape[0] for part in whole.parts] == [20, 12, 30]
    views[1].copy_(torch.zeros(20, 256))
    assert not matrix.clone()[7:27].any()
    assert torch.equal(matrix.clone()[27:], values[27:])


def test_writing_another_shape_to_a_mixed_matrix_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"cannot write \[2, 256\] to \[62, 256\]"):
        mixed().copy_(torch.zeros(2, 256))


def load_packed(directory: Path, file: Path, dtype: torch.dtype = torch.float32) -> DecoderModel:
    for checkpoint in directory.glob("*.safetensors"):
        checkpoint.unlink()
    (directory / LINK).unlink(missing_ok=True)
    (directory / LINK).symlink_to(file)
    config = ModelConfig.from_directory(directory)
    stored = stored_parts(config, stored_kinds(directory, config.tie_word_embeddings))
    model = create_model(config, dtype, allocate, None, stored)
    load_weights(model, directory)
    return model


def test_the_parts_of_a_fused_matrix_have_their_own_formats(tmp_path: Path) -> None:
    reference = reference_model("qwen3", **WIDE)
    attention = "model.layers.0.self_attn"
    kinds = {f"{attention}.v_proj.weight": "Q6_K", f"{attention}.k_proj.weight": "F16"}
    file = write_model(tmp_path / "m.gguf", reference, kind="Q4_K", kinds=kinds)
    model = load_packed(save(reference, tmp_path), file)
    fused = model.layers[0].mixer.qkv_proj.weight
    assert isinstance(fused, MixedMatrix)
    found = [getattr(part, "kind", part.dtype) for part in fused.parts]
    assert found == ["q4_k", torch.float32, "q6_k"]
    assert isinstance(model.layers[1].mixer.qkv_proj.weight, PackedMatrix)
    assert isinstance(model.embedding.table, PackedMatrix)


@pytest.mark.parametrize(
    ("family", "kind", "kinds"),
    [
        ("qwen3", name, {}) if name in USUAL_TYPES else slow("qwen3", name, {})
        for name in BLOCK_TYPES
    ]
    + [
        ("llama", "Q4_K", {"v_proj": "Q6_K", "down_proj": "Q6_K", "k_proj": "F16"}),
        ("gemma3", "Q5_0", {"v_proj": "Q8_0", "embed_tokens": "Q8_0"}),
        ("qwen3_moe", "Q4_K", {"experts.down_proj": "Q6_K"}),
    ],
)  # fmt: skip
def test_logits_are_those_of_a_float_model_of_the_same_values(
    family: str, kind: str, kinds: dict[str, str], tmp_path: Path
) -> None:
    sizes = WIDE | {"tie_word_embeddings": family != "qwen3"}
    if family == "qwen3_moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    reference = reference_model(family, **sizes)
    names = [*reference.state_dict()]
    names += [f"{name}.weight" for name in names if name.endswith("experts.down_proj")]
    chosen = {name: other for part, other in kinds.items() for name in names if part in name}
    file = write_model(tmp_path / "m.gguf", reference, kind=kind, kinds=chosen)
    model = load_packed(save(reference, tmp_path), file)
    plain = create_model(model.config, torch.float32, allocate)
    load_weights(plain, tmp_path)
    for name, views in model.named_weights().items():
        assert torch.equal(views[0].clone(), plain.named_weights()[name][0]), name
    assert_logits_close(our_logits(model, TOKENS), our_logits(plain, TOKENS), 1e-4)
