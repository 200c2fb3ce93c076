"""What is in a directory, as `shmllm models` shows it and as the error of a start says it."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gguf_models import KINDS, quantized, write, write_model
from support.reference_models import make_model

from shmllm.errors import EngineStartError
from shmllm.formats.gguf_directory import IDENTITY
from shmllm.frontend import model_catalog
from shmllm.frontend.model_catalog import check_model, contents_of, record_of_model
from shmllm.frontend.model_files import bundled_model
from shmllm.frontend.options.engine_options import make_engine_config

BUNDLED = bundled_model("tiny")
CONFIG = json.loads((BUNDLED / "config.json").read_text())
SHAPES = {"a": [3, 4], "b": [5]}


def write_weights(path: Path, shapes: dict[str, list[int]], data: bytes = b"") -> None:
    tensors = {name: {"dtype": "F32", "shape": shape} for name, shape in shapes.items()}
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with all that a model needs, with headers and no data in its weights."""
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(BUNDLED / name, directory / name)
    write_weights(directory / "model.safetensors", SHAPES)
    return directory


def change_config(directory: Path, **changes: Any) -> None:
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))


def test_a_model_that_runs_is_described(model: Path) -> None:
    check_model(model, needs_weights=True)
    found = record_of_model("m", "local", model)
    assert (found.format, found.architecture) == ("safetensors", CONFIG["architectures"][0])
    assert (found.parameters, found.problem) == (17, None)
    assert found.size_bytes == sum(file.stat().st_size for file in model.iterdir())


def test_parameters_of_all_shards_are_counted(model: Path) -> None:
    write_weights(model / "model-2.safetensors", {"c": [1000, 1000]})
    assert record_of_model("m", "local", model).parameters == 1_000_017


