"""The configuration of a model, read from its config.json.

This module owns what holds for a whole model of any family; `specs.py` has what holds for a layer,
`readers.py` reads fields that families share. It must not import torch: front ends import it too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from shmllm.errors import EngineStartError
from shmllm.models.both_ways import attend_both_ways
from shmllm.models.combined_specs import FeedForwardSpec
from shmllm.models.compressed_specs import CompressedAttentionSpec
from shmllm.models.config_file import (
    architecture_name,
    eos_token_ids,
    read_fields,
    stored_dtype,
)
from shmllm.models.draft_specs import DraftSpec
from shmllm.models.fields import Fields
from shmllm.models.head_specs import DenseSpec, HeadSpec, TransformSpec
from shmllm.models.item_towers import ItemTowers
from shmllm.models.kv_heads import KVHeads
from shmllm.models.kv_sources import check_sources, of_one_size, sources_of
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mixer_specs import (
    WITHIN_ITEMS,
    AnyAttention,
    AttentionSpec,
    Encoded,
    LatentAttentionSpec,
    MixerSpec,
)
from shmllm.models.model_size import problem_of_size
from shmllm.models.quantization_methods import quantization_fields
from shmllm.models.recurrent_specs import MambaSpec, ShortConvolutionSpec
from shmllm.models.registry import Purpose, find_family, purpose_of
from shmllm.models.rope_config import RopeConfig
from shmllm.models.shard import ONLY, WHOLE, Shard, Stage
from shmllm.models.sinusoid_kinds import SinusoidKind
from shmllm.models.specs import MLPSpec, MoESpec, NormSpec
from shmllm.models.stream_specs import AltUpSpec, ConnectionSpec, PerLayerSpec
from shmllm.models.task_adapters import TaskAdapters, TaskDirectory
from shmllm_kernels.windows import Window

__all__ = ["ModelConfig", "RopeConfig"]

Pooled = Literal["CLS", "LAST", "MEAN"]
"""The hidden states of a prompt that are pooled: the first token's, the last one's, or the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ItemTowers):
    """What one model consists of. `ItemTowers` has what it computes of items.

    Attributes:
        architecture: the first name in config.json's ``architectures``.
        layers: what each layer is. At least one has attention or a recurrent state, but in a model
            that drafts.
        norm: all norms of the model, those of queries and keys included.
        dtype: the dtype of the checkpoint: "float32", "float16" or "bfloat16"; None: config.json
            does not name one.
        eos_token_ids: those in config.json, then further ones in generation_config.json.
        embedding_scale: the factor of the embeddings of tokens, which is rounded to the dtype of
            the weights.
        embeds_scale: the factor of embeddings that a prompt gives itself, rounded likewise.
        num_learned_positions: the length of the table of position embeddings; 0: there is none.
        sinusoids: which sinusoids that table has; None: checkpoints have the table.
        first_position: the row of that table for a request's first token.
        num_token_types: the length of the table of token types' embeddings; 0: there is none.
        num_task_types: the same of tasks; the embedding of the first is added to all tokens.
        embedding_size: the width of embeddings that are projected; None: that of hidden states.
        embedding_norm: whether the embeddings have a norm.
        final_norm: whether the result of the last layer has a norm.
        last_norm: that norm, if it differs from `norm`.
        lm_head: whether the model has an LM head, and so can generate.
        transform: what the LM head reads of hidden states; None: these themselves.
        lm_head_bias: whether the LM head has a bias.
        lm_head_float32: whether the LM head, which is not tied then, and logits are float32 in a
            model of any dtype.
        num_outputs: the number of tokens, the first ones, that the LM head has rows for in a
            checkpoint; the logits of others are minus infinity; None: all.
        head: what is computed of pooled hidden states; None: nothing.
        pooling: which hidden states are pooled unless somebody says otherwise.
        padding_token: what fills texts up to `max_position_embeddings`, which the model was trained
            on, if the tokenizer does not say; None: nothing fills them.
        usual_length: at how many tokens prompts are cut unless somebody says otherwise; None: only
            `max_position_embeddings` limits them.
        normalizes: whether embeddings have the length 1 unless somebody says otherwise.
        residual_scale: the factor of what mixers, unless they lie side by side, and MLPs add to the
            residual stream.
        logits_scale: the factor of the logits.
        logits_cap: scaled logits become ``logits_cap * tanh(logit / logits_cap)``; None: they stay.
        transposed: whether a checkpoint has the matrices of the layers as [in, out].
        per_layer: the inputs that each layer has of its own; None: there are none.
        altup: how several residual streams are predicted and corrected; None: there is one, or
            `connections` says how many.
        connections: how layers are connected to several residual streams; None: they are not.
        scales_layers: whether each layer ends by multiplying the residual stream by a weight.
        further_layers: the layers that a checkpoint may have behind those of the model, each of
            which predicts one token further ahead.
        num_further: how many of them are loaded.
        drafting: what the model drafts from if it reads hidden states of another one; None: it
            reads tokens alone.
        kept_levels: behind how many layers the residual stream is kept for such a model.
        spans_prompts: whether WITHIN_ITEMS means all of the prompt that a token belongs to.
        returns_experts: whether a step keeps the experts that its layers choose.
        weights_of: for each layer the one whose weights it has, itself or an earlier one; empty:
            each layer has its own.
        skipped_prefixes: those of names of tensors in checkpoints that the model lacks.
        skipped_experts: the layers of checkpoints that have tensors of experts that the model
            lacks, and the numbers of these experts; None: there are none.
        zeros_if_absent: the ends of names of weights that are 0 where a checkpoint lacks them.
        extra_files: the names of files beside the checkpoint, which begin those of their tensors.
        task_adapters: the adapters that its checkpoint has for tasks, or which one of those beside.
        shard: the rank whose part of a model this is. The sizes of the layers are those of the
            part, `vocab_size` and `hidden_size` are the model's.
        stage: the stage whose part of a model this is. `layers` are those of all stages.
        whole: the configuration of the model whose part this is; None: it is no part.
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
    sinusoids: SinusoidKind | None = None
    first_position: int = 0
    num_token_types: int = 0
    num_task_types: int = 0
    embedding_size: int | None = None
    embedding_norm: bool = False
    final_norm: bool = True
    last_norm: NormSpec | None = None
    lm_head: bool = True
    transform: TransformSpec | None = None
    lm_head_bias: bool = False
    lm_head_float32: bool = False
    num_outputs: int | None = None
    head: HeadSpec | None = None
    pooling: Pooled = "LAST"
    padding_token: int | None = None
    usual_length: int | None = None
    normalizes: bool = True
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_cap: float | None = None
    transposed: bool = False
    per_layer: PerLayerSpec | None = None
    altup: AltUpSpec | None = None
    connections: ConnectionSpec | None = None
    scales_layers: bool = False
    further_layers: tuple[LayerSpec, ...] = ()
    num_further: int = 0
    drafting: DraftSpec | None = None
    kept_levels: tuple[int, ...] = ()
    spans_prompts: bool = False
    returns_experts: bool = False
    weights_of: tuple[int, ...] = ()
    skipped_prefixes: tuple[str, ...] = ()
    skipped_experts: tuple[range, range] | None = None
    zeros_if_absent: tuple[str, ...] = ()
    extra_files: tuple[str, ...] = ()
    task_adapters: TaskAdapters | TaskDirectory | None = None
    shard: Shard = WHOLE
    stage: Stage = ONLY
    whole: ModelConfig | None = None

    def __post_init__(self) -> None:
        mixes = any(mixer.kv or mixer.state_bytes for mixer in self.mixers)
        if not mixes and self.drafting is None:
            raise EngineStartError(
                f"{self.architecture}: models without a layer that mixes tokens are not supported"
            )
        check_sources(self.architecture, self.loaded_layers)

    @classmethod
    def from_directory(cls, path: Path) -> ModelConfig:
        """Reads config.json, and generation_config.json if it exists.

        Raises:
            EngineStartError: a file is missing or malformed, or asks for an unsupported feature.
                The message is one line and names the file and the field.
        """
        return cls.from_fields(read_fields(Path(path)), Path(path))

    @classmethod
    def from_fields(cls, fields: Fields, path: Path) -> ModelConfig:
        """As `from_directory`, with the result of `read_fields`."""
        architecture = architecture_name(fields)
        is_quantized = quantization_fields(fields) is not None
        config: ModelConfig = find_family(architecture).configure(fields)
        if not fields.null_as_false("is_causal").flag("is_causal", True) and not config.both_ways:
            config = replace(config, layers=attend_both_ways(config.layers, fields))
        if is_quantized and config.transposed:
            raise fields.error("quantized checkpoints of this family are not supported")
        if problem := problem_of_size(config):
            raise fields.error(problem)
        generates = purpose_of(architecture) is Purpose.GENERATE and not config.both_ways
        return replace(
            config,
            dtype=stored_dtype(fields),
            eos_token_ids=eos_token_ids(fields, path / "generation_config.json"),
            lm_head=generates or config.drafting is not None,
        )

    @property
    def is_divided(self) -> bool:
        """Whether other processes have parts of the model."""
        return self.stage.layers is not None or self.shard.size > 1

    @property
    def item_width(self) -> int:
        """The width of the embeddings of items."""
        return self.keys_width or self.pooled_width or (1 + self.num_levels) * self.hidden_size

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def embedding_width(self) -> int:
        """The width of embeddings."""
        return self.hidden_size if self.embedding_size is None else self.embedding_size

    @property
    def num_streams(self) -> int:
        """The number of residual streams that layers read one of."""
        return 1 if self.altup is None else self.altup.num_streams

    @property
    def connected_width(self) -> int:
        """The width of the streams that layers are connected to, side by side; 0: there are
        none."""
        return 0 if self.connections is None else self.connections.num_streams * self.hidden_size

    @property
    def scales_stream(self) -> bool:
        """Whether the residual stream is a multiple, which differs by layer, of what the family
        has in its place."""
        return any(layer.norms.eps_before is not None for layer in self.layers)

    @property
    def has_streams(self) -> bool:
        """Whether there are several residual streams, of either kind."""
        return self.altup is not None or self.connections is not None

    @property
    def both_ways(self) -> bool:
        """Whether tokens of any text attend to tokens behind them, so that none is generated. What
        drafts has no text."""
        if self.drafting is not None:
            return False
        kinds = AttentionSpec | ShortConvolutionSpec
        aheads = (mixer.ahead for mixer in self.mixers if isinstance(mixer, kinds))
        return any(a not in (0, WITHIN_ITEMS) and not isinstance(a, Encoded) for a in aheads)

    @property
    def whole_prompts(self) -> bool:
        """Whether a prompt is one step, because its tokens attend to tokens behind them."""
        return self.both_ways or self.spans_prompts

    @property
    def num_encoded(self) -> int:
        """The number of a request's positions before its text, the first of which have keys and
        values that an encoder computes of an item; 0: the model is no encoder-decoder."""
        aheads = (each.ahead for each in self.attentions)
        return next((ahead.text_begins for ahead in aheads if isinstance(ahead, Encoded)), 0)

    @property
    def own_tokens(self) -> range:
        """The tokens whose rows of the embedding table and of the LM head the shard has."""
        return self.shard.part_of(self.vocab_size)

    @property
    def num_logits(self) -> int:
        """The number of a token's logits."""
        return self.vocab_size if self.drafting is None else self.drafting.num_drafted

    @property
    def loaded_layers(self) -> tuple[LayerSpec, ...]:
        """The layers of the model, and those of `further_layers` that are loaded."""
        return self.layers + self.further_layers[: self.num_further]

    @property
    def classes_are_tokens(self) -> bool:
        """Whether the head is made of rows of the LM head."""
        steps = () if self.head is None else self.head.steps
        return any(isinstance(step, DenseSpec) and step.tokens for step in steps)

    @property
    def mixers(self) -> tuple[MixerSpec, ...]:
        """The mixers of all layers, in their order."""
        return tuple(mixer for layer in self.loaded_layers for mixer in layer.mixers)

    @property
    def feed_forwards(self) -> tuple[FeedForwardSpec, ...]:
        """The feed-forward of each layer that has one."""
        return tuple(layer.mlp for layer in self.loaded_layers if layer.mlp is not None)

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """The attention of each layer that has one."""
        return tuple(mixer for mixer in self.mixers if isinstance(mixer, AttentionSpec))

    @property
    def latent_attentions(self) -> tuple[LatentAttentionSpec, ...]:
        """The latent attention of each layer that has one."""
        return tuple(mixer for mixer in self.mixers if isinstance(mixer, LatentAttentionSpec))

    @property
    def compressed_attentions(self) -> tuple[CompressedAttentionSpec, ...]:
        """The compressed attention of each layer that has one."""
        return tuple(each for each in self.mixers if isinstance(each, CompressedAttentionSpec))

    @property
    def all_attentions(self) -> tuple[AnyAttention, ...]:
        """The attention of any kind of each layer that has one."""
        return (*self.attentions, *self.latent_attentions, *self.compressed_attentions)

    @property
    def mambas(self) -> tuple[MambaSpec, ...]:
        """The different Mambas of the layers."""
        return tuple(dict.fromkeys(each for each in self.mixers if isinstance(each, MambaSpec)))

    @property
    def layer_windows(self) -> tuple[Window | None, ...]:
        """The window of each layer's attention; see `LayerSpec.window`."""
        return tuple(layer.window for layer in self.loaded_layers)

    @property
    def layer_state_bytes(self) -> tuple[int, ...]:
        """The size of a request's state in each layer; 0 for those without one."""
        layers = self.loaded_layers
        return tuple(sum(mixer.state_bytes for mixer in layer.mixers) for layer in layers)

    @property
    def layer_kv(self) -> tuple[KVHeads | None, ...]:
        """What each layer stores of a token in the KV cache; None: nothing, because it has no
        attention or reads what another layer stored. See `of_one_size`."""
        sources = self.kv_sources
        return of_one_size(
            next((each.kv for each in layer.mixers if each.kv and index not in sources), None)
            for index, layer in enumerate(self.loaded_layers)
        )

    @property
    def kv_sources(self) -> dict[int, int]:
        """See `sources_of`."""
        return sources_of(self.loaded_layers)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The different rotations of the layers."""
        ropes = (attention.rope for attention in self.all_attentions)
        return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))

    @property
    def mixtures(self) -> tuple[MoESpec, ...]:
        """The different mixtures of experts of the layers."""
        every = (mixture for mlp in self.feed_forwards for mixture in mlp.mixtures)
        return tuple(dict.fromkeys(every))

    @property
    def dense_mlps(self) -> tuple[MLPSpec, ...]:
        """The different dense MLPs of the layers."""
        return tuple(dict.fromkeys(mlp for layer in self.loaded_layers for mlp in layer.dense))

    def with_further(self, count: int) -> ModelConfig:
        """Returns the configuration with so many of `further_layers` loaded.

        Raises:
            EngineStartError: there are fewer.
        """
        if count > len(self.further_layers):
            raise EngineStartError(
                f"method mtp needs {count} of the layers that predict further tokens: a checkpoint "
                f"of {self.architecture} with these fields has {len(self.further_layers)}"
            )
        return replace(self, num_further=count)

    def with_mixers(self, change: Callable[[MixerSpec], MixerSpec]) -> ModelConfig:
        """Returns the configuration with other mixers, each in the place of one of its own."""
        layers, further = (
            tuple(layer.with_mixers(change) for layer in layers)
            for layers in (self.layers, self.further_layers)
        )
        return replace(self, layers=layers, further_layers=further)
