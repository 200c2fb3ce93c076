"""Overwrites weights of a loaded model, all of an update or nothing of it.

Owns the checks and the copying. When to do it (between two steps), and that cached keys and
values are stale afterwards, is the caller's business.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shmllm.errors import RequestError
from shmllm.models.layers import NamedWeights
from shmllm.models.weights import copy_weight

if TYPE_CHECKING:
    from shmllm.models.decoder import DecoderModel

_IGNORED_SUFFIX = "rotary_emb.inv_freq"


def check_weights(model: DecoderModel, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise RequestError, naming the first one, unless every tensor has its place, and that
    is awake.

    Args:
        model: to be updated.
        named_tensors: names as in a Hugging Face checkpoint of the model.
    """
    model.check_awake()
    destinations = model.named_weights()
    for name, tensor in named_tensors:
        if not _is_ignored(model, name):
            _check(destinations, name, tensor)


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
        RequestError: an unknown name, another shape, no floating numbers, or not finite.
    """
    update = list(named_tensors)
    check_weights(model, update)
    destinations = model.named_weights()
    written: set[str] = set()
    with torch.no_grad():
        for name, tensor in update:
            if name not in destinations:
                continue
            for view in destinations[name]:
                copy_weight(view, tensor)
            written.add(name)
    if written:
        model.weights_changed(written)
    return written


def _is_ignored(model: DecoderModel, name: str) -> bool:
    tied = model.config.tie_word_embeddings
    return name.endswith(_IGNORED_SUFFIX) or (tied and name == "lm_head.weight")


def _check(destinations: NamedWeights, name: str, tensor: Tensor) -> None:
    if name not in destinations:
        near = difflib.get_close_matches(name, destinations, n=1, cutoff=0.0)
        hint = f"; the nearest name is {near[0]}" if near else ""
        raise RequestError(f"the model has no weight {name!r}{hint}")
    shape = tuple(destinations[name][0].shape)
    if tuple(tensor.shape) != shape:
        raise RequestError(f"{name} has shape {list(tensor.shape)}, the model's is {list(shape)}")
    if not tensor.dtype.is_floating_point:
        raise RequestError(f"{name} is {tensor.dtype}; weights are floating numbers")
    # Keys and values that are not finite would stay in the cache and reach other requests
    # after the next update, since what attention masks has to be finite.
    if not bool(tensor.to(destinations[name][0].dtype).isfinite().all()):
        raise RequestError(f"{name} has values that are not finite")
