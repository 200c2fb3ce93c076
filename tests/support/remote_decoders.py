"""Dense decoders that transformers has no classes of, as what they are: other families of
transformers under other names. Their repositories bring code of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from shmllm.models.weight_names import renamed


def write(model: Any, directory: Path, tensors: dict[str, Tensor]) -> None:
    """Writes the files of a model."""
    Path(directory).mkdir(exist_ok=True)
    found = {name: each.clone() for name, each in tensors.items()}
    save_file(found, Path(directory) / "model.safetensors", {"format": "pt"})
    model.config.architectures, model.config.dtype = [type(model).__name__], model.dtype
    model.config.save_pretrained(directory)


class InternLM2Config(LlamaConfig):  # type: ignore[misc]
    """Llama with one field for the biases of attention."""

    model_type = "internlm2"

    bias: bool = True

    def __post_init__(self, **options: Any) -> None:
        super().__post_init__(**options)
        self.attention_bias = self.bias


_INTERNLM2_NAMES = {
    "model.embed_tokens.": "model.tok_embeddings.",
    "lm_head.": "output.",
    ".self_attn.o_proj.": ".attention.wo.",
    ".mlp.gate_proj.": ".feed_forward.w1.",
    ".mlp.up_proj.": ".feed_forward.w3.",
    ".mlp.down_proj.": ".feed_forward.w2.",
    ".input_layernorm.": ".attention_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
}


def as_internlm2(tensors: dict[str, Tensor], groups: int) -> dict[str, Tensor]:
    """Llama's tensors as InternLM 2 has them: for each of so many keys the projections of its
    queries, its own, and that of its value."""
    found = {}
    for name, tensor in tensors.items():
        prefix, projection, kind = name.partition(".self_attn.q_proj.")
        if projection:
            parts = [tensors[f"{prefix}.self_attn.{each}_proj.{kind}"] for each in "qkv"]
            rows = [part.unflatten(0, (groups, -1)) for part in parts]
            found[f"{prefix}.attention.wqkv.{kind}"] = torch.cat(rows, 1).flatten(0, 1)
        elif not name.partition(".self_attn.")[2].startswith(("k_proj", "v_proj")):
            found[renamed(name, _INTERNLM2_NAMES)] = tensor
    return found


class InternLM2ForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    config_class = InternLM2Config

    def save_pretrained(self, directory: Path, **_: Any) -> None:
        """Writes the names that the family's files have."""
        groups = self.config.num_key_value_heads
        write(self, directory, as_internlm2(self.state_dict(), groups))


for _config, _model in ((InternLM2Config, InternLM2ForCausalLM),):
    AutoConfig.register(_config.model_type, _config)
    AutoModelForCausalLM.register(_config, _model)
