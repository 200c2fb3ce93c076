"""The configuration of a model, read from its config.json.

This module owns what holds for a whole model of any family; `specs.py` has what holds for a layer,
`readers.py` reads fields that families share. It must not import torch: front ends import it too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shmllm.errors import EngineStartError
from shmllm.models.fields import Fields, read_json_object
from shmllm.models.quantization_methods import quantization_fields
from shmllm.models.registry import ARCHITECTURES, TEXT_MODELS, find_family
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import (
    AttentionSpec,
    DeltaNetSpec,
    LayerSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
)

__all__ = ["DTYPES", "ModelConfig", "RopeConfig", "architecture_name", "text_fields"]

DTYPES = ("float32", "float16", "bfloat16")

MOST_PARAMETERS = 2**44
"""Ten times those of the largest models. Sizes beyond come from a damaged file, and products of
them are numbers that no tensor can have."""

_OUTER_FIELDS = (
    "architectures",
    "dtype",
    "torch_dtype",
    "eos_token_id",
    "tie_word_embeddings",
    "quantization_config",
)
"""The fields that hold for a multimodal model's language model although they are beside its
``text_config``, which may have them, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What one decoder-only model consists of.

    Attributes:
        architecture: the first name in config.json's ``architectures``.
        layers: what each layer is. All with attention have the same number of heads and the same
            head_dim; there is at least one.
        norm: all norms of the model, those of queries and keys included.
        dtype: the dtype of the checkpoint: "float32", "float16" or "bfloat16"; None: config.json
            does not name one.
        eos_token_ids: the union of those in config.json and generation_config.json, in that
            order.
        embedding_scale: the factor of the embeddings of tokens, which is rounded to the dtype of
            the weights.
        embeds_scale: the factor of embeddings that a prompt gives itself, rounded likewise.
        num_learned_positions: the length of the table of position embeddings; 0: there is none.
        residual_scale: the factor of what attention and MLP add to the residual stream.
        logits_scale: the factor of the logits.
        logits_cap: scaled logits become ``logits_cap * tanh(logit / logits_cap)``; None: they stay.
        transposed: whether a checkpoint has the matrices of the layers as [in, out].
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    tie_word_embeddings: bool = False
    dtype: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    embedding_scale: float = 1.0
    embeds_scale: float = 1.0
    num_learned_positions: int = 0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_cap: float | None = None
    transposed: bool = False

    def __post_init__(self) -> None:
        attentions = [
            (index, layer.attention)
            for index, layer in enumerate(self.layers)
            if isinstance(layer.attention, AttentionSpec)
        ]
        if not attentions:
            raise EngineStartError(
                f"{self.architecture}: models without a layer of attention are not supported"
            )
        first, attention = attentions[0]
        for index, other in attentions:
            if _heads(other) != _heads(attention):
                raise EngineStartError(
                    f"{self.architecture}: layers with different heads are not supported: layer "
                    f"{first} has {_in_words(attention)}, layer {index} has {_in_words(other)}"
                )

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
        whole = Fields(read_json_object(config_path), str(config_path))
        family = find_family(architecture_name(whole))
        fields = text_fields(whole)
        is_quantized = quantization_fields(fields) is not None
        config: ModelConfig = family.configure(fields)
        if is_quantized and config.transposed:
            raise fields.error("quantized checkpoints of this family are not supported")
        if (count := config.num_matrix_elements) > MOST_PARAMETERS:
            raise fields.error(f"its sizes are those of {count:,} parameters: one of them is wrong")
        return replace(
            config,
            dtype=_dtype(fields),
            eos_token_ids=_eos_token_ids(fields, path / "generation_config.json"),
        )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        """The number of query heads of each layer."""
        return self.attentions[0].num_heads

    @property
    def num_kv_heads(self) -> int:
        """The number of key heads of each layer, and of value heads."""
        return self.attentions[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        """The width of each head."""
        return self.attentions[0].head_dim

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """The attention of each layer that has one."""
        every = (layer.attention for layer in self.layers)
        return tuple(attention for attention in every if isinstance(attention, AttentionSpec))

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The window of each layer's attention, see `AttentionSpec`; None for other layers."""
        every = (layer.attention for layer in self.layers)
        return tuple(
            attention.window if isinstance(attention, AttentionSpec) else None
            for attention in every
        )

    @property
    def layer_state_bytes(self) -> tuple[int, ...]:
        """The size of a request's state in each layer; 0 for those with attention."""
        every = (layer.attention for layer in self.layers)
        return tuple(mixer.state_bytes if isinstance(mixer, DeltaNetSpec) else 0 for mixer in every)

    @property
    def attended_widths(self) -> tuple[int, ...]:
        """The different widths of what the output projections of attention, or of what takes its
        place, read, in ascending order."""
        return tuple(sorted({layer.attention.width for layer in self.layers}))

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The different rotations of the layers."""
        ropes = (attention.rope for attention in self.attentions)
        return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))

    @property
    def linear_widths(self) -> tuple[int, ...]:
        """The different widths of the outputs of the layers' projections, in ascending order."""
        widths = {self.hidden_size}
        for layer in self.layers:
            widths.add(layer.attention.in_width)
        widths |= {mlp.up_width for mlp in self.dense_mlps}
        return tuple(sorted(widths))

    @property
    def inner_widths(self) -> tuple[int, ...]:
        """The different widths of the outputs of the MLPs' activations, in ascending order."""
        return tuple(sorted({mlp.inner for mlp in self.dense_mlps}))

    @property
    def mixtures(self) -> tuple[MoESpec, ...]:
        """The different mixtures of experts of the layers."""
        mlps = (layer.mlp for layer in self.layers)
        return tuple(dict.fromkeys(mlp for mlp in mlps if isinstance(mlp, MoESpec)))

    @property
    def dense_mlps(self) -> tuple[MLPSpec, ...]:
        """The different dense MLPs of the layers, the shared experts included."""
        dense = [layer.mlp for layer in self.layers if isinstance(layer.mlp, MLPSpec)]
        dense += [moe.shared for moe in self.mixtures if moe.shared is not None]
        return tuple(dict.fromkeys(dense))

    @property
    def num_matrix_elements(self) -> int:
        """About the number of parameters."""
        rows = self.vocab_size + self.num_learned_positions
        return (rows + sum(map(_num_rows, self.layers))) * self.hidden_size

    def for_length(self, max_length: int) -> ModelConfig:
        """Returns the configuration for requests of at most `max_length` tokens: the angles of
        longrope depend on it."""

        def changed(layer: LayerSpec) -> LayerSpec:
            attention = layer.attention
            rope = attention.rope if isinstance(attention, AttentionSpec) else None
            if rope is None or rope.type != "longrope":
                return layer
            assert isinstance(attention, AttentionSpec)
            rope = replace(rope, max_length=max_length)
            return replace(layer, attention=replace(attention, rope=rope))

        return replace(self, layers=tuple(changed(layer) for layer in self.layers))


def text_fields(fields: Fields) -> Fields:
    """Returns the fields of the language model of a multimodal one, which has them in
    ``text_config``; those of any other model as they are.

    Raises:
        EngineStartError: the language model is of another type than those of the architecture.
    """
    nested = fields.table("text_config")
    if not nested:
        return fields
    where, architecture = f"{fields.where}: text_config", architecture_name(fields)
    found, expected = nested.get("model_type"), TEXT_MODELS.get(architecture)
    if expected is not None and found not in (None, expected):
        raise EngineStartError(
            f"{where}: model_type {found!r} is not supported in {architecture}; supported: "
            f"{expected}"
        )
    inner = {name: value for name, value in nested.items() if value is not None}
    outer = {name: fields.values.get(name) for name in _OUTER_FIELDS}
    outer = {name: value for name, value in outer.items() if value is not None}
    return Fields(inner | outer, where)


def architecture_name(fields: Fields) -> str:
    """Returns the first of ``architectures``."""
    names = fields.values.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        known = ", ".join(sorted(ARCHITECTURES))
        raise fields.error(f"'architectures' must name the model's class; supported: {known}")
    return names[0]


def _heads(attention: AttentionSpec) -> tuple[int, int, int]:
    return attention.num_heads, attention.num_kv_heads, attention.head_dim


def _num_rows(layer: LayerSpec) -> int:
    """The rows of all matrices of a layer, each as wide as the hidden state."""
    attention, mlp = layer.attention.in_width + layer.attention.width, layer.mlp
    if isinstance(mlp, MLPSpec):
        return attention + mlp.up_width + mlp.inner
    shared = 0 if mlp.shared is None else mlp.shared.up_width + mlp.shared.inner
    return attention + mlp.num_experts * (3 * mlp.inner + 1) + shared


def _in_words(attention: AttentionSpec) -> str:
    num_heads, num_kv_heads, head_dim = _heads(attention)
    return f"{num_heads} heads and {num_kv_heads} key-value heads with a head_dim of {head_dim}"


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
