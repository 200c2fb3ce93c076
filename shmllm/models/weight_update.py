"""Checks new weights before any of them overwrites those of a loaded model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from shmllm.errors import RequestError, nearest
from shmllm.models.layers import NamedWeights
from shmllm.models.weight_names import BOUND_SUFFIXES

MAX_LISTED_PROBLEMS = 8
"""The largest number of problems that one error message lists."""


def checked_update(
    destinations: NamedWeights,
    named_tensors: Iterable[tuple[str, Tensor]],
    destination_name: Callable[[str, Sequence[int]], str | None],
) -> list[tuple[str, Tensor]]:
    """Checks new weights. It skips the names for which `destination_name` is None.

    Args:
        destinations: the model's `destinations()`.
        named_tensors: names as in a Hugging Face checkpoint of the model, and tensors of the
            checkpoint's shape, of any floating dtype and on any device. Any of the names, in any
            order.
        destination_name: the model's `destination_name`.

    Returns:
        The tensors by the model's names.

    Raises:
        RequestError: tensors have unknown names, wrong shapes, a dtype that is not floating, or
            values that are not finite. The message lists them.
    """
    known = ((destination_name(name, tensor.shape), tensor) for name, tensor in named_tensors)
    update = [(name, tensor) for name, tensor in known if name is not None]
    problems: dict[str, str] = {}
    for name, tensor in update:
        problem = find_problem(destinations, name, tensor.shape, tensor.dtype)
        if problem is None:
            problem = find_problem_of_values(name, tensor.to(destinations[name][0].dtype))
        if problem is not None:
            problems[name] = problem
    refuse(problems)
    return update


def find_problem(
    destinations: NamedWeights, name: str, shape: Sequence[int], dtype: torch.dtype
) -> str | None:
    """Returns why a tensor of this shape and dtype cannot be the weight ``name``, or None."""
    if name not in destinations:
        near = nearest(name, destinations)
        hint = f"; the nearest name is {near}" if near else ""
        return f"the model has no weight {name!r}{hint}"
    expected = list(destinations[name][0].shape)
    if list(shape) != expected:
        return f"{name} has shape {list(shape)}, the model's is {expected}"
    if not dtype.is_floating_point:
        return f"{name} is {dtype}; weights are floating numbers"
    return None


def is_finite(values: Tensor) -> bool:
    """Whether all values are finite.

    Weights that are not finite would put such keys and values into the KV cache. These would
    reach other requests even after the next update: attention multiplies masked values by zero,
    which must be finite.
    """
    # A sum takes one pass and no mask: a value that is not finite makes the sum not finite. The
    # sum of finite values can overflow, which the second pass decides. torch adds bfloat16 in
    # float32 anyway; to ask for float32 takes five times as long. A float16 overflows easily.
    dtype = torch.float32 if values.dtype == torch.float16 else None
    return bool(values.sum(dtype=dtype).isfinite()) or bool(values.isfinite().all())


def find_problem_of_values(name: str, values: Tensor) -> str | None:
    """Returns why a tensor, or a part of it, cannot be the weight ``name``, or None: its values
    must be finite, or, of a bound, numbers."""
    is_right = ~values.isnan().any() if name.endswith(BOUND_SUFFIXES) else is_finite(values)
    return None if is_right else f"{name} has values that are not finite"


def refuse(problems: Mapping[str, str]) -> None:
    """Raises RequestError if there are problems.

    Args:
        problems: messages by the name of the tensor.
    """
    if not problems:
        return
    listed = list(problems.values())[:MAX_LISTED_PROBLEMS]
    more = len(problems) - len(listed)
    raise RequestError("; ".join(listed) + (f"; and {more} more" if more else ""))
