"""What holds for each tower: checks of its results, which families compute in their own ways."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shmllm.models.config import ModelConfig
from shmllm.models.create import create_model
from shmllm.models.tower import Tower
from shmllm.params.items import Grid
from shmllm.worker.cpu.products import dtype_name
from shmllm.worker.cpu.row_products import RowProducts

Embed = Callable[[], Tensor]
"""Computes the embeddings of an item with the tower."""


def assert_close(ours: Tensor, reference: Tensor) -> None:
    """The largest difference is within 1e-5 of the largest number."""
    assert ours.shape == reference.shape
    difference = float((ours - reference).abs().max() / reference.abs().max())
    assert difference < 1e-5, f"relative difference {difference:.2e}"


def assert_near(ours: Tensor, exact: Tensor) -> None:
    """Results of a smaller dtype differ from those of float32, but not by much."""
    error = float((ours.float() - exact).abs().max() / exact.abs().max())
    assert 0 < error < 0.05, f"relative difference {error:.2e}"


def same_on_all_threads(tower: Tower, embed: Embed) -> Tensor:
    """Check that the number of threads changes no bit, and that the kernels of a CPU compute what
    torch does. Returns the embeddings."""
    plain, found, before = tower.products.multiply, [], torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            tower.products.multiply = RowProducts(num_threads, dtype_name(tower.dtype), False)
            found.append(embed())
    finally:
        tower.products.multiply = plain
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], each) for each in found)
    if tower.dtype == torch.float32:
        assert_close(found[0], embed())
    return found[0]


def check_device(
    config: ModelConfig, modality: str, inputs: tuple[Tensor, Grid], count: int
) -> Tower:
    """Check that a tower computes on the device of its weights. Returns it.

    Args:
        config: the model's.
        modality: that of the tower.
        inputs: those of an item.
        count: its number of embeddings.
    """

    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    tower = create_model(config, torch.bfloat16, allocate).towers[modality]
    ours = tower(inputs[0].to("meta"), inputs[1])
    assert (ours.device.type, len(ours)) == ("meta", count)
    return tower
