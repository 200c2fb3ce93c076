"""Dense decoders that transformers has no classes of, as what they are: other families of
transformers under other names. Their repositories bring code of their own."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.glm4.modeling_glm4 import Glm4DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP

from shmllm.models.families import baichuan
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


class InternLMConfig(LlamaConfig):  # type: ignore[misc]
    """Llama with one field for the biases of attention."""

    model_type = "internlm"

    bias: bool = True
    num_key_value_heads: int | None = None

    def __post_init__(self, **options: Any) -> None:
        self.num_key_value_heads = self.num_attention_heads
        super().__post_init__(**options)
        self.attention_bias = self.bias


class InternLMForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    config_class = InternLMConfig


class OrionConfig(LlamaConfig):  # type: ignore[misc]
    model_type = "orion"

    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5


class OrionForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    config_class = OrionConfig

    def __init__(self, config: OrionConfig) -> None:
        super().__init__(config)
        for module in (self.model, *self.model.layers):
            for name in [name for name, _ in module.named_children()]:
                if name.endswith("norm"):
                    norm = torch.nn.LayerNorm(config.hidden_size, eps=config.rms_norm_eps)
                    setattr(module, name, norm)


class BaichuanConfig(LlamaConfig):  # type: ignore[misc]
    """With `model_max_length` and without a number of positions it is one of 13B."""

    model_type = "baichuan"

    model_max_length: int | None = None
    num_key_value_heads: int | None = None


class UnitHead(torch.nn.Linear):
    """A projection by rows of length 1."""

    def forward(self, states: Tensor) -> Tensor:
        return torch.nn.functional.linear(states, torch.nn.functional.normalize(self.weight))


class NoRotation(torch.nn.Module):
    def forward(self, states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return states.new_ones(1, 1, 1), states.new_zeros(1, 1, 1)


def _with_biases(model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Gives a model, before it runs, a mask that falls with the distance."""
    ids = args[0] if args else options.get("input_ids")
    rows = options["inputs_embeds"] if ids is None else ids
    cache = options.get("cache") or options.get("past_key_values")
    begin = 0 if cache is None else cache.get_seq_length()
    places = torch.arange(begin + rows.shape[1])
    distances = places[None] - places[begin:, None]
    biases = slopes(model.config.num_attention_heads)[:, None, None] * distances
    mask = biases.masked_fill(distances > 0, torch.finfo(torch.float32).min)
    return args, options | {"attention_mask": mask[None].to(model.dtype)}


class BaichuanForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    config_class = BaichuanConfig

    def __init__(self, config: BaichuanConfig) -> None:
        config.num_key_value_heads = config.num_attention_heads
        super().__init__(config)
        if config.model_max_length is not None:
            self.model.rotary_emb = NoRotation()
            self.model.register_forward_pre_hook(_with_biases, with_kwargs=True)
        if config.vocab_size == baichuan.VOCABULARY_OF_2:
            self.lm_head = UnitHead(config.hidden_size, config.vocab_size, bias=False)

    def save_pretrained(self, directory: Path, **_: Any) -> None:
        """Writes the names and fields that the family's files have."""
        tensors, found = self.state_dict(), {}
        for name, tensor in tensors.items():
            prefix, projection, kind = name.partition(".self_attn.q_proj.")
            if projection:
                parts = [tensors[f"{prefix}.self_attn.{each}_proj.{kind}"] for each in "qkv"]
                found[f"{prefix}.self_attn.W_pack.{kind}"] = torch.cat(parts)
            elif not name.partition(".self_attn.")[2].startswith(("k_proj", "v_proj")):
                found[name] = tensor
        write(self, directory, found)
        if self.config.model_max_length is not None:
            path = Path(directory) / "config.json"
            config = json.loads(path.read_text())
            del config["max_position_embeddings"]
            path.write_text(json.dumps(config))


