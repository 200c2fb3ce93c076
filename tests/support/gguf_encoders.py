"""Small encoders in GGUF files, with the names of tensors that the `gguf` package gives them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
from safetensors.torch import load_file
from support.gguf_models import Change, write
from support.pooling_models import make_pooling_model
from torch import Tensor

ARCHITECTURES = {
    "bert": gguf.MODEL_ARCH.BERT,
    "xlm_roberta": gguf.MODEL_ARCH.BERT,
    "nomic_bert": gguf.MODEL_ARCH.NOMIC_BERT,
    "gemma3": gguf.MODEL_ARCH.GEMMA_EMBEDDING,
    "jina_bert": gguf.MODEL_ARCH.JINA_BERT_V2,
    "modernbert": gguf.MODEL_ARCH.MODERN_BERT,
    "eurobert": gguf.MODEL_ARCH.EUROBERT,
}
"""The architectures of llama.cpp by the kinds of `pooling_models.RECIPES`."""
POOLINGS = {"CLS": gguf.PoolingType.CLS, "MEAN": gguf.PoolingType.MEAN}

Tensors = Iterator[tuple[str, Tensor]]


def _of_bert(tensors: dict[str, Tensor], config: dict[str, Any]) -> Tensors:
    """The positions of RoBERTa begin behind that of padding; llama.cpp's converter leaves those
    before out, and poolers of models that make vectors."""
    own = config["model_type"]
    offset = 0 if own == "bert" else config["pad_token_id"] + 1
    for name, tensor in tensors.items():
        name = name.removeprefix("bert.").removeprefix("roberta.")
        if name == "embeddings.position_embeddings.weight":
            tensor = tensor[offset:]
        if not name.startswith("pooler."):
            yield name, tensor


def _of_gemma(tensors: dict[str, Tensor], config: dict[str, Any]) -> Tensors:
    """The weights of norms are those that it multiplies by, which are one more."""
    for name, tensor in tensors.items():
        yield f"model.{name}", tensor + 1 if name.endswith("norm.weight") else tensor


def _as_it_is(tensors: dict[str, Tensor], config: dict[str, Any]) -> Tensors:
    yield from tensors.items()


_NAMED: dict[str, Callable[[dict[str, Tensor], dict[str, Any]], Tensors]] = {
    "bert": _of_bert,
    "xlm_roberta": _of_bert,
    "gemma3": _of_gemma,
}


def write_encoder(
    kind: str,
    directory: Path,
    file: Path,
    change: Change | None = None,
    suffix: str = "Model",
    **config: Any,
) -> Any:
    """Writes a small model as safetensors and as GGUF, without a vocabulary, and returns it.

    Args:
        kind: one of ARCHITECTURES.
        directory: of transformers' files.
        file: the GGUF file.
        change: adds further metadata and tensors.
        suffix, config: see `make_pooling_model`.
    """
    model = make_pooling_model(kind, suffix, directory, **config)
    fields = json.loads((directory / "config.json").read_text())
    architecture = ARCHITECTURES[kind]
    names = gguf.get_tensor_name_map(architecture, fields["num_hidden_layers"])

    def fill(writer: gguf.GGUFWriter) -> None:
        _add_sizes(writer, kind, fields)
        writer.add_tokenizer_model("none")
        if change is not None:
            change(writer)
        tensors = load_file(directory / "model.safetensors")
        for name, tensor in _NAMED.get(kind, _as_it_is)(tensors, fields):
            stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert stored is not None, name
            writer.add_tensor(stored, tensor.contiguous().numpy())

    write(file, gguf.MODEL_ARCH_NAMES[architecture], fill)
    return model


def _add_sizes(writer: gguf.GGUFWriter, kind: str, fields: dict[str, Any]) -> None:
    positions = fields["max_position_embeddings"]
    if kind == "xlm_roberta":
        positions -= fields["pad_token_id"] + 1
    writer.add_context_length(positions)
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_head_count(fields["num_attention_heads"])
    writer.add_causal_attention(False)
    if kind == "gemma3":
        _add_gemma(writer, fields)
        return
    writer.add_layer_norm_eps(fields.get("layer_norm_eps", fields.get("norm_eps", 1e-5)))
    if kind == "eurobert":
        writer.add_head_count_kv(fields["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
    if kind == "modernbert":
        writer.add_sliding_window(fields["local_attention"])
        writer.add_sliding_window_pattern(fields["global_attn_every_n_layers"])
        writer.add_string("modern-bert.hidden_activation", fields["hidden_activation"])
    if "type_vocab_size" in fields:
        writer.add_token_type_count(fields["type_vocab_size"])
    rope = fields.get("rope_parameters") or {}
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    if "full_attention" in rope:
        _add_ropes(writer, rope)


def _add_ropes(writer: gguf.GGUFWriter, ropes: dict[str, Any]) -> None:
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])


def _add_gemma(writer: gguf.GGUFWriter, fields: dict[str, Any]) -> None:
    writer.add_head_count_kv(fields["num_key_value_heads"])
    writer.add_key_length(fields["head_dim"])
    writer.add_value_length(fields["head_dim"])
    writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
    writer.add_sliding_window(fields["sliding_window"])
    _add_ropes(writer, fields["rope_parameters"])
