"""A part of gpu_check: products with packed weights, compared with products with their values and
timed beside torch's.

The kernels, tile sizes and formats are those of an engine whose checkpoint is quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu.clock import seconds_each
from gpu.compile_part import compile_ahead
from gpu.figures import Figures
from gpu.kernels_part import PRODUCTS, time_rows
from gpu.settings import Settings
from shmllm.models.matrices import FORMATS
from shmllm.models.quantized import QuantizedMatrix
from shmllm_kernels.gpu.configs import has_dependent_launches, packed_config
from shmllm_kernels.gpu.packings import PackedRows
from shmllm_kernels.gpu.products import linear
from shmllm_kernels.gpu.single_row import config_of, multiply_row

BASELINE = next(iter(PRODUCTS))
LARGEST_ERROR = 1e-5
"""The largest error of a sum in float32, as a share of the sum of the magnitudes of its terms. One
wrong term of 4,096 is 2e-4 of them."""
DRAWN_ROWS = 256
"""The number of different rows of a matrix. They are rounded and decoded on the host, in the
torch code that the tests compare with other implementations."""


def run(settings: Settings, figures: Figures) -> None:
    torch.manual_seed(0)
    figures.put("compiled", compile_ahead(settings, ("packed",)))
    errors: dict[str, Any] = {}
    for shape in settings.packed_shapes:
        errors[name_of(shape)] = by_kind = {}
        for kind in FORMATS:
            by_kind[kind] = check(settings, kind, shape)
            figures.put("errors", errors)
    times: dict[str, Any] = {}
    for shape in settings.packed_shapes:
        times[name_of(shape)] = found = {BASELINE: time_baseline(settings, shape)}
        for kind in FORMATS:
            found[kind] = time_kind(settings, kind, shape, found[BASELINE])
            figures.put("linear", times)


def name_of(shape: tuple[int, int]) -> str:
    return f"{shape[0]} x {shape[1]}"


def launches(settings: Settings) -> Iterator[Callable[[], object]]:
    """Yields a launch of every kernel of this part, on weights that nobody has written."""
    dtype: torch.dtype = getattr(torch, settings.dtype)

    def allocate(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=torch.device(settings.device))

    for outputs, inputs in settings.packed_shapes:
        for kind in FORMATS:
            matrix = FORMATS[kind].make((outputs, inputs), dtype, allocate)
            for rows in settings.packed_rows:
                x, out = (allocate((rows, width), dtype) for width in (inputs, outputs))
                yield partial(multiply, out, x, matrix)


def multiply(out: Tensor, x: Tensor, matrix: QuantizedMatrix) -> None:
    """Writes the product of rows with packed weights, as an engine computes it."""
    weight = PackedRows.of(matrix.kind, matrix.integers, matrix.scales, matrix.shape[-1])
    if len(x) == 1:
        is_dependent = has_dependent_launches(x.device)
        multiply_row(out, x, weight, config_of(weight, x.device), is_dependent=is_dependent)
    else:
        linear(out, x, weight, None, packed_config(x.device, len(x), x.dtype))


def check(settings: Settings, kind: str, shape: tuple[int, int]) -> float:
    """Compares products with packed weights with the products with `clone`d ones in float64.

    Returns:
        The largest error, as a share of the error that is allowed.

    Raises:
        AssertionError: an error is larger than the rounding of the sum and of the result.
    """
    matrix, values = draw(settings, kind, shape)
    wide, worst = values.double(), 0.0
    magnitudes = wide.abs()
    for rows in settings.packed_rows:
        x = _random(settings, rows, shape[1])
        out = torch.full((rows, shape[0]), torch.nan, dtype=x.dtype, device=x.device)
        multiply(out, x, matrix)
        wanted = x.double() @ wide.t()
        allowed = x.double().abs() @ magnitudes.t() * LARGEST_ERROR
        allowed += wanted.abs() * torch.finfo(x.dtype).eps
        shares = ((out.double() - wanted).abs() / allowed).nan_to_num(torch.inf)
        worst = max(worst, shares.max().item())
        assert worst <= 1, f"{kind}, {name_of(shape)}, {rows} rows: {worst:.3g} times the error"
    return worst


def draw(settings: Settings, kind: str, shape: tuple[int, int]) -> tuple[QuantizedMatrix, Tensor]:
    """Returns a random packed matrix [outputs, inputs] and its values, in the settings' dtype."""
    outputs, inputs = shape
    dtype, device = getattr(torch, settings.dtype), torch.device(settings.device)
    few = FORMATS[kind].make(
        (min(DRAWN_ROWS, outputs), inputs), dtype, lambda size, dtype: torch.zeros(size).to(dtype)
    )
    few.copy_(torch.randn(few.shape) * inputs**-0.5)
    chosen = torch.randint(len(few.integers), (outputs,), device=device)
    parts = (part.to(device)[chosen] for part in (few.integers, few.scales))
    return few.of_parts(*parts), few.clone().to(device)[chosen]


def time_baseline(settings: Settings, shape: tuple[int, int]) -> dict[str, Any]:
    """Measures torch's product with weights in the settings' dtype.

    Returns:
        By number of rows: microseconds, and bytes of the matrix per second.
    """
    one = _random(settings, *shape)
    weights = [one, *(one.clone() for _ in range(_copies(settings, one.nbytes) - 1))]
    return {
        str(rows): time_rows(settings, weights, rows, (BASELINE,))[BASELINE]
        for rows in settings.packed_rows
    }


def time_kind(
    settings: Settings, kind: str, shape: tuple[int, int], baseline: dict[str, Any]
) -> dict[str, Any]:
    """Measures products with packed weights.

    Returns:
        By number of rows: microseconds, bytes of the packed matrix per second, and the time of
        the baseline as a multiple of this one.
    """
    one, _ = draw(settings, kind, shape)
    num_bytes = one.integers.nbytes + one.scales.nbytes
    others = range(_copies(settings, num_bytes) - 1)
    weights = [one, *(one.of_parts(one.integers.clone(), one.scales.clone()) for _ in others)]
    found = {}
    for rows in settings.packed_rows:
        x = _random(settings, rows, shape[1])
        out = x.new_empty(rows, shape[0])
        works = [partial(multiply, out, x, weight) for weight in weights]
        us = seconds_each(works, x.device, settings.rounds) * 1e6
        found[str(rows)] = {
            "us": us,
            "bytes_per_s": num_bytes / us * 1e6,
            "times": baseline[str(rows)]["us"] / us,
        }
    return found


def _copies(settings: Settings, num_bytes: int) -> int:
    return max(1, -(-settings.rotated_bytes // num_bytes))


def _random(settings: Settings, *shape: int) -> Tensor:
    device = torch.device(settings.device)
    return torch.randn(shape, device=device).to(getattr(torch, settings.dtype))
