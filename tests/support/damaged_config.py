"""Damages config.json. The functions are as in `damaged_gguf`."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from support.damaged_gguf import shift, truncate
from support.damaged_safetensors import any_json, change_text, dumped

SIZES = (0, -1, 3, 2**15, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 10**400, 0.5, 1e300, "4")
QUANTIZATION = "quantization_config"


def objects(value: Any) -> list[dict[str, Any]]:
    """All objects in a value that are not empty."""
    found: list[dict[str, Any]] = []
    if isinstance(value, dict) and value:
        found.append(value)
    for each in value.values() if isinstance(value, dict) else ():
        found += objects(each)
    return found


def change_some(rng: random.Random, places: list[dict[str, Any]]) -> None:
    for _ in range(rng.choice([1, 1, 2, 4])):
        place = rng.choice(places)
        if not place:
            continue
        name = rng.choice([*place])
        match rng.randrange(5):
            case 0:
                del place[name]
            case 1:
                place[name] = any_json(rng)
            case 2 | 3:
                place[name] = rng.choice(SIZES)
            case 4:
                place[name] = place[rng.choice([*place])]


def change_fields(rng: random.Random, content: bytes) -> bytes:
    config = json.loads(content)
    change_some(rng, [config])
    return dumped(config)


def change_sizes(rng: random.Random, content: bytes) -> bytes:
    """Numbers alone, so that most files are read further."""
    config = json.loads(content)
    names = [name for name, value in config.items() if type(value) in (int, float)]
    for _ in range(rng.choice([1, 1, 2])):
        config[rng.choice(names)] = rng.choice(SIZES)
    return dumped(config)


def change_nested(rng: random.Random, content: bytes) -> bytes:
    """Objects in the object; of the quantization, if the model is quantized."""
    config = json.loads(content)
    inner = objects(config.get(QUANTIZATION)) or objects(config)
    change_some(rng, inner)
    return dumped(config)


def change_whole(rng: random.Random, content: bytes) -> bytes:
    config = json.loads(content)
    name = rng.choice(["", QUANTIZATION, "text_config", "rope_parameters", "architectures"])
    return dumped(config | {name: any_json(rng)} if name else any_json(rng))


DAMAGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    change_fields, change_fields, change_sizes, change_nested, change_nested, change_whole,
    change_text, shift, truncate,
)  # fmt: skip