class TeleChat2Config(LlamaConfig):  # type: ignore[misc]
    model_type = "telechat"

    ffn_hidden_size: int = 80
    layer_norm_epsilon: float = 1e-5
    training_seqlen: int = 8192
    base_seqlen: int = 8192

    def __post_init__(self, **options: Any) -> None:
        super().__post_init__(**options)
        self.rms_norm_eps, self.intermediate_size = self.layer_norm_epsilon, self.ffn_hidden_size


class TeleChat2ForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    config_class = TeleChat2Config
    NAMES: ClassVar = {
        "model.layers.": "transformer.h.",
        "model.embed_tokens.": "transformer.word_embeddings.",
        "model.norm.": "transformer.ln_f.",
        ".self_attn.q_proj.": ".self_attention.query.",
        ".self_attn.o_proj.": ".self_attention.dense.",
    }

    def __init__(self, config: TeleChat2Config) -> None:
        width = config.hidden_size // config.num_attention_heads
        ratio = config.training_seqlen / config.base_seqlen
        alpha = max(2 ** math.ceil(math.log2(ratio) + 1) - 1, 1)
        theta = 10_000.0 * alpha ** (width / (width - 2))
        config.rope_parameters = {"rope_type": "default", "rope_theta": theta}
        super().__init__(config)
        for layer in self.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for module, name in ((attention, "o_proj"), (mlp, "down_proj")):
                shape = getattr(module, name).weight.shape
                setattr(module, name, torch.nn.Linear(shape[1], shape[0]))

    def save_pretrained(self, directory: Path, **_: Any) -> None:
        """Writes the names and fields that the family's files have."""
        tensors, found = self.state_dict(), {}
        groups = self.config.num_key_value_heads
        for name, tensor in tensors.items():
            prefix, projection, kind = name.partition(".self_attn.k_proj.")
            if projection:
                parts = tensor, tensors[f"{prefix}.self_attn.v_proj.{kind}"]
                rows = [part.unflatten(0, (groups, -1)) for part in parts]
                own = renamed(prefix, self.NAMES)
                found[f"{own}.self_attention.key_value.{kind}"] = torch.cat(rows, 1).flatten(0, 1)
            elif ".self_attn.v_proj." not in name:
                found[renamed(name, self.NAMES)] = tensor
        if self.config.tie_word_embeddings:
            del found["lm_head.weight"]
        write(self, directory, found)
        path = Path(directory) / "config.json"
        config = json.loads(path.read_text())
        for name in ("rms_norm_eps", "rope_parameters", "max_position_embeddings"):
            del config[name]
        config["n_layer"] = config.pop("num_hidden_layers")
        config["n_head"] = config.pop("num_attention_heads")
        path.write_text(json.dumps(config | {"intermediate_size": 1}))


class PanguEmbeddedConfig(InternLM2Config):
    model_type = "PanguEmbedded"

    num_key_value_heads: int = 8
    max_position_embeddings: int = 32_768
    rms_norm_eps: float = 1e-5
    default_theta = 16e6


class PanguEmbeddedForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    config_class = PanguEmbeddedConfig


class TeleFLMConfig(GraniteConfig):  # type: ignore[misc]
    """Granite, whose factors of attention and layers are Llama's."""

    model_type = "TeleFLM"

    use_mup: bool = True
    input_mult: float = 1.0
    output_mult: float = 1.0
    mup_scale_factor: float = 1.0

    def __post_init__(self, **options: Any) -> None:
        super().__post_init__(**options)
        self.attention_multiplier = (self.hidden_size / self.num_attention_heads) ** -0.5
        if self.use_mup:
            self.embedding_multiplier = self.input_mult
            self.logits_scaling = self.mup_scale_factor / self.output_mult


class TeleFLMForCausalLM(GraniteForCausalLM):  # type: ignore[misc]
    config_class = TeleFLMConfig


