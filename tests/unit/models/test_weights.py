"""Loading checkpoints: single-file and sharded, tied and untied, valid and damaged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.model_helpers import (
    allocate,
    assert_logits_close,
    load,
    our_logits,
    reference_logits,
    reference_model,
    save,
)

from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.create import create_model
from shmllm.models.weights import load_dummy_weights, load_weights

TOKENS = [3, 14, 15, 92, 65]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A single-file Llama checkpoint."""
    return save(reference_model("llama"), tmp_path)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A Llama checkpoint in several files."""
    return save(reference_model("llama"), tmp_path, max_shard_size="40KB")


def edit(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Rewrites the only file of a checkpoint."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def failure(directory: Path) -> str:
    """Returns the error message of loading the checkpoint, which must be one line."""
    with pytest.raises(EngineStartError) as caught:
        load(directory)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_shards_load_as_one(shards: Path) -> None:
    assert len(list(shards.glob("*.safetensors"))) > 2
    ours = our_logits(load(shards), TOKENS)
    assert_logits_close(ours, reference_logits(reference_model("llama"), TOKENS), 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_destination_holds_its_tensor(checkpoint: Path, dtype: torch.dtype) -> None:
    model = load(checkpoint, dtype)
    stored = load_file(checkpoint / "model.safetensors")
    weights = model.named_weights()
    assert set(weights) == set(stored)
    for name, views in weights.items():
        for view in views:
            assert torch.equal(view, stored[name].to(dtype)), name


def test_tied_model_ignores_a_stored_head(tmp_path: Path) -> None:
    reference = reference_model("qwen3", tie_word_embeddings=True)
    save(reference, tmp_path)
    expected = our_logits(load(tmp_path), TOKENS)
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(97, 48)}))
    assert torch.equal(our_logits(load(tmp_path), TOKENS), expected)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "transformer.h.0.attn.causal_mask",
        "transformer.h.0.attn.attention.masked_bias",
    ],
)
def test_constants_of_old_files_are_ignored(checkpoint: Path, name: str) -> None:
    edit(checkpoint, lambda tensors: tensors.update({name: torch.zeros(4)}))
    load(checkpoint)


@pytest.mark.parametrize("form", ["checkpoint", "shards"])
def test_progress_grows_and_ends_complete(form: str, request: pytest.FixtureRequest) -> None:
    directory: Path = request.getfixturevalue(form)
    model = load(directory)
    calls: list[tuple[int, int]] = []
    load_weights(model, directory, lambda done, total: calls.append((done, total)))
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert len(calls) == len(model.named_weights())
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    assert calls[-1] == (size, size)


def test_a_tensor_in_two_shards_names_both(shards: Path) -> None:
    first, second, *_ = sorted(shards.glob("*.safetensors"))
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor + 1}, second)
    message = failure(shards)
    assert message.endswith(f"both have {name}: remove one of them")
    assert first.name in message
    assert second.name in message


def test_files_that_change_while_they_are_read_are_an_error(shards: Path) -> None:
    *_, last = sorted(shards.glob("*.safetensors"))
    model = load(shards)

    def replace_last(done: int, total: int) -> None:
        save_file({name: each[:1] for name, each in load_file(last).items()}, last)

    with pytest.raises(EngineStartError, match="has changed while it was read: load it again"):
        load_weights(model, shards, replace_last)
    assert model.missing == set(model.named_weights())


def test_no_weights_names_the_files(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    message = failure(checkpoint)
    assert "model.safetensors and model.safetensors.index.json" in message


def test_missing_shard_is_named(shards: Path) -> None:
    victim = sorted(shards.glob("*.safetensors"))[1]
    victim.unlink()
    assert str(victim) in failure(shards)


@pytest.mark.parametrize(
    "content", ["{", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../b.safetensors"}}']
)
def test_malformed_index_is_named(shards: Path, content: str) -> None:
    (shards / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in failure(shards)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_truncated_file_is_named(checkpoint: Path, kept: int) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    message = failure(checkpoint)
    assert str(path) in message
    assert "damaged" in message


def test_file_of_another_format_is_named(shards: Path) -> None:
    victim = sorted(shards.glob("*.safetensors"))[0]
    victim.write_bytes(b"<!doctype html>" * 100)
    assert str(victim) in failure(shards)


def test_integers_are_no_weights(checkpoint: Path) -> None:
    edit(checkpoint, lambda weights: weights.update({"model.norm.weight": torch.ones(48).int()}))
    with pytest.raises(EngineStartError, match=r"model\.norm\.weight has type I32; supported: F64"):
        load(checkpoint)


@pytest.mark.parametrize("name", ["", "a" * 300, "a\0b", "\ud800", "../model.safetensors"])
def test_what_cannot_be_a_file_name_is_refused(shards: Path, name: str) -> None:
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    assert "must map tensor names to file names" in failure(shards)


def test_missing_tensor_is_named(checkpoint: Path) -> None:
    edit(checkpoint, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert "lacks model.layers.1.mlp.up_proj.weight" in failure(checkpoint)


def test_untied_model_needs_a_head(checkpoint: Path) -> None:
    edit(checkpoint, lambda tensors: tensors.pop("lm_head.weight"))
    assert "lacks lm_head.weight" in failure(checkpoint)


def test_wrong_shape_error_names_both_shapes(checkpoint: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    edit(checkpoint, lambda tensors: tensors.update({name: torch.zeros(16, 47)}))
    message = failure(checkpoint)
    assert all(word in message for word in (name, "[16, 47]", "[16, 48]"))


def test_unknown_tensors_are_refused_before_anything_is_written(checkpoint: Path) -> None:
    extra = {"model.layers.0.b": torch.ones(1), "model.layers.0.c": torch.ones(1)}
    edit(checkpoint, lambda tensors: tensors.update(extra))
    model = create_model(ModelConfig.from_directory(checkpoint), torch.float32, allocate)
    with pytest.raises(EngineStartError, match=r"lacks: model\.layers\.0\.b and 1 more"):
        load_weights(model, checkpoint)
    assert all(view.isnan().all() for views in model.named_weights().values() for view in views)


def test_a_tensor_of_integers_is_refused_before_anything_is_written(checkpoint: Path) -> None:
    model = load(checkpoint)
    before = {name: views[0].clone() for name, views in model.named_weights().items()}
    edit(checkpoint, lambda tensors: tensors.update(zero(tensors)))
    with pytest.raises(EngineStartError, match=r"norm\.weight has type I32"):
        load_weights(model, checkpoint)
    assert not model.missing
    for name, views in model.named_weights().items():
        assert torch.equal(views[0], before[name]), name


def zero(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Zeros in place of all tensors; the last one is of integers."""
    zeros = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    return zeros | {"model.norm.weight": zeros["model.norm.weight"].to(torch.int32)}


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_after_a_load_that_ended_in_the_middle_all_weights_are_missing(
    error: type[BaseException], checkpoint: Path
) -> None:
    model = load(checkpoint)
    version = model.weights_version

    def fail(done: int, total: int) -> None:
        if done > total // 2:
            raise error

    with pytest.raises(error):
        load_weights(model, checkpoint, fail)
    assert model.missing == set(model.named_weights())
    assert model.weights_version > version
    load_weights(model, checkpoint)
    model.weights_changed(model.named_weights())
    assert not model.missing


