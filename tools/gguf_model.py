#!/usr/bin/env python3
"""Writes a Llama model of a Hugging Face directory as a GGUF file, for llama.cpp.

    python tools/gguf_model.py DIRECTORY --kind F32|F16|BF16|Q8_0|Q4_0 FILE

All matrices get the given kind, the embedding table included, and all norms are F32, as in
`llama-quantize --pure`; matrices whose rows are no multiple of a block of 32 become F16. A tied
model has no tensor for its LM head: llama.cpp computes it with the embedding table. The file has no
vocabulary: prompts must be token ids.
"""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from typing import Any

import click
import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import LlamaFileType

from shmllm.models.config import ModelConfig
from shmllm.models.safetensors_file import find_safetensors
from shmllm.models.specs import AttentionSpec, MLPSpec

FILE_TYPES = {
    "F32": LlamaFileType.ALL_F32,
    "F16": LlamaFileType.MOSTLY_F16,
    "BF16": LlamaFileType.MOSTLY_BF16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
}
ARCHITECTURE = gguf.MODEL_ARCH.LLAMA
ROTATED = ("q_proj.weight", "k_proj.weight")

Array = np.ndarray[Any, np.dtype[Any]]


def cached(model: Path, kind: str) -> Path:
    """Returns the model's GGUF file, which lies beside its directory; writes it if it is not there
    or older than the weights."""
    file = model.with_name(f"{model.name}.{kind}.gguf")
    newest = max((each.path.stat().st_mtime for each in find_safetensors(model)), default=0.0)
    if not file.exists() or file.stat().st_mtime < newest:
        click.echo(f"  writing {file}")
        write(model, file, kind)
    return file


def write(model: Path, file: Path, kind: str) -> None:
    """Writes the GGUF file, one tensor after the other.

    Args:
        model: the directory with config.json and safetensors files.
        file: the file, which appears when it is complete.
        kind: a key of FILE_TYPES.

    Raises:
        ClickException: it is no Llama model, or has a feature that this module does not write.
    """
    config = ModelConfig.from_directory(model)
    check(config)
    attention = config.layers[0].attention
    unfinished = file.with_name(f"{file.name}.unfinished")
    writer = gguf.GGUFWriter(unfinished, gguf.MODEL_ARCH_NAMES[ARCHITECTURE])
    add_metadata(writer, config, kind)
    names = gguf.get_tensor_name_map(ARCHITECTURE, config.num_layers)
    sources = []
    for source in find_safetensors(model):
        with source:
            for name, shape in source.shapes().items():
                if name == "lm_head.weight" and config.tie_word_embeddings:
                    continue
                stored = names.get_name(name, try_suffixes=(".weight",))
                if stored is None:
                    raise click.ClickException(f"{source.path}: no GGUF name for {name}")
                chosen = stored_kind(shape, kind)
                writer.add_tensor_info(stored, shape, _FLOAT32, num_bytes(shape, chosen), chosen)
                sources.append((source, name, chosen))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for source, name, chosen in sources:
        with source, source.tensor(name) as tensor:
            values = in_llama_cpp_order(tensor.float().numpy(), name, attention)
            writer.write_tensor_data(gguf.quants.quantize(values, chosen))
    writer.close()
    os.replace(unfinished, file)


_FLOAT32 = np.dtype(np.float32)
"""Tells GGUFWriter that a shape counts elements, not bytes."""


def check(config: ModelConfig) -> None:
    """Raises ClickException if the model has a feature that this module does not write."""
    attention = config.layers[0].attention
    if config.architecture != "LlamaForCausalLM":
        problem = f"the architecture is {config.architecture}, not LlamaForCausalLM"
    elif attention.rope is None or attention.rope.type != "default":
        problem = "config.json extends the context length (rope_scaling)"
    elif attention.bias or attention.output_bias:
        problem = "the attention has biases"
    else:
        return
    raise click.ClickException(f"no GGUF file for llama.cpp can be written here: {problem}")


def add_metadata(writer: gguf.GGUFWriter, config: ModelConfig, kind: str) -> None:
    """Adds the sizes, and says that there is no vocabulary."""
    layer = config.layers[0]
    assert isinstance(layer.mlp, MLPSpec)
    assert layer.attention.rope is not None
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(layer.mlp.inner)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm.eps)
    writer.add_rope_freq_base(layer.attention.rope.theta)
    writer.add_rope_dimension_count(layer.attention.rope.rotary_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")


def stored_kind(shape: tuple[int, ...], kind: str) -> Kind:
    """The kind of a tensor in a file of a given kind."""
    if len(shape) == 1:
        return Kind.F32
    block_size = gguf.GGML_QUANT_SIZES[Kind[kind]][0]
    return Kind.F16 if shape[-1] % block_size else Kind[kind]


def num_bytes(shape: tuple[int, ...], kind: Kind) -> int:
    """The stored size of a tensor."""
    num_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    return prod(shape) // num_elements * block_bytes


def in_llama_cpp_order(values: Array, name: str, attention: AttentionSpec) -> Array:
    """The rows of a matrix for llama.cpp, which rotates neighbouring elements of queries and keys
    together; Hugging Face's checkpoints rotate element i and i + head_dim / 2.

    Args:
        values: [rows, columns] or [rows].
        name: the tensor's name in the checkpoint.
        attention: the sizes of the heads.
    """
    if not name.endswith(ROTATED):
        return values
    halves = values.reshape(-1, 2, attention.head_dim // 2, values.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--kind", type=click.Choice(list(FILE_TYPES)), required=True, help="Of all matrices.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def main(model: Path, kind: str, file: Path) -> None:
    write(model, file, kind)


if __name__ == "__main__":
    main()
