"""The package `safetensors` reads what was written tensor by tensor."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from shmllm.quantize.safetensors_writer import SafetensorsWriter


def test_the_package_reads_all_tensors(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        "a.weight_packed": torch.arange(5, dtype=torch.int32),
        "a.weight_shape": torch.tensor([2, 3]),
        "b": torch.tensor([1.5, -2.0], dtype=torch.float8_e4m3fn),
        "c": torch.zeros(3, 4, dtype=torch.float32).t(),
        "d": torch.full((3,), -7, dtype=torch.int8),
    }
    with SafetensorsWriter(tmp_path / "m", len(tensors), 20) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    found = load_file(tmp_path / "m")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].float(), tensor.float()), name
    with safe_open(tmp_path / "m", "pt") as file:
        assert file.metadata() == {"format": "pt"}
