"""Directories of compressed-tensors, read back by the package; they need it installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.model_helpers import assert_logits_close, our_logits, reference_logits
from support.quantize_helpers import change_config, writable_model
from support.quantized_checkpoints import load_packed
from transformers import AutoModelForCausalLM

from shmllm.errors import QuantizeError
from shmllm.quantize.formats import COMPRESSED
from shmllm.quantize.job import quantize

TOKENS = [5, 17, 3, 88, 41, 2, 9]
ENDS = ("weight", "weight_packed", "weight_scale", "weight_shape")
GROUP = 32
"""No larger one divides an MLP of 96 columns."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    directory = tmp_path_factory.mktemp("model")
    return writable_model("qwen3", directory, num_hidden_layers=2), directory


@pytest.mark.parametrize("format", COMPRESSED)
def test_the_package_reads_what_was_written(
    format: str, model: tuple[Any, Path], tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    original, directory = model
    report = quantize(str(directory), tmp_path / "out", format)
    out = tmp_path / "out"
    fields = json.loads((out / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig(**fields)
    scheme = config.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(config.format)
    stored = load_file(out / "model.safetensors")
    assert config.ignore == ["lm_head"]
    assert scheme.weights.group_size == (GROUP if "w4" in format else None)
    worst = 0.0
    for name, values in original.state_dict().items():
        if values.ndim < 2 or "layers" not in name:
            torch.testing.assert_close(stored[name], values, rtol=0, atol=0)
            continue
        prefix = name.removesuffix("weight")
        parts = {key.removeprefix(prefix): part for key, part in stored.items() if prefix in key}
        found = compressor.decompress(parts, scheme)["weight"].float()
        worst = max(worst, float((found - values).norm() / values.norm()))
    assert report.worst == pytest.approx(worst, rel=1e-5)
    assert (
        report.worst < {"w4": 0.2, "w8": 0.02, "fp8": 0.05}[format.split("-")[-1][:3].rstrip("a")]
    )
    assert (out / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()


def test_transformers_reads_what_was_written(model: tuple[Any, Path], tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    original, directory = model
    quantize(str(directory), tmp_path / "out", "compressed-tensors-w8a16")
    auto: Any = AutoModelForCausalLM
    loaded = auto.from_pretrained(tmp_path / "out", dtype="float32")
    tokens = torch.arange(1, 20)[None]
    with torch.inference_mode():
        expected, found = original(tokens).logits, loaded(tokens).logits
    assert float((found - expected).norm() / expected.norm()) < 0.05


def plain_copy(quantized: Path, copy: Path) -> Any:
    """transformers' model with the values that the package reads, in float32."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    fields = json.loads((quantized / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig(**fields)
    compressor = BaseCompressor.get_value_from_registry(config.format)
    stored = load_file(quantized / "model.safetensors")
    found: dict[str, torch.Tensor] = {}
    for name in [each for each in stored if each.endswith("_scale")]:
        prefix = name.removesuffix("weight_scale")
        parts = {end: stored.pop(prefix + end) for end in ENDS if prefix + end in stored}
        values = compressor.decompress(parts, config.config_groups["group_0"])["weight"]
        found[prefix + "weight"] = values.float()
    copy.mkdir()
    save_file(stored | found, copy / "model.safetensors", {"format": "pt"})
    (copy / "config.json").write_bytes((quantized / "config.json").read_bytes())
    change_config(copy, quantization_config=None)
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(copy, dtype="float32", attn_implementation="eager")


@pytest.mark.parametrize("format", ["compressed-tensors-w4a16", "compressed-tensors-w8a8"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_each_expert_is_rounded_and_no_router(kind: str, format: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    shared = {"shared_expert_intermediate_size": 32} if kind == "qwen2_moe" else {}
    writable_model(kind, tmp_path / "model", num_hidden_layers=2, **shared)
    quantize(str(tmp_path / "model"), tmp_path / "out", format)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    original = load_file(tmp_path / "model" / "model.safetensors")
    kept = {name for name in original if name in stored and stored[name].is_floating_point()}
    assert {name for name in original if name.endswith("gate.weight")} < kept
    assert not [name for name in kept if "experts." in name]
    reference = plain_copy(tmp_path / "out", tmp_path / "plain")
    ours = our_logits(load_packed(tmp_path / "out"), TOKENS)
    assert_logits_close(ours, reference_logits(reference, TOKENS), 2e-5)


def test_experts_in_one_tensor_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    writable_model("gpt_oss", tmp_path / "model")
    with pytest.raises(QuantizeError, match="one tensor has the matrices of all experts"):
        quantize(str(tmp_path / "model"), tmp_path / "out", "compressed-tensors-w8a16")
    assert not (tmp_path / "out").exists()


def test_a_missing_package_is_named(
    model: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    with pytest.raises(QuantizeError, match="pip install compressed-tensors"):
        quantize(str(model[1]), tmp_path / "out", "compressed-tensors-w8a8")
    assert list(tmp_path.iterdir()) == []
