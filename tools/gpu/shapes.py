"""The sizes of the measured models, and the bytes and flops of their steps.

This module owns the config.json of each model and the arithmetic of the roofline. It must not know
an engine or a device, and imports only the standard library.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

TOKENIZER = Path(__file__).resolve().parents[2] / "shmllm" / "assets" / "tiny"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def write_model(directory: Path, config: dict[str, Any]) -> Path:
    """Writes config.json and the tokenizer of the bundled model into a model directory; returns
    it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for name in TOKENIZER_FILES:
        shutil.copyfile(TOKENIZER / name, directory / name)
    return directory


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder.

    Attributes:
        rope: the field ``rope_parameters`` of config.json.
        qk_norm: whether query and key heads have a norm, whose weights count as parameters.
    """

    architecture: str
    model_type: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    max_positions: int
    eps: float
    rope: dict[str, Any]
    qk_norm: bool = False

    @property
    def embedding_parameters(self) -> int:
        """The number of parameters of the embedding table; the LM head has as many."""
        return self.vocab * self.hidden

    @property
    def matrix_parameters(self) -> int:
        """The number of parameters of all layers' matrices, without the LM head."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def num_parameters(self) -> int:
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        tables = self.embedding_parameters * (1 if self.tied else 2)
        return self.matrix_parameters + self.layers * norms + self.hidden + tables

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Returns the bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def decode_bytes(
        self, batch: int, context: float, itemsize: int, kv_itemsize: int | None = None
    ) -> float:
        """Returns the bytes that a decode step must at least read and write.

        These are the weights, and the keys and values of all contexts, the new ones included. The
        embedding table counts only if the LM head is tied to it and therefore reads it.

        Args:
            batch: the number of requests.
            context: the number of tokens that each request attends to, its own included.
            itemsize: the bytes of one element.
            kv_itemsize: those of one element of keys and values; None: as many.
        """
        weights = self.num_parameters - (0 if self.tied else self.embedding_parameters)
        per_token = self.kv_bytes_per_token(kv_itemsize or itemsize)
        # The last token's keys and values are written and need not be read from memory.
        return weights * itemsize + batch * context * per_token

    def prefill_flops(self, tokens: int) -> int:
        """Returns the flops of one prompt's prefill: the layers' matrices for each token, the LM
        head for the last token, and the lower triangle of attention. A multiply-add has 2 flops."""
        width = self.heads * self.head_dim
        attention = 2 * tokens * (tokens + 1) * width * self.layers
        return 2 * tokens * self.matrix_parameters + 2 * self.embedding_parameters + attention

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Returns rows and columns of a layer's fused matrices and of the LM head."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            "o": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
            "head": (self.vocab, self.hidden),
        }

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of all weights by their names in a checkpoint of Hugging Face. A tied
        LM head has none of its own."""
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        query, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (self.hidden,),
            "self_attn.q_proj": (query, self.hidden),
            "self_attn.k_proj": (keys, self.hidden),
            "self_attn.v_proj": (keys, self.hidden),
            "self_attn.o_proj": (self.hidden, query),
            "post_attention_layernorm": (self.hidden,),
            "mlp.gate_proj": (self.inner, self.hidden),
            "mlp.up_proj": (self.inner, self.hidden),
            "mlp.down_proj": (self.hidden, self.inner),
        }
        if self.qk_norm:
            layer |= {f"self_attn.{name}_norm": (self.head_dim,) for name in "qk"}
        for number in range(self.layers):
            found |= {f"model.layers.{number}.{name}.weight": size for name, size in layer.items()}
        found["model.norm.weight"] = (self.hidden,)
        return found if self.tied else found | {"lm_head.weight": (self.vocab, self.hidden)}

    def shrunk(self) -> Shape:
        """Returns a model of the same architecture that is small enough for a CPU."""
        return replace(
            self, hidden=64, inner=128, layers=2, heads=4, kv_heads=2, head_dim=16, vocab=4096
        )

    def first_layers(self) -> Shape:
        """Returns a model of the first layer: all are of one kind."""
        return replace(self, layers=1)

    def config(self, dtype: str) -> dict[str, Any]:
        """Returns config.json. It has no end-of-sequence token, so that no request ends early."""
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.eps,
            "rope_parameters": self.rope,
            "hidden_act": "silu",
            "attention_bias": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "dtype": dtype,
        }

    def write(self, directory: Path, dtype: str) -> Path:
        """Writes a model directory without weights. It gets the tokenizer of the bundled model,
        which is not used: prompts and outputs are token ids."""
        return write_model(directory, self.config(dtype))


def _llama_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


SHAPES = {
    "1b": Shape(
        "LlamaForCausalLM",
        "llama",
        hidden=2048,
        inner=8192,
        layers=16,
        heads=32,
        kv_heads=8,
        head_dim=64,
        vocab=128_256,
        tied=True,
        max_positions=131_072,
        eps=1e-5,
        rope=_llama_rope(32.0),
    ),
    "4b": Shape(
        "Qwen3ForCausalLM",
        "qwen3",
        hidden=2560,
        inner=9728,
        layers=36,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocab=151_936,
        tied=True,
        max_positions=40_960,
        eps=1e-6,
        rope={"rope_type": "default", "rope_theta": 1_000_000.0},
        qk_norm=True,
    ),
    "8b": Shape(
        "LlamaForCausalLM",
        "llama",
        hidden=4096,
        inner=14_336,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocab=128_256,
        tied=False,
        max_positions=131_072,
        eps=1e-5,
        rope=_llama_rope(8.0),
    ),
}
NAMES = {"1b": "Llama-3.2-1B", "4b": "Qwen3-4B", "8b": "Llama-3.1-8B"}
