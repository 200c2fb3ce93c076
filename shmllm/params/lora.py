"""The request for a low-rank adapter (LoRA), with vLLM's names and meaning."""

from __future__ import annotations

import os
from dataclasses import dataclass

from shmllm.errors import RequestError

MAX_ID = 2**31 - 1
LONGEST_NAME = 256


@dataclass(frozen=True, slots=True, eq=False)
class LoRARequest:
    """An adapter that a request is computed with. Two are equal if their names are.

    Attributes:
        lora_name: what people call it.
        lora_int_id: identifies it in the engine, from 1.
        lora_path: its directory, with adapter_config.json and adapter_model.safetensors; empty:
            the engine has it already.
        base_model_name: the name of the model that it was trained for; not used.
        load_inplace: read it again, although the engine has an adapter of this id.

    Raises:
        RequestError: a value is not valid.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        name, number, path = self.lora_name, self.lora_int_id, os.fspath(self.lora_path)
        if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or "\0" in name:
            raise RequestError(
                f"lora_name must be a text of 1 to {LONGEST_NAME} characters, got {name!r}"
            )
        if type(number) is not int or not 0 < number <= MAX_ID:
            raise RequestError(f"lora_int_id must be a whole number from 1, got {number!r}")
        if not isinstance(path, str) or "\0" in path:
            raise RequestError(f"lora_path must be a directory, got {path!r}")
        object.__setattr__(self, "lora_path", os.path.abspath(path) if path else "")

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)