def test_a_config_with_more_layers_than_the_checkpoint_is_an_error(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    assert "lacks model.layers.3" in failure(checkpoint)


@pytest.mark.parametrize("tied", [True, False])
def test_dummy_weights_are_deterministic(tied: bool, tmp_path: Path) -> None:
    model = load(save(reference_model("qwen2", tie_word_embeddings=tied), tmp_path))
    load_dummy_weights(model, 5)
    first = our_logits(model, TOKENS)
    load_dummy_weights(model, 6)
    second = our_logits(model, TOKENS)
    load_dummy_weights(model, 5)
    assert torch.equal(our_logits(model, TOKENS), first)
    assert not torch.equal(first, second)
    assert first.isfinite().all()
    weights = model.named_weights()
    assert (weights["model.norm.weight"][0] == 1).all()
    assert all(torch.equal(views[0], view) for views in weights.values() for view in views)


LOAD_AND_PRINT_PEAK = """
import sys
from pathlib import Path
from types import SimpleNamespace
import torch
from shmllm.models.weights import load_weights

class Sink:
    shape, dtype = torch.Size((1024, 4096)), torch.float16
    def copy_(self, tensor):
        for piece in tensor.view(-1).split(2**16):
            Sink.total += int(piece.view(torch.int16).sum())
    total = 0

def most():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024

Sink().copy_(torch.zeros(2**17, dtype=torch.float16))
names = [f"tensor.{index}" for index in range(16)]
model = SimpleNamespace(
    destination_name=lambda name, shape: name,
    named_weights=lambda: names,
    destinations=lambda: {name: (Sink(),) for name in names},
    written=set,
    check_weights=lambda: None,
    config=SimpleNamespace(task_adapters=None, extra_files=()),
)
open("/proc/self/clear_refs", "w").write("5")
before = most()
load_weights(model, Path(sys.argv[1]))
print(most() - before, Sink.total)
"""


def test_loading_holds_at_most_one_tensor_in_memory(tmp_path: Path) -> None:
    """Runs in a separate process, because the peak memory is that of a whole process."""
    tensor = torch.ones((1024, 4096), dtype=torch.float16)
    places: dict[str, str] = {}
    for file in (f"model-{number}.safetensors" for number in range(4)):
        names = [f"tensor.{len(places) + index}" for index in range(4)]
        save_file({name: tensor.clone() for name in names}, tmp_path / file)
        places |= dict.fromkeys(names, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    command = [sys.executable, "-c", LOAD_AND_PRINT_PEAK, str(tmp_path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    grown, total = map(int, printed.split())
    assert total == 16 * int(tensor.view(torch.int16).sum())
    assert grown < 2 * tensor.nbytes
