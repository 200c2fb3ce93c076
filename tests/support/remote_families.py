"""Families that transformers has no classes of, as what they are: other families of transformers
under other names. Their repositories bring code of their own."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    GraniteConfig,
    GraniteForCausalLM,
    JinaEmbeddingsV3Config,
    JinaEmbeddingsV3Model,
    Lfm2Config,
    Lfm2Model,
    Lfm2PreTrainedModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MT5Config,
    MT5EncoderModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)
from transformers.modeling_outputs import TokenClassifierOutput
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from shmllm.models.weight_names import renamed

__all__ = ["MT5EncoderModel", "T5EncoderModel", "UMT5EncoderModel"]


class MiMoConfig(Qwen2Config):  # type: ignore[misc]
    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):  # type: ignore[misc]
    config_class = MiMoConfig


class MiniCPMConfig(GraniteConfig):  # type: ignore[misc]
    """Granite whose factors follow from MiniCPM's fields."""

    model_type = "minicpm"

    scale_emb: float = 1.0
    scale_depth: float = 1.0
    dim_model_base: int = 1
    tie_word_embeddings: bool = True

    def __post_init__(self, **options: Any) -> None:
        super().__post_init__(**options)
        self.embedding_multiplier = self.scale_emb
        self.attention_multiplier = (self.hidden_size / self.num_attention_heads) ** -0.5
        self.residual_multiplier = self.scale_depth / self.num_hidden_layers**0.5
        self.logits_scaling = self.hidden_size / self.dim_model_base


class MiniCPMForCausalLM(GraniteForCausalLM):  # type: ignore[misc]
    config_class = MiniCPMConfig


class DeciLMConfig(LlamaConfig):  # type: ignore[misc]
    model_type = "nemotron-nas"

    block_configs: list[dict[str, Any]] | None = None


class LlamaBidirectionalConfig(LlamaConfig):  # type: ignore[misc]
    model_type = "llama_bidirec"

    is_causal: bool = False
    pooling: str = "avg"


class LlamaBidirectionalModel(LlamaModel):  # type: ignore[misc]
    config_class = LlamaBidirectionalConfig


class Lfm2BidirectionalConfig(Lfm2Config):  # type: ignore[misc]
    """LFM2's, of which published files have the ``model_type``, too."""


