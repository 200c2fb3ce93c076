"""Answers WORK: takes what front ends send for the worker off their slots, and puts its
results there.

Owns the engine's end of this conversation; `worker_client` is the other one. Must not know
what the worker can do.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from shmllm.engine.calls import reply_with
from shmllm.engine.core import EngineCore
from shmllm.engine.worker import Worker
from shmllm.errors import NoSpaceError
from shmllm.ipc.channel import CoreChannel
from shmllm.ipc.packed import PackedRef, as_torch, try_put_all, view_all
from shmllm.wire.messages import Reply, Work
from shmllm.wire.rpc import decode_call, encode_result
from shmllm.wire.values import is_torch_tensor, tensor_kinds


class RpcServer:
    """
    Args:
        core: of the engine.
        allow_functions: whether front ends may send functions to be run.
    """

    def __init__(self, core: EngineCore, allow_functions: bool) -> None:
        self._worker = Worker(core)
        self._allow_functions = allow_functions

    def reply_to(self, channel: CoreChannel, work: Work) -> Reply:
        """Have the worker do it, and answer."""
        return reply_with(work.number, lambda: self._do(channel, json.loads(work.json)))

    def _do(self, channel: CoreChannel, question: dict[str, Any]) -> str:
        with _received(channel, question) as tensors:
            call = decode_call(question["tree"], tensors, self._allow_functions)
            tree, results = encode_result(self._worker.run(call), call)
            # Not later: a result may be a view of what was received.
            ref = _lend(channel, results)
        return json.dumps({"tree": tree, "tensors": ref and ref.to_json()})


@contextlib.contextmanager
def _received(channel: CoreChannel, question: dict[str, Any]) -> Iterator[list[Any]]:
    if question["tensors"] is None:
        yield []
        return
    ref = PackedRef.from_json(question["tensors"])
    with view_all(channel.slots, ref) as arrays:
        kinds = tensor_kinds(question["tree"], len(arrays))
        tensors: list[Any] = []
        for kind, array, packed in zip(kinds, arrays, ref.tensors, strict=True):
            if kind == "tensor":
                tensors.append(as_torch(array, packed.dtype))
            else:
                tensors.append(array.tobytes() if kind == "bytes" else array)
        yield tensors


def _lend(channel: CoreChannel, results: list[Any]) -> PackedRef | None:
    if not results:
        return None
    sources = [result.cpu() if is_torch_tensor(result) else result for result in results]
    ref = try_put_all(channel.output_slots, sources)
    if ref is None:
        raise NoSpaceError("the front end holds all slots that could take the result")
    return ref