@pytest.mark.parametrize("content", [b"", b"short", struct.pack("<Q", 2**60), b"\xff" * 40])
def test_damaged_weights_are_a_problem_of_the_record(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    found = record_of_model("m", "local", model)
    assert found.parameters is None
    assert "model.safetensors is damaged" in (found.problem or "")


def test_an_unexpected_exception_is_a_problem_of_the_record(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("expand")

    monkeypatch.setattr("shmllm.models.config.ModelConfig.from_fields", fail)
    found = record_of_model("m", "local", model)
    assert (found.name, found.path) == ("m", str(model))
    assert found.problem == "cannot be described (KeyError: 'expand')"


def test_a_known_quantization_is_shown(model: Path) -> None:
    change_config(model, quantization_config={"quant_method": "gptq", "bits": 4})
    found = record_of_model("m", "local", model)
    assert (found.problem, found.quantization) == (None, "gptq")


PROBLEMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown": ({"architectures": ["PerceptronLM"]}, "'PerceptronLM'; the nearest of", ""),
    "hqq": (
        {"quantization_config": {"quant_method": "hqq", "bits": 4}},
        "quantized with hqq, which is not supported",
        "take the model that it was made from",
    ),
    "two lines": (
        {"quantization_config": {"quant_method": "a\nb"}, "architectures": ["a\nb"]},
        "quantized with an unknown method",
        "take the",
    ),
    "odd": ({"quantization_config": "yes"}, "quantized with an unknown method", "take the"),
}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_what_no_engine_can_compute_says_what_it_is(
    name: str, has_tokenizer: bool, model: Path
) -> None:
    changes, problem, remedy = PROBLEMS[name]
    change_config(model, **changes)
    if not has_tokenizer:
        (model / "tokenizer.json").unlink()
    found = record_of_model("m", "local", model)
    assert problem in (found.problem or "")
    assert remedy in (found.remedy or "")
    assert found.parameters == 17
    with pytest.raises(EngineStartError) as caught:
        check_model(model, needs_weights=True)
    message = str(caught.value)
    assert problem in message
    assert remedy in message
    assert str(model) in message
    assert "tokenizer" not in message
    assert "\n" not in message


def test_an_adapter_names_its_base_and_what_to_do(tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "base_model_name_or_path": "org/base"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    write_weights(tmp_path / "adapter_model.safetensors", SHAPES)
    with pytest.raises(
        EngineStartError, match=r"a LORA adapter for org/base.*merge both with peft"
    ):
        check_model(tmp_path, needs_weights=True)
    found = contents_of(tmp_path)
    assert found.format == "adapter"
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(BUNDLED / name, tmp_path / name)
    write_weights(tmp_path / "model.safetensors", SHAPES)
    assert contents_of(tmp_path).format == "safetensors"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_pickles_with_transformers_names_are_weights(name: str, model: Path) -> None:
    (model / "model.safetensors").rename(model / name)
    check_model(model, needs_weights=True)
    record = record_of_model("m", "local", model)
    assert (record.format, record.problem) == ("pickle", None)


@pytest.mark.parametrize("name", ["weights.bin", "model.pt", "model.pth"])
def test_other_pickles_are_refused_unless_no_weights_are_needed(name: str, model: Path) -> None:
    (model / "model.safetensors").rename(model / name)
    with pytest.raises(EngineStartError, match=rf"pickle \({name}\).*save_pretrained"):
        check_model(model, needs_weights=True)
    check_model(model, needs_weights=False)
    assert record_of_model("m", "local", model).format == "pickle"


@pytest.mark.parametrize("name", ["README.md", "tokenizer.json"])
def test_a_directory_without_a_model_says_what_was_looked_for(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(EngineStartError, match=r"no model: looked for .*config.json, \*.safe"):
        check_model(tmp_path, needs_weights=True)


def test_what_is_missing_is_a_problem_of_the_record(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_catalog, "available_memory_bytes", lambda: 67)
    monkeypatch.setattr(model_catalog.glob, "glob", lambda _: [])
    found = record_of_model("m", "local", model)
    assert "need 0 MiB as float32" in (found.problem or "")
    monkeypatch.setattr(model_catalog, "available_memory_bytes", lambda: 68)
    assert record_of_model("m", "local", model).problem is None
    (model / "tokenizer.json").unlink()
    assert record_of_model("m", "local", model).problem == "no tokenizer"
    (model / "spiece.model").touch()
    assert record_of_model("m", "local", model).problem is None
    (model / "model.safetensors").unlink()
    assert record_of_model("m", "local", model).problem == "no weights"
    check_model(model, needs_weights=True)  # the engine and the tokenizer say it with more words


@pytest.mark.parametrize("kind", ["Q8_0", "BF16"])
def test_a_quantised_file_needs_no_more_memory_than_it_has_bytes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama", tmp_path / "float")
    path = write_model(tmp_path / "m.gguf", model, kind=kind)
    needed = path.stat().st_size
    if kind == "BF16":
        needed = 4 * sum(values.numel() for values in model.state_dict().values())
    monkeypatch.setattr(model_catalog.glob, "glob", lambda _: [])
    monkeypatch.setattr(model_catalog, "available_memory_bytes", lambda: needed)
    found = record_of_model("m", "local", path)
    assert (found.problem, found.remedy) == (None, None)
    monkeypatch.setattr(model_catalog, "available_memory_bytes", lambda: needed - 1)
    found = record_of_model("m", "local", path)
    assert found.problem
    assert "its weights need" in found.problem
    assert ("as float32" in found.problem) == (kind == "BF16")
    assert ("--quantization" in (found.remedy or "")) == (kind == "BF16")


def test_a_damaged_gguf_file_is_described_as_one(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF but not really")
    found = contents_of(tmp_path)
    assert found.format == "GGUF"
    assert found.problem
    with pytest.raises(EngineStartError, match=r"model.gguf"):
        check_model(tmp_path, needs_weights=True)


@pytest.mark.parametrize(("number", "name"), [(None, "Q4_1"), (15, "Q4_K_M"), (3, "Q4_1")])
def test_the_quantization_of_a_gguf_file_is_shown(
    number: int | None, name: str, tmp_path: Path
) -> None:
    def fill(writer: Any) -> None:
        if number is not None:
            writer.add_file_type(number)
        for tensor, kind, rows in (("a", "Q4_1", 4), ("b", "Q8_0", 3), ("c", "F32", 2)):
            values = quantized(np.zeros((rows, 32), np.float32), kind)
            writer.add_tensor(tensor, values, raw_dtype=KINDS[kind])

    found = record_of_model("m", "local", write(tmp_path / "m.gguf", "llama", fill))
    assert (found.format, found.quantization) == ("GGUF", name)


def test_a_file_of_another_kind_is_not_called_gguf(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no model")
    found = record_of_model("notes.txt", "local", tmp_path / "notes.txt")
    assert found.format is None
    assert "not a GGUF file" in (found.problem or "")


def test_the_error_comes_before_an_engine_starts(model: Path) -> None:
    assert make_engine_config(str(model)).load.model_name == "model"
    change_config(model, architectures=["PerceptronLM"])
    with pytest.raises(EngineStartError, match="'PerceptronLM'; the nearest"):
        make_engine_config(str(model))


def test_several_gguf_files_are_named(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    found = contents_of(tmp_path)
    assert found.problem == "2 GGUF models (a.gguf, b.gguf)"
    assert found.remedy == "give the path of one of them"


def test_a_class_of_transformers_is_named_as_a_way_out(model: Path) -> None:
    change_config(model, architectures=["JetMoeForCausalLM"])
    with pytest.raises(EngineStartError, match="; model_impl='transformers' may run it, slower"):
        check_model(model, needs_weights=True)
    check_model(model, needs_weights=True, ours=False)
    change_config(model, architectures=["JetMoeModel"])
    with pytest.raises(EngineStartError, match="known ones") as caught:
        check_model(model, needs_weights=True)
    assert "model_impl" not in str(caught.value)


def test_modules_of_transformers_read_neither_pickles_nor_gguf_files(
    model: Path, tmp_path: Path
) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(EngineStartError, match="pickle"):
        check_model(model, needs_weights=True, ours=False)
    made = tmp_path / "made"
    made.mkdir()
    (made / IDENTITY).touch()
    with pytest.raises(EngineStartError, match="model_impl='transformers' reads no GGUF files"):
        check_model(made, needs_weights=True, ours=False)
