"""The weights of a module: their memory, their names, and what a checkpoint may lack."""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.programs import result_of, run_source
from support.transformers_models import make_family

from shmllm.config.load import LoadConfig
from shmllm.errors import EngineStartError, RequestError
from shmllm.models.transformers_impl.model import TransformersModel
from shmllm.sigbus.bus_handler import HANDLERS
from shmllm.worker.cpu.make_program import check_model
from shmllm.worker.cpu.memory import HostMemory
from shmllm.worker.loading import LoadedModel, load_model

FILE = "model.safetensors"


def load(directory: Path, **options: Any) -> LoadedModel:
    config = LoadConfig(str(directory), model_impl="transformers", dtype="float32", **options)
    return load_model(config, HostMemory(), lambda checkpoint: "float32", check_model)


@pytest.mark.parametrize("family", ["gemma", "glm4_moe", "gpt_neox", "opt"])
def test_weights_have_the_names_and_values_of_files(family: str, tmp_path: Path) -> None:
    """Those of experts and buffers, and of tied and renamed heads, among them."""
    make_family(family, tmp_path)
    loaded = load(tmp_path)
    stored = load_file(tmp_path / FILE)
    found = loaded.model.named_weights()
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name][0], tensor) for name, tensor in stored.items())
    assert loaded.weights.num_bytes >= sum(tensor.nbytes for tensor in stored.values())


def test_a_tied_head_is_no_weight_of_its_own(tmp_path: Path) -> None:
    make_family("gemma", tmp_path)
    model = load(tmp_path).model
    assert "lm_head.weight" not in model.destinations()
    table = torch.ones(512, 64)
    written = model.load_weights([("model.embed_tokens.weight", table), ("lm_head.weight", table)])
    assert written == {"model.embed_tokens.weight"}
    with pytest.raises(RequestError, match=r"no weight 'model\.foo'"):
        model.load_weights([("model.foo", table)])


def test_writing_all_experts_writes_each(tmp_path: Path) -> None:
    make_family("glm4_moe", tmp_path)
    model = load(tmp_path).model
    model.weights_lost()
    fused = "model.layers.1.mlp.experts.gate_up_proj"
    shape = model.destinations()[fused][0].shape
    before = len(model.missing)
    model.load_weights([(fused, torch.zeros(shape))])
    assert before - len(model.missing) == 2 * shape[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stored: stored.pop("model.norm.weight"), "lacks model.norm.weight$"),
        (lambda stored: stored.update(extra=torch.ones(1)), "has a tensor the model lacks: extra$"),
        (
            lambda stored: stored.update({"model.norm.weight": torch.ones(3)}),
            r"model.norm.weight has shape \[3\], the config asks for \[64\]$",
        ),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(
    change: object, message: str, tmp_path: Path
) -> None:
    make_family("gemma", tmp_path)
    loaded = load(tmp_path)
    stored = load_file(tmp_path / FILE)
    before = loaded.model.named_weights()["model.norm.weight"][0].clone()
    assert callable(change)
    change(stored)
    save_file(stored, tmp_path / FILE, metadata={"format": "pt"})
    with pytest.raises(EngineStartError, match=message):
        loaded.reload(None)
    assert torch.equal(loaded.model.named_weights()["model.norm.weight"][0], before)
    assert not loaded.model.missing


