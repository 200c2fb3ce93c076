"""Quantizes a model: from its name to the complete file or directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shmllm.errors import QuantizeError
from shmllm.quantize.formats import FORMATS, GGUF_KINDS
from shmllm.quantize.source import Source
from shmllm.quantize.target import Target, size_of

Progress = Callable[[str, int, int], None]
"""Called with a tensor's name before it is written, the number of written weights, and that of all
weights."""


@dataclass(frozen=True, slots=True)
class Report:
    """What was written.

    Attributes:
        bytes_before: the size of the checkpoint's safetensors files.
        bytes_after: the size of the file or directory.
        num_tensors: the number of the checkpoint's tensors that were rounded.
        drift: the relative root-mean-square error of all rounded weights.
        worst: the same of the tensor with the largest one.
        worst_name: that tensor's name in the checkpoint; "" if no tensor was rounded.
    """

    bytes_before: int
    bytes_after: int
    num_tensors: int
    drift: float
    worst: float
    worst_name: str


def quantize(
    model: str,
    out: Path,
    format: str,
    *,
    overwrite: bool = False,
    on_progress: Progress | None = None,
) -> Report:
    """Writes a quantized copy of a model.

    Args:
        model: a directory with config.json and safetensors files, or another name of one.
        out: the file or directory to write.
        format: one of FORMATS.
        overwrite: whether `out` may exist.
        on_progress: called before each tensor.

    Raises:
        QuantizeError: the format does not fit the model, or nothing can be written there. There is
            no `out` then, or it is as before.
        EngineStartError: the model cannot be read.
    """
    if format not in FORMATS:
        raise QuantizeError(f"unknown format {format!r}; known: {', '.join(FORMATS)}")
    target = Target(out, is_directory=format not in GGUF_KINDS, overwrite=overwrite)
    source = Source.find(model)
    target.check_not(source.directory)
    progress = on_progress or (lambda *_: None)
    if format in GGUF_KINDS:
        from shmllm.quantize.gguf_model import write_gguf

        drift = write_gguf(source, target, GGUF_KINDS[format], progress)
    else:
        from shmllm.quantize.compressed_model import write_compressed

        drift = write_compressed(source, target, format, progress)
    before = sum(each.stat().st_size for each in source.directory.glob("*.safetensors"))
    return Report(
        before,
        size_of(target.path),
        drift.num_tensors,
        drift.overall,
        drift.worst,
        drift.worst_name,
    )
