"""Files with low-rank adapters beside their weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shmllm.errors import EngineStartError
from shmllm.models.checkpoint_formats.adapted_file import AdaptedFile
from shmllm.models.safetensors_file import SafetensorsFile
from shmllm.models.task_adapters import TaskAdapters

WITHIN = "parametrizations.weight"
TENSORS = {
    f"a.{WITHIN}.original": torch.randn(6, 5),
    f"a.{WITHIN}.0.lora_A": torch.randn(3, 2, 5),
    f"a.{WITHIN}.0.lora_B": torch.randn(3, 6, 2),
    f"embeddings.t.{WITHIN}.original": torch.randn(9, 5),
    f"embeddings.t.{WITHIN}.0.lora_A": torch.randn(3, 9, 2),
    f"embeddings.t.{WITHIN}.0.lora_B": torch.randn(3, 2, 5),
    "a.bias": torch.randn(6),
}


def opened(directory: Path, tensors: dict[str, torch.Tensor], chosen: int | None) -> AdaptedFile:
    path = directory / "model.safetensors"
    save_file(tensors, path)
    adapters = TaskAdapters(count=3, chosen=chosen, rank=2, scale=0.5)
    return AdaptedFile(SafetensorsFile(path), adapters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chosen", [None, 0, 2])
def test_weights_are_those_with_the_chosen_adapters(
    chosen: int | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in TENSORS.items()}
    with opened(tmp_path, tensors, chosen) as file:
        assert file.shapes() == {"a.weight": (6, 5), "embeddings.t.weight": (9, 5), "a.bias": (6,)}
        for module in ("a", "embeddings.t"):
            file.check(f"{module}.weight")
            first, second = (tensors[f"{module}.{WITHIN}.0.lora_{x}"].float() for x in "AB")
            if module == "a":
                first, second = second, first
            wanted = tensors[f"{module}.{WITHIN}.original"].float()
            if chosen is not None:
                wanted = wanted + 0.5 * first[chosen] @ second[chosen]
            with file.tensor(f"{module}.weight") as found:
                torch.testing.assert_close(found.float(), wanted)
        with file.tensor("a.bias") as found:
            assert torch.equal(found, tensors["a.bias"])


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (None, "lora_B is missing"),
        (torch.randn(2, 6, 2), r"shape \[2, 6, 2\], it must have \[3, 6"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(
    changed: torch.Tensor | None, reason: str, tmp_path: Path
) -> None:
    tensors = TENSORS | {f"a.{WITHIN}.0.lora_B": changed}
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with opened(tmp_path, present, 1) as file, pytest.raises(EngineStartError, match=reason):
        file.check("a.weight")
