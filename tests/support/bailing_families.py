"""Bailing MoE, whose code its repositories bring: families of transformers under other names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM

_NAMES = {
    "model.embed_tokens.": "model.word_embeddings.",
    ".self_attn.o_proj.": ".attention.dense.",
    ".self_attn.q_norm.": ".attention.query_layernorm.",
    ".self_attn.k_norm.": ".attention.key_layernorm.",
    ".gate.e_score_correction_bias": ".gate.expert_bias",
}


class BailingMoeV2Config(Glm4MoeConfig):  # type: ignore[misc]
    """GLM-4.5 with other names of fields."""

    model_type = "bailing_moe_v2"

    num_experts: int = 256
    num_shared_experts: int = 1
    use_qk_norm: bool = True

    def __post_init__(self, **options: Any) -> None:
        self.n_routed_experts = self.num_experts
        self.n_shared_experts = self.num_shared_experts
        super().__post_init__(**options)


class BailingMoeV2ForCausalLM(Glm4MoeForCausalLM):  # type: ignore[misc]
    config_class = BailingMoeV2Config

    def save_pretrained(self, directory: Path, **_: Any) -> None:
        """Writes the names that the families' files have."""
        tensors = dict(published(self.state_dict()))
        Path(directory).mkdir(exist_ok=True)
        save_file(tensors, Path(directory) / "model.safetensors", {"format": "pt"})
        self.config.architectures, self.config.dtype = [type(self).__name__], self.dtype
        self.config.save_pretrained(directory)


def published(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of files: queries, keys and values are one, and experts are apart."""
    for name, tensor in tensors.items():
        for part, own in _NAMES.items():
            name = name.replace(part, own)
        prefix, _, kind = name.partition(".self_attn.q_proj.")
        if kind:
            parts = [tensors[f"{prefix}.self_attn.{each}_proj.{kind}"] for each in "qkv"]
            yield f"{prefix}.attention.query_key_value.{kind}", torch.cat(parts)
        elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            yield from _apart(name, tensor)
        elif ".self_attn." not in name:
            yield name, tensor.clone()


def _apart(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    prefix, _, kind = name.rpartition(".")
    names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    for expert, rows in enumerate(tensor):
        for part, values in zip(names, rows.chunk(len(names)), strict=True):
            yield f"{prefix}.{expert}.{part}.weight", values.clone()


AutoConfig.register(BailingMoeV2Config.model_type, BailingMoeV2Config)
AutoModelForCausalLM.register(BailingMoeV2Config, BailingMoeV2ForCausalLM)