class CentredConvolution(Lfm2ShortConv):  # type: ignore[misc]
    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        before, behind, inputs = self.in_proj(hidden_states).transpose(1, 2).chunk(3, 1)
        weight, taps = self.conv.weight, self.conv_kernel_size
        gated, groups = before * inputs, len(weight)
        out = nn.functional.conv1d(gated, weight, self.conv.bias, padding=taps // 2, groups=groups)
        out = behind * out[..., : hidden_states.shape[1]]
        projected: Tensor = self.out_proj(out.transpose(1, 2))
        return projected


class Lfm2BidirectionalModel(Lfm2Model):  # type: ignore[misc]
    config_class = Lfm2BidirectionalConfig

    def __init__(self, config: Lfm2BidirectionalConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            if layer.is_attention_layer:
                layer.self_attn.is_causal = False
            else:
                layer.conv = CentredConvolution(config, index)

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        masks = {"full_attention": None, "conv": None}
        return super().forward(input_ids, attention_mask=masks, use_cache=False)


class Lfm2BidirectionalForMaskedLM(Lfm2PreTrainedModel):  # type: ignore[misc]
    config_class, base_model_prefix = Lfm2BidirectionalConfig, "lfm2"

    def __init__(self, config: Lfm2BidirectionalConfig) -> None:
        super().__init__(config)
        self.lfm2 = Lfm2BidirectionalModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


Lfm2BidirP2Config = Lfm2BidirectionalConfig


class Lfm2BidirP2ForTokenClassification(Lfm2PreTrainedModel):  # type: ignore[misc]
    """A classifier, and how much each class counted in its training."""

    config_class, base_model_prefix = Lfm2BidirectionalConfig, "lfm2"

    def __init__(self, config: Lfm2BidirectionalConfig) -> None:
        super().__init__(config)
        self.lfm2 = Lfm2BidirectionalModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.register_buffer("class_weights", torch.ones(config.num_labels))
        self.post_init()

    def forward(self, input_ids: Tensor) -> TokenClassifierOutput:
        states = self.lfm2(input_ids).last_hidden_state
        return TokenClassifierOutput(logits=self.classifier(states))


class JinaBertConfig(BertConfig):  # type: ignore[misc]
    feed_forward_type: str = "geglu"
    emb_pooler: str = "mean"


class GatedLayers(nn.Module):
    """What JinaBERT has in place of BERT's first projection of an MLP."""

    def __init__(self, config: JinaBertConfig) -> None:
        super().__init__()
        self.gated_layers = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.act = nn.GELU() if config.feed_forward_type == "geglu" else nn.ReLU()

    def forward(self, states: Tensor) -> Tensor:
        gate, up = self.gated_layers(states).chunk(2, dim=-1)
        gated: Tensor = self.act(gate) * up
        return gated


class NoPositions(nn.Module):
    """What it has in place of a table of positions."""

    def forward(self, positions: Tensor) -> Tensor:
        return positions.new_zeros((), dtype=torch.float32)


class JinaBertModel(BertModel):  # type: ignore[misc]
    """BERT with linear biases of scores and gated MLPs."""

    config_class = JinaBertConfig
    NAMES: ClassVar = {
        ".intermediate.": ".mlp.",
        ".attention.output.": ".attention_output.",
        ".output.dense.": ".mlp.wo.",
        ".output.LayerNorm.": ".mlp.layernorm.",
        ".attention_output.": ".attention.output.",
    }
    SLOPES: ClassVar = {
        4: [1 / 4, 1 / 16, 1 / 64, 1 / 256],
        12: [2**-i for i in range(1, 9)] + [2 ** -(i + 0.5) for i in range(4)],
    }

    def __init__(self, config: JinaBertConfig) -> None:
        super().__init__(config, add_pooling_layer=False)
        self.embeddings.position_embeddings = NoPositions()
        for layer in self.encoder.layer:
            layer.intermediate = GatedLayers(config)

    def forward(self, input_ids: Tensor) -> Any:
        places = torch.arange(input_ids.shape[1])
        slopes = torch.tensor(self.SLOPES[self.config.num_attention_heads])
        biases = -slopes[:, None, None] * (places[None] - places[:, None]).abs()
        return super().forward(input_ids, attention_mask=biases[None])

    def save_pretrained(self, directory: Path, **options: Any) -> None:
        """Writes the files as the authors' are."""
        self.config.architectures = ["JinaBertForMaskedLM"]
        self.config.save_pretrained(directory)
        stored = {renamed(name, self.NAMES): each for name, each in self.state_dict().items()}
        save_file(stored, directory / "model.safetensors")
        config = json.loads((directory / "config.json").read_text())
        config["position_embedding_type"] = "alibi"
        (directory / "config.json").write_text(json.dumps(config))


T5EncoderConfig, MT5EncoderConfig, UMT5EncoderConfig = T5Config, MT5Config, UMT5Config


class NomicMoeConfig(JinaEmbeddingsV3Config):  # type: ignore[misc]
    num_experts: int = 5
    moe_top_k: int = 2


class NomicExperts(nn.Module):
    """The experts of nomic-embed-text-v2-moe. The weights of those that are chosen do not add up to
    1, and their sum has a bias."""

    def __init__(self, config: NomicMoeConfig) -> None:
        super().__init__()
        self.top_k = config.moe_top_k
        self.shape = config.num_experts, config.intermediate_size, config.hidden_size
        experts, inner, hidden = self.shape
        self.router = nn.ModuleDict({"layer": nn.Linear(hidden, experts, bias=False)})
        self.experts = nn.ParameterDict({"bias": torch.empty(hidden)})
        self.experts["mlp"] = nn.ParameterDict(
            {name: torch.empty(experts * inner, hidden) for name in ("w1", "w2")}
        )

    def forward(self, states: Tensor) -> Tensor:
        first, last = (self.experts["mlp"][name].view(self.shape) for name in ("w1", "w2"))
        weights, chosen = self.router["layer"](states).softmax(-1).topk(self.top_k)
        shares = torch.zeros(*states.shape[:-1], len(first)).scatter_(-1, chosen, weights)
        inner = nn.functional.gelu(torch.einsum("...h,eih->...ei", states, first))
        out = torch.einsum("...ei,eih,...e->...h", inner, last, shares)
        summed: Tensor = out + self.experts["bias"]
        return summed


class NomicMoeModel(JinaEmbeddingsV3Model):  # type: ignore[misc]
    """The layers of jina-embeddings-v3 but for the experts of every second one."""

    config_class = NomicMoeConfig
    NAMES: ClassVar = {
        "layers.": "encoder.layers.",
        "embeddings.LayerNorm.": "emb_ln.",
        ".self_attn.o_proj.": ".attn.out_proj.",
        ".self_attn.": ".attn.",
        ".post_attention_layernorm.": ".norm1.",
        ".post_mlp_layernorm.": ".norm2.",
    }

    def __init__(self, config: NomicMoeConfig) -> None:
        super().__init__(config, add_pooling_layer=False)
        for layer in self.layers[1::2]:
            layer.mlp = NomicExperts(config)

    def save_pretrained(self, directory: Path, **options: Any) -> None:
        """Writes the files as the authors' are."""
        directory.mkdir(exist_ok=True)
        stored = {renamed(name, self.NAMES): each for name, each in self.state_dict().items()}
        for name in [name for name in stored if ".q_proj." in name]:
            parts = [stored.pop(name.replace(".q_", f".{x}_")) for x in "qkv"]
            stored[name.replace(".q_proj.", ".Wqkv.")] = torch.cat(parts)
        save_file(stored, directory / "model.safetensors")
        config = self.config
        fields = {
            "architectures": ["NomicBertModel"],
            "n_embd": config.hidden_size,
            "n_head": config.num_attention_heads,
            "n_layer": config.num_hidden_layers,
            "n_inner": config.intermediate_size,
            "n_positions": config.max_position_embeddings,
            "layer_norm_epsilon": config.layer_norm_eps,
            "rotary_emb_base": config.rope_parameters["rope_theta"],
            "rotary_emb_fraction": 1.0,
            "activation_function": "gelu",
            "vocab_size": config.vocab_size,
            "type_vocab_size": config.type_vocab_size,
            "moe_every_n_layers": 2,
            "num_experts": config.num_experts,
            "moe_top_k": config.moe_top_k,
            **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), True),
        }
        (directory / "config.json").write_text(json.dumps(fields))


