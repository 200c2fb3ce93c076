"""Compares rotary frequencies and tables with transformers' rotary embedding modules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.model_helpers import load, our_logits, reference_model, save
from transformers import LlamaConfig, Qwen2Config, Qwen3VLTextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.lengths import for_length
from shmllm.models.rope import attention_factor, axes, inverse_frequencies
from shmllm.models.rope_config import RopeConfig, count_axes
from shmllm.models.transformers_impl.config import find_length
from shmllm_kernels.cpu import KernelProgram, word_of_float
from shmllm_kernels.cpu.rows import ROPE_TABLES

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
CASES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "default", "rope_theta": 1000000},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    {"rope_type": "dynamic", "rope_theta": 1000000.0, "factor": 2.0},
    LLAMA3 | {"rope_theta": 500000.0},
    {name: LLAMA3[name] for name in LLAMA3 if "original" not in name} | {"rope_theta": 10000.0},
    YARN | {"rope_theta": 10000.0},
    YARN | {"rope_theta": 1000000.0, "beta_fast": 64, "beta_slow": 2},
    YARN | {"rope_theta": 10000.0, "attention_factor": 0.7},
    YARN | {"rope_theta": 10000.0, "mscale": 0.707, "mscale_all_dim": 1.2},
    YARN | {"rope_theta": 10000.0, "mscale": 0.707},
    YARN | {"rope_theta": 10000.0, "truncate": False},
    YARN | {"rope_theta": 10000.0, "factor": 0.5},
    YARN | {"rope_theta": 10000.0, "original_max_position_embeddings": 7},
]


def build(parameters: dict[str, Any], head_dim: int) -> tuple[LlamaConfig, RopeConfig]:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=4096,
        rope_parameters=dict(parameters),
    )
    fields = Fields({"rope_parameters": parameters}, "config.json")
    return config, RopeConfig.from_fields(fields, 4096, head_dim)


def tables(rope: RopeConfig, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns cosines and sines as the engine computes them: [positions, rotary_dim / 2] each. With
    positions on axes, these are [axes, positions]."""
    frequencies, count = inverse_frequencies(rope), np.array(positions.shape[-1:])
    half, of_pairs = rope.rotary_dim // 2, np.array(axes(rope))
    cos, sin = (torch.empty(int(count[0]), half) for _ in range(2))
    inputs = [count.ctypes.data, positions.data_ptr(), frequencies.data_ptr(), half]
    outputs = [cos.data_ptr(), sin.data_ptr(), word_of_float(attention_factor(rope))]
    has_axes = positions.dim() > 1
    of_axes = [of_pairs.ctypes.data, 8 * positions.stride(0)] if has_axes else []
    program = KernelProgram(1)
    program.record(ROPE_TABLES[has_axes], [*inputs, *outputs, *of_axes])
    program.replay()
    return cos, sin


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("parameters", CASES)
def test_tables_equal_transformers(parameters: dict[str, Any], head_dim: int) -> None:
    config, rope = build(parameters, head_dim)
    positions = torch.tensor([0, 1, 2, 17, 1023, 1024, 4095])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    our_cos, our_sin = tables(rope, positions)
    half = head_dim // 2
    # float32 represents an angle of 4,095 radians to 2e-4, which bounds the tables' precision.
    torch.testing.assert_close(our_cos, cos[0, :, half:], atol=6e-4, rtol=0)
    torch.testing.assert_close(our_sin, sin[0, :, half:], atol=6e-4, rtol=0)


@pytest.mark.parametrize("parameters", CASES[2:])
def test_frequencies_equal_transformers(parameters: dict[str, Any]) -> None:
    config, rope = build(parameters, 64)
    frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    torch.testing.assert_close(inverse_frequencies(rope), frequencies, rtol=1e-6, atol=0)
    assert attention_factor(rope) == pytest.approx(factor)


def test_old_and_new_fields_read_the_same() -> None:
    new = Fields({"rope_parameters": YARN | {"rope_theta": 5e5}}, "config.json")
    scaling = {"type" if name == "rope_type" else name: YARN[name] for name in YARN}
    old = Fields({"rope_theta": 5e5, "rope_scaling": scaling}, "config.json")
    assert RopeConfig.from_fields(new, 4096, 64) == RopeConfig.from_fields(old, 4096, 64)
    expected = Qwen2Config(rope_theta=5e5, rope_scaling=dict(scaling), max_position_embeddings=4096)
    assert expected.rope_parameters["rope_theta"] == RopeConfig.from_fields(old, 4096, 64).theta


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + pair / 8 for pair in range(12)],
    "long_factor": [2.0 + pair for pair in range(12)],
    "original_max_position_embeddings": 1024,
}


