"""Adapters beside a checkpoint, which are added to its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import lora_adapters

from shmllm.errors import EngineStartError
from shmllm.models.checkpoint_formats.merged_file import merged_files
from shmllm.models.safetensors_file import SafetensorsFile

TENSORS = {"layers.0.q_proj.weight": torch.randn(6, 5), "norm.weight": torch.randn(5)}
SHAPES = {"layers.0.q_proj": (6, 5)}
ADAPTER = lora_adapters.draw(SHAPES, rank=8)
A, B = (f"base_model.model.layers.0.q_proj.lora_{each}.weight" for each in "AB")


def checkpoint(directory: Path, prefix: str = "") -> list[SafetensorsFile]:
    path = directory / "model.safetensors"
    save_file({prefix + name: tensor for name, tensor in TENSORS.items()}, path)
    return [SafetensorsFile(path)]


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize(
    ("fields", "scale"),
    [({}, 2.0), ({"use_rslora": True}, 16 / 8**0.5), ({"lora_alpha": 3}, 3 / 8)],
)
def test_weights_have_the_adapter(
    fields: dict[str, Any], scale: float, prefix: str, tmp_path: Path
) -> None:
    adapter = lora_adapters.write(tmp_path / "adapter", ADAPTER, **fields)
    (file,) = merged_files(checkpoint(tmp_path, prefix), adapter)
    wanted = TENSORS["layers.0.q_proj.weight"] + scale * ADAPTER[B] @ ADAPTER[A]
    with file:
        assert set(file.shapes()) == {prefix + name for name in TENSORS}
        file.check(f"{prefix}layers.0.q_proj.weight")
        with file.tensor(f"{prefix}layers.0.q_proj.weight") as found:
            torch.testing.assert_close(found, wanted)
        with file.tensor(f"{prefix}norm.weight") as found:
            assert torch.equal(found, TENSORS["norm.weight"])


@pytest.mark.parametrize(
    ("changed", "fields", "reason"),
    [
        ({B: None}, {}, "'layers.0.q_proj' has no lora_B"),
        ({B: torch.zeros(5, 8)}, {}, r"q_proj.lora_B has shape \[5, 8\], not \[6, 8\]"),
        ({}, {"r": 4}, r"q_proj.lora_A has shape \[8, 5\], not \[4, 5\]"),
        ({A: torch.full((8, 5), torch.nan)}, {}, "lora_A has values that are not finite"),
        (lora_adapters.draw({"layers.0.x_proj": (6, 5)}), {}, "no weight that 'layers.0.x_proj'"),
        ({"base_model.model.norm.weight": torch.zeros(5)}, {}, "only lora_A and lora_B are"),
        ({}, {"use_dora": True}, "'use_dora' is not supported"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(
    changed: dict[str, Any], fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    tensors = {name: each for name, each in (ADAPTER | changed).items() if each is not None}
    adapter = lora_adapters.write(tmp_path / "adapter", tensors, **fields)
    with pytest.raises(EngineStartError, match=reason):
        merged_files(checkpoint(tmp_path), adapter)


def test_a_missing_adapter_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=r"adapters/x has no adapter_config.json: put the"):
        merged_files(checkpoint(tmp_path), tmp_path / "adapters" / "x")