class DeciLMLayer(LlamaDecoderLayer):  # type: ignore[misc]
    """Llama's layer with heads and an MLP of its own, or without one of them."""

    def __init__(self, config: DeciLMConfig, index: int) -> None:
        assert config.block_configs is not None
        attention, ffn = (config.block_configs[index][name] for name in ("attention", "ffn"))
        own = copy.deepcopy(config)
        own.num_key_value_heads = config.num_attention_heads // (attention["n_heads_in_group"] or 1)
        width = int(2 * (ffn["ffn_mult"] or 1) * config.hidden_size / 3)
        own.intermediate_size = -(-width // 256) * 256
        super().__init__(own, index)
        if attention["no_op"]:
            del self.self_attn, self.input_layernorm
        if ffn["no_op"]:
            del self.mlp, self.post_attention_layernorm

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        x = hidden_states
        if hasattr(self, "self_attn"):
            x = x + self.self_attn(hidden_states=self.input_layernorm(x), **options)[0]
        if hasattr(self, "mlp"):
            x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class DeciLMForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    config_class = DeciLMConfig

    def __init__(self, config: DeciLMConfig) -> None:
        super().__init__(config)
        for index in range(config.num_hidden_layers):
            self.model.layers[index] = DeciLMLayer(config, index)


for _config, _model in (
    (MiMoConfig, MiMoForCausalLM),
    (MiniCPMConfig, MiniCPMForCausalLM),
    (DeciLMConfig, DeciLMForCausalLM),
):
    AutoConfig.register(_config.model_type, _config)
    AutoModelForCausalLM.register(_config, _model)