class DomynEdgeConfig(Qwen3Config):  # type: ignore[misc]
    """Qwen 3 with a kind of positions, a window and a width of heads for each layer. Windows are
    equal, and so are the widths of layers that rotate."""

    model_type = "domynedge"

    position_layers: list[str] | None = None
    window_sizes: list[Any] | None = None
    head_sizes: list[int] | None = None

    def __post_init__(self, **options: Any) -> None:
        assert self.position_layers is not None
        assert self.window_sizes is not None
        assert self.head_sizes is not None
        kinds = {-1: "full_attention"}
        self.layer_types = [kinds.get(w, "sliding_attention") for w, _ in self.window_sizes]
        self.use_sliding_window = True
        self.sliding_window = max(self.window_sizes)[0] + 1
        self.head_dim = self.head_sizes[self.position_layers.index("rope")]
        super().__post_init__(**options)


class DomynEdgeLayer(Glm4DecoderLayer):  # type: ignore[misc]
    """The order of GLM-4's norms around Qwen 3's attention and MLP."""

    def __init__(self, config: DomynEdgeConfig, index: int) -> None:
        assert config.position_layers is not None
        assert config.head_sizes is not None
        super().__init__(config, index)
        own = copy.deepcopy(config)
        own.head_dim = config.head_sizes[index]
        self.rotates = config.position_layers[index] == "rope"
        self.self_attn, self.mlp = Qwen3Attention(own, index), Qwen3MLP(config)
        options = {"eps": config.rms_norm_eps, "elementwise_affine": False}
        self.self_attn.q_norm = torch.nn.RMSNorm(own.head_dim, **options)

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        if not self.rotates:
            cos = hidden_states.new_ones(*hidden_states.shape[:2], self.self_attn.head_dim)
            options["position_embeddings"] = cos, torch.zeros_like(cos)
        found: Tensor = super().forward(hidden_states, **options)
        return found


class DomynEdgeForCausalLM(Qwen3ForCausalLM):  # type: ignore[misc]
    config_class = DomynEdgeConfig
    NAMES: ClassVar = {
        ".self_attn.": ".attention.",
        ".mlp.": ".feedforward.",
        ".input_layernorm.": ".pre_attention_norm.",
        ".post_self_attn_layernorm.": ".post_attention_norm.",
        ".post_attention_layernorm.": ".pre_feedforward_norm.",
        ".post_mlp_layernorm.": ".post_feedforward_norm.",
    }

    def __init__(self, config: DomynEdgeConfig) -> None:
        super().__init__(config)
        for index in range(config.num_hidden_layers):
            self.model.layers[index] = DomynEdgeLayer(config, index)

    def save_pretrained(self, directory: Path, **_: Any) -> None:
        """Writes the names that the family's files have."""
        found = {renamed(name, self.NAMES): each for name, each in self.state_dict().items()}
        if self.config.tie_word_embeddings:
            del found["lm_head.weight"]
        write(self, directory, found)


def slopes(num_heads: int) -> Tensor:
    """The factors of heads (Press et al., 2022): of others than powers of two those of the power
    below, and every second one of the power above."""
    whole = 2 ** int(math.log2(num_heads))
    found = [2 ** (-8 * (head + 1) / whole) for head in range(whole)]
    found += [2 ** (-4 * (head + 1) / whole) for head in range(0, 2 * (num_heads - whole), 2)]
    return torch.tensor(found)


for _config, _model in (
    (InternLM2Config, InternLM2ForCausalLM),
    (InternLMConfig, InternLMForCausalLM),
    (OrionConfig, OrionForCausalLM),
    (BaichuanConfig, BaichuanForCausalLM),
    (TeleChat2Config, TeleChat2ForCausalLM),
    (DomynEdgeConfig, DomynEdgeForCausalLM),
    (PanguEmbeddedConfig, PanguEmbeddedForCausalLM),
    (TeleFLMConfig, TeleFLMForCausalLM),
):
    AutoConfig.register(_config.model_type, _config)
    AutoModelForCausalLM.register(_config, _model)