def test_a_truncated_file_is_an_error_in_one_line(tmp_path: Path) -> None:
    make_family("gemma", tmp_path)
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:9_000])
    with pytest.raises(EngineStartError, match=f"{FILE} is damaged or not a safetensors") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def in_shards(directory: Path) -> tuple[Path, Path]:
    """The files of a checkpoint that is divided into two."""
    stored = load_file(directory / FILE)
    (directory / FILE).unlink()
    names = sorted(stored)
    parts = names[: len(names) // 2], names[len(names) // 2 :]
    files = directory / "model-1.safetensors", directory / "model-2.safetensors"
    for file, part in zip(files, parts, strict=True):
        save_file({name: stored[name] for name in part}, file, metadata={"format": "pt"})
    places = {name: file.name for file, part in zip(files, parts, strict=True) for name in part}
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return files


def test_a_tensor_in_two_files_names_both(tmp_path: Path) -> None:
    make_family("gemma", tmp_path)
    first, second = in_shards(tmp_path)
    loaded = load(tmp_path)
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor + 1}, second, metadata={"format": "pt"})
    message = f"{first} and {second} both have {name}: remove one of them"
    with pytest.raises(EngineStartError, match=f"^{re.escape(message)}$"):
        loaded.reload(None)
    assert not loaded.model.missing


def test_a_file_that_changes_while_it_is_copied_is_an_error(tmp_path: Path) -> None:
    make_family("gemma", tmp_path)
    _, second = in_shards(tmp_path)
    loaded, other = load(tmp_path), tmp_path / "other"
    model = loaded.model
    assert isinstance(model, TransformersModel)

    def replace_second(done: int, total: int) -> None:
        other.write_bytes(second.read_bytes())
        other.replace(second)

    with pytest.raises(EngineStartError, match=f"{second.name} has changed while it was read"):
        model.load(tmp_path, replace_second)
    assert model.missing == set(model.named_weights())
    loaded.reload(None)
    assert not model.missing


COPYING = """
import json, os, sys
from pathlib import Path
from shmllm.config.load import LoadConfig
from shmllm.errors import EngineStartError
from shmllm.sigbus import bus_guard
from shmllm.worker.cpu.make_program import check_model
from shmllm.worker.cpu.memory import HostMemory
from shmllm.worker.loading import load_model
assert bus_guard.install()
directory, file = Path(sys.argv[1]), Path(sys.argv[2])
config = LoadConfig(str(directory), model_impl="transformers", dtype="float32")
loaded = load_model(config, HostMemory(), lambda checkpoint: "float32", check_model)
try:
    loaded.model.load(directory, lambda done, total: os.truncate(file, 4096))
except EngineStartError as error:
    print(json.dumps(str(error)))
"""


@pytest.mark.skipif(platform.machine() not in HANDLERS, reason="no SIGBUS handler")
def test_a_file_that_is_truncated_while_it_is_copied_is_an_error(tmp_path: Path) -> None:
    make_family("gemma", tmp_path)
    file = tmp_path / FILE
    message = result_of(run_source(COPYING, str(tmp_path), str(file)))
    assert message == f"{file} has changed while it was read: load it again"


def test_a_directory_without_weights_says_what_was_looked_for(tmp_path: Path) -> None:
    make_family("gemma", tmp_path)
    (tmp_path / FILE).unlink()
    with pytest.raises(EngineStartError, match=f"no weights in .*: looked for {FILE}"):
        load(tmp_path)


@pytest.mark.parametrize(
    "option",
    [
        {"quantization": "int8"},
        {"activation_dtype": "bfloat16"},
        {"convert": "classify"},
        {"hf_overrides": {"vocab_size": 5}},
    ],
    ids=lambda each: next(iter(each)),
)
def test_options_of_our_own_models_are_refused(option: dict[str, Any], tmp_path: Path) -> None:
    [name] = option
    with pytest.raises(EngineStartError, match=f"{name}=.* is not supported with model_impl"):
        load(tmp_path, **option)


def test_angles_that_depend_on_the_longest_request_need_a_bound(tmp_path: Path) -> None:
    make_family("arcee", tmp_path)
    path = tmp_path / "config.json"
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_parameters": rope}))
    with pytest.raises(EngineStartError, match="start with max_model_len=64"):
        load(tmp_path)
    config = LoadConfig(str(tmp_path), model_impl="transformers", max_model_len=64)
    load_model(config, HostMemory(), lambda checkpoint: "float32", check_model)