@pytest.mark.parametrize("extra", [{}, {"factor": 8.0}, {"factor": 0.5}, {"attention_factor": 1.3}])
@pytest.mark.parametrize(("length", "seq_len"), [(1024, 1024), (1025, 4096)])
def test_longrope_has_the_table_of_the_longest_request(
    extra: dict[str, float], length: int, seq_len: int
) -> None:
    parameters = LONGROPE | extra | {"partial_rotary_factor": 0.75}
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=4096,
        rope_parameters=dict(parameters),
    )
    expected, factor = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=seq_len)
    fields = Fields({"rope_parameters": parameters}, "config.json")
    rope = RopeConfig.from_fields(fields, 4096, 32, partial=1.0)
    assert (rope.rotary_dim, rope.max_length) == (24, 4096)
    rope = replace(rope, max_length=length)
    torch.testing.assert_close(inverse_frequencies(rope), expected, rtol=1e-6, atol=0)
    assert attention_factor(rope) == pytest.approx(factor)


@pytest.mark.parametrize("factors", [None, [1.0], [1.0] * 11 + [0.0], "all"])
def test_longrope_needs_a_factor_for_each_pair(factors: Any) -> None:
    fields = Fields({"rope_parameters": LONGROPE | {"long_factor": factors}}, "config.json")
    with pytest.raises(EngineStartError, match="long_factor"):
        RopeConfig.from_fields(fields, 4096, 24)


def test_yarn_needs_a_base_that_is_not_one() -> None:
    fields = Fields({"rope_parameters": YARN | {"rope_theta": 1.0}}, "config.json")
    with pytest.raises(EngineStartError, match="rope_theta must not be 1 with rope type 'yarn'"):
        RopeConfig.from_fields(fields, 4096, 16)


@pytest.mark.parametrize(
    ("trained", "factor", "length"), [(1024, 4.0, 4096), (1500, 2.5, 2560), (8192, 4.0, 8192)]
)
def test_yarn_stretches_the_length_of_a_model(
    trained: int, factor: float, length: int, tmp_path: Path
) -> None:
    rope = YARN | {"rope_theta": 1e4, "factor": factor}
    model = reference_model("qwen2", max_position_embeddings=trained, rope_parameters=rope)
    save(model, tmp_path)
    assert ModelConfig.from_directory(tmp_path).max_position_embeddings == length
    assert find_length(model.config, tmp_path, None) == length


def test_parameters_may_differ_by_layer_type() -> None:
    nested = {
        "full_attention": YARN | {"rope_theta": 1e6},
        "sliding_attention": {"rope_theta": 7.0},
    }
    fields = Fields({"rope_parameters": nested}, "config.json")
    full, sliding = (RopeConfig.from_fields(fields, 4096, 16, layer_type=name) for name in nested)
    assert (full.type, full.theta) == ("yarn", 1e6)
    assert sliding == RopeConfig(rotary_dim=16, theta=7.0)


@pytest.mark.parametrize("partial", [0.5, 0.75])
def test_a_part_of_each_head_is_rotated_only_where_a_family_does_that(partial: float) -> None:
    fields = Fields({"partial_rotary_factor": partial}, "config.json")
    assert RopeConfig.from_fields(fields, 64, 8, partial=1.0).rotary_dim == 8 * partial
    assert RopeConfig.from_fields(Fields({}, ""), 64, 8, partial=partial).rotary_dim == 8 * partial
    with pytest.raises(EngineStartError, match=r"partial_rotary_factor .* is not supported"):
        RopeConfig.from_fields(fields, 64, 8)


def test_a_rotated_part_must_be_pairs() -> None:
    fields = Fields({"partial_rotary_factor": 0.4}, "config.json")
    with pytest.raises(EngineStartError, match=r"partial_rotary_factor 0\.4 of a head_dim of 8"):
        RopeConfig.from_fields(fields, 64, 8, partial=1.0)


def with_ropes(config: ModelConfig, *ropes: RopeConfig) -> ModelConfig:
    layers = [
        replace(layer, mixer=replace(layer.mixer, rope=rope))
        for layer, rope in zip(config.layers, ropes, strict=True)
    ]
    return replace(config, layers=tuple(layers))


def test_each_layer_has_the_tables_of_its_own_rotation(tmp_path: Path) -> None:
    model = load(save(reference_model("llama", 4.0), tmp_path))
    config, tokens = model.config, list(range(30))
    (rope,) = config.ropes
    same, other = replace(rope, truncate=False), replace(rope, theta=20.0)

    def logits(*ropes: RopeConfig) -> torch.Tensor:
        model.config = with_ropes(config, *ropes)
        for layer, spec in zip(model.layers, model.config.layers, strict=True):
            layer.mixer.spec = spec.mixer
        return our_logits(model, tokens)

    plain, mixed = logits(rope, rope, rope), logits(rope, other, rope)
    assert torch.equal(logits(rope, same, rope), plain)
    assert torch.equal(logits(same, other, rope), mixed)
    assert not torch.allclose(mixed, plain, atol=1e-2)
    assert not torch.allclose(logits(other, rope, other), mixed, atol=1e-2)


