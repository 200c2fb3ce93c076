"""Damages safetensors files and their indexes. The functions are as in `damaged_gguf`."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

from support.damaged_gguf import shift, truncate

DTYPES = (
    "F64",
    "F32",
    "F16",
    "BF16",
    "I64",
    "I8",
    "U8",
    "BOOL",
    "F8_E4M3",
    "F8_E8M0",
    "F4",
    "C64",
    "?",
)
NUMBERS = (0, 1, 2, 3, -1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**400, 0.5, 1e300)
NAMES = (
    "", ".", "..", "/", "/etc/passwd", "../model.safetensors", "a" * 300, "a\0b", "\ud800", "a\nb",
    "model", "none.safetensors",
)  # fmt: skip


def any_json(rng: random.Random) -> Any:
    depth = rng.choice([1, 1, 1, 2, 3, 5_000, 100_000])
    if depth > 3:
        return json.loads("[]") if rng.random() < 0.2 else Deep(depth)
    value: Any = rng.choice([None, True, "x", [], {}, *NUMBERS, *NAMES, float("nan")])
    for _ in range(depth - 1):
        value = [value, value] if rng.random() < 0.5 else {"a": value}
    return value


class Deep(int):
    """Stands for so many nested lists, which `json` cannot write."""


def dumped(value: Any) -> bytes:
    found: list[int] = []

    def marked(value: Any) -> Any:
        if isinstance(value, Deep):
            found.append(int(value))
            return f"DEEP{len(found) - 1}"
        if isinstance(value, dict):
            return {key: marked(each) for key, each in value.items()}
        return [marked(each) for each in value] if isinstance(value, list) else value

    written = json.dumps(marked(value)).encode()
    for number, depth in enumerate(found):
        written = written.replace(b'"DEEP%d"' % number, b"[" * depth + b"]" * depth)
    return written


def split(content: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack_from("<Q", content)
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def joined(header: Any, data: bytes) -> bytes:
    head = dumped(header)
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + data


def change_tensors(rng: random.Random, content: bytes) -> bytes:
    header, data = split(content)
    names = [name for name in header if name != "__metadata__"]
    for _ in range(rng.randint(1, 2)):
        name = rng.choice(names)
        tensor, other = header.get(name), header.get(rng.choice(names))
        if not isinstance(tensor, dict) or not isinstance(other, dict):
            continue
        field = rng.choice(["dtype", "shape", "data_offsets"])
        match rng.randrange(7):
            case 0:
                tensor["dtype"] = rng.choice(DTYPES)
            case 1:
                tensor["shape"] = [rng.choice(NUMBERS) for _ in range(rng.randint(0, 4))]
            case 2:
                tensor["data_offsets"] = [rng.choice(NUMBERS) for _ in range(2)]
            case 3:
                tensor["data_offsets"] = other.get("data_offsets")
            case 4:
                tensor.pop(field, None)
            case 5:
                tensor[field] = any_json(rng)
            case 6:
                header[rng.choice([*names, *NAMES])] = header.pop(name)
                names = [each for each in header if each != "__metadata__"]
    return joined(header, data)


def change_kind(rng: random.Random, content: bytes) -> bytes:
    """A type of the same width, with which all else remains right."""
    header, data = split(content)
    tensors = [each for name, each in header.items() if name != "__metadata__"]
    rng.choice(tensors)["dtype"] = rng.choice(["I32", "U32", "F32", "F64", "C64"])
    return joined(header, data)


def change_header(rng: random.Random, content: bytes) -> bytes:
    header, data = split(content)
    match rng.randrange(3):
        case 0:
            return joined(any_json(rng), data)
        case 1:
            header[rng.choice(["__metadata__", *header])] = any_json(rng)
        case 2:
            header.pop(rng.choice([*header]))
    return joined(header, data)


def set_length(rng: random.Random, content: bytes) -> bytes:
    (present,) = struct.unpack_from("<Q", content)
    lengths = [0, 1, 7, 2**31, 2**63, 2**64 - 1, 99_999_999, len(content), present - 1, present + 8]
    return struct.pack("<Q", rng.choice(lengths)) + content[8:]


def change_bytes(rng: random.Random, content: bytes) -> bytes:
    damaged = bytearray(content)
    size = 8 + struct.unpack_from("<Q", content)[0]
    for _ in range(rng.choice([1, 1, 2, 8])):
        place = rng.randrange(size)
        damaged[place] = rng.choice([damaged[place] ^ 1 << rng.randrange(8), rng.randrange(256)])
    return bytes(damaged)


DAMAGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    change_tensors, change_tensors, change_kind, change_header, set_length, change_bytes, shift,
    truncate,
)  # fmt: skip


def change_index(rng: random.Random, content: bytes) -> bytes:
    index = json.loads(content)
    table = index["weight_map"]
    for _ in range(rng.randint(1, 3)):
        match rng.randrange(6):
            case 0:
                table[rng.choice([*table])] = rng.choice(NAMES)
            case 1:
                table[rng.choice([*table])] = any_json(rng)
            case 2:
                index["weight_map"] = any_json(rng)
                break
            case 3:
                return dumped(any_json(rng))
            case 4:
                table.clear()
                table["x"] = rng.choice(NAMES)
            case 5:
                del index["weight_map"]
                break
    return dumped(index)


def change_text(rng: random.Random, content: bytes) -> bytes:
    damaged = bytearray(content)
    for _ in range(rng.randint(1, 8)):
        damaged[rng.randrange(len(damaged))] = rng.choice(
            [0xFF, 0, *b'{}[]",:', rng.randrange(256)]
        )
    return bytes(damaged)


INDEX_DAMAGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    change_index, change_index, change_text, shift, truncate,
)  # fmt: skip
