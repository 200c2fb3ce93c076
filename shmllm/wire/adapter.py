"""The adapter of a request, as ADD and POOL carry it: its name, number and path as JSON."""

from __future__ import annotations

import json

from shmllm.errors import ProtocolMismatchError
from shmllm.params.lora import LoRARequest

LONGEST = 2**14
"""The most characters of an adapter."""


def encode_adapter(lora: LoRARequest | None) -> bytes:
    """Returns the bytes of an adapter; none at all: there is none."""
    if lora is None:
        return b""
    return json.dumps([lora.lora_name, lora.lora_int_id, lora.lora_path]).encode()


def decode_adapter(text: str, record: str) -> LoRARequest | None:
    """Returns the adapter; None without a text.

    Args:
        text: what the record has.
        record: what errors call the record.

    Raises:
        ProtocolMismatchError: it is none.
    """
    if not text:
        return None
    if len(text) > LONGEST:
        raise ProtocolMismatchError(f"{record}'s adapter has {len(text):,} bytes")
    try:
        name, number, path = json.loads(text)
        return LoRARequest(name, number, path)
    except (ValueError, TypeError) as problem:
        raise ProtocolMismatchError(f"{record}'s adapter: {problem}") from None
