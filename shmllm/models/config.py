"""Reads and checks a model's config.json.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shmllm.errors import EngineStartError
from shmllm.models.fields import Fields, read_json_object
from shmllm.models.registry import ARCHITECTURES, Architecture, find_architecture
from shmllm.models.rope_config import RopeConfig

__all__ = ["DTYPES", "ModelConfig", "RopeConfig"]

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and options of one decoder-only model.

    Attributes:
        dtype: the dtype of the checkpoint: "float32", "float16" or "bfloat16"; None: config.json
            does not name one.
        attention_bias: whether q, k and v have a bias.
        mlp_bias: whether gate, up and down have a bias.
        eos_token_ids: the union of those in config.json and generation_config.json, in that
            order.
        layer_windows: for each layer, the number of positions that a token attends to, its own
            included; None: its own and all before it.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    dtype: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    layer_windows: tuple[int | None, ...] = ()
    rope: RopeConfig = field(default_factory=RopeConfig)

    def __post_init__(self) -> None:
        if not self.layer_windows:
            object.__setattr__(self, "layer_windows", (None,) * self.num_layers)

    @classmethod
    def from_directory(cls, path: Path) -> ModelConfig:
        """Reads config.json, and generation_config.json if it exists.

        Raises:
            EngineStartError: a file is missing or malformed, or asks for an unsupported feature.
                The message is one line and names the file and the field.
        """
        path = Path(path)
        config_path = path / "config.json"
        if not config_path.is_file():
            raise EngineStartError(f"no model in {path}: looked for {config_path}")
        fields = Fields(read_json_object(config_path), str(config_path))
        name = _architecture_name(fields)
        architecture = find_architecture(name)
        _reject_unsupported(fields)
        num_heads = fields.integer("num_attention_heads")
        num_kv_heads = _num_kv_heads(fields, architecture, num_heads)
        num_layers = fields.integer("num_hidden_layers")
        return cls(
            architecture=name,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_head_dim(fields, architecture, num_heads),
            max_position_embeddings=_max_positions(fields, architecture),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            attention_bias=_attention_bias(fields, architecture),
            mlp_bias=architecture.mlp_bias and fields.flag("mlp_bias", False),
            dtype=_dtype(fields),
            eos_token_ids=_eos_token_ids(fields, path / "generation_config.json"),
            layer_windows=_layer_windows(fields, architecture, num_layers),
            rope=RopeConfig.from_fields(fields, _max_positions(fields, architecture)),
        )


def _architecture_name(fields: Fields) -> str:
    names = fields.values.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        known = ", ".join(sorted(ARCHITECTURES))
        raise fields.error(f"'architectures' must name the model's class; supported: {known}")
    return names[0]


def _reject_unsupported(fields: Fields) -> None:
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.error(f"hidden_act {activation!r} is not supported; supported: silu")
    if fields.values.get("quantization_config"):
        raise fields.error("quantized checkpoints are not supported")


def _num_kv_heads(fields: Fields, architecture: Architecture, num_heads: int) -> int:
    if "num_key_value_heads" in fields.values:
        num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    else:
        num_kv_heads = architecture.num_kv_heads or num_heads
    if num_heads % num_kv_heads:
        raise fields.error(
            f"num_attention_heads ({num_heads}) must be a multiple of "
            f"num_key_value_heads ({num_kv_heads})"
        )
    return num_kv_heads


def _head_dim(fields: Fields, architecture: Architecture, num_heads: int) -> int:
    head_dim = fields.optional_integer("head_dim") or architecture.head_dim
    if head_dim is None:
        hidden_size = fields.integer("hidden_size")
        if hidden_size % num_heads:
            raise fields.error(
                f"without 'head_dim', hidden_size ({hidden_size}) must be a multiple of "
                f"num_attention_heads ({num_heads})"
            )
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise fields.error(f"head_dim must be even for rotary embedding, not {head_dim}")
    return head_dim


def _max_positions(fields: Fields, architecture: Architecture) -> int:
    return fields.integer("max_position_embeddings", architecture.max_position_embeddings)


def _attention_bias(fields: Fields, architecture: Architecture) -> bool:
    if architecture.attention_bias == "configured":
        return fields.flag("attention_bias", False)
    return architecture.attention_bias == "always"


def _dtype(fields: Fields) -> str | None:
    name = "torch_dtype" if fields.values.get("dtype") is None else "dtype"
    if fields.values.get(name) is None:
        return None
    dtype = fields.text(name).removeprefix("torch.")
    if dtype not in DTYPES:
        raise fields.error(f"{name} {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    return dtype


def _eos_token_ids(fields: Fields, generation_path: Path) -> tuple[int, ...]:
    sources = [fields]
    if generation_path.is_file():
        sources.append(Fields(read_json_object(generation_path), str(generation_path)))
    token_ids: list[int] = []
    for source in sources:
        value: Any = source.values.get("eos_token_id")
        found = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(token_id) is not int or token_id < 0 for token_id in found):
            raise source.error(f"'eos_token_id' must be token ids, not {value!r}")
        token_ids += found
    return tuple(dict.fromkeys(token_ids))


def _layer_windows(
    fields: Fields, architecture: Architecture, num_layers: int
) -> tuple[int | None, ...]:
    if architecture.window == "none":
        return (None,) * num_layers
    default = None if "sliding_window" in fields.values else 4096
    window = default or fields.optional_integer("sliding_window")
    if architecture.window == "every_layer":
        return (window,) * num_layers
    if not fields.flag("use_sliding_window", False):
        window = None
    layer_types = fields.values.get("layer_types")
    if layer_types is None:
        first = fields.integer("max_window_layers", 28, minimum=0) if window else num_layers
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return _windows_by_type(fields, layer_types, window, num_layers)


def _windows_by_type(
    fields: Fields, layer_types: Any, window: int | None, num_layers: int
) -> tuple[int | None, ...]:
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise fields.error(f"'layer_types' must list one type for each of {num_layers} layers")
    if "sliding_attention" in layer_types and window is None:
        raise fields.error("'layer_types' has sliding_attention but no sliding window is enabled")
    windows = {"full_attention": None, "sliding_attention": window}
    unknown = [name for name in layer_types if name not in windows]
    if unknown:
        raise fields.error(
            f"layer type {unknown[0]!r} is not supported; supported: {', '.join(windows)}"
        )
    return tuple(windows[name] for name in layer_types)
