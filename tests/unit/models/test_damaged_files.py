"""Damaged checkpoints: each is read, or refused with one line that names the file.

GGUF files and pieces, safetensors files, shards and their index, quantized ones, and config.json.

Another process reads them, with little memory, and ends if one takes too long; this one sees also
crashes. SHMLLM_TEST_SEED repeats a run.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from support import damaged_reading
from support.gguf_models import NORMAL, UNKNOWN, add_vocabulary, write_model
from support.model_helpers import reference_model, save
from support.programs import environment_of_test_files, python
from support.quantized_checkpoints import (
    Weight,
    awq,
    config_group,
    fp8,
    gptq,
    int_quantized,
    named,
    pack_quantized,
    write_checkpoint,
)

SEED = int(os.environ.get("SHMLLM_TEST_SEED", str(time.time_ns() % 10**9)))
GGUF = f"{damaged_reading.STEM}.gguf"
"""Errors that name the directory that is made for the file name the file."""
SHORT, LONG = 300, 10_000
ONE_HEAP = {"MALLOC_ARENA_MAX": "1"}
"""Else each thread that loads weights may reserve all address space that the limit leaves."""

NARROW = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
NARROW |= {"num_attention_heads": 2, "num_key_value_heads": 1}
WIDE = NARROW | {"hidden_size": 256, "intermediate_size": 256, "head_dim": 128}
EXPERTS = {"num_experts_per_tok": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 10000.0,
}
LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0] * 8,
    "original_max_position_embeddings": 128,
}


def sentence_piece(writer: Any) -> None:
    tokens = ["<unk>", "a", "b", "ab", "\u2581", "\u2581a", *(f"t{n}" for n in range(91))]
    kinds = [UNKNOWN, *[NORMAL] * 96]
    for key in ("model", "pre", "tokens", "token_type", "merges"):
        writer.kv_data[0].pop(f"tokenizer.ggml.{key}", None)
    add_vocabulary(writer, tokens, kinds, scores=[-float(n) for n in range(97)])


def add_length(writer: Any) -> None:
    writer.add_rope_scaling_orig_ctx_len(128)


BASES: Sequence[tuple[str, str, dict[str, Any], dict[str, Any]]] = (
    ("llama", "F32", NARROW, {}),
    ("llama", "Q4_0", NARROW, {"change": sentence_piece}),
    ("llama", "Q6_K", WIDE, {}),
    ("llama", "F16", NARROW | {"rope_parameters": LLAMA3},
     {"factors": {"rope_freqs.weight": np.ones(8)}}),
    ("qwen2", "Q8_0", NARROW, {}),
    ("qwen3", "BF16", NARROW, {}),
    ("qwen3_moe", "Q4_1", NARROW | EXPERTS | {"num_experts": 3, "moe_intermediate_size": 32}, {}),
    ("mixtral", "F32", NARROW | EXPERTS | {"num_local_experts": 3}, {}),
    ("gemma2", "Q5_0", NARROW, {}),
    ("gemma3", "F16", NARROW, {}),
    ("gpt_oss", "MXFP4", NARROW | EXPERTS | {"num_local_experts": 3}, {}),
    ("gpt2", "Q8_0", NARROW | {"head_dim": None}, {}),
    ("phi3", "F16", NARROW | {"rope_parameters": LONG_ROPE}, {"change": add_length, "factors": {
        "rope_factors_long.weight": np.ones(8), "rope_factors_short.weight": np.ones(8)}}),
    ("qwen2_moe", "F32", NARROW | EXPERTS | {"num_experts": 3, "moe_intermediate_size": 32}
     | {"shared_expert_intermediate_size": 32}, {}),
)  # fmt: skip
"""Families, types of matrices, options of the family, and options of `write_model`."""


PACKED: dict[str, tuple[Any, Callable[[tuple[int, int]], Weight]]] = {
    "w4a16": (config_group(num_bits=4, strategy="group", group_size=32), pack_quantized),
    "w8a8": (config_group(num_bits=8, strategy="channel", format="int-quantized"), int_quantized),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32}, gptq),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32}, awq),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [16, 16]},
        lambda shape: fp8(shape, (16, 16)),
    ),
}
"""For each checkpoint its quantization_config, and what makes a weight."""


def write_packed(directory: Path, config: Any, make: Callable[[tuple[int, int]], Weight]) -> None:
    """Quantizes the projections of a checkpoint."""
    tensors = load_file(directory / "model.safetensors")
    for name in [*tensors]:
        if name.endswith("_proj.weight"):
            shape = tensors.pop(name).shape
            tensors |= named(name.removesuffix(".weight"), make((shape[0], shape[1])))
    write_checkpoint(directory, config, tensors)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the valid files."""
    folder = tmp_path_factory.mktemp("damaged")
    for family, kind, options, more in BASES:
        reference = reference_model(family, **options)
        directory = save(reference, folder / f"gguf-{family}-{kind}-base")
        (directory / "model.safetensors").unlink()
        write_model(directory / GGUF, reference, kind=kind, **more)
    pieces = reference_model("llama", **NARROW)
    write_model(save(pieces, folder / "pieces-base") / GGUF, pieces, kind="Q8_0", max_tensors=5)
    (folder / "pieces-base" / "model.safetensors").unlink()
    assert len([*(folder / "pieces-base").glob("*.gguf")]) > 1
    for name, (config, make) in PACKED.items():
        write_packed(save(pieces, folder / f"packed-{name}-base"), config, make)
    for family in ("gemma3", "mixtral"):
        save(reference_model(family, **NARROW), folder / f"config-{family}-base")
    reference = reference_model("llama", **NARROW)
    save(reference, folder / "single-base")
    save(reference_model("qwen2", **NARROW, dtype="bfloat16"), folder / "single-bf16-base")
    save(reference, folder / "sharded-base", max_shard_size=10_000)
    assert len([*(folder / "sharded-base").glob("*.safetensors")]) > 1
    return folder


def check(folder: Path, count: int) -> None:
    print(f"SHMLLM_TEST_SEED={SEED}")
    done = python(
        *(damaged_reading.__file__, str(folder), str(SEED), "0", str(count)),
        env=environment_of_test_files() | ONE_HEAP,
        timeout=1200,
    )
    *faults, summary = done.stdout.decode().splitlines() or [""]
    last = folder / "number"
    where = f"seed {SEED}, number {last.read_text() if last.exists() else 'none'}"
    assert done.returncode == 0, f"{where}:\n{done.stderr.decode()[-4000:]}"
    assert not faults, f"{len(faults)} faults, seed {SEED}:\n" + "\n".join(faults[:20])
    found = json.loads(summary)
    print(found, file=sys.stderr)
    assert found["files"] == count
    assert found["refused"] > found["read"] / 4


def test_a_few_hundred_files(folder: Path) -> None:
    check(folder, SHORT)


@pytest.mark.slow
def test_ten_thousand_files(folder: Path) -> None:
    check(folder, LONG)
