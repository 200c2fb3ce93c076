"""The engine's end of remote procedure calls on the worker (WORK records).

This module reads the tensors of a call from the front end's slots, runs the call, and writes the
tensors of its result to output slots. `client.rpc_client` is the other end. This module must not
know the worker's methods.
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
from shmllm.ipc.core_channel import CoreChannel
from shmllm.ipc.packed import PackedRef, as_torch, try_put_all, view_all
from shmllm.wire.messages import Reply, Work
from shmllm.wire.rpc import decode_call, encode_result
from shmllm.wire.values import is_torch_tensor, tensor_kinds


class RpcServer:
    """
    Args:
        core: the engine core.
        allow_functions: whether front ends may run functions of their own in the engine.
    """

    def __init__(self, core: EngineCore, allow_functions: bool) -> None:
        self._worker = Worker(core)
        self._allow_functions = allow_functions

    def reply_to(self, client: int, channel: CoreChannel, work: Work) -> Reply:
        """Run a call of the front end `client` on the worker, and return the reply."""
        return reply_with(work.number, lambda: self._run(client, channel, json.loads(work.json)))

    def _run(self, client: int, channel: CoreChannel, message: dict[str, Any]) -> str:
        with _tensors_of(channel, message) as tensors:
            call = decode_call(message["tree"], tensors, self._allow_functions)
            tree, results = encode_result(self._worker.run(call, client), call)
            # Within the `with` block, because a result may be a view of an argument in a slot.
            ref = _put_results(channel, results)
        return json.dumps({"tree": tree, "tensors": ref and ref.to_json()})


@contextlib.contextmanager
def _tensors_of(channel: CoreChannel, message: dict[str, Any]) -> Iterator[list[Any]]:
    """The tensors of a call, as views of the slot in which they lie."""
    if message["tensors"] is None:
        yield []
        return
    ref = PackedRef.from_json(message["tensors"])
    with view_all(channel.slots, ref) as arrays:
        kinds = tensor_kinds(message["tree"], len(arrays))
        tensors: list[Any] = []
        for kind, array, packed in zip(kinds, arrays, ref.tensors, strict=True):
            if kind == "tensor":
                tensors.append(as_torch(array, packed.dtype))
            else:
                tensors.append(array.tobytes() if kind == "bytes" else array)
        yield tensors


def _put_results(channel: CoreChannel, results: list[Any]) -> PackedRef | None:
    if not results:
        return None
    sources = [result.cpu() if is_torch_tensor(result) else result for result in results]
    ref = try_put_all(channel.output_slots, sources)
    if ref is None:
        raise NoSpaceError("the front end holds all slots that could take the result")
    return ref
