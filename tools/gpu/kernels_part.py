"""A part of gpu_check: measures the products and the attention of a decode step separately.

Together with the profile of the engine's steps this shows which kernels are far from the roofline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu.attention_case import AttentionCase, AttentionSizes
from gpu.clock import seconds_each
from gpu.figures import Figures
from gpu.settings import Settings
from gpu.shapes import Shape
from shmllm_kernels.gpu.configs import has_dependent_launches
from shmllm_kernels.gpu.single_row import config_of, multiply_row

SIZES = ("1b", "8b")
SPLITS = (1, 2, 4)
"""In how many parts contexts are split, besides what an engine chooses."""

Product = Callable[[Tensor, Tensor, Tensor], object]


def _single_row(out: Tensor, x: Tensor, weight: Tensor) -> None:
    is_dependent = has_dependent_launches(weight.device)
    multiply_row(out, x, weight, config_of(weight, weight.device), is_dependent=is_dependent)


PRODUCTS: dict[str, tuple[int | None, Product]] = {
    # name: the most rows that it takes, and a function of (out [rows, outputs],
    # x [rows, inputs], weight [outputs, inputs]).
    "torch.mm": (None, lambda out, x, weight: torch.mm(x, weight.t(), out=out)),
    "single row": (1, _single_row),
}


def run(settings: Settings, figures: Figures) -> None:
    torch.manual_seed(0)
    products: dict[str, Any] = {}
    attention: dict[str, Any] = {}
    for size in SIZES:
        attention[size] = time_attention(settings, settings.shape(size))
        figures.put("attention", attention)
    for size in SIZES:
        products[size] = time_products(settings, settings.shape(size))
        figures.put("products", products)


def time_attention(settings: Settings, shape: Shape) -> dict[str, Any]:
    """Measures one layer's attention of decodes.

    Returns:
        By batch: microseconds, bytes per second, the config and the number of splits. "others" has
        the microseconds by the order within a block of the cache, by the number of splits.
    """
    found: dict[str, Any] = {}
    for batch in settings.attention_batches:
        sizes = AttentionSizes(
            shape.heads, shape.kv_heads, shape.head_dim, batch, 1, settings.context
        )
        case = AttentionCase(sizes, settings)
        config, splits = case.current()
        took = case.seconds(config, splits)
        found[str(batch)] = {
            "us": took * 1e6,
            "bytes_per_s": sizes.kv_bytes / took,
            "config": str(config),
            "splits": splits,
            "others": {
                order: {
                    str(each): of_order.seconds(case.config(each), each) * 1e6 for each in SPLITS
                }
                for order, of_order in (
                    ("tokens first", case.with_order(heads_first=False)),
                    ("heads first", case.with_order(heads_first=True)),
                )
            },
        }
    return found


def time_products(settings: Settings, shape: Shape) -> dict[str, Any]:
    """Measures the matrix products of a decode step.

    Returns:
        By matrix, number of rows and product: microseconds, and bytes of the matrix per second.
    """
    device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
    found: dict[str, Any] = {}
    for name, (outputs, inputs) in shape.matrices().items():
        one = torch.randn(outputs, inputs, device=device).to(dtype)
        copies = max(1, -(-settings.rotated_bytes // one.nbytes))
        weights = [one, *(one.clone() for _ in range(copies - 1))]
        found[name] = {
            str(rows): time_rows(settings, weights, rows) for rows in settings.product_rows
        }
    return found


def time_rows(
    settings: Settings, weights: list[Tensor], rows: int, names: Iterable[str] = PRODUCTS
) -> dict[str, Any]:
    """Measures products with each of `weights` [outputs, inputs] in turn: those of `PRODUCTS` with
    these names that take so many rows.

    Returns:
        By product: microseconds, and bytes of the matrix per second.
    """
    outputs, inputs = weights[0].shape
    x = torch.randn(rows, inputs, device=weights[0].device).to(weights[0].dtype)
    out = torch.empty(rows, outputs, device=x.device, dtype=x.dtype)
    found = {}
    for name in names:
        most_rows, product = PRODUCTS[name]
        if most_rows is not None and rows > most_rows:
            continue
        works = [partial(product, out, x, weight) for weight in weights]
        took = seconds_each(works, x.device, settings.rounds)
        found[name] = {"us": took * 1e6, "bytes_per_s": weights[0].nbytes / took}
    return found
