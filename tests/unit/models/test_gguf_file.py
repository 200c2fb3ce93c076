"""Weights from GGUF files: equal to those of a Hugging Face checkpoint, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from support.gguf_models import K_QUANTS, KINDS, PYTHON_QUANTIZES, quantized, write, write_model
from support.model_helpers import allocate, load, reference_model, save

from shmllm.errors import EngineStartError
from shmllm.formats.gguf_directory import IDENTITY, LINK, SourceFile, identity
from shmllm.models.config import ModelConfig
from shmllm.models.create import create_model
from shmllm.models.decoder import DecoderModel
from shmllm.models.weights import load_weights

FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"num_key_value_heads": 6},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4},
    "gemma2": {"head_dim": 16},
    "gemma3": {"head_dim": 16},
    "phi3": {},
    "qwen2_moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    | {"shared_expert_intermediate_size": 40},
    "olmoe": {"num_experts": 5, "num_experts_per_tok": 2},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2},
    "smollm3": {"attention_bias": True},
    "olmo2": {},
    "olmo3": {},
    "granite": {"attention_bias": True},
    "glm4": {"head_dim": 16, "attention_bias": True},
    "cohere2": {},
    "gpt2": {},
}
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "head_dim": 64,
}


def load_gguf(directory: Path, file: Path, dtype: torch.dtype = torch.float32) -> DecoderModel:
    """A model with the config.json in a directory and the weights in a file."""
    for checkpoint in directory.glob("*.safetensors"):
        checkpoint.unlink()
    (directory / LINK).unlink(missing_ok=True)
    (directory / LINK).symlink_to(file)
    return load(directory, dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_equal_those_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    reference = reference_model(family, **FAMILIES[family])
    expected = load(save(reference, tmp_path)).named_weights()
    found = load_gguf(tmp_path, write_model(tmp_path / "m.gguf", reference)).named_weights()
    assert found.keys() == expected.keys()
    for name, (view, *_) in found.items():
        # The file has 1 + w of Gemma's norms.
        bound = 2.0**-23 if "gemma" in family and name.endswith("norm.weight") else 0.0
        assert (view - expected[name][0]).abs().max() <= bound, name


@pytest.mark.parametrize("kind", [*PYTHON_QUANTIZES, *K_QUANTS])
def test_each_type_is_dequantised_as_the_gguf_package_does_it(kind: str, tmp_path: Path) -> None:
    reference = reference_model("qwen3", **WIDE)
    file = write_model(tmp_path / "m.gguf", reference, kind=kind)
    found = load_gguf(save(reference, tmp_path), file).named_weights()
    for name, tensor in reference.state_dict().items():
        expected = tensor
        if tensor.ndim == 2:
            stored = quantized(tensor.numpy(), kind)
            expected = torch.from_numpy(gguf.quants.dequantize(stored, KINDS[kind]))
        assert torch.equal(found[name][0], expected), name


def test_large_tensors_are_dequantised_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = reference_model("llama", **WIDE)
    file = write_model(tmp_path / "m.gguf", reference, kind="Q4_1")
    save(reference, tmp_path)
    whole = load_gguf(tmp_path, file).named_weights()
    monkeypatch.setattr("shmllm.models.gguf_file.ELEMENTS_AT_ONCE", 3 * 256)
    for name, (view, *_) in load_gguf(tmp_path, file).named_weights().items():
        assert torch.equal(view, whole[name][0])


def test_progress_counts_stored_bytes_and_ends_complete(tmp_path: Path) -> None:
    reference = reference_model("llama", **WIDE)
    file = write_model(tmp_path / "m.gguf", reference, kind="Q4_0")
    model = load_gguf(save(reference, tmp_path), file)
    calls: list[tuple[int, int]] = []
    load_weights(model, tmp_path, lambda done, total: calls.append((done, total)))
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert len(calls) == len(model.named_weights())
    assert calls[-1] == (file.stat().st_size, file.stat().st_size)


def failure(directory: Path) -> str:
    """The error of loading a directory, one line, before anything is written."""
    model = create_model(ModelConfig.from_directory(directory), torch.float32, allocate)
    with pytest.raises(EngineStartError) as caught:
        load_weights(model, directory)
    assert all(view.isnan().all() for views in model.named_weights().values() for view in views)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A directory that loads from a GGUF file, and the file."""
    reference = reference_model("llama")
    file = write_model(tmp_path / "source.gguf", reference)
    load_gguf(save(reference, tmp_path / "model"), file)
    return tmp_path / "model", file


def rewritten(file: Path, tensors: Callable[[dict[str, Any]], object]) -> None:
    """Change the tensors of a file."""
    reader = gguf.GGUFReader(file)
    stored = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    tensors(stored)

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_head_count(6)
        writer.add_head_count_kv(2)
        for name, values in stored.items():
            writer.add_tensor(name, values)

    write(file, "llama", fill)


