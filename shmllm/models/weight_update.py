"""Overwrites weights of a loaded model, all of an update or nothing of it.

Owns what may be written where, and the copying. When to do it (between two steps), and that
cached keys and values are stale afterwards, is the caller's business.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shmllm.errors import RequestError
from shmllm.models.layers import NamedWeights

if TYPE_CHECKING:
    from shmllm.models.decoder import DecoderModel

MOST_NAMED = 8
"""Problems that one message spells out."""
_IGNORED_SUFFIX = "rotary_emb.inv_freq"


def update_weights(model: DecoderModel, named_tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Copy tensors into the model in place, converted to its dtype.

    Everything is checked first: an error leaves the model as it was. Fused and doubled copies
    of a weight are all written. Like in a checkpoint, the LM head of a model whose embeddings
    are tied, and frequencies of rotary embeddings, are passed over.

    Args:
        model: whose weights are overwritten. Not while it runs.
        named_tensors: names as in a Hugging Face checkpoint of the model; any of them, in any
            order, each of the checkpoint's shape, any floating dtype and device.

    Returns:
        The names that were written.

    Raises:
        RequestError: unknown names, other shapes, no floating numbers, or not finite; lists
            them; or they are asleep.
    """
    model.check_awake()
    update = [(name, tensor) for name, tensor in named_tensors if not is_ignored(model, name)]
    destinations = model.named_weights()
    problems: dict[str, str] = {}
    for name, tensor in update:
        problem = find_problem(destinations, name, tensor.shape, tensor.dtype)
        if problem is None and not is_finite(tensor.to(destinations[name][0].dtype)):
            problem = not_finite(name)
        if problem is not None:
            problems[name] = problem
    refuse(problems)
    with torch.no_grad():
        for name, tensor in update:
            for view in destinations[name]:
                view.copy_(tensor)
    written = {name for name, _ in update}
    if written:
        model.weights_changed(written)
    return written


def is_ignored(model: DecoderModel, name: str) -> bool:
    """Whether a checkpoint may have this tensor although the model does not keep it."""
    tied = model.config.tie_word_embeddings
    return name.endswith(_IGNORED_SUFFIX) or (tied and name == "lm_head.weight")


def find_problem(
    destinations: NamedWeights, name: str, shape: Sequence[int], dtype: torch.dtype
) -> str | None:
    """Why a tensor cannot be that weight, as far as can be said without its values."""
    if name not in destinations:
        near = difflib.get_close_matches(name, destinations, n=1, cutoff=0.0)
        hint = f"; the nearest name is {near[0]}" if near else ""
        return f"the model has no weight {name!r}{hint}"
    expected = list(destinations[name][0].shape)
    if list(shape) != expected:
        return f"{name} has shape {list(shape)}, the model's is {expected}"
    if not dtype.is_floating_point:
        return f"{name} is {dtype}; weights are floating numbers"
    return None


def is_finite(values: Tensor) -> bool:
    """Whether all values are finite. Keys and values that are not would stay in the cache and
    reach other requests after the next update, since what attention masks has to be finite."""
    # One pass without a mask: what is not finite never leaves a sum. Finite ones may overflow.
    return bool(values.sum(dtype=torch.float32).isfinite()) or bool(values.isfinite().all())


def not_finite(name: str) -> str:
    """The problem of a tensor that is not."""
    return f"{name} has values that are not finite"


def refuse(problems: Mapping[str, str]) -> None:
    """Raise RequestError with the problems, by the name of the tensor, if there are any."""
    if not problems:
        return
    named = list(problems.values())[:MOST_NAMED]
    more = len(problems) - len(named)
    raise RequestError("; ".join(named) + (f"; and {more} more" if more else ""))
