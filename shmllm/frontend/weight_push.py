"""Sends weights to the engine's model, however many and however large.

Owns how an update is cut into parts that fit a tensor slot. The engine keeps the parts and
writes the weights when the last one is there. torch is not imported: who has tensors has it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from shmllm.engine.worker_call import WorkerCall
from shmllm.errors import RequestError

PART_BYTES = 32 * 2**20
"""What a large slot keeps allocated: more would have to be allocated again each time."""

Run = Callable[[WorkerCall], Any]
_updates = itertools.count(1)


def push_weights(run: Run, weights: Iterable[tuple[str, Any]]) -> set[str]:
    """Overwrite weights of the engine's model between two steps, all or none of them.

    Args:
        run: has the worker do something.
        weights: (name as in the checkpoint, torch tensor or numpy array of its shape and of
            any floating dtype) pairs; read once, so a generator may make them one by one.

    Returns:
        The names written.

    Raises:
        RequestError: an unknown name, another shape, no floating numbers; nothing changed.
    """
    update, number = next(_updates), 0
    part: list[tuple[str, Any]] = []
    size = 0
    try:
        for name, tensor in weights:
            nbytes = _nbytes(name, tensor)
            if part and size + nbytes > PART_BYTES:
                run(_call(part, update, number, is_last=False))
                part, size, number = [], 0, number + 1
            part.append((name, tensor))
            size += nbytes
        return set(run(_call(part, update, number, is_last=True)))
    except BaseException:
        if number:
            with contextlib.suppress(Exception):
                run(_call([], update, 0, is_last=True))  # has it drop the parts it keeps
        raise


def _call(part: list[tuple[str, Any]], update: int, number: int, is_last: bool) -> WorkerCall:
    return WorkerCall("load_weights", (part, update, number, is_last))


def _nbytes(name: object, tensor: Any) -> int:
    if not isinstance(name, str) or not hasattr(tensor, "nbytes"):
        raise RequestError(
            "weights are (name, tensor) pairs, got "
            f"({type(name).__name__}, {type(tensor).__name__})"
        )
    return int(tensor.nbytes)
