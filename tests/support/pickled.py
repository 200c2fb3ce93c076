"""Makes checkpoints of torch.save of checkpoints with safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


def pickle_weights(directory: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Replaces a directory's model.safetensors by pytorch_model.bin.

    Args:
        directory: the directory of a model.
        tensors: the tensors by their names; None: those of model.safetensors.
    """
    path = directory / "model.safetensors"
    torch.save(
        load_file(path) if tensors is None else dict(tensors), directory / "pytorch_model.bin"
    )
    path.unlink()
