"""Compares the option ``quantization`` with how a checkpoint is stored.

vLLM's programs name the method of a quantized checkpoint. The name changes nothing here, but a
wrong one means that the checkpoint is not what its user expects.
"""

from __future__ import annotations

from pathlib import Path

from shmllm.config.quantization import ROUNDINGS, STORED_METHODS, Quantization
from shmllm.errors import EngineStartError
from shmllm.formats.gguf_directory import IDENTITY

GGUF = "gguf"


def check_stored_method(model: str, directory: Path, quantization: Quantization | None) -> None:
    """Checks that a checkpoint is stored by the method that the option names.

    Args:
        model: what the user calls it, for the message.
        directory: its directory, which an engine can load.
        quantization: the option.

    Raises:
        EngineStartError: it is stored by another method, or not quantized. The message names both.
    """
    if quantization not in STORED_METHODS:
        return
    found = _method_of(directory)
    if found == STORED_METHODS[quantization]:
        return
    wrong = f"quantization={quantization!r} says that the checkpoint is stored so, but {model}"
    if found is not None:
        name = "a GGUF file" if found == GGUF else f"quantized with {found}"
        raise EngineStartError(f"{wrong} is {name}; leave the option out")
    raise EngineStartError(
        f"{wrong} is not quantized; leave the option out, or choose one that rounds the matrices "
        f"while they are loaded: {', '.join(ROUNDINGS)}"
    )


def _method_of(directory: Path) -> str | None:
    """Returns how a checkpoint is stored; None: it is not quantized."""
    if (directory / IDENTITY).is_file():
        return GGUF
    from shmllm.models.config_file import read_config, text_fields
    from shmllm.models.fields import Fields
    from shmllm.models.quantization_methods import quantization_fields

    where = str(directory / "config.json")
    fields = quantization_fields(text_fields(Fields(read_config(directory), where)))
    return None if fields is None else fields.text("quant_method")
