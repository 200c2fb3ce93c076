"""Writes a model as a GGUF file, by the `gguf` package.

All matrices get the type of the format, the embedding table included, as `llama-quantize --pure`
does it. Norms, biases and routers are F32, and a matrix whose rows are no multiple of a block
becomes F16. A tied model has no tensor for its LM head. This module must not know the metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import LlamaFileType
from torch import Tensor

from shmllm.errors import QuantizeError
from shmllm.formats.gguf import TensorEntry
from shmllm.formats.gguf_families import GgufFamily
from shmllm.frontend.gguf.config import SAMPLING
from shmllm.frontend.gguf.rope import FACTORS
from shmllm.frontend.model_files import generation_defaults, model_title
from shmllm.models.gguf_file import permuted
from shmllm.quantize.drift import Drift, squares
from shmllm.quantize.gguf_metadata import check_kept, describe, find_gguf_family, rope_factors
from shmllm.quantize.gguf_vocabulary import vocabulary, with_ends
from shmllm.quantize.source import Source, SourceTensor
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
_UNROUNDED_MODULE = ".ffn_gate_inp."
"""A router. llama.cpp has it in F32."""
_QK_NORMS = {"attn_q_norm", "attn_k_norm"}


@dataclass(slots=True)
class _Planned:
    """A tensor of the file.

    Attributes:
        name: its name.
        kind: how it is stored.
        parts: the checkpoint's tensors by the number of the expert, or one of them.
        num_heads: the number of heads whose rows are permuted; 0 if they are not.
        offset: what is added to its values.
    """

    name: str
    kind: Kind
    num_heads: int
    offset: float
    parts: dict[int, SourceTensor] = field(default_factory=dict)

    @property
    def is_of_experts(self) -> bool:
        return "_exps." in self.name

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.parts[0].shape
        return (len(self.parts), *shape) if self.is_of_experts else shape

    @property
    def num_bytes(self) -> int:
        num_elements, block_bytes = gguf.GGML_QUANT_SIZES[self.kind]
        return prod(self.shape) // num_elements * block_bytes


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
        planned = _plan(source, tensors, family, values, architecture, Kind[kind])
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


def _plan(
    source: Source,
    tensors: list[SourceTensor],
    family: GgufFamily,
    values: Mapping[str, Any],
    architecture: str,
    kind: Kind,
) -> list[_Planned]:
    """The tensors of the file, in the order in which they are written."""
    planned: dict[str, _Planned] = {}
    known = _known_names(architecture, source.config.num_layers)
    for tensor in tensors:
        if tensor.name is None:
            continue
        found = family.stored_name(tensor.name)
        if found is None or found[0].rpartition(".")[0] not in known:
            raise QuantizeError(
                f"{tensor.file.path}: {tensor.stored} has no name in a GGUF file of {family.title}"
            )
        name, expert = found
        key = family.heads_key(name)
        num_heads = values[f"{architecture}.{key}"] if key else 0
        chosen = _kind_of(name, tensor.shape, kind)
        each = planned.setdefault(name, _Planned(name, chosen, num_heads, family.offset(name)))
        each.parts[expert] = tensor
    _check_complete(source, planned, family)
    return list(planned.values())


def _known_names(architecture: str, num_layers: int) -> set[str]:
    """The names of all tensors that llama.cpp has for an architecture, without ".weight"."""
    kind = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    forms = [gguf.TENSOR_NAMES[each] for each in gguf.MODEL_TENSORS[kind]]
    return {form.format(bid=layer) for form in forms for layer in range(num_layers)}


def _kind_of(name: str, shape: tuple[int, ...], kind: Kind) -> Kind:
    if len(shape) < 2 or _UNROUNDED_MODULE in name:
        return Kind.F32
    return Kind.F16 if shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] else kind


def _check_complete(source: Source, planned: Mapping[str, _Planned], family: GgufFamily) -> None:
    """Raises QuantizeError if the checkpoint lacks a tensor that the model needs."""
    config = source.config
    needed = ["token_embd.weight", "output_norm.weight"]
    needed += [] if config.tie_word_embeddings else ["output.weight"]
    modules = set(family.modules)
    if config.layers[0].attention.qk_norm is None:
        modules -= _QK_NORMS
    endings = {f"{module}.weight" for module in modules}
    endings |= {name.split(".", 2)[2] for name in planned if name.startswith("blk.")}
    for layer in range(config.num_layers):
        needed += [f"blk.{layer}.{ending}" for ending in sorted(endings)]
    missing = [name for name in needed if name not in planned]
    for mixture in config.mixtures:
        of_experts = [each for each in planned.values() if each.is_of_experts]
        missing += [each.name for each in of_experts if len(each.parts) != mixture.num_experts]
    if missing:
        name = family.checkpoint_name(missing[0])
        raise QuantizeError(f"{source.directory} is not complete: it has no {name}")


def _write(
    path: Path,
    architecture: str,
    values: Mapping[str, Any],
    planned: list[_Planned],
    source: Source,
    on_progress: Progress,
) -> Drift:
    writer = gguf.GGUFWriter(path, architecture)
    try:
        for key, value in values.items():
            _add_value(writer, key, value)
        factors = np.array(rope_factors(source.config), np.float32)
        if len(factors):
            writer.add_tensor_info(FACTORS, factors.shape, _FLOAT32, factors.nbytes, Kind.F32)
        for each in planned:
            writer.add_tensor_info(each.name, each.shape, _FLOAT32, each.num_bytes, each.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if len(factors):
            writer.write_tensor_data(factors)
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


def _stored_bytes(each: _Planned, drift: Drift) -> Array:
    """The bytes of a tensor of the file; counts its drift."""
    stored = np.empty(each.num_bytes, np.uint8)
    size = each.num_bytes // len(each.parts)
    for number in range(len(each.parts)):
        part = each.parts[number]
        with part.read() as tensor:
            if each.num_heads:
                tensor = permuted(tensor, each.num_heads)
            rounded = stored[number * size : (number + 1) * size]
            error, total = _round_into(rounded, tensor, each)
        if each.kind is not Kind.F32:
            drift.add(part.stored, error, total)
    return stored


def _round_into(stored: Array, tensor: Tensor, each: _Planned) -> tuple[float, float]:
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
