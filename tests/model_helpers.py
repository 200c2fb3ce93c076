"""Small transformers models on disk, and the plainest attention that can run ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from shmllm.models.config import ModelConfig
from shmllm.models.decoder import DecoderModel
from shmllm.models.registry import create_model
from shmllm.models.weights import load_weights

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Storage full of NaN, so that a weight nobody loads is seen."""
    return torch.full(shape, float("nan"), dtype=dtype)


def reference_model(
    family: str, scale: float = 1.0, dtype: str = "float32", **options: Any
) -> PreTrainedModel:
    """A random transformers model; matrices and biases multiplied by ``scale``."""
    settings = SIZES | ({"head_dim": 16} if family == "qwen3" else {}) | options
    torch.manual_seed(11)
    config = CONFIGS[family](**settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.2)
            else:
                parameter.normal_(0.0, 0.05).mul_(scale)
    return model.to(getattr(torch, dtype))


def save(model: PreTrainedModel, directory: Path, **options: Any) -> Path:
    model.save_pretrained(directory, **options)
    assert AutoConfig.from_pretrained(directory).model_type == model.config.model_type
    return directory


def load(directory: Path, dtype: torch.dtype = torch.float32) -> DecoderModel:
    model = create_model(ModelConfig.from_directory(directory), dtype, allocate, "cpu")
    load_weights(model, directory, None)
    return model


class DenseAttention:
    """Causal attention over the tokens of one call, one sequence, nothing cached."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.layers: list[int] = []

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.layers.append(layer)
        tokens, num_heads, head_dim = query.shape
        groups = num_heads // key.shape[1]
        key = key.repeat_interleave(groups, 1).float()
        value = value.repeat_interleave(groups, 1).float()
        scores = torch.einsum("qhd,khd->hqk", query.float(), key) * head_dim**-0.5
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
        hidden = distance < 0
        window = self.config.layer_windows[layer]
        if window is not None:
            hidden |= distance >= window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value).reshape(tokens, -1).to(query.dtype)


@torch.inference_mode()
def our_logits(model: DecoderModel, token_ids: list[int]) -> Tensor:
    ids = torch.tensor(token_ids)
    attention = DenseAttention(model.config)
    hidden = model.forward(ids, torch.arange(len(token_ids)), attention)
    assert attention.layers == list(range(model.config.num_layers))
    return model.compute_logits(hidden)


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    return model(torch.tensor([token_ids])).logits[0].float()


def assert_logits_close(ours: Tensor, reference: Tensor, tolerance: float) -> None:
    """The largest difference is within ``tolerance`` of the largest reference logit."""
    assert ours.dtype == torch.float32
    assert ours.shape == reference.shape
    difference = float((ours - reference).abs().max() / reference.abs().max())
    assert difference < tolerance, f"relative difference {difference:.2e}"
