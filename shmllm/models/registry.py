"""Which architectures exist, and what their config.json leaves unsaid.

Imports no torch: the class of an architecture is loaded when a model is created.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from shmllm.errors import EngineStartError

if TYPE_CHECKING:
    import torch

    from shmllm.models.config import ModelConfig
    from shmllm.models.decoder import DecoderModel
    from shmllm.models.layers import Allocator

WindowRule = Literal["none", "every_layer", "by_layer_type"]
"""Which layers a sliding window applies to."""

BiasRule = Literal["none", "always", "configured"]
"""Whether q, k and v have a bias: never, always, or as ``attention_bias`` says."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One entry: where the class is, and what transformers assumes of an absent field.

    Attributes:
        target: "module:Class", a subclass of DecoderModel.
        num_kv_heads: for a config.json without ``num_key_value_heads``; None: num_heads.
        head_dim: for a config.json without ``head_dim``; None: hidden_size / num_heads.
        max_position_embeddings: for a config.json without that field.
        window: which layers ``sliding_window`` applies to.
        attention_bias: whether q, k and v have a bias.
        mlp_bias: True where the MLP follows the field ``mlp_bias``.
    """

    target: str
    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    window: WindowRule = "none"
    attention_bias: BiasRule = "none"
    mlp_bias: bool = False


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        "shmllm.models.llama:LlamaForCausalLM", attention_bias="configured", mlp_bias=True
    ),
    "MistralForCausalLM": Architecture(
        "shmllm.models.mistral:MistralForCausalLM",
        num_kv_heads=8,
        max_position_embeddings=131072,
        window="every_layer",
    ),
    "Qwen2ForCausalLM": Architecture(
        "shmllm.models.qwen2:Qwen2ForCausalLM",
        num_kv_heads=32,
        max_position_embeddings=32768,
        window="by_layer_type",
        attention_bias="always",
    ),
    "Qwen3ForCausalLM": Architecture(
        "shmllm.models.qwen3:Qwen3ForCausalLM",
        num_kv_heads=32,
        head_dim=128,
        max_position_embeddings=32768,
        window="by_layer_type",
        attention_bias="configured",
    ),
}


def find_architecture(name: str) -> Architecture:
    """The entry of ``name``.

    Raises:
        EngineStartError: no such architecture; the message lists those there are.
    """
    try:
        return ARCHITECTURES[name]
    except KeyError:
        known = ", ".join(sorted(ARCHITECTURES))
        raise EngineStartError(f"unknown architecture {name!r}; supported: {known}") from None


def create_model(
    config: ModelConfig,
    dtype: torch.dtype,
    allocate: Allocator,
    quantization: str | None = None,
) -> DecoderModel:
    """Builds a model whose weights are unset.

    Args:
        config: what to build.
        dtype: of weights, keys and values.
        allocate: called once for each weight tensor, always in the same order. It may return
            meta tensors when only the sizes are wanted.
        quantization: "int8" rounds the matrices that are multiplied with to 8 bits.
    """
    from shmllm.models.layers import Storage

    module, _, name = find_architecture(config.architecture).target.partition(":")
    model_class: type[DecoderModel] = getattr(import_module(module), name)
    return model_class(config, Storage(allocate, dtype, rounds=quantization == "int8"))