def test_a_missing_tensor_is_named_as_the_model_names_it(pair: tuple[Path, Path]) -> None:
    directory, file = pair
    rewritten(file, lambda tensors: tensors.pop("blk.1.ffn_up.weight"))
    assert "lacks model.layers.1.mlp.up_proj.weight" in failure(directory)


def test_an_unknown_tensor_is_named_as_the_file_names_it(pair: tuple[Path, Path]) -> None:
    directory, file = pair
    rewritten(file, lambda tensors: tensors.update({"blk.0.ssm_a": np.zeros(3, np.float32)}))
    assert "a tensor the model lacks: blk.0.ssm_a" in failure(directory)


def test_braces_in_a_name_are_no_format(pair: tuple[Path, Path]) -> None:
    directory, file = pair
    rewritten(file, lambda t: t.update({"output.{}{": np.zeros((2, 3), np.float32)}))
    assert "a tensor the model lacks: output.{}{" in failure(directory)


def test_a_wrong_shape_is_named(pair: tuple[Path, Path]) -> None:
    directory, file = pair
    rewritten(file, lambda t: t.update({"blk.0.ffn_up.weight": np.zeros((2, 3), np.float32)}))
    assert "mlp.up_proj.weight has shape [2, 3], the config asks for [80, 48]" in failure(directory)


def test_factors_of_frequencies_are_no_weights(pair: tuple[Path, Path]) -> None:
    directory, file = pair
    rewritten(file, lambda t: t.update({"rope_freqs.weight": np.ones(4, np.float32)}))
    load(directory)


def test_a_truncated_file_is_named(pair: tuple[Path, Path]) -> None:
    directory, file = pair
    os.truncate(file, file.stat().st_size - 1)
    assert "damaged or incomplete" in failure(directory)


def test_a_source_that_changed_or_is_gone_is_named(pair: tuple[Path, Path]) -> None:
    directory, file = pair
    (directory / IDENTITY).write_text(identity([SourceFile.of(file)]))
    load(directory)
    os.utime(file, ns=(1, 1))
    message = failure(directory)
    assert str(file) in message
    assert "has changed" in message
    file.unlink()
    message = failure(directory)
    assert str(file) in message
    assert "No such file" in message


def test_any_directory_with_one_file_loads(pair: tuple[Path, Path]) -> None:
    directory, file = pair
    (directory / LINK).unlink()
    (directory / "other-name.gguf").symlink_to(file)
    load(directory)
    (directory / "second.gguf").symlink_to(file)
    assert "no weights in" in failure(directory)


def test_a_missing_package_is_one_line(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = pair
    monkeypatch.setitem(sys.modules, "gguf.quants", None)
    load(directory)  # numbers that are not quantised need no package
    reference = reference_model("llama", **WIDE)
    file = write_model(tmp_path / "q.gguf", reference, kind="Q8_0")
    with pytest.raises(EngineStartError, match="pip install gguf"):
        load_gguf(save(reference, tmp_path / "quantized"), file)


LOAD_AND_PRINT_PEAK = """
import sys
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import torch
import gguf.quants
from shmllm.models.weights import load_weights

class Sink:
    shape, dtype = torch.Size((1024, 4096)), torch.float32
    def copy_(self, tensor):
        Sink.total += 1
    total = 0

def most():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024

names = [f"model.layers.{index}.mlp.up_proj.weight" for index in range(8)]
model = SimpleNamespace(
    destination_name=lambda name, shape: name,
    named_weights=lambda: names,
    destinations=lambda: {name: (Sink(),) for name in names},
    written=set,
    check_weights=lambda: None,
    config=SimpleNamespace(task_adapters=None, extra_files=()),
)
gguf.quants.dequantize(np.zeros((1, 18), np.uint8), gguf.GGMLQuantizationType.Q4_0)
open("/proc/self/clear_refs", "w").write("5")
before = most()
load_weights(model, Path(sys.argv[1]))
print(most() - before, Sink.total)
"""


def test_loading_holds_at_most_the_floats_of_one_tensor(tmp_path: Path) -> None:
    """Runs in a separate process, because the peak memory is that of a whole process."""
    kind = "Q4_0"
    size = gguf.quants.quant_shape_to_byte_shape((1024, 4096), KINDS[kind])

    def fill(writer: gguf.GGUFWriter) -> None:
        for layer in range(8):
            blocks = np.zeros(size, np.uint8)
            writer.add_tensor(f"blk.{layer}.ffn_up.weight", blocks, raw_dtype=KINDS[kind])

    write(tmp_path / "m.gguf", "llama", fill)
    command = [sys.executable, "-c", LOAD_AND_PRINT_PEAK, str(tmp_path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    grown, total = map(int, printed.split())
    assert total == 8
    # One tensor's floats, the temporaries of a part, and the stored bytes.
    assert grown < 2 * 4 * 1024 * 4096, f"{grown:,}"
