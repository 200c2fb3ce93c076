"""The formats that a model can be written in.

This module imports nothing heavy: the command's help lists the formats.
"""

from __future__ import annotations

GGUF_KINDS = {
    "gguf-q8_0": "Q8_0",
    "gguf-q5_1": "Q5_1",
    "gguf-q5_0": "Q5_0",
    "gguf-q4_1": "Q4_1",
    "gguf-q4_0": "Q4_0",
    "gguf-f16": "F16",
    "gguf-bf16": "BF16",
}
"""For each format that is a GGUF file, llama.cpp's name of the type of its matrices."""

COMPRESSED = (
    "compressed-tensors-w4a16",
    "compressed-tensors-w8a16",
    "compressed-tensors-w8a8",
    "compressed-tensors-fp8",
)
"""The formats that are directories of the `compressed-tensors` package."""

FORMATS = (*GGUF_KINDS, *COMPRESSED)
