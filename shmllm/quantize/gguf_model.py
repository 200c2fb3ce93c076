"""Writes a model as a GGUF file, by the `gguf` package.

This module must not know which tensors a file has, nor the metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import LlamaFileType
from torch import Tensor

from shmllm.formats.gguf import TensorEntry
from shmllm.frontend.gguf.config import SAMPLING
from shmllm.frontend.model_files import generation_defaults, model_title
from shmllm.models.gguf_tensors import in_file_order, of_place
from shmllm.quantize.drift import Drift, squares
from shmllm.quantize.gguf_description import describe, rope_tensors
from shmllm.quantize.gguf_metadata import check_kept, find_gguf_family
from shmllm.quantize.gguf_plan import Planned, plan
from shmllm.quantize.gguf_vocabulary import vocabulary, with_ends
from shmllm.quantize.source import Source
from shmllm.quantize.target import Target

Array = np.ndarray[Any, np.dtype[Any]]
Progress = Callable[[str, int, int], None]

FILE_TYPES = {
    "F32": LlamaFileType.ALL_F32,
    "F16": LlamaFileType.MOSTLY_F16,
    "BF16": LlamaFileType.MOSTLY_BF16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q5_1": LlamaFileType.MOSTLY_Q5_1,
    "Q5_0": LlamaFileType.MOSTLY_Q5_0,
    "Q4_1": LlamaFileType.MOSTLY_Q4_1,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
}
"""The types that matrices can get, by llama.cpp's names."""

ELEMENTS_AT_ONCE = 2**20
"""About how many elements are rounded at a time: `gguf` needs several temporaries of them."""

_FLOAT32 = np.dtype(np.float32)


def write_gguf(
    source: Source,
    target: Target,
    kind: str,
    on_progress: Progress = lambda *_: None,
    *,
    has_vocabulary: bool = True,
) -> Drift:
    """Writes the file.

    Args:
        source: the model.
        target: what to write.
        kind: a key of FILE_TYPES: the type of the matrices.
        on_progress: called before each tensor with its name, the number of written weights, and
            that of all weights.
        has_vocabulary: whether the file gets the tokenizer; prompts must be token ids otherwise.

    Returns:
        How far the weights are from the checkpoint's. Tensors in F32 do not count.

    Raises:
        QuantizeError: the model has what a GGUF file cannot have, or the file cannot be written.
        EngineStartError: the model cannot be read.
    """
    architecture, family = find_gguf_family(source.config)
    values = _general(source, kind) | describe(source.config, source.fields, architecture)
    if has_vocabulary:
        values |= vocabulary(source.directory, source.config.vocab_size)
        values = with_ends(values, source.config.eos_token_ids)
    else:
        values["tokenizer.ggml.model"] = "none"
    with source.open() as tensors:
        names = [each.name or "" for each in tensors]
        family = family.form(lambda _, module: any(f".{module}." in name for name in names))
        planned = plan(source, tensors, family, values, architecture, Kind[kind])
        entries = {
            each.name: TensorEntry(each.shape, each.kind.value, 0, each.num_bytes)
            for each in planned
        }
        check_kept(source.config, values, architecture, entries)
        target.check_room(sum(each.num_bytes for each in planned))
        with target.writing() as path:
            return _write(path, architecture, values, planned, source, on_progress)


def _general(source: Source, kind: str) -> dict[str, Any]:
    defaults = generation_defaults(source.directory)
    values: dict[str, Any] = {
        "general.type": "model",
        "general.name": model_title(source.title),
        "general.file_type": int(FILE_TYPES[kind]),
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
    }
    sampling = {name: defaults[known] for name, known in SAMPLING.items() if known in defaults}
    for name, value in sampling.items():
        values[f"general.sampling.{name}"] = value if name == "top_k" else float(value)
    return values


def _write(
    path: Path,
    architecture: str,
    values: Mapping[str, Any],
    planned: list[Planned],
    source: Source,
    on_progress: Progress,
) -> Drift:
    writer = gguf.GGUFWriter(path, architecture)
    try:
        for key, value in values.items():
            _add_value(writer, key, value)
        factors = {
            name: np.array(each, np.float32) for name, each in rope_tensors(source.config).items()
        }
        for name, numbers in factors.items():
            writer.add_tensor_info(name, numbers.shape, _FLOAT32, numbers.nbytes, Kind.F32)
        for each in planned:
            writer.add_tensor_info(each.name, each.shape, _FLOAT32, each.num_bytes, each.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for numbers in factors.values():
            writer.write_tensor_data(numbers)
        drift, done, total = Drift(), 0, sum(prod(each.shape) for each in planned)
        for each in planned:
            on_progress(each.parts[0].stored, done, total)
            writer.write_tensor_data(_stored_bytes(each, drift))
            done += prod(each.shape)
        return drift
    finally:
        for file in writer.fout or []:
            file.close()


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _stored_bytes(each: Planned, drift: Drift) -> Array:
    """The bytes of a tensor of the file; counts its drift."""
    stored = np.empty(each.num_bytes, np.uint8)
    size = each.num_bytes // len(each.parts)
    for number in range(len(each.parts)):
        part = each.parts[number]
        with part.read() as tensor:
            tensor = of_place(tensor, each.place, each.num_rows)
            tensor = in_file_order(tensor, each.heads, each.place.layout)
            rounded = stored[number * size : (number + 1) * size]
            error, total = _round_into(rounded, tensor, each)
        if each.kind is not Kind.F32:
            drift.add(part.stored, error, total)
    return stored


def _round_into(stored: Array, tensor: Tensor, each: Planned) -> tuple[float, float]:
    """Rounds a tensor; returns the sums of the squares of the errors and of the values."""
    error = total = 0.0
    end = 0
    for values in _chunks(tensor):
        values += each.offset
        with np.errstate(all="ignore"):
            rounded = gguf.quants.quantize(values.numpy(), each.kind)
            again = gguf.quants.dequantize(rounded, each.kind)
        begin, end = end, end + rounded.nbytes
        stored[begin:end] = rounded.reshape(-1).view(np.uint8)
        total += squares(values)
        error += squares(torch.from_numpy(again).sub_(values))
    return error, total


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """The rows in float32, some at a time, as copies."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    step = max(ELEMENTS_AT_ONCE // rows.shape[-1], 1)
    for begin in range(0, len(rows), step):
        yield rows[begin : begin + step].to(torch.float32, copy=True)
