"""The front end's end of remote procedure calls on the engine's worker (WORK records).

This module transmits the tensors of calls and results through slots; `engine.rpc_server` is the
other end. It copies the tensors of a result, so that their slot can be released at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from shmllm.errors import REFUSALS, CallError
from shmllm.ipc.client_channel import ClientChannel
from shmllm.ipc.packed import PackedRef, arrays_in, as_torch, try_put_all
from shmllm.wire.messages import Reply
from shmllm.wire.rpc import RpcCall, decode_result, encode_call
from shmllm.wire.values import is_torch_tensor, tensor_kinds


def pack_call(channel: ClientChannel, call: RpcCall, wait: Callable[[], None]) -> str:
    """Put the tensors of a call into a slot. Returns the JSON text of the WORK record.

    Args:
        channel: the channel to the engine.
        call: the call.
        wait: called as long as no slot is free; raises an error if the engine has ended.

    Raises:
        RequestError: the call cannot be transmitted.
    """
    tree, sources = encode_call(call)
    ref = None
    if sources:
        sources = [each.cpu() if is_torch_tensor(each) else each for each in sources]
        while (ref := try_put_all(channel.slots, sources)) is None:
            wait()
    return json.dumps({"tree": tree, "tensors": ref and ref.to_json()})


def unpack_result(channel: ClientChannel, call: RpcCall, content: dict[str, Any]) -> Any:
    """The result in a reply's content. The caller releases its slot; see `release_result`.

    Raises:
        CallError: the result cannot be loaded in this process.
    """
    if content["tensors"] is None:
        return decode_result(content["tree"], [], call)
    ref = PackedRef.from_json(content["tensors"])
    arrays = arrays_in(channel.output_slots, ref)
    tensors: list[Any] = []
    kinds = tensor_kinds(content["tree"], len(arrays))
    for kind, array, packed in zip(kinds, arrays, ref.tensors, strict=True):
        if kind == "tensor":
            tensors.append(as_torch(array, packed.dtype).clone())
        else:
            tensors.append(array.tobytes() if kind == "bytes" else array.copy())
    return decode_result(content["tree"], tensors, call)


def release_result(channel: ClientChannel, content: Any) -> None:
    """Release the slot of a reply's content, if it has one. The release is the last action."""
    if isinstance(content, dict) and content.get("tensors") is not None:
        channel.output_slots.release(PackedRef.from_json(content["tensors"]).slot)


def content_of(reply: Reply) -> Any:
    """The result in a reply. Raises the error of a failed call."""
    content = json.loads(reply.json)
    if reply.ok:
        return content
    kind, message, trace = content
    if kind in REFUSALS:
        raise REFUSALS[kind](message)
    raise CallError(f"{kind}: {message}", trace)
