"""`shmllm quantize`: writes a quantized copy of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from shmllm.cli.interrupts import interruptible
from shmllm.cli.options import Status
from shmllm.quantize.formats import FORMATS

if TYPE_CHECKING:
    from shmllm.quantize.job import Report

EPILOG = """\b
Formats:
  gguf-q8_0, gguf-q5_1, gguf-q5_0,      one GGUF file, with the tokenizer, for
  gguf-q4_1, gguf-q4_0,                 shmllm and llama.cpp; all matrices have
  gguf-f16, gguf-bf16                   this type, norms and biases are float32
  compressed-tensors-w4a16              a directory for shmllm, vLLM, transformers:
  compressed-tensors-w8a16              weights of 4 or 8 bits
  compressed-tensors-w8a8               8 bits, activations rounded per token
  compressed-tensors-fp8                the same in float8
  (these four: pip install compressed-tensors)

\b
Examples:
  shmllm quantize ./my-model my-model.q8_0.gguf --format gguf-q8_0
  shmllm quantize org/name ./name-w4a16 --format compressed-tensors-w4a16

\b
OUT appears when it is complete: a command that is interrupted or killed leaves
none. Weights are rounded to the nearest value, without calibration data.
"""


@click.command(epilog=EPILOG)
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "format",
    type=click.Choice(FORMATS),
    required=True,
    metavar="FORMAT",
    help="What to write; see below.",
)
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
def quantize(model: str, out: Path, format: str, overwrite: bool) -> None:
    """Write a quantized copy of MODEL to OUT.

    MODEL is a directory with config.json and safetensors files, the name of a bundled model, or a
    Hugging Face hub id. The command reads one tensor at a time. At the end it prints both sizes,
    and the drift: the root mean square of the rounding errors over that of the weights.
    """
    from shmllm.quantize.job import quantize as run
    from shmllm.sigbus import bus_guard

    bus_guard.install()
    status = Status()

    def show(name: str, done: int, total: int) -> None:
        status.show(f"quantizing {100 * done // max(total, 1)} % ({name})")

    with interruptible():
        try:
            report = run(model, out, format, overwrite=overwrite, on_progress=show)
        finally:
            status.clear()
    _print(out, report)


def _print(out: Path, report: Report) -> None:
    before, after = (size / 2**20 for size in (report.bytes_before, report.bytes_after))
    share = f", {100 * after / before:.1f} %" if before else ""
    click.echo(f"{out}: {before:,.1f} -> {after:,.1f} MiB{share}")
    where = f"; largest {100 * report.worst:.3g} % in {report.worst_name}" if report.worst else ""
    click.echo(
        f"drift of {report.num_tensors:,} rounded tensors: {100 * report.drift:.3g} %{where}"
    )
