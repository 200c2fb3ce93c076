"""Writes a model as a directory of the `compressed-tensors` package.

The package makes the scheme, the scales and the integers. The matrices of the layers are rounded,
those of each expert by themselves; the embedding table, the LM head, the routers of experts, norms
and biases stay as they are.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shmllm.errors import QuantizeError
from shmllm.models.safetensors_file import INDEX_FILE, SINGLE_FILE
from shmllm.quantize.drift import Drift, squares
from shmllm.quantize.safetensors_writer import SafetensorsWriter
from shmllm.quantize.source import Source, SourceTensor
from shmllm.quantize.target import Target

Progress = Callable[[str, int, int], None]
Json = dict[str, Any]

GROUP_SIZES = (128, 64, 32)
"""Numbers of columns that share a scale in 4 bits: the first that divides all widths is used."""

ELEMENTS_AT_ONCE = 2**22
"""About how many elements are rounded at a time: the package needs several temporaries of them."""

_MATRIX = re.compile(r"model\.layers\.\d+\..*(?<!gate)\.weight")
_ROUTERS = "re:.*gate$"
"""The modules that choose experts and, in Qwen2-MoE, weigh the shared one."""
_ROUNDED = "weight"
_MOST_PARTS = 3
_LONGEST_SUFFIX = len("_packed")
_COPIED = (".json", ".jinja", ".model", ".tiktoken", ".txt")
_REPLACED = ("config.json", INDEX_FILE)


@dataclass(frozen=True, slots=True)
class _Scheme:
    """How matrices are rounded.

    Attributes:
        layout: the package's name of how the integers are stored.
        weights: the arguments of its QuantizationArgs for weights.
        activations: the same for activations; None: they are not rounded.
    """

    layout: str
    weights: Json
    activations: Json | None = None


_PER_ROW: Json = {"type": "int", "num_bits": 8, "symmetric": True, "strategy": "channel"}
_PER_TOKEN: Json = {"symmetric": True, "strategy": "token", "dynamic": True, "num_bits": 8}
_SCHEMES = {
    "compressed-tensors-w4a16": _Scheme(
        "pack-quantized", {"type": "int", "num_bits": 4, "symmetric": True, "strategy": "group"}
    ),
    "compressed-tensors-w8a16": _Scheme("pack-quantized", _PER_ROW),
    "compressed-tensors-w8a8": _Scheme("int-quantized", _PER_ROW, {"type": "int"} | _PER_TOKEN),
    "compressed-tensors-fp8": _Scheme(
        "float-quantized", _PER_ROW | {"type": "float"}, {"type": "float"} | _PER_TOKEN
    ),
}


def write_compressed(
    source: Source, target: Target, format: str, on_progress: Progress = lambda *_: None
) -> Drift:
    """Writes the directory.

    Args:
        source: the model.
        target: what to write.
        format: a key of _SCHEMES.
        on_progress: called before each tensor with its name, the number of written weights, and
            that of all weights.

    Returns:
        How far the rounded weights are from the checkpoint's.

    Raises:
        QuantizeError: the package is missing, the model has what it cannot round, or the directory
            cannot be written.
        EngineStartError: the model cannot be read.
    """
    _check_package()
    _check_model(source, format)
    with source.open() as tensors:
        kept = [each for each in tensors if each.name is not None]
        rounded = {each.stored for each in kept if _is_rounded(each)}
        if any(len(each.shape) > 2 for each in kept):
            raise _cannot_write(source, format, "one tensor has the matrices of all experts")
        if not rounded:
            raise QuantizeError(f"{source.directory} has no matrices model.layers.*.weight")
        widths = {each.shape[-1] for each in kept if each.stored in rounded}
        packed = _Rounding(_SCHEMES[format], widths, source)
        with target.writing() as path:
            _write_texts(source, path, packed.config)
            return _write_weights(path / SINGLE_FILE, kept, rounded, packed, on_progress)


def _check_package() -> None:
    try:
        import_module("compressed_tensors")
    except ModuleNotFoundError as error:
        raise QuantizeError(
            f"this format needs a package that is missing ({error.name}): "
            "pip install compressed-tensors"
        ) from None


def _check_model(source: Source, format: str) -> None:
    """Raises QuantizeError if the model's matrices are not those of Linear modules of layers."""
    config = source.config
    if config.transposed:
        problem = "its checkpoint has transposed matrices"
    elif isinstance(source.fields.get("text_config"), dict):
        problem = "it is multimodal"
    else:
        return
    raise _cannot_write(source, format, problem)


def _cannot_write(source: Source, format: str, problem: str) -> QuantizeError:
    return QuantizeError(f"{source.title} cannot be written as {format}: {problem}")


def _is_rounded(tensor: SourceTensor) -> bool:
    return len(tensor.shape) == 2 and bool(_MATRIX.fullmatch(tensor.name or ""))