def test_only_longrope_depends_on_the_length_of_requests(tmp_path: Path) -> None:
    config = ModelConfig.from_directory(save(reference_model("llama"), tmp_path))
    (rope,) = config.ropes
    assert for_length(config, 100) == config
    long = replace(rope, type="longrope", max_length=4096)
    found = for_length(with_ropes(config, rope, long, rope), 100)
    assert found == with_ropes(config, rope, replace(long, max_length=100), rope)


ON_AXES = [
    # sections, head_dim, whether pairs of the axes take turns
    ([16, 24, 24], 128, False),
    ([2, 3, 3], 16, False),
    ([24, 20, 20], 128, True),
    ([4, 2, 2], 16, True),
    ([2, 3, 3], 16, True),
    ([11, 11, 10], 64, True),
]


@pytest.mark.parametrize(("sections", "head_dim", "mixed"), ON_AXES)
def test_tables_of_positions_on_axes_equal_transformers(
    sections: list[int], head_dim: int, mixed: bool
) -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    if mixed:
        parameters["mrope_interleaved"] = True
    make_config, module = (
        (Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding)
        if mixed
        else (Qwen2_5_VLTextConfig, Qwen2_5_VLRotaryEmbedding)
    )
    config = make_config(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        rope_parameters=dict(parameters),
    )
    rope = RopeConfig.from_fields(Fields({"rope_parameters": parameters}, ""), 4096, head_dim)
    assert count_axes([rope]) == 3
    positions = torch.randint(0, 4096, (3, 40), generator=torch.Generator().manual_seed(2))
    wanted = module(config)(torch.zeros(1), positions[:, None])
    half = head_dim // 2
    for ours, theirs in zip(tables(rope, positions), wanted, strict=True):
        torch.testing.assert_close(ours, theirs[0, :, half:], atol=6e-4, rtol=0)
    alike = positions[:1].expand(3, -1).contiguous()
    plain = tables(replace(rope, sections=()), alike[0])
    for ours, other in zip(tables(rope, alike), plain, strict=True):
        assert torch.equal(ours, other), "positions of text"


def test_the_old_type_of_sections_reads_the_same() -> None:
    scaling = {"type": "mrope", "mrope_section": [2, 3, 3]}
    old = Fields({"rope_theta": 5e5, "rope_scaling": scaling}, "config.json")
    found = RopeConfig.from_fields(old, 4096, 16)
    assert found == RopeConfig(rotary_dim=16, theta=5e5, sections=(2, 3, 3))
    assert axes(found) == (0, 0, 1, 1, 1, 2, 2, 2)
    assert axes(replace(found, mixes_axes=True)) == (0, 1, 2, 0, 1, 2, 0, 1)
    assert axes(replace(found, sections=(6, 1, 1), mixes_axes=True)) == (0, 1, 2, 0, 0, 0, 0, 0)
    assert axes(replace(found, sections=(2, 2, 4), time_last=True)) == (1, 2, 1, 2, 0, 0, 0, 0)
    plain = replace(found, sections=())
    assert axes(plain) == (0,) * 8
    assert not count_axes([plain])


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"mrope_section": [3, 3, 3]}, "add up to the 8 rotated pairs of a head, not 9"),
        ({"mrope_section": [4, 4, 0]}, "'mrope_section' must list 3 positive integers"),
        ({"mrope_section": [4, 4]}, "'mrope_section' must list 3 positive integers"),
        ({"mrope_section": [2.0, 3, 3]}, "'mrope_section' must list 3 positive integers"),
        ({"mrope_section": "233"}, "'mrope_section' must list 3 positive integers"),
        ({"mrope_section": [2, 3, 3], "mrope_interleaved": 1}, "'mrope_interleaved' must be true"),
        (YARN | {"mrope_section": [2, 3, 3]}, "'mrope_section' beside rope type 'yarn' is not"),
        ({"rope_type": "mrope"}, "rope type 'mrope' needs 'mrope_section'"),
        (
            {"rope_type": "proportional", "mrope_section": [2, 3, 3]},
            "'mrope_section' beside rope type 'proportional' is not supported",
        ),
    ],
)
def test_wrong_sections_are_refused(parameters: dict[str, Any], message: str) -> None:
    fields = Fields({"rope_parameters": parameters}, "config.json")
    with pytest.raises(EngineStartError, match=message):
        RopeConfig.from_fields(fields, 4096, 16)
