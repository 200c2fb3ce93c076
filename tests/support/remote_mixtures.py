"""Mixtures of experts that transformers has no classes of, made of what it has. Their repositories
bring code of their own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV2Config,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
)
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel, Step3p7TextModel

_NAMES = {
    "model.embed_tokens.": "model.word_embeddings.",
    ".self_attn.o_proj.": ".attention.dense.",
    ".self_attn.q_norm.": ".attention.query_layernorm.",
    ".self_attn.k_norm.": ".attention.key_layernorm.",
    ".gate.e_score_correction_bias": ".gate.expert_bias",
}


_STEP_NAMES = {
    ".mlp.gate.weight": ".moe.gate.weight",
    ".mlp.gate.e_score_correction_bias": ".moe.router_bias",
    ".mlp.experts.down_proj": ".moe.down_proj.weight",
    ".mlp.shared_experts.": ".share_expert.",
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
        """Writes the names that the family's files have."""
        _write(self, directory, dict(published(self.state_dict())))


class DeepseekConfig(LlamaConfig):  # type: ignore[misc]
    model_type = "deepseek"

    n_routed_experts: int = 8
    n_shared_experts: int = 1
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 16
    first_k_dense_replace: int = 0
    norm_topk_prob: bool = False


class DeepseekMoe(DeepseekV2Moe):  # type: ignore[misc]
    """DeepSeek-V2's experts, whose weights may be divided by their sum."""

    def __init__(self, config: DeepseekConfig) -> None:
        counts = "n_routed_experts", "n_shared_experts", "num_experts_per_tok"
        names = *counts, "moe_intermediate_size", "hidden_size", "num_attention_heads"
        super().__init__(DeepseekV2Config(**{name: getattr(config, name) for name in names}))
        if config.norm_topk_prob:
            self.gate.register_forward_hook(_divided)


def _divided(module: Any, given: Any, routing: tuple[Tensor, Tensor, Tensor]) -> Any:
    logits, weights, indices = routing
    return logits, weights / (weights.sum(-1, keepdim=True) + 1e-20), indices


class DeepseekForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    config_class = DeepseekConfig

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers[config.first_k_dense_replace :]:
            layer.mlp = DeepseekMoe(config)
            for parameter in layer.mlp.parameters():
                torch.nn.init.normal_(parameter, std=config.initializer_range)

    def save_pretrained(self, directory: Path, **_: Any) -> None:
        """Writes the names that the family's files have."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.state_dict().items():
            is_whole = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
            tensors |= dict(_apart(name, tensor)) if is_whole else {name: tensor.clone()}
        _write(self, directory, tensors)


class BailingMoeConfig(DeepseekConfig):
    """DeepSeek-MoE with other names of fields."""

    model_type = "bailing_moe"

    num_experts: int = 8
    num_shared_experts: int = 1
    norm_topk_prob: bool = True
    use_bias: bool = False
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 16384

    def __post_init__(self, **options: Any) -> None:
        self.n_routed_experts = self.num_experts
        self.n_shared_experts = self.num_shared_experts
        super().__post_init__(**options)


class BailingMoeForCausalLM(DeepseekForCausalLM):
    config_class = BailingMoeConfig

    def save_pretrained(self, directory: Path, **_: Any) -> None:
        """Writes the names that the family's files have."""
        _write(self, directory, dict(published(self.state_dict())))


def _write(model: Any, directory: Path, tensors: dict[str, Tensor]) -> None:
    Path(directory).mkdir(exist_ok=True)
    save_file(tensors, Path(directory) / "model.safetensors", {"format": "pt"})
    model.config.architectures, model.config.dtype = [type(model).__name__], model.dtype
    model.config.save_pretrained(directory)


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


class NemotronHPuzzleConfig(NemotronHConfig):  # type: ignore[misc]
    """Nemotron-H whose layers have fields of their own."""

    model_type = "nemotron_h_puzzle"

    block_configs: list[dict[str, Any]] | None = None

    def __post_init__(self, **options: Any) -> None:
        assert self.block_configs is not None
        kinds = {"mamba": "linear_attention", "attention": "full_attention"}
        types = [each["block_type"] for each in self.block_configs]
        self.layers_block_type = [kinds.get(each, each) for each in types]
        super().__post_init__(**options)


class NemotronHPuzzleForCausalLM(NemotronHForCausalLM):  # type: ignore[misc]
    config_class = NemotronHPuzzleConfig

    def __init__(self, config: NemotronHPuzzleConfig) -> None:
        super().__init__(config)
        assert config.block_configs is not None
        for index, block in enumerate(config.block_configs):
            own = copy.deepcopy(config)
            for name, value in block.items():
                setattr(own, name, value)
            self.model.layers[index] = NemotronHBlock(own, index)
        self.apply(self._init_weights)

    def save_pretrained(self, directory: Path, **_: Any) -> None:
        """Writes the names that the family's files have."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.state_dict().items():
            prefix, dot, kind = name.rpartition(".experts.")
            if dot and tensor.ndim == 3:
                for expert, rows in enumerate(tensor):
                    tensors[f"{prefix}.experts.{expert}.{kind}.weight"] = rows.clone()
            else:
                tensors[name] = tensor.clone()
        _write(self, directory, tensors)


class Step3p5ForCausalLM(Step3p7PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The language model of Step 3.7 by itself, which is Step 3.5."""

    config_class = Step3p7TextConfig

    def __init__(self, config: Step3p7TextConfig) -> None:
        super().__init__(config)
        self.model = Step3p7TextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
        self.post_init()

    def forward(self, input_ids: Tensor, **options: Any) -> CausalLMOutputWithPast:
        hidden = self.model(input_ids, **options)
        return CausalLMOutputWithPast(logits=self.lm_head(hidden.last_hidden_state))

    def save_pretrained(self, directory: Path, **_: Any) -> None:
        """Writes the names that the family's files have."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.state_dict().items():
            for part, own in _STEP_NAMES.items():
                name = name.replace(part, own)
            if name.endswith(".mlp.experts.gate_up_proj"):
                prefix = name.removesuffix("mlp.experts.gate_up_proj")
                for part, values in zip(("gate", "up"), tensor.chunk(2, 1), strict=True):
                    tensors[f"{prefix}moe.{part}_proj.weight"] = values.clone()
            else:
                tensors[name] = tensor.clone()
        if self.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        _write(self, directory, tensors)


for _config, _model in (
    (BailingMoeV2Config, BailingMoeV2ForCausalLM),
    (DeepseekConfig, DeepseekForCausalLM),
    (BailingMoeConfig, BailingMoeForCausalLM),
    (NemotronHPuzzleConfig, NemotronHPuzzleForCausalLM),
):
    AutoConfig.register(_config.model_type, _config)
    AutoModelForCausalLM.register(_config, _model)
