"""config.json from a GGUF file: equal to what a Hugging Face checkpoint's says, or one line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.gguf_models import write, write_model
from support.gguf_sizes import add_sizes
from support.model_helpers import reference_model, save

from shmllm.errors import EngineStartError
from shmllm.formats.gguf import read_header
from shmllm.frontend.gguf.config import generation_config, model_config
from shmllm.models.config import ModelConfig

GEMMA_SCALE = {"query_pre_attn_scalar": 16}
Change = Callable[[gguf.GGUFWriter], object]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}


def configured(file: Path, directory: Path) -> ModelConfig:
    """The configuration that the engine reads."""
    (directory / "config.json").write_text(json.dumps(model_config(read_header(file))))
    (directory / "generation_config.json").unlink(missing_ok=True)
    return ModelConfig.from_directory(directory)


def no_change(writer: gguf.GGUFWriter) -> None:
    """Metadata that the helper writes in any case."""


@pytest.mark.parametrize(
    ("family", "options", "change"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}, no_change),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 6}, no_change),
        ("mistral", {"sliding_window": 48, "head_dim": 16}, lambda w: w.add_sliding_window(48)),
        ("qwen2", {"rope_theta": 1e6}, no_change),
        ("qwen3", {"tie_word_embeddings": True}, no_change),
        (
            "qwen3_moe",
            {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
            | {"norm_topk_prob": True},
            no_change,
        ),
        ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3}, no_change),
        ("gemma2", {"head_dim": 16, "sliding_window": 7} | GEMMA_SCALE, no_change),
        (
            "gemma2",
            {"head_dim": 8, "num_hidden_layers": 46, "sliding_window": 7}
            | {"query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0},
            no_change,
        ),
        (
            "gemma3",
            {"head_dim": 16, "sliding_window": 7, "num_hidden_layers": 7} | GEMMA_SCALE,
            no_change,
        ),
        (
            "gemma3",
            {"head_dim": 16, "sliding_window": 7, "num_hidden_layers": 3}
            | GEMMA_SCALE
            | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
            | {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                }
            },
            lambda w: (
                w.add_sliding_window_pattern([False, True, False]),
                w.add_rope_freq_base_swa(500.0),
                w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR),
                w.add_rope_scaling_factor(8.0),
            ),
        ),
        (
            "llama",
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            lambda w: (
                w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR),
                w.add_rope_scaling_factor(4.0),
            ),
        ),
        (
            "qwen2",
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            lambda w: (
                w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
                w.add_rope_scaling_factor(4.0),
                w.add_rope_scaling_orig_ctx_len(64),
            ),
        ),
    ],
)
def test_it_says_what_the_checkpoint_says(
    family: str, options: dict[str, Any], change: Change, tmp_path: Path
) -> None:
    reference = reference_model(family, **options, eos_token_id=0)
    expected = ModelConfig.from_directory(save(reference, tmp_path))
    found = configured(write_model(tmp_path / "m.gguf", reference, change), tmp_path)
    assert abs(found.norm.eps - expected.norm.eps) < 1e-9
    assert dataclasses.replace(found, norm=expected.norm) == expected


def llama3_factors(head_dim: int, high: float = 4.0) -> Any:
    """What llama.cpp's conversion of Llama 3.1 writes into rope_freqs.weight, or of Llama 4, whose
    bounds are equal."""
    factors = []
    for wavelength in 2 * np.pi * 500000.0 ** (np.arange(0, head_dim, 2) / head_dim):
        if wavelength < 8192 / high:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(8.0)
        else:
            smooth = (8192 / wavelength - 1) / (high - 1)
            factors.append(1 / ((1 - smooth) / 8 + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("high", [4.0, 1.0])
def test_the_factors_of_llama_3_become_its_parameters(high: float, tmp_path: Path) -> None:
    rope = LLAMA3 | {"high_freq_factor": high}
    reference = reference_model("llama", rope_parameters=rope, head_dim=64)
    expected = ModelConfig.from_directory(save(reference, tmp_path))
    factors = llama3_factors(64, high)
    assert (1 < sorted(set(factors.tolist()))[1] < 8) == (high > 1)
    file = write_model(tmp_path / "m.gguf", reference, factors={"rope_freqs.weight": factors})
    assert configured(file, tmp_path).ropes == expected.ropes


@pytest.mark.parametrize("damage", [lambda f: f * 1.01, lambda f: f[:-1], lambda f: f[::-1]])
def test_other_factors_are_refused(damage: Callable[[Any], Any], tmp_path: Path) -> None:
    reference = reference_model("llama", rope_parameters=LLAMA3, head_dim=64)
    file = write_model(
        tmp_path / "m.gguf", reference, factors={"rope_freqs.weight": damage(llama3_factors(64))}
    )
    with pytest.raises(EngineStartError, match=r"rope_freqs\.weight has other factors than"):
        model_config(read_header(file))


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ({"kind": "F32"}, "float32"),
        ({"kind": "F16"}, "float16"),
        ({"kind": "BF16"}, "bfloat16"),
        ({"kind": "Q4_0"}, "bfloat16"),
        ({"kind": "F16", "kinds": {"lm_head.weight": "F32"}}, "float16"),
        ({"kind": "Q4_0", "kinds": {"model.layers.0.mlp.up_proj.weight": "F16"}}, "bfloat16"),
    ],
)
def test_the_dtype_is_that_of_the_matrices(
    kinds: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    reference = reference_model("llama", hidden_size=96, intermediate_size=96, num_hidden_layers=1)
    file = write_model(tmp_path / "m.gguf", reference, **kinds)
    assert model_config(read_header(file))["dtype"] == expected


def small(path: Path, change: Change, architecture: str = "llama") -> Path:
    """A file whose only tensor is the embedding table. Later values replace earlier ones."""

    def fill(writer: gguf.GGUFWriter) -> None:
        add_sizes(writer, reference_model("llama", num_hidden_layers=1).config)
        change(writer)

    return write(path, architecture, fill)


def with_table(change: Change) -> Change:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("token_embd.weight", np.zeros((97, 48), np.float32))
        change(writer)

    return fill


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.add_rope_dimension_count(4), "a part of each head"),
        (lambda w: w.add_value_length(4), "different lengths"),
        (
            lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
            "rope scaling 'longrope' is not supported; supported: none, linear, yarn",
        ),
        (
            lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR),
            r"llama\.rope\.scaling\.factor must be a positive number, found nothing",
        ),
    ],
)
def test_what_no_engine_computes_is_refused(change: Change, message: str, tmp_path: Path) -> None:
    file = small(tmp_path / "m.gguf", with_table(change))
    with pytest.raises(EngineStartError, match=message) as caught:
        model_config(read_header(file))
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


def test_other_architectures_are_named_with_those_that_run(tmp_path: Path) -> None:
    file = small(tmp_path / "m.gguf", with_table(no_change), "rwkv7")
    with pytest.raises(EngineStartError, match="'rwkv7' is not supported; supported: llama, qwen"):
        model_config(read_header(file))


def test_experts_of_a_dense_architecture_are_refused(tmp_path: Path) -> None:
    change = with_table(lambda w: w.add_uint32("qwen3.expert_count", 8))
    file = small(tmp_path / "m.gguf", change, "qwen3")
    with pytest.raises(EngineStartError, match="'qwen3' with experts is not supported; supported"):
        model_config(read_header(file))


def test_a_file_without_a_model_is_named(tmp_path: Path) -> None:
    file = small(tmp_path / "m.gguf", no_change)
    with pytest.raises(
        EngineStartError, match=r"no matrix token_embd\.weight; is it a vocabulary or"
    ):
        model_config(read_header(file))


def test_sizes_that_differ_by_layer_are_refused(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_embedding_length(48)
        writer.add_head_count([4, 2])
        with_table(no_change)(writer)

    file = write(tmp_path / "m.gguf", "llama", fill)
    with pytest.raises(EngineStartError, match=r"head_count must be one .* found \[4, 2\]"):
        model_config(read_header(file))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: w.add_block_count(2**31),
            r"block_count is 2,147,483,648, and there are .* of 1",
        ),
        (
            lambda w: w.add_feed_forward_length(2**31),
            r"blk\.0\.ffn_up\.weight has the shape \[80, 48\], .* ask for \[2147483648, 48\]",
        ),
        (lambda w: w.add_head_count_kv(3), r"blk\.0\.attn_k\.weight has the shape \[16, 48\]"),
        (lambda w: w.add_embedding_length(96), r"token_embd\.weight has the shape \[97, 48\]"),
        (
            lambda w: w.add_array("tokenizer.ggml.eos_token_id", [1]),
            r"eos_token_id must be a token's id, found \[1\]",
        ),
    ],
)
def test_metadata_that_do_not_fit_the_tensors_are_refused(
    change: Change, message: str, tmp_path: Path
) -> None:
    reference = reference_model("llama", num_hidden_layers=1, head_dim=8)

    def replaced(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop("tokenizer.ggml.eos_token_id")
        change(writer)

    file = write_model(tmp_path / "m.gguf", reference, replaced)
    with pytest.raises(EngineStartError, match=message):
        model_config(read_header(file))


def test_all_tokens_that_end_a_text_are_collected(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(["<s>", "</s>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>"])
        writer.add_token_types([3, 3, 3, 3, 1])
        writer.add_eos_token_id(1)
        writer.add_eot_token_id(0)

    found = generation_config(read_header(write(tmp_path / "m.gguf", "llama", fill)))
    assert found == {"eos_token_id": [1, 0, 2, 3]}


def test_the_authors_sampling_becomes_defaults(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_eos_token_id(1)
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 20)

    found = generation_config(read_header(write(tmp_path / "m.gguf", "llama", fill)))
    assert found == {"temperature": 0.5, "top_k": 20}


def test_the_end_of_a_message_is_no_end_of_gpt_oss(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(["<|endoftext|>", "<|end|>", "<|return|>", "<|call|>"])
        writer.add_token_types([3, 3, 3, 3])
        writer.add_eos_token_id(2)

    found = generation_config(read_header(write(tmp_path / "m.gguf", "gpt-oss", fill)))
    assert found == {"eos_token_id": [2, 3]}
