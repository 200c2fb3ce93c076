#!/usr/bin/env python3
"""Makes a Llama or Qwen3-MoE model with random weights, for benchmarks.

    python tools/make_model.py --size 4m|135m|1b|moe-400m DIRECTORY

The result is a Hugging Face directory: config.json, model.safetensors (float32, tied embeddings)
and a byte-level tokenizer that covers every token id, so that any engine can load it and convert
its output to text. The matrices are scaled so that the layers affect the result, and so that the
difference of the two best logits is large compared with rounding errors: correct engines then agree
on greedy tokens. The size 1b has the widths of Llama-3.2-1B; its file has 4.9 GB.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, product
from pathlib import Path

import click
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

END_OF_TEXT = "<|endoftext|>"
MAX_POSITIONS = 32_768
LOGIT_SPREAD = 4.0
LAYER_GAIN = 2.0


@dataclass(frozen=True)
class Size:
    """The sizes of a model: widths, counts of layers and heads, and the vocabulary.

    With experts it is a Qwen3-MoE model, and ``inner`` is the width of an expert; without it is a
    Llama model.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    experts: int = 0
    top_k: int = 0

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def family(self) -> dict[str, object]:
        """The fields of config.json that name the family, and those that only it has."""
        if not self.experts:
            return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False}
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "moe_intermediate_size": self.inner,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "norm_topk_prob": True,
        }


SIZES = {
    "4m": Size(hidden=256, layers=4, heads=4, kv_heads=2, inner=688, vocab=4_096),
    "135m": Size(hidden=576, layers=30, heads=9, kv_heads=3, inner=1_536, vocab=49_152),
    "1b": Size(hidden=2_048, layers=16, heads=32, kv_heads=8, inner=8_192, vocab=128_256),
    "moe-400m": Size(
        hidden=768, layers=12, heads=12, kv_heads=4, inner=384, vocab=32_768, experts=32, top_k=4
    ),
}


def config(size: Size) -> dict[str, object]:
    """The content of config.json, for transformers, vLLM and shmllm."""
    return size.family | {
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "intermediate_size": size.inner,
        "vocab_size": size.vocab,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": size.vocab - 1,
        "torch_dtype": "float32",
        "use_cache": True,
    }


def weights(size: Size, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) for each tensor of the checkpoint.

    A layer's matrix scales the magnitude of its input by LAYER_GAIN. The embedding matrix gives the
    logits a standard deviation of LOGIT_SPREAD.
    """
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float) -> Tensor:
        scale: float = gain * columns**-0.5
        return torch.randn(rows, columns, generator=generator) * scale

    queries, keys = size.heads * size.head_dim, size.kv_heads * size.head_dim
    yield "model.embed_tokens.weight", matrix(size.vocab, size.hidden, LOGIT_SPREAD)
    for layer in range(size.layers):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{prefix}.self_attn.{name}_proj.weight", matrix(rows, size.hidden, LAYER_GAIN)
        yield f"{prefix}.self_attn.o_proj.weight", matrix(size.hidden, queries, LAYER_GAIN)
        mlps = [f"{prefix}.mlp.experts.{expert}" for expert in range(size.experts)]
        for mlp in mlps or [f"{prefix}.mlp"]:
            for name in ("gate", "up"):
                yield f"{mlp}.{name}_proj.weight", matrix(size.inner, size.hidden, LAYER_GAIN)
            yield f"{mlp}.down_proj.weight", matrix(size.hidden, size.inner, LAYER_GAIN)
        if size.experts:
            yield f"{prefix}.mlp.gate.weight", matrix(size.experts, size.hidden, LAYER_GAIN)
            for name in ("q_norm", "k_norm"):
                yield f"{prefix}.self_attn.{name}.weight", torch.ones(size.head_dim)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", 1 + 0.1 * torch.randn(size.hidden, generator=generator)
    yield "model.norm.weight", 1 + 0.1 * torch.randn(size.hidden, generator=generator)


def tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer; its merges fill the vocabulary with pairs of bytes, then with
    pairs and a third byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_merges = vocab_size - len(alphabet) - 1
    pairs = map("".join, product(alphabet, alphabet))
    longer = chain(product(alphabet, alphabet), product(pairs, alphabet))
    merges = list(islice(longer, num_merges))
    entries = [*alphabet, *(first + second for first, second in merges)]
    made = Tokenizer(models.BPE({entry: i for i, entry in enumerate(entries)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END_OF_TEXT])
    assert made.get_vocab_size() == vocab_size
    return made


def make(size: Size, directory: Path, seed: int) -> None:
    """Writes the model to `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = dict(weights(size, seed))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer(size.vocab).save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "bos_token": None,
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (directory / "config.json").write_text(json.dumps(config(size), indent=2) + "\n")


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option("--size", type=click.Choice(list(SIZES)), required=True, help="Size of the model.")
@click.option("--seed", default=0, show_default=True, help="Seed of the weights.")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
def main(size: str, seed: int, directory: Path) -> None:
    make(SIZES[size], directory, seed)


if __name__ == "__main__":
    main()