class _Rounding:
    """The package's scheme and what computes by it.

    Attributes:
        config: the entry `quantization_config` of config.json.
    """

    def __init__(self, scheme: _Scheme, widths: Iterable[int], source: Source) -> None:
        package = import_module("compressed_tensors.quantization")
        weights = dict(scheme.weights)
        if weights["strategy"] == "group":
            weights["group_size"] = _group_size(source, set(widths))
        self._group_size = weights.get("group_size")
        self._scheme = package.QuantizationScheme(
            targets=["Linear"],
            weights=package.QuantizationArgs(**weights),
            input_activations=scheme.activations and package.QuantizationArgs(**scheme.activations),
            format=scheme.layout,
        )
        compressors: Any = import_module("compressed_tensors.compressors.base").BaseCompressor
        self._compressor = compressors.get_value_from_registry(scheme.layout)
        config = package.QuantizationConfig(
            config_groups={"group_0": self._scheme},
            format=scheme.layout,
            quantization_status=package.QuantizationStatus.COMPRESSED,
            ignore=["lm_head", *([_ROUTERS] if source.config.mixtures else [])],
        )
        self.config: Json = config.model_dump(mode="json", exclude_none=True)

    def round(self, values: Tensor) -> tuple[dict[str, Tensor], float, float]:
        """Rounds some rows of a matrix.

        Returns:
            The parts that are stored, by the ends of their names; the sums of the squares of the
            errors and of the values.
        """
        whole = values.float()
        scale = self._scales(whole).to(values.dtype)
        parts = self._compressor.compress({"weight": whole, "weight_scale": scale}, self._scheme)
        again = self._compressor.decompress(parts, self._scheme)["weight"]
        return parts, squares(again.float() - whole), squares(whole)

    def _scales(self, values: Tensor) -> Tensor:
        compute = import_module("compressed_tensors.quantization.utils").calculate_qparams
        grouped = values
        if self._group_size is not None:
            grouped = values.view(len(values), -1, self._group_size)
        smallest, largest = grouped.aminmax(dim=-1, keepdim=self._group_size is None)
        scales: Tensor = compute(smallest, largest, self._scheme.weights)[0]
        return scales


def _group_size(source: Source, widths: set[int]) -> int:
    for size in GROUP_SIZES:
        if all(width % size == 0 for width in widths):
            return size
    odd = next(width for width in sorted(widths) if width % GROUP_SIZES[-1])
    raise QuantizeError(
        f"{source.title} has matrices with {odd} columns, which is no multiple of "
        f"{GROUP_SIZES[-1]}: no group size fits"
    )


def _write_texts(source: Source, path: Path, config: Json) -> None:
    """Writes config.json, and copies the tokenizer's and all other small files."""
    fields = source.fields | {"quantization_config": config}
    (path / "config.json").write_text(json.dumps(fields, indent=2), encoding="utf-8")
    for file in source.directory.iterdir():
        if file.suffix in _COPIED and file.name not in _REPLACED and file.is_file():
            shutil.copyfile(file, path / file.name)
    more = source.directory / "additional_chat_templates"
    if more.is_dir():
        shutil.copytree(more, path / more.name)


def _write_weights(
    path: Path,
    tensors: list[SourceTensor],
    rounded: set[str],
    rounding: _Rounding,
    on_progress: Progress,
) -> Drift:
    longest = max(len(each.stored.encode()) for each in tensors) + _LONGEST_SUFFIX
    total = sum(_num_elements(each) for each in tensors)
    drift, done = Drift(), 0
    with SafetensorsWriter(path, _MOST_PARTS * len(tensors), longest) as writer:
        for each in tensors:
            on_progress(each.stored, done, total)
            with each.read() as tensor:
                if each.stored in rounded:
                    _write_rounded(writer, each.stored, tensor, rounding, drift)
                else:
                    writer.add(each.stored, tensor)
            done += _num_elements(each)
    return drift


def _num_elements(tensor: SourceTensor) -> int:
    return torch.Size(tensor.shape).numel()


def _write_rounded(
    writer: SafetensorsWriter, name: str, tensor: Tensor, rounding: _Rounding, drift: Drift
) -> None:
    step = max(ELEMENTS_AT_ONCE // tensor.shape[-1], 1)
    found: dict[str, list[Tensor]] = {}
    error = total = 0.0
    for begin in range(0, len(tensor), step):
        parts, errors, squared = rounding.round(tensor[begin : begin + step])
        for ending, part in parts.items():
            found.setdefault(ending, []).append(part)
        error, total = error + errors, total + squared
    drift.add(name, error, total)
    prefix = name.removesuffix(_ROUNDED)
    for ending, pieces in found.items():
        is_shape = ending == "weight_shape"
        whole = torch.tensor(tensor.shape) if is_shape else torch.cat(pieces)
        writer.add(prefix + ending, whole)
