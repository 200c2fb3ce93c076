"""GGUF files of Hugging Face directories, for the comparison with llama.cpp.

`shmllm quantize` writes them; here they have no vocabulary, so prompts must be token ids.
"""

from __future__ import annotations

from pathlib import Path

import click

from shmllm.errors import ShmLLMError
from shmllm.models.safetensors_file import find_safetensors
from shmllm.quantize.gguf_model import write_gguf
from shmllm.quantize.source import Source
from shmllm.quantize.target import Target


def cached(model: Path, kind: str) -> Path:
    """Returns the model's GGUF file, which lies beside its directory; writes it if it is not there
    or older than the weights.

    Args:
        model: the directory with config.json and safetensors files.
        kind: llama.cpp's name of the type of the matrices.

    Raises:
        ClickException: the model has what a GGUF file cannot have.
    """
    file = model.with_name(f"{model.name}.{kind}.gguf")
    newest = max((each.path.stat().st_mtime for each in find_safetensors(model)), default=0.0)
    if not file.exists() or file.stat().st_mtime < newest:
        click.echo(f"  writing {file}")
        target = Target(file, is_directory=False, overwrite=True)
        try:
            write_gguf(Source.find(str(model)), target, kind, has_vocabulary=False)
        except ShmLLMError as error:
            raise click.ClickException(str(error)) from None
    return file
