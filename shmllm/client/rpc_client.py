"""Sends WORK and takes its answer: the front end's end of `worker_desk`.

Owns how tensors get to the engine's worker and back over a channel. Results are copies, so
that no slot stays taken.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from shmllm.ipc.channel import ClientChannel
from shmllm.ipc.packed import PackedRef, as_torch, try_put_all, view_all
from shmllm.wire.rpc import RpcCall, decode_result, encode_call
from shmllm.wire.values import is_torch_tensor, tensor_kinds


def encode_work(channel: ClientChannel, call: RpcCall, wait: Callable[[], None]) -> str:
    """The JSON text of a WORK record; its tensors are lent to the engine.

    Args:
        channel: to the engine.
        call: what to do.
        wait: called while no slot is free; raises when there is none to be expected.

    Raises:
        RequestError: it cannot cross.
    """
    tree, sources = encode_call(call)
    ref = None
    if sources:
        sources = [each.cpu() if is_torch_tensor(each) else each for each in sources]
        while (ref := try_put_all(channel.slots, sources)) is None:
            wait()
    return json.dumps({"tree": tree, "tensors": ref and ref.to_json()})


def decode_work(channel: ClientChannel, call: RpcCall, answer: dict[str, Any]) -> Any:
    """What the worker returned.

    Raises:
        CallError: it cannot be loaded here.
    """
    if answer["tensors"] is None:
        return decode_result(answer["tree"], [], call)
    ref = PackedRef.from_json(answer["tensors"])
    with view_all(channel.output_slots, ref) as arrays:
        tensors: list[Any] = []
        kinds = tensor_kinds(answer["tree"], len(arrays))
        for kind, array, packed in zip(kinds, arrays, ref.tensors, strict=True):
            if kind == "tensor":
                tensors.append(as_torch(array, packed.dtype).clone())
            else:
                tensors.append(array.tobytes() if kind == "bytes" else array.copy())
    return decode_result(answer["tree"], tensors, call)


def drop_answer(channel: ClientChannel, answer: dict[str, Any]) -> None:
    """Give back what came with an answer that nobody waits for any more."""
    if answer["tensors"] is not None:
        channel.output_slots.release(PackedRef.from_json(answer["tensors"]).slot)
