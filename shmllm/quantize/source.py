"""The checkpoint that a model is quantized from.

This module finds it, refuses what is quantized already, and lists its tensors. It must not know
the formats that are written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmllm.errors import QuantizeError
from shmllm.formats.gguf import is_gguf
from shmllm.formats.gguf_directory import LINK
from shmllm.frontend.model_files import resolve_model
from shmllm.models.config import ModelConfig
from shmllm.models.config_file import read_config

if TYPE_CHECKING:
    from torch import Tensor

    from shmllm.models.safetensors_file import SafetensorsFile


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor of the checkpoint.

    Attributes:
        file: the file that has it.
        stored: its name there.
        name: its name without prefixes of multimodal models; None: a language model does not read
            it.
        shape: its shape.
    """

    file: SafetensorsFile
    stored: str
    name: str | None
    shape: tuple[int, ...]

    @contextmanager
    def read(self) -> Iterator[Tensor]:
        """Reads it, for the time of the `with` block.

        Raises:
            QuantizeError: its numbers are quantized already.
        """
        with self.file.tensor(self.stored) as tensor:
            if not tensor.is_floating_point() or tensor.itemsize < 2:
                kind = str(tensor.dtype).removeprefix("torch.")
                raise QuantizeError(
                    f"{self.file.path}: {self.stored} has dtype {kind}: the model is quantized "
                    "already; give the original one"
                )
            yield tensor


@dataclass(frozen=True, slots=True)
class Source:
    """A model's directory.

    Attributes:
        title: what the user called the model.
        directory: its directory.
        fields: the content of config.json.
        config: the model that these describe.
    """

    title: str
    directory: Path
    fields: dict[str, Any]
    config: ModelConfig

    @classmethod
    def find(cls, model: str) -> Source:
        """Finds a model, without a look at its weights.

        Raises:
            QuantizeError: it is quantized already, or a GGUF file.
            EngineStartError: there is no such model, or its config.json is not understood.
        """
        if is_gguf(Path(model).expanduser()):
            raise _is_gguf(model)
        directory = resolve_model(model)
        if (directory / LINK).is_file():
            raise _is_gguf(model)
        if not (directory / "config.json").is_file():
            raise QuantizeError(f"no model in {directory}: looked for {directory}/config.json")
        fields = read_config(directory)
        _check_not_quantized(model, fields)
        return cls(model, directory, fields, ModelConfig.from_directory(directory))

    @contextmanager
    def open(self) -> Iterator[list[SourceTensor]]:
        """Opens the files and lists their tensors, for the time of the `with` block.

        Raises:
            QuantizeError: there are no safetensors files, or the LM head is not the embedding
                table, although config.json says so.
            EngineStartError: a file is missing or damaged.
        """
        from contextlib import ExitStack

        from shmllm.models.safetensors_file import SINGLE_FILE, find_safetensors
        from shmllm.models.weight_names import model_name
        from shmllm.models.weights import has_own_head

        files = find_safetensors(self.directory)
        if not files:
            raise QuantizeError(
                f"no weights in {self.directory}: looked for {SINGLE_FILE}; load others with "
                "transformers and save them with save_pretrained()"
            )
        if has_own_head(self.directory, self.config):
            raise QuantizeError(
                f"{self.directory} has an LM head that differs from the embeddings, although its "
                'config.json ties them: write "tie_word_embeddings": false there'
            )
        tied = self.config.tie_word_embeddings
        with ExitStack() as stack:
            for file in files:
                stack.enter_context(file)
            yield [
                SourceTensor(file, stored, model_name(stored, tied), shape)
                for file in files
                for stored, shape in file.shapes().items()
            ]


def _is_gguf(model: str) -> QuantizeError:
    return QuantizeError(
        f"{model} is a GGUF file, whose weights are rounded already; give the directory with "
        "config.json and safetensors files that it was made from"
    )


def _check_not_quantized(model: str, fields: dict[str, Any]) -> None:
    """Raises QuantizeError if config.json says that the weights are quantized."""
    inner = fields.get("text_config")
    places = (fields, inner) if isinstance(inner, dict) else (fields,)
    found = next(filter(None, (each.get("quantization_config") for each in places)), None)
    if found:
        method = found.get("quant_method") if isinstance(found, dict) else None
        how = f" ({method})" if isinstance(method, str) else ""
        raise QuantizeError(f"{model} is quantized already{how}; give the original model")
