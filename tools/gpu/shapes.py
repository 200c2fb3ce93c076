"""The models that are measured: their sizes, and what a step of them has to move and compute.

Owns config.json of each, written by hand, and the arithmetic of rooflines. Knows no engine and
no device; imports nothing but the standard library.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

TOKENIZER = Path(__file__).resolve().parents[2] / "shmllm" / "assets" / "tiny"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder.

    Attributes:
        rope: what config.json says of rotary embedding.
        qk_norm: query and key heads have a norm, whose weights count as parameters.
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
        """Of the table that token ids look up; the head has as many."""
        return self.vocab * self.hidden

    @property
    def matrix_parameters(self) -> int:
        """Of the matrices that every token is multiplied with; the head is none of them."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def num_parameters(self) -> int:
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        tables = self.embedding_parameters * (1 if self.tied else 2)
        return self.matrix_parameters + self.layers * norms + self.hidden + tables

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Keys and values of one token, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def decode_bytes(self, batch: int, context: float, itemsize: int) -> float:
        """What a step of decodes must at least move: all weights but the embedding table, which
        a tied head reads as well, the keys and values of every context, and the new ones.

        Args:
            context: tokens that each request attends to, its own included.
        """
        weights = self.num_parameters - (0 if self.tied else self.embedding_parameters)
        per_token = self.kv_bytes_per_token(itemsize)
        # Of each context's tokens the last one is written and, being at hand, not read.
        return weights * itemsize + batch * context * per_token

    def prefill_flops(self, tokens: int) -> int:
        """Of one prompt: every matrix for each token, the head for the last one, and the lower
        triangle of the attention, 2 flops for each multiplication and addition."""
        width = self.heads * self.head_dim
        attention = 2 * tokens * (tokens + 1) * width * self.layers
        return 2 * tokens * self.matrix_parameters + 2 * self.embedding_parameters + attention

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of the products of a layer, as the engine has them, and the head's."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            "o": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
            "head": (self.vocab, self.hidden),
        }

    def shrunk(self) -> Shape:
        """The same kind of model, so small that a CPU runs it at once."""
        return replace(
            self, hidden=64, inner=128, layers=2, heads=4, kv_heads=2, head_dim=16, vocab=4096
        )

    def config(self, dtype: str) -> dict[str, Any]:
        """config.json. It names no end of text, so that nothing ends early."""
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
        """A model directory without weights; the tokenizer is the bundled model's, and unused:
        prompts and outputs are token ids."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config(dtype), indent=1) + "\n")
        for name in TOKENIZER_FILES:
            shutil.copyfile(TOKENIZER / name, directory / name)
        return directory


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
