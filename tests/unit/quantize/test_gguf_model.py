"""Written GGUF files: the bytes are those of the `gguf` package, the model is the checkpoint's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.gguf_models import ARCHITECTURES, KINDS, stored_values
from support.quantize_helpers import change_config, writable_model
from support.variants import slow

from shmllm.errors import QuantizeError
from shmllm.formats.gguf import read_header
from shmllm.frontend.gguf.config import generation_config, model_config
from shmllm.models.gguf_file import GgufFile
from shmllm.quantize.formats import GGUF_KINDS
from shmllm.quantize.job import quantize

QUICK = ("llama", "qwen3_moe", "gemma3")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gemma2", "gemma3")
FAMILY_PARAMS = [kind if kind in QUICK else slow(kind) for kind in FAMILIES]
QUICK_FORMATS = ("gguf-q8_0", "gguf-q4_0", "gguf-bf16")
FORMAT_PARAMS = [each if each in QUICK_FORMATS else slow(each) for each in GGUF_KINDS]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    directory = tmp_path_factory.mktemp("llama")
    return writable_model("llama", directory), directory


def expected_bytes(model: Any, kind: str) -> dict[str, bytes]:
    """The bytes of each tensor by its name in the file."""
    config = model.config
    names = gguf.get_tensor_name_map(ARCHITECTURES[config.model_type], config.num_hidden_layers)
    found = {}
    for name, values in stored_values(model):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None
        chosen = kind if values.ndim > 1 and "ffn_gate_inp" not in stored else "F32"
        found[stored] = gguf.quants.quantize(values.copy(), KINDS[chosen]).tobytes()
    return found


def assert_bytes(model: Any, file: Path, kind: str) -> None:
    found = {each.name: each.data.tobytes() for each in gguf.GGUFReader(file).tensors}
    expected = expected_bytes(model, kind)
    assert found.keys() == expected.keys()
    assert [name for name, stored in expected.items() if found[name] != stored] == []


@pytest.mark.parametrize("format", FORMAT_PARAMS)
def test_the_bytes_are_those_of_the_package(
    format: str, llama: tuple[Any, Path], tmp_path: Path
) -> None:
    model, directory = llama
    report = quantize(str(directory), tmp_path / "m.gguf", format)
    assert_bytes(model, tmp_path / "m.gguf", GGUF_KINDS[format])
    assert report.bytes_after == (tmp_path / "m.gguf").stat().st_size < report.bytes_before
    assert 0 < report.drift <= report.worst < 0.2
    assert report.worst_name in dict(model.named_parameters())


@pytest.mark.parametrize("kind", FAMILY_PARAMS)
def test_a_family_keeps_its_model_and_its_tensors(kind: str, tmp_path: Path) -> None:
    model = writable_model(kind, tmp_path / "model")
    quantize(str(tmp_path / "model"), tmp_path / "m.gguf", "gguf-q8_0")
    assert_bytes(model, tmp_path / "m.gguf", "Q8_0")
    found = model_config(read_header(tmp_path / "m.gguf"))
    wanted = json.loads((tmp_path / "model" / "config.json").read_text())
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"):
        assert found[name] == wanted[name], name


def test_the_drift_is_that_of_the_values_that_are_read_back(
    llama: tuple[Any, Path], tmp_path: Path
) -> None:
    model, directory = llama
    report = quantize(str(directory), tmp_path / "m.gguf", "gguf-q4_0")
    worst, errors, sizes = {}, 0.0, 0.0
    with GgufFile(tmp_path / "m.gguf") as file:
        for name, values in model.state_dict().items():
            if values.ndim < 2:
                continue
            with file.tensor(name) as found:
                error = float((found - values).double().square().sum())
            size = float(values.double().square().sum())
            worst[name] = (error / size) ** 0.5
            errors, sizes = errors + error, sizes + size
    assert report.num_tensors == len(worst)
    assert report.drift == pytest.approx((errors / sizes) ** 0.5, rel=1e-6)
    assert report.worst == pytest.approx(max(worst.values()), rel=1e-6)
    assert report.worst_name == max(worst, key=worst.__getitem__)


def test_matrices_with_incomplete_blocks_become_f16(tmp_path: Path) -> None:
    writable_model("llama", tmp_path / "model", intermediate_size=80)
    quantize(str(tmp_path / "model"), tmp_path / "m.gguf", "gguf-q4_0")
    kinds = {
        name: each.type_name for name, each in read_header(tmp_path / "m.gguf").tensors.items()
    }
    assert kinds["blk.0.ffn_down.weight"] == "F16"
    assert kinds["blk.0.ffn_up.weight"] == kinds["token_embd.weight"] == "Q4_0"
    assert kinds["blk.0.attn_norm.weight"] == kinds["blk.0.attn_q.bias"] == "F32"


def test_llama_3s_factors_ends_and_sampling_defaults_are_stored(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    writable_model("llama", directory, rope_parameters=LLAMA3)
    settings = {"eos_token_id": [2, 0], "do_sample": True, "temperature": 0.5, "top_k": 7}
    (directory / "generation_config.json").write_text(json.dumps(settings))
    quantize(str(directory), tmp_path / "m.gguf", "gguf-f16")
    header = read_header(tmp_path / "m.gguf")
    assert model_config(header)["rope_scaling"]["factor"] == 8.0
    found = generation_config(header)
    assert set(found["eos_token_id"]) == {0, 2}
    assert (found["temperature"], found["top_k"]) == (0.5, 7)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"architectures": ["GraniteForCausalLM"]}, "GraniteForCausalLM cannot be written"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
          | {"attention_factor": 3.0, "original_max_position_embeddings": 256}},
         "cannot express this model: layers.0..attention.rope.attention_factor is 3"),
        ({"num_hidden_layers": 4}, "has no model.layers.3"),
        ({"vocab_size": 4097}, "vocab_size is 4097"),
        ({"vocab_size": 9}, "has only 9 rows"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantized already \(gptq\)"),
    ],
)  # fmt: skip
def test_what_a_file_cannot_say_is_refused(
    fields: dict[str, Any], reason: str, llama: tuple[Any, Path], tmp_path: Path
) -> None:
    _, directory = llama
    copy = tmp_path / "model"
    copy.mkdir()
    for file in directory.iterdir():
        (copy / file.name).symlink_to(file)
    content = json.loads((copy / "config.json").read_text())
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(json.dumps(content))
    change_config(copy, **fields)
    with pytest.raises(QuantizeError, match=reason) as error:
        quantize(str(copy), tmp_path / "m.gguf", "gguf-q8_0")
    assert "\n" not in str(error.value)
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def test_a_tensor_that_llama_cpp_does_not_know_is_refused(tmp_path: Path) -> None:
    writable_model("gemma2", tmp_path / "model", tie_word_embeddings=False)
    with pytest.raises(
        QuantizeError, match=r"lm_head\.weight has no name in a GGUF file of Gemma 2"
    ):
        quantize(str(tmp_path / "model"), tmp_path / "m.gguf", "gguf-q8_0")


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    writable_model("llama", tmp_path / "model", num_hidden_layers=1)
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight"] = np.full((96, 64), 1e9, np.float32)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(QuantizeError, match=r"up_proj\.weight has values that are not finite"):
        quantize(str(tmp_path / "model"), tmp_path / "m.gguf", "gguf-f16")
    assert [each.name for each in tmp_path.iterdir()] == ["model"]
